"""``python -m jscaler`` is ``jscaler``."""

from jscaler.cli import main

main()
