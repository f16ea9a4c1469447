"""The command line: ``jscaler train`` and ``jscaler compare``; the other commands have files of their own."""

import functools
import itertools
import json
import platform as platform_
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from jscaler import __version__
from jscaler.commands.calibrate import calibrate_
from jscaler.commands.chosen_job import chosen_job
from jscaler.commands.comm import bench_comm
from jscaler.commands.compile import compile_
from jscaler.commands.diff_command import diff_
from jscaler.commands.export import export
from jscaler.commands.fit_command import fit_
from jscaler.commands.interrupts import Interruptible
from jscaler.commands.options import (
    Batch,
    Data,
    Devices,
    Dtype,
    JobFile,
    Model,
    PlanName,
    Platform,
    Remat,
    Schedule,
    Seed,
    Sequence,
    Size,
    Stacked,
    Strict,
    use_platform,
)  # fmt: skip
from jscaler.commands.plan_command import plan_
from jscaler.commands.processes import (
    PANEL,
    Coordinator,
    Distributed,
    LocalDevices,
    Process,
    Processes,
    StartedBy,
    devices_of_one,
    end_with,
    join,
    run_locally,
    without,
)  # fmt: skip
from jscaler.commands.profile import profile_
from jscaler.commands.redistribute import redistribute
from jscaler.commands.runs import runs_
from jscaler.commands.schedules import schedules_
from jscaler.commands.screen import screen, show, show_error
from jscaler.commands.search_command import search_
from jscaler.commands.told_model import telling_sizes
from jscaler.commands.training import OnScreen, Timelines
from jscaler.errors import DeviceError, JscalerError
from jscaler.plans import with_schedule
from jscaler.report.draw_layout import refuse_picture
from jscaler.report.written import check_file, check_folder
from jscaler.runtime.agreement import agree, check_shares
from jscaler.runtime.devices import resolve_devices
from jscaler.runtime.watch import end_soon
from jscaler.training.not_finite import OnNan
from jscaler.training.planned_job import PlannedJob, devices_for
from jscaler.training.trackers import JsonLines, Profile, TensorBoard, Tracker
from jscaler.training.train import train as run

COMPARED = 5  # steps after which numbers are compared

app = typer.Typer(cls=Interruptible, no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jscaler {__version__}, jax {jax.__version__}, Python {platform_.python_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version, and JAX's")
    ] = False,
) -> None:
    """Expert-written parallel plans for Flax train steps.

    Example: jscaler train --model gpt --size nano --plan data_parallel --devices 8 --platform cpu
    """


