"""``jscaler compile``: does a plan fit on a cluster that need not be there, and what does XLA make of it?"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jscaler.commands.job import Job, stacked_by_default
from jscaler.commands.options import Batch, Dtype, Model, PlanName, Remat, Sequence, Size, Stacked, use_platform
from jscaler.commands.progress import stages
from jscaler.report.draw_layout import refuse_picture

TARGET_HELP = "cluster to compile for: 8xH100-80GB, 4x8xV100-32GB (hosts x devices x kind), a built-in name or a .toml file"
PIPED = 140  # columns where the output is no terminal


def compile_(
    target: Annotated[str, typer.Option(help=TARGET_HELP)],
    model: Model = "gpt",
    size: Size = None,
    plan: PlanName = "data_parallel",
    batch: Batch = 32,
    seq: Sequence = None,
    dtype: Dtype = "bf16",
    stacked: Stacked = None,
    remat: Remat = False,
    rows: Annotated[int, typer.Option(help="how many of the largest contributors to show", min=0)] = 12,
    draw: Annotated[Path | None, typer.Option(help="write a picture of the memory: .png, .svg or .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> None:
    """Compile a plan for a cluster without its GPUs: memory by kind, what takes it, NCCL collectives, does it fit?

    Needs no GPU and allocates no model; needs the extra aot (JAX's CUDA plugin and a compiler).

    Example: jscaler compile --model gpt-1.3b --plan "megatron(dp=4, tp=8)" --target 4x8xV100-32GB --remat
    """
    from jscaler.report.draw_memory import draw_memory
    from jscaler.report.target_report import heading, tables, verdict
    from jscaler.runtime.target import compile_for, find_target

    if draw is not None:
        refuse_picture(draw)
    use_platform("cpu", None)
    cluster = find_target(target)
    job = Job(model, size, plan, cluster.num_devices, batch, seq, dtype, stacked_by_default(model, stacked), remat)
    with stages() as begin:
        begin("capturing and planning")
        lowered = job.step.lower(*job.arguments())
        report = compile_for(lowered.plan, cluster, lowered.executable.donated, begin)
    if draw is not None:
        draw_memory(draw, report)
    if as_json:
        record = {"model": job.describe(), **report.as_json(), "plan": plan}
        typer.echo(json.dumps({**record, "picture": str(draw) if draw else None}))
        return
    console = Console() if sys.stdout.isatty() else Console(width=PIPED)
    console.print(f"{job.describe()}, plan {plan}\n{heading(report)}", highlight=False, markup=False)
    for made in tables(report, rows):
        console.print(made)
    console.print(verdict(report.memory), highlight=False, markup=False)
    if draw is not None:
        console.print(f"written: {draw}", highlight=False, markup=False)
