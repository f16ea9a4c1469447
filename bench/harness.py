"""What every benchmark shares: options, a table for people, one JSON object as the last line for machines."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def compile_fast() -> None:
    """Leave out most of XLA's passes over machine code, here and in processes to come; before devices are made."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"


def bounds_of(row: Row) -> dict[str, float]:
    """The limits that a row is held to, by column."""
    return {**row.get("bounds", {}), **({"value": row["bound"]} if row.get("bound") is not None else {})}


def main(
    name: str,
    description: str,
    columns: Sequence[str],
    rows: Callable[..., Iterable[Row]],
    devices: int = 8,
    options: Mapping[str, dict[str, Any]] | None = None,
) -> None:
    """Run a benchmark's command line.

    Args:
        name: the benchmark.
        columns: of the table; a row may leave some out.
        rows: measures; its argument is whether to be quick (under a minute). A row's ``"bound"`` is the limit of its
            ``"value"``, its ``"bounds"`` those of several columns; a row above one makes the run exit with code 1.
        devices: virtual CPU devices to make.
        options: further options by name, with what ``argparse`` is to know of them; ``rows`` takes them by keyword.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer cases, under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    for option, known in (options or {}).items():
        parser.add_argument(f"--{option}", **known)
    chosen = vars(parser.parse_args())
    quick, as_json = chosen.pop("quick"), chosen.pop("json")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    if not run(name, columns, rows(quick, **chosen), as_json):
        sys.exit(1)


def run(name: str, columns: Sequence[str], rows: Iterable[Row], as_json: bool) -> bool:
    """Measure and print; returns whether every row keeps within its bounds."""
    import jax
    from rich.console import Console
    from rich.progress import track

    from jscaler.text.tables import table

    wide = None if sys.stdout.isatty() else 140
    console = Console(stderr=as_json, width=wide)
    measured = []
    for row in track(rows, f"bench.{name}", console=Console(stderr=True), transient=True):
        measured.append(row)
        if as_json:  # rows of a long run are not lost if it is stopped
            print(json.dumps(row), file=sys.stderr, flush=True)
    title = f"bench.{name}: jax {jax.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    console.print(table(title, columns, [[row.get(c, "") for c in columns] for row in measured]))
    failed = [r for r in measured if not all(r[c] <= limit for c, limit in bounds_of(r).items())]
    if as_json:
        print(json.dumps({"bench": name, "jax": jax.__version__, "rows": measured}))
    if failed:
        print(f"bench.{name}: {len(failed)} rows miss their bound: {failed[:3]}", file=sys.stderr)
    return not failed