@app.command()
@telling_sizes
def train(
    context: typer.Context,
    model: Model = "gpt",
    size: Size = None,
    job: JobFile = None,
    plan: PlanName = "data_parallel",
    devices: Devices = None,
    platform: Platform = None,
    data: Data = None,
    steps: Annotated[int, typer.Option(help="optimizer steps", min=1)] = 100,
    batch: Batch = 16,
    seq: Sequence = None,
    learning_rate: Annotated[float, typer.Option(help="peak learning rate")] = 3e-3,
    log: Annotated[Path | None, typer.Option(help="write one JSON line per step to this file")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="write events for TensorBoard to this folder")] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="steps between evaluations, on data that is not trained on", min=1, metavar="N")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="save the state in this folder: after the last step, and on Ctrl-C or SIGTERM")
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="and after every so many steps", min=1)] = None,
    keep: Annotated[int | None, typer.Option(help="states that stay, the latest; all by default", min=1)] = None,
    resume: Annotated[bool, typer.Option(help="start from the checkpoint, which may be another plan's")] = False,
    resume_if_any: Annotated[
        bool, typer.Option("--resume-if-any", help="the same where there is one: for launchers that start jobs again")
    ] = False,
    on_nan: Annotated[
        OnNan, typer.Option(help="where a loss is not finite: stop, skip the step, or go back to the checkpoint")
    ] = OnNan.STOP,
    seed: Seed = 0,
    dtype: Dtype = None,
    stacked: Stacked = None,
    remat: Remat = False,
    schedule: Schedule = None,
    trace: Annotated[
        Path | None, typer.Option(help="write when blocks ran in some steps to this folder, for Perfetto")
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="write a picture of the last of these steps: .png, .svg or .pdf")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="let jax.profiler see these steps, up to before TO", metavar="FROM:TO")
    ] = None,
    profile_to: Annotated[Path | None, typer.Option(help="the folder of what it has seen: profile, by default")] = None,
    strict: Strict = False,
    explain: Annotated[bool, typer.Option("--explain", help="show the plan op by op, not in five lines")] = False,
    local_processes: Annotated[
        int | None, typer.Option(help="share the CPU devices out to so many, started here", min=1, rich_help_panel=PANEL)
    ] = None,
    restarts: Annotated[
        int, typer.Option(help="of these, from the checkpoint, where one of them fails", min=0, rich_help_panel=PANEL)
    ] = 0,
    coordinator: Coordinator = None,
    processes: Processes = None,
    process: Process = None,
    distributed: Distributed = False,
    local_devices: LocalDevices = None,
    started_by: StartedBy = None,
    hang_after: Annotated[
        int,
        typer.Option(
            help="end where a process is silent for so many seconds, or none goes on", min=1, rich_help_panel=PANEL
        ),
    ] = 300,
) -> None:
    """Train a model under a plan: a built-in one on text, or yours on its data.

    Every device makes and stores its own parts of the state.

    A plan that jscaler plan saved brings the options of the model that it was made for, where they are not given.

    Example: jscaler train --model gpt --size nano --plan "megatron(dp=2, tp=4)" --devices 8 --platform cpu

    Example: jscaler train --job my_model.py:job --plan zero3 --devices 8 --platform cpu

    In a job of many processes all get the same command; --distributed under a launcher, --coordinator without one.
    """
    needing = {"--resume": resume, "--resume-if-any": resume_if_any, "--save-every": save_every, "--keep": keep}
    for option, given in (needing | {"--restarts": restarts}).items():
        if given and checkpoint is None:
            raise typer.BadParameter("give the --checkpoint that it is about", param_hint=option)
    if on_nan is OnNan.RESTORE and checkpoint is None:
        raise typer.BadParameter("restore goes back to a state of --checkpoint, which is not given", param_hint="--on-nan")
    if profile_to is not None and profile is None:
        raise typer.BadParameter("give the steps that are to be seen, with --profile", param_hint="--profile-to")
    if restarts and local_processes is None:
        raise typer.BadParameter("it is for --local-processes: a launcher has its own", param_hint="--restarts")
    refuse_picture(draw)
    check_file("log", log)  # before, not after hours of training
    check_folder("traces", trace)
    check_folder("events", tensorboard)
    profiled = None if profile is None else (_steps(profile, steps), profile_to or Path("profile"))
    check_folder("profile", profiled and profiled[1])
    plan = plan if schedule is None else with_schedule(plan, schedule)
    devices = devices_for(plan, devices)
    if local_processes is not None:
        devices_of_one(devices, local_processes)
        if platform != "cpu" or devices is None:
            raise DeviceError("--local-processes shares out virtual CPU devices: give --platform cpu and --devices")
        words = without(sys.argv[1:], "--local-processes", "--restarts")
        run_locally(local_processes, restarts, words, checkpoint)
        return
    if distributed and platform == "cpu" and devices is not None and processes is None:
        raise DeviceError("virtual CPU devices are made before the launcher's processes meet: give --processes too")
    end_with(started_by)
    joins = functools.partial(join, coordinator, processes, process, distributed, local_devices, hang_after)
    use_platform(platform, devices_of_one(devices, processes), joins)
    console = screen(quiet=jax.process_index() > 0)
    if jax.process_count() > 1 and (trace or draw):
        raise DeviceError(f"--trace and --draw watch one process, and the job has {jax.process_count()}: leave them out")
    chosen = chosen_job(
        context, job, plan=plan, model=model, size=size, batch=batch, seq=seq, dtype=dtype, stacked=stacked, remat=remat,
        data=data, learning_rate=learning_rate, steps=steps, seed=seed, eval_every=eval_every,
    )  # fmt: skip
    check_shares()
    agree({"--resume": str(resume), "--checkpoint": "none" if checkpoint is None else "one"})
    if resume and checkpoint is not None:
        from jscaler.runtime.checkpoint import latest_step

        latest_step(checkpoint)  # there is one
    about = {"plan": plan, "job": chosen.name, "seed": seed}
    others: list[Tracker] = [JsonLines(log, about)] if log is not None else []
    others += [TensorBoard(tensorboard)] if tensorboard is not None else []
    others += [Profile(*profiled)] if profiled is not None else []
    with OnScreen(console, explain) as shown:
        run(
            chosen, plan, steps, devices=resolve_devices(devices), seed=seed, strict=strict, checkpoint=checkpoint,
            save_every=save_every, keep=keep, resume=resume or resume_if_any, on_nan=on_nan, trackers=[shown, *others],
            hang_after=hang_after, say=functools.partial(show, console),
            before_step=Timelines(trace, draw) if trace or draw else None,
        )  # fmt: skip


