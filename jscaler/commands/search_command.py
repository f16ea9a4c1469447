"""``jscaler search``: which plan makes a model fastest on a target, within its memory."""

import json
from pathlib import Path
from typing import Annotated

import typer

from jscaler.commands.built_in_job import stacked_by_default
from jscaler.commands.chosen_job import chosen_job
from jscaler.commands.fit_command import CONFIRM_HELP, NOTHING, STOPPED, TARGET_HELP
from jscaler.commands.options import Batch, Dtype, JobFile, Model, Remat, Sequence, Size, Stacked, use_platform
from jscaler.commands.screen import screen, show
from jscaler.commands.told_model import with_model
from jscaler.errors import PlanFileError
from jscaler.plan_search.found import found_table, verdict
from jscaler.plan_search.query import search
from jscaler.report.draw_layout import refuse_picture
from jscaler.report.written import check_file
from jscaler.runtime.target import find_target
from jscaler.spaces import SPACES
from jscaler.training.planned_job import PlannedJob

SPACE_HELP = f"what to search, several times for several: {', '.join(SPACES)}; by default the first seven and per_op"


def search_(
    context: typer.Context,
    target: Annotated[str, typer.Option(help=TARGET_HELP)],
    model: Model = "gpt",
    size: Size = None,
    job: JobFile = None,
    space: Annotated[list[str] | None, typer.Option(help=SPACE_HELP)] = None,
    seconds: Annotated[float, typer.Option(help="how long the search may take", min=1.0)] = 60.0,
    memory: Annotated[float | None, typer.Option(help="GiB that each device may take; all it has by default")] = None,
    batch: Batch = 32,
    seq: Sequence = None,
    dtype: Dtype = "bf16",
    stacked: Stacked = None,
    remat: Remat = False,
    confirm: Annotated[bool | None, typer.Option("--confirm/--no-confirm", help=CONFIRM_HELP)] = None,
    save: Annotated[Path | None, typer.Option(help="write the plan's decisions to this .json file")] = None,
    draw: Annotated[Path | None, typer.Option(help="write a picture, seconds against memory: .png, .svg or .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
) -> None:
    """Search for the fastest plan that fits: its seconds, a bound of all plans, why it is so, and what came next.

    Needs no devices, compiles nothing but the plan that is found, allocates no model. Exit code 0 where the search went to
    its end, 4 where it was stopped, 3 where nothing fits.

    Example: jscaler search --model gpt-1.3b --target 8xV100-32GB --batch 64 --dtype fp16 --save plan.json

    Example: jscaler search --job my_model.py:job --target 2x8xA100-80GB --space megatron
    """
    refuse_picture(draw)
    if save is not None and save.suffix != ".json":
        raise PlanFileError(f"a plan is saved in a .json file, not '{save}'")
    check_file("plan", save)
    use_platform("cpu", None)
    cluster = find_target(target)
    chosen = chosen_job(
        context, job, model=model, size=size, batch=batch, seq=seq, dtype=dtype,
        stacked=stacked_by_default(model, stacked), remat=remat,
    )  # fmt: skip
    planned = PlannedJob(chosen, "single", 1)
    graph = planned.step.graph(*planned.arguments())
    limit = None if memory is None else memory * 2**30
    found = search(graph, target=cluster, space=space, seconds=seconds, memory=limit, confirm=confirm)
    written = []
    if draw is not None and found.candidates:
        found.draw(draw)
        written.append(str(draw))
    if save is not None and found.plan is not None:
        with_model(found.plan, job, model, size, stacked, dtype=dtype, remat=remat, batch=batch, seq=seq).save(save)
        written.append(str(save))
    if as_json:
        typer.echo(json.dumps({"model": planned.describe(), **found.as_json(), "written": written}))
    else:
        console = screen()
        show(console, planned.describe())
        console.print(found_table(found))
        show(console, "\n".join([*verdict(found), *(f"written: {name}" for name in written)]))
    if not found.complete:
        raise typer.Exit(STOPPED)
    if found.chosen is None:
        raise typer.Exit(NOTHING)
