"""``jscaler runs``: which of several runs is better, as a table and as curves of their losses."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jscaler.commands.screen import screen, show
from jscaler.report.draw_layout import refuse_picture
from jscaler.report.draw_losses import draw_losses
from jscaler.text.tables import table
from jscaler.text.units import readable_bytes
from jscaler.training.run_logs import EVALUATION, RunLog, run_logs

MOST_LOSSES = 4  # names of evaluations in the table


def runs_(
    folder: Annotated[Path, typer.Argument(help="a folder with logs in it, or a log: what train --log has written")],
    draw: Annotated[Path | None, typer.Option(help="write a picture of the losses: .png, .svg or .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
) -> None:
    """Compare runs by their logs: losses, seconds of a step, speed, what they wait for, memory.

    Example: jscaler runs --draw losses.png my_runs
    """
    refuse_picture(draw)
    found = run_logs(folder)
    if draw is not None:
        draw_losses(draw, {one.name: (one.values("loss"), one.values(f"{EVALUATION}loss")) for one in found})
    told = [one.as_json() for one in found]
    if as_json:
        typer.echo(json.dumps({"runs": told}))
        return
    console = screen()
    console.print(_table(found, told))
    if draw is not None:
        show(console, f"written: {draw}")


def _table(found: list[RunLog], told: list[dict[str, Any]]) -> Any:
    evaluations = list(dict.fromkeys(key for one in told for key in one if key.startswith(EVALUATION)))[:MOST_LOSSES]
    header = (
        "run", "plan", "devices", "steps", "loss", "lowest", *(name.removeprefix(EVALUATION) for name in evaluations),
        "s/step", "speed", "of the peak", "waiting", "saving", "memory",
    )  # fmt: skip
    rows = [[*_beginning(one), *(one.get(name, "") for name in evaluations), *_speed(one)] for one in told]
    return table(f"{len(found)} run{'s' if len(found) > 1 else ''}", header, rows, expendable=("saving", "lowest"))


def _beginning(one: dict[str, Any]) -> list[Any]:
    return [one["run"], *(one.get(key, "") for key in ("plan", "devices", "steps", "loss", "lowest_loss"))]


def _speed(one: dict[str, Any]) -> list[Any]:
    speeds = [f"{one[key]:,.0f} {what}/s" for what in ("tokens", "rows") if (key := f"{what}_per_second") in one]
    shares = [f"{one[key]:.0%}" if key in one else "" for key in ("utilisation", "waited", "saving")]
    memory = readable_bytes(one["peak_bytes"]) if "peak_bytes" in one else ""
    return [one.get("seconds", ""), ", ".join(speeds), *shares, memory]
