"""The documentation's site, by Sphinx: `make docs` writes it to ``build/docs``."""

import jscaler

project = "jscaler"
author = "the jscaler developers"
copyright = author
release = version = jscaler.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
exclude_patterns: list[str] = []
default_role = "code"  # names in single backticks
html_theme = "furo"
html_title = "jscaler"
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_type_aliases = {"PlanLike": "PlanLike", "Devices": "Devices"}
napoleon_use_rtype = False
suppress_warnings = ["misc.highlighting_failure"]  # text blocks show plans and layouts