def _steps(text: str, steps: int) -> tuple[int, int]:
    """``10:20`` as a pair."""
    first, _, behind = text.partition(":")
    if not (first.isdecimal() and behind.isdecimal() and int(first) < int(behind)):
        raise typer.BadParameter(f"steps are FROM:TO, such as 10:20, and not {text!r}", param_hint="--profile")
    if int(first) >= steps:
        raise typer.BadParameter(
            f"the run has steps 0 to {steps - 1}, and ends before step {first}: give steps that it has",
            param_hint="--profile",
        )
    return int(first), int(behind)


@app.command()
@telling_sizes
def compare(
    context: typer.Context,
    model: Model = "gpt",
    size: Size = None,
    job: JobFile = None,
    plan: PlanName = "data_parallel",
    devices: Devices = None,
    platform: Platform = None,
    data: Data = None,
    batch: Batch = 16,
    seq: Sequence = None,
    rounds: Annotated[int, typer.Option(help="timed runs of each side", min=1)] = 10,
    beside: Annotated[str | None, typer.Option(help="the plan whose split GSPMD gets; by default the same")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
    seed: Seed = 0,
) -> None:
    """Run a plan beside the same split given to jax.jit (GSPMD), in one process, in turn.

    Beside a pipeline stands what it does in each stage, over all devices.

    Example: jscaler compare --size nano --plan data_parallel --devices 8 --platform cpu

    Example: jscaler compare --job my_model.py:job --plan zero3 --devices 8 --platform cpu
    """
    from jscaler.comparison import compare_calls, comparison_table

    devices = devices_for(plan, devices)
    use_platform(platform, devices)
    chosen = chosen_job(context, job, plan=plan, model=model, size=size, batch=batch, seq=seq, data=data, seed=seed)
    planned = PlannedJob(chosen, plan, resolve_devices(devices), seed)
    state = planned.state()
    calls = [(state, batch) for batch in itertools.islice(planned.batches(), COMPARED)]
    result = compare_calls(planned.step, calls, rounds, beside)
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        screen().print(comparison_table(result))


app.command()(bench_comm)
app.command("calibrate")(calibrate_)
app.command()(redistribute)
app.command("compile")(compile_)
app.command("plan")(plan_)
app.command("diff")(diff_)
app.command("fit")(fit_)
app.command("search")(search_)
app.command("profile")(profile_)
app.command("schedules")(schedules_)
app.command("export")(export)
app.command("runs")(runs_)


def main() -> None:
    """Run the command line: errors of ours have no traceback, and an exit code, and warnings no line."""
    warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
    try:
        app()
    except Exception as error:
        if jax.distributed.is_initialized():
            end_soon()
        if not isinstance(error, JscalerError):
            raise
        show_error("error:", f"{type(error).__name__}: {error}")
        sys.exit(error.exit_code)


def _show_warning(otherwise: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any) -> None:
    """Of ours a sentence: a command has no line of the user's own that it could be of."""
    if category.__module__ == JscalerError.__module__:
        show_error("warning:", f"{category.__name__}: {message}")
    else:
        otherwise(message, category, *where)
