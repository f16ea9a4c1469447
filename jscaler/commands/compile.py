"""``jscaler compile``: does a plan fit on a cluster that need not be there, and what does XLA make of it?"""

import json
from pathlib import Path
from typing import Annotated

import typer

from jscaler.commands.built_in_job import stacked_by_default
from jscaler.commands.chosen_job import chosen_job
from jscaler.commands.options import (
    Batch,
    Dtype,
    JobFile,
    Model,
    PlanName,
    Remat,
    Sequence,
    Size,
    Stacked,
    Strict,
    use_platform,
)
from jscaler.commands.progress import stages
from jscaler.commands.screen import screen, show
from jscaler.commands.told_model import telling_sizes
from jscaler.report.draw_layout import refuse_picture, save_picture
from jscaler.training.planned_job import PlannedJob

TARGET_HELP = "cluster to compile for: 8xH100-80GB, 4x8xV100-32GB (hosts x devices x kind), a built-in name or a .toml file"


@telling_sizes
def compile_(
    context: typer.Context,
    target: Annotated[str, typer.Option(help=TARGET_HELP)],
    model: Model = "gpt",
    size: Size = None,
    job: JobFile = None,
    plan: PlanName = "data_parallel",
    batch: Batch = 32,
    seq: Sequence = None,
    dtype: Dtype = "bf16",
    stacked: Stacked = None,
    remat: Remat = False,
    strict: Strict = False,
    rows: Annotated[int, typer.Option(help="how many of the largest contributors to show", min=0)] = 12,
    draw: Annotated[Path | None, typer.Option(help="write a picture of the memory: .png, .svg or .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> None:
    """Compile a plan for a cluster without its GPUs: memory by kind, what takes it, NCCL collectives, does it fit?

    Needs no GPU and allocates no model; needs the extra aot (JAX's CUDA plugin and a compiler).

    Example: jscaler compile --model gpt-1.3b --plan "megatron(dp=4, tp=8)" --target 4x8xV100-32GB --remat

    Example: jscaler compile --job my_model.py:job --plan zero3 --target 8xH100-80GB
    """
    from jscaler.report.draw_memory import memory_figure
    from jscaler.report.target_report import heading, tables, verdict
    from jscaler.runtime.target import compile_for, find_target

    refuse_picture(draw)
    use_platform("cpu", None)
    cluster = find_target(target)
    chosen = chosen_job(
        context, job, plan=plan, model=model, size=size, batch=batch, seq=seq, dtype=dtype,
        stacked=stacked_by_default(model, stacked), remat=remat,
    )  # fmt: skip
    planned = PlannedJob(chosen, plan, cluster.num_devices, strict=strict, target=cluster)
    with stages() as begin:
        begin("capturing and planning")
        lowered = planned.step.lower(*planned.arguments())
        report = compile_for(lowered.plan, cluster, lowered.executable.donated, begin)
    if draw is not None:
        save_picture(draw, memory_figure(report))
    if as_json:
        record = {"model": planned.describe(), **report.as_json(), "plan": plan}
        typer.echo(json.dumps({**record, "picture": str(draw) if draw else None}))
        return
    console = screen()
    show(console, f"{planned.describe()}, plan {plan}\n{heading(report)}")
    for made in tables(report, rows):
        console.print(made)
    show(console, verdict(report.memory))
    if draw is not None:
        show(console, f"written: {draw}")
