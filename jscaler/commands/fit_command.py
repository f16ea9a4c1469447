"""``jscaler fit``: which plans make a model fit on a target, the fastest first."""

import json
from pathlib import Path
from typing import Annotated

import typer

from jscaler.commands.built_in_job import stacked_by_default
from jscaler.commands.chosen_job import chosen_job
from jscaler.commands.options import Batch, Dtype, JobFile, Model, Remat, Sequence, Size, Stacked, use_platform
from jscaler.commands.screen import screen, show
from jscaler.plan_search.draw_fit import fit_figure
from jscaler.plan_search.fit import fit
from jscaler.plan_search.found import MOST_ROWS, found_table, verdict
from jscaler.report.draw_layout import refuse_picture, save_picture
from jscaler.runtime.target import find_target
from jscaler.training.planned_job import PlannedJob

TARGET_HELP = "what it is to fit on: V100-32GB (one device), 8xH100-80GB, 4x8xV100-32GB, a built-in name or a .toml file"
PLANS_HELP = "work out this plan in place of the space 'memory'; give it several times for several"
CONFIRM_HELP = "compile what fits for the target, for XLA's own peak; on where JAX's CUDA plugin is at hand (extra aot)"
NOTHING = 3  # the exit code if nothing fits; 1 is an error, 2 a mistake in the options
STOPPED = 4  # the exit code where a search was stopped before its end: its plan stands, the gap is wider


def fit_(
    context: typer.Context,
    target: Annotated[str, typer.Option(help=TARGET_HELP)],
    model: Model = "gpt",
    size: Size = None,
    job: JobFile = None,
    plan: Annotated[list[str] | None, typer.Option("--plan", help=PLANS_HELP)] = None,
    batch: Batch = 1,
    seq: Sequence = None,
    dtype: Dtype = "bf16",
    stacked: Stacked = None,
    remat: Remat = False,
    every: Annotated[bool, typer.Option("--all", help="work out every plan, also those that are not the fastest")] = False,
    confirm: Annotated[bool | None, typer.Option("--confirm/--no-confirm", help=CONFIRM_HELP)] = None,
    draw: Annotated[Path | None, typer.Option(help="write a picture of memory over the step: .png, .svg or .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
) -> None:
    """Look for the fastest plan that fits: its peak and seconds, and what others would take.

    Estimates need no devices, and allocate no model. Exit code 0 if something fits, 3 if nothing does, 4 if it was stopped.

    Example: jscaler fit --model gpt-1.3b --target V100-32GB --seq 4096 --dtype fp16

    Example: jscaler fit --job my_model.py:job --target 8xH100-80GB
    """
    refuse_picture(draw)
    use_platform("cpu", None)
    cluster = find_target(target)
    chosen = chosen_job(
        context, job, model=model, size=size, batch=batch, seq=seq, dtype=dtype,
        stacked=stacked_by_default(model, stacked), remat=remat,
    )  # fmt: skip
    planned = PlannedJob(chosen, "single", 1)
    graph = planned.step.graph(*planned.arguments())
    found = fit(graph, cluster, plan, every=every, confirm=confirm)
    if draw is not None:
        save_picture(draw, fit_figure(found, planned.describe()), dpi=110)
    if as_json:
        record = found.as_json()
        record |= {
            "capacity": found.memory, "fits": found.chosen is not None, "chosen": None if found.chosen is None else 0,
            "tried": record.pop("candidates"), "illegal": found.illegal, "picture": str(draw) if draw else None,
        }  # fmt: skip
        typer.echo(json.dumps({"model": planned.describe(), **record}))
    else:
        console = screen()
        show(console, planned.describe())
        console.print(found_table(found, len(found.candidates) if every or plan else MOST_ROWS))
        show(console, "\n".join([*verdict(found), *([f"written: {draw}"] if draw else [])]))
    if not found.complete:
        raise typer.Exit(STOPPED)
    if found.chosen is None:
        raise typer.Exit(NOTHING)
