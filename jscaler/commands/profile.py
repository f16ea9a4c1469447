"""``jscaler profile``: the programs of a plan, each run on a device at hand, for estimates of this plan and of others."""

import json
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console
from rich.progress import track

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
    use_platform,
)
from jscaler.commands.progress import stages
from jscaler.commands.screen import screen, show
from jscaler.commands.told_model import telling_sizes
from jscaler.estimate.pieces import op_pieces, pieces_of
from jscaler.estimate.profile import Profile, load_profile, measure_piece, missing
from jscaler.report.written import check_file, writing
from jscaler.text.tables import aligned
from jscaler.text.units import counted, readable_seconds
from jscaler.training.planned_job import PlannedJob, devices_for

MOST_SHOWN = 12


@telling_sizes
def profile_(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="the profile: a .json file; what it has already is not measured again")],
    model: Model = "gpt",
    size: Size = None,
    job: JobFile = None,
    plan: PlanName = "data_parallel",
    devices: Annotated[int | None, typer.Option(help="number of devices of the plan; 1 by default", min=1)] = None,
    platform: Annotated[str | None, typer.Option(help="'cpu' measures on a virtual CPU device")] = None,
    batch: Batch = 32,
    seq: Sequence = None,
    dtype: Dtype = "bf16",
    stacked: Stacked = None,
    remat: Remat = False,
    rounds: Annotated[int, typer.Option(help="timed runs of each; the median counts", min=1)] = 5,
    whole: Annotated[
        bool, typer.Option("--whole", help="only programs between collectives, and no ops by themselves")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
) -> None:
    """Run each distinct op of a plan, and each program between its collectives, once on a device at hand.

    The plan may be for any number of devices: each program is that of one of them. Estimates read the file with
    jscaler.cost(…, profile=…).

    Example: jscaler profile --model gpt-125m --plan tensor_parallel --devices 8 --out h200.json
    """
    check_file("profile", out)
    use_platform(platform, None)
    device = jax.devices()[0]
    known = load_profile(out) if out.exists() else Profile()
    chosen = chosen_job(
        context, job, plan=plan, model=model, size=size, batch=batch, seq=seq, dtype=dtype,
        stacked=stacked_by_default(model, stacked), remat=remat,
    )  # fmt: skip
    planned = PlannedJob(chosen, plan, devices_for(plan, devices) or 1)
    with stages() as begin:
        begin("capturing and planning")
        step = planned.step.lower(*planned.arguments()).plan
        begin("cutting it between its collectives")
        pieces = [piece for block in step.blocks for piece in pieces_of(block)]
        every = pieces if whole else [*pieces, *(piece for _, piece in op_pieces(step))]
        new = missing(every, known, device.device_kind)
    console = Console(stderr=True)
    for piece in track(new, "measuring programs", console=console, transient=True):
        known.add(piece, device.device_kind, measure_piece(piece, device, rounds))
        with writing("profile", out):  # what was measured is not lost if this is stopped
            known.save(out)
    seconds = {piece.key: known.of(piece.key, device.device_kind) or 0.0 for piece in new}
    if as_json:
        programs = [{"key": p.key, "about": p.about, "seconds": seconds[p.key]} for p in new]
        typer.echo(json.dumps({"device": device.device_kind, "plan": plan, "measured": programs, "profile": str(out)}))
        return
    longest = sorted(new, key=lambda piece: -seconds[piece.key])[:MOST_SHOWN]
    lines = aligned([("longest programs", "seconds"), *((p.about, readable_seconds(seconds[p.key])) for p in longest)])
    told = f"{planned.describe()}, plan {plan}: {counted(len(new), 'program')} measured on {device.device_kind}"
    show(screen(), "\n".join([told, *(lines if new else []), f"written: {out}"]))
