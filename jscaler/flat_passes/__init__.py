"""Passes over the flat program, some that save memory or time alone."""
