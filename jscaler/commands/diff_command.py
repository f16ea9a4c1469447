"""``jscaler diff``: which decisions of two plans differ, and what each difference costs; nothing is compiled or run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from jscaler.clusters import find_cluster
from jscaler.commands.built_in_job import stacked_by_default
from jscaler.commands.chosen_job import chosen_job
from jscaler.commands.options import Batch, Dtype, JobFile, Model, Remat, Sequence, Size, Stacked, use_platform
from jscaler.commands.plan_command import TARGET_HELP
from jscaler.commands.progress import stages
from jscaler.commands.screen import screen, show
from jscaler.commands.told_model import check_told_alike
from jscaler.estimate.difference import MOST_LINES, diff, shown_parts
from jscaler.training.planned_job import PlannedJob, devices_for

PLAN_HELP = 'as --plan takes it: "megatron(dp=2, tp=4)", path.py:function, or a saved plan, path.json'


def diff_(
    context: typer.Context,
    a: Annotated[str, typer.Argument(help=f"the first plan, {PLAN_HELP}")],
    b: Annotated[str, typer.Argument(help="the second, which is compared with it")],
    target: Annotated[str, typer.Option(help=TARGET_HELP)],
    model: Model = "gpt",
    size: Size = None,
    job: JobFile = None,
    devices: Annotated[
        int | None, typer.Option(help="number of devices; by default those of a saved plan, or of the target", min=1)
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="seconds that jscaler profile has measured")] = None,
    batch: Batch = 32,
    seq: Sequence = None,
    dtype: Dtype = "bf16",
    stacked: Stacked = None,
    remat: Remat = False,
    most: Annotated[int, typer.Option(help="lines of most effect that are shown; others are added up", min=1)] = MOST_LINES,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object, with all lines")] = False,
) -> None:
    """Print which decisions of two plans differ, and the seconds and bytes of each; the lines add up to the difference.

    Needs no devices, compiles nothing, allocates no model. A saved plan brings the options of the model it was made for.

    Example: jscaler diff zero1 "megatron(dp=4, tp=2)" --model gpt-1.3b --target 8xH100-80GB

    Example: jscaler diff --target 8xV100-32GB found.json mine.json
    """
    use_platform("cpu", None)
    cluster = find_cluster(target)
    check_told_alike(a, b)
    saved = next((plan for plan in (a, b) if plan.endswith(".json")), None)
    chosen = chosen_job(
        context, job, plan=saved, model=model, size=size, batch=batch, seq=seq, dtype=dtype,
        stacked=stacked_by_default(model, stacked), remat=remat,
    )  # fmt: skip
    count = devices if saved is None else devices_for(saved, devices)
    planned = PlannedJob(chosen, "single", 1)
    with stages() as begin:
        begin("capturing the step")
        graph = planned.step.graph(*planned.arguments())
        begin("what both plans cost")
        found = diff(graph, a, b, cluster, devices=count, profile=profile)
    if as_json:
        typer.echo(json.dumps({"model": planned.describe(), "target": cluster.name, **found.as_json()}))
        return
    console = screen()
    for part in (planned.describe(), *shown_parts(found, most)):
        show(console, part) if isinstance(part, str) else console.print(part)
