"""The documentation's site, by Sphinx: `make docs` writes it to ``build/docs``."""

import json
from typing import Any

from myst_parser.parsers.sphinx_ import MystParser  # pyright: ignore[reportMissingImports]  # of the extra docs

import jscaler

project = "jscaler"
author = "the jscaler developers"
copyright = author
release = version = jscaler.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
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


class Notebook(MystParser):
    """A notebook as the Markdown that it stands for: text, code, and what the code has printed."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        super().parse("\n\n".join(map(_as_markdown, json.loads(inputstring)["cells"])), document)


def _as_markdown(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    printed = "".join(line for output in cell["outputs"] for line in output["text"])
    return f"```python\n{source}\n```" + (f"\n\n```text\n{printed}```" if printed else "")


def setup(app: Any) -> dict[str, bool]:
    app.add_source_parser(Notebook)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
