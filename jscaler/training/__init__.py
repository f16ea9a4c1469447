"""Jobs that run: a model, its data and its train step under a plan, step by step."""
