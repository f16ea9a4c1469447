"""Results as tables for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from jscaler.report.explain import readable_bytes

if TYPE_CHECKING:
    from jscaler.report.compare import Comparison, Side


def comparison_table(result: "Comparison") -> Table:
    """A plan and its GSPMD twin, column by column."""
    title = f"plan {result.plan} on {result.devices} device(s), {result.steps} steps"
    ours, gspmd = result.ours, result.gspmd
    rows: list[tuple[str, str, str, str]] = [
        _row("step time", ours.step_seconds, gspmd.step_seconds, _milliseconds, result.time_ratio),
        _row("trace to executable", ours.compile_seconds, gspmd.compile_seconds, _milliseconds),
        _row("FLOPs per device", ours.flops, gspmd.flops, lambda f: f"{f:.4g}"),
    ]
    for name in ("argument", "output", "temp", "alias"):
        rows.append(_row(f"memory: {name}", ours.memory.get(name, 0), gspmd.memory.get(name, 0), readable_bytes))
    for kind in sorted({*ours.collectives, *gspmd.collectives}):
        mine, theirs = (_collective(side, kind) for side in (ours, gspmd))
        rows.append((f"{kind} (count, bytes)", *mine[:1], *theirs[:1], _ratio(mine[1], theirs[1])))
    for what, value in (
        ("loss", result.loss_difference),
        ("gradient", result.gradient_difference),
        ("parameter", result.parameter_difference),
    ):
        rows.append((f"largest {what} difference", f"{value:.3g}", "", ""))
    return table(title, ("", "jscaler", "jax.jit, same split", "ratio"), rows)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def _row(name: str, mine: float, theirs: float, show: Any, ratio: float | None = None) -> tuple[str, str, str, str]:
    return name, show(mine), show(theirs), f"{ratio:.3f}" if ratio else _ratio(mine, theirs)


def _collective(side: "Side", kind: str) -> tuple[str, int]:
    found = side.collectives.get(kind)
    return (f"{found.count}, {readable_bytes(found.nbytes)}", found.nbytes) if found else ("none", 0)


def _ratio(mine: float, theirs: float) -> str:
    return f"{mine / theirs:.3f}" if theirs else ""


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table of strings and numbers; numbers are shown in four digits."""
    made = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        made.add_column(name, no_wrap=i == 0)
    for row in rows:
        made.add_row(*(f"{c:.4g}" if isinstance(c, float) else str(c) for c in row))
    return made
