"""``jscaler plan``: a plan and what it costs, for any number of devices; nothing is compiled and nothing runs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from jscaler.clusters import Cluster, find_cluster
from jscaler.commands.built_in_job import stacked_by_default
from jscaler.commands.chosen_job import chosen_job
from jscaler.commands.options import (
    Batch,
    Dtype,
    JobFile,
    Model,
    PlanName,
    Remat,
    Schedule,
    Sequence,
    Size,
    Stacked,
    Strict,
    use_platform,
)
from jscaler.commands.progress import stages
from jscaler.commands.screen import screen, show
from jscaler.commands.told_model import telling_sizes, with_model
from jscaler.errors import DeviceError, PlanFileError
from jscaler.estimate.query import cost
from jscaler.estimate.simulation import simulate
from jscaler.plans import with_schedule
from jscaler.report.draw_layout import refuse_picture
from jscaler.report.draw_timeline import draw_timelines
from jscaler.report.trace_file import write_trace
from jscaler.report.written import check_file
from jscaler.training.planned_job import PlannedJob, devices_for

TARGET_HELP = "cluster whose links and devices the cost is of: 4x8xV100-32GB, a built-in name or a .toml file"


@telling_sizes
def plan_(
    context: typer.Context,
    model: Model = "gpt",
    size: Size = None,
    job: JobFile = None,
    plan: PlanName = "data_parallel",
    devices: Annotated[
        int | None, typer.Option(help="number of devices; by default those of a saved plan, or of the target", min=1)
    ] = None,
    target: Annotated[str | None, typer.Option(help=TARGET_HELP)] = None,
    profile: Annotated[Path | None, typer.Option(help="seconds that jscaler profile has measured; needs --target")] = None,
    batch: Batch = 32,
    seq: Sequence = None,
    dtype: Dtype = "bf16",
    stacked: Stacked = None,
    remat: Remat = False,
    schedule: Schedule = None,
    simulated: Annotated[
        bool, typer.Option("--simulate", help="when each block of a pipeline would run; needs --target")
    ] = False,
    draw: Annotated[Path | None, typer.Option(help="write a picture of that: .png, .svg or .pdf")] = None,
    trace: Annotated[Path | None, typer.Option(help="write that for ui.perfetto.dev: .json")] = None,
    passes: Annotated[bool, typer.Option("--passes", help="print what each pass made of the program")] = False,
    after: Annotated[str | None, typer.Option(help="print the graph, or the program, behind this pass")] = None,
    strict: Strict = False,
    save: Annotated[Path | None, typer.Option(help="write the plan's decisions to this .json file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> None:
    """Print a plan and what it costs: who splits what, collectives, seconds, bytes per link, memory per device.

    Needs no devices, compiles nothing, allocates no model.

    Example: jscaler plan --model gpt-1.3b --plan "megatron(dp=4, tp=8)" --target 4x8xV100-32GB

    Example: jscaler plan --job my_model.py:job --plan zero3 --devices 8
    """
    refuse_picture(draw)
    check_file("trace", trace)
    check_file("plan", save)
    if save is not None and save.suffix != ".json":
        raise PlanFileError(f"a plan file is named *.json, not '{save}': --plan knows it by that")
    if profile is not None and target is None:
        raise DeviceError("--profile has seconds of a kind of device: say of which with --target 8xH200-141GB")
    plan = plan if schedule is None else with_schedule(plan, schedule)
    use_platform("cpu", None)
    cluster = None if target is None else find_cluster(target)
    count = _count(devices_for(plan, devices), cluster)
    chosen = chosen_job(
        context, job, plan=plan, model=model, size=size, batch=batch, seq=seq, dtype=dtype,
        stacked=stacked_by_default(model, stacked), remat=remat,
    )  # fmt: skip
    planned = PlannedJob(chosen, plan, count, strict=strict, target=cluster)
    with stages() as begin:
        begin("capturing and planning")
        step = planned.step.lower(*planned.arguments()).plan
        if cluster is not None:
            begin("what it costs")
        priced = None if cluster is None else cost(step, None, cluster, profile=profile)
        timeline = simulate(step, cluster) if simulated or draw is not None or trace is not None else None
    written = [str(path) for path in (save, draw, trace) if path is not None]
    if draw is not None and timeline is not None:
        draw_timelines(draw, [timeline])
    if trace is not None and timeline is not None:
        write_trace(trace, timeline)
    if save is not None:
        with_model(step.plan, job, model, size, stacked, dtype=dtype, remat=remat, batch=batch, seq=seq).save(save)
    if as_json:
        record = {"model": planned.describe(), "plan": plan, "report": step.report.as_json()}
        record |= {"passes": step.passes.as_json()} if passes else {}
        record |= {"simulated": timeline.as_json()} if timeline is not None else {}
        record |= {"cost": None if priced is None else priced.as_json(), "saved": None if save is None else str(save)}
        typer.echo(json.dumps(record))
        return
    parts = [f"{planned.describe()}, plan {plan}", step.explain()]
    parts += [str(priced)] if priced is not None else ["give --target for seconds, bytes per link and memory over time"]
    parts += [str(timeline)] if timeline is not None else []
    parts += [str(step.passes)] if passes else []
    parts += [str(step.passes.after(after))] if after is not None else []
    parts += [f"written: {', '.join(written)}"] if written else []
    show(screen(), "\n\n".join(parts))


def _count(devices: int | None, cluster: Cluster | None) -> int:
    if devices is None and cluster is None:
        raise DeviceError("say for how many devices to plan: --devices 32, or --target 4x8xV100-32GB")
    if cluster is None or devices is None:
        return devices or (cluster.num_devices if cluster is not None else 0)
    if devices > cluster.num_devices:
        raise DeviceError(f"{devices} devices are asked for and the target '{cluster.name}' has {cluster.num_devices}")
    return devices
