"""``jscaler schedules``: which of the published schedules is best for a plan's stages; and one that is searched."""

import dataclasses
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from jscaler import plans
from jscaler.clusters import Cluster, find_cluster
from jscaler.commands.built_in_job import stacked_by_default
from jscaler.commands.chosen_job import chosen_job
from jscaler.commands.fit_command import NOTHING
from jscaler.commands.options import Batch, Dtype, JobFile, Model, Remat, Sequence, Size, Stacked, use_platform
from jscaler.commands.progress import stages
from jscaler.commands.screen import screen, show, show_error
from jscaler.errors import JscalerError, PlanError, PlanWarning, ScheduleWarning
from jscaler.estimate.query import planned
from jscaler.estimate.simulation import simulate
from jscaler.ir import Graph
from jscaler.report.draw_layout import refuse_picture
from jscaler.report.draw_timeline import draw_timelines
from jscaler.tables import SCHEDULES
from jscaler.tables.recomputing import MARKS
from jscaler.tables.searched import SEARCHED
from jscaler.tables.timeline import Timeline
from jscaler.text.tables import table
from jscaler.text.units import readable_bytes, readable_seconds
from jscaler.training.planned_job import PlannedJob

MOST_CHUNKS = 4


@dataclass(frozen=True)
class Simulated:
    """A schedule for a plan's stages: its timeline, and the seconds of a step at the peaks; or why there is none."""

    schedule: str
    chunks: int
    timeline: Timeline | None = None
    bound: float | None = None
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        found = {"schedule": self.schedule, "chunks": self.chunks, "why": self.why, "bound": self.bound}
        return found | (self.timeline.as_json() if self.timeline is not None else {})


def schedules_(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="cluster whose devices and links count: 4x8xV100-32GB, a name, a .toml file")],
    plan: Annotated[str, typer.Option(help='a plan with stages: "megatron(tp=8, pp=4, microbatches=16)"')],
    model: Model = "gpt",
    size: Size = None,
    job: JobFile = None,
    batch: Batch = 32,
    seq: Sequence = None,
    dtype: Dtype = "bf16",
    stacked: Stacked = None,
    remat: Remat = False,
    draw: Annotated[Path | None, typer.Option(help="write a picture of all timelines: .png, .svg or .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
) -> None:
    """Simulate a plan with every published schedule that exists for its numbers: seconds, waiting, memory, does it fit?

    Each is tried as it is, and with layers that are computed again in blocks of their own (+R, +R early). "search" is the
    best order of the plan's own blocks, of one chunk and of two. Needs no devices, compiles nothing, allocates no model.

    Example: jscaler schedules --model gpt-1.3b --plan "megatron(tp=8, pp=4, microbatches=16)" --target 4x8xV100-32GB

    Example: jscaler schedules --job my_model.py:job --plan "pipeline(4, 16)" --target 4xH100-80GB
    """
    refuse_picture(draw)
    use_platform("cpu", None)
    cluster = find_cluster(target)
    found: list[Simulated] = []
    chosen = chosen_job(
        context, job, model=model, size=size, batch=batch, seq=seq, dtype=dtype,
        stacked=stacked_by_default(model, stacked), remat=remat,
    )  # fmt: skip
    planned_job = PlannedJob(chosen, plan, cluster.num_devices)
    with stages() as begin:
        begin("capturing the step")
        graph = planned_job.step.graph(*planned_job.arguments())
        for name, chunks in _all():
            begin(f"planning and simulating {name}, {len(found)} done")
            found.append(_simulated(graph, plan, name, chunks, cluster))
    found = [one for one in found if not any(_gains_nothing(one, other) for other in found)]
    best = sorted((one for one in found if one.timeline is not None), key=lambda one: one.timeline.makespan)  # type: ignore[union-attr]
    others = [one for one in found if one.timeline is None]
    if draw is not None and best:
        alone = [
            dataclasses.replace(one.timeline, name=one.schedule, memory={}) for one in best if one.timeline is not None
        ]
        draw_timelines(draw, alone)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "model": planned_job.describe(),
                    "plan": plan,
                    "schedules": [one.as_json() for one in (*best, *others)],
                }
            )
        )
    else:
        console = screen()
        show(console, f"{planned_job.describe()}, plan {plan}, on {cluster.name}")
        if best:
            header = ("schedule", "chunks", "step", "waiting", "sends show", "at peaks", "peak memory", "fits")
            console.print(table("schedules, the fastest first", header, [_row(one) for one in best]))
        lines = [f"{', '.join(names)}: {why}" for why, names in _reasons(others).items()]
        lines += [f"written: {draw}"] if draw is not None and best else []
        show(console, "\n".join(lines))
    if not best:
        show_error("error:", "none of these schedules is possible: change what their reasons name, in --plan or --batch")
        raise typer.Exit(NOTHING)


def _reasons(others: list[Simulated]) -> dict[str, list[str]]:
    """Which schedules are not possible, by the sentence that says why: one sentence often is for many."""
    found: dict[str, list[str]] = {}
    for one in others:
        names = found.setdefault(one.why, [])
        if one.schedule not in names:
            names.append(one.schedule)
    return found


def _all() -> Iterator[tuple[str, int]]:
    """The name of each schedule, with how many chunks it is tried."""
    for one in SCHEDULES.values():
        if one.name == "forward_only":
            continue  # a train step has backwards
        for chunks in range(2, MOST_CHUNKS + 1, 2) if one.chunks is None else (one.chunks,):
            yield from ((one.name + mark, chunks) for mark in ("", *MARKS.values()))
    if find_spec("ortools") is not None:
        yield from ((SEARCHED.name, chunks) for chunks in (1, 2))


def _gains_nothing(one: Simulated, other: Simulated) -> bool:
    """Whether ``one`` is a schedule with recompute, and ``other`` the same without, or later, that is as good."""
    mark = next((mark for mark in MARKS.values() if one.schedule.endswith(mark)), None)
    if mark is None or one.chunks != other.chunks or one.schedule == other.schedule:
        return False
    plain = one.schedule.removesuffix(mark)
    if other.schedule not in (plain, *((plain + MARKS["late"],) if mark == MARKS["early"] else ())):
        return False
    if one.timeline is None or other.timeline is None:
        return one.timeline is None
    return one.timeline.makespan >= other.timeline.makespan and _peak(one.timeline) >= _peak(other.timeline)


def _simulated(graph: Graph, plan: str, name: str, chunks: int, cluster: Cluster) -> Simulated:
    try:
        more = {"chunks": chunks} if chunks > 1 else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the schedule '.*' has", PlanWarning)  # who runs it is told
            warnings.simplefilter("error", ScheduleWarning)
            step = planned(graph, plans.with_schedule(plan, name, **more), cluster)
    except (PlanError, ScheduleWarning) as error:
        return Simulated(name, chunks, why=str(error))
    if step.instructions.table is None:
        raise JscalerError(f"plan '{plan}' has no stages: give one that has, \"megatron(tp=8, pp=4, microbatches=16)\"")
    return Simulated(name, chunks, simulate(step, cluster), simulate(step, cluster.at_peaks()).makespan)


def _peak(timeline: Timeline) -> int:
    """Bytes of the device that holds most."""
    return max(timeline.peak(own[0]) for own in timeline.memory)


def _row(one: Simulated) -> tuple[str, ...]:
    timeline = one.timeline
    assert timeline is not None
    peak = _peak(timeline)
    fits = {True: "yes", False: "NO", None: "?"}[timeline.fits]
    times = readable_seconds(timeline.makespan), f"{timeline.bubble:.1%}", readable_seconds(timeline.exposed)
    return one.schedule, str(one.chunks), *times, readable_seconds(one.bound), readable_bytes(peak), fits
