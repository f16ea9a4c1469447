"""``jscaler fit``: which memory plans make a model fit on a target, from the cheapest to the most drastic."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from jscaler.clusters import Cluster
from jscaler.commands.built_in_job import stacked_by_default
from jscaler.commands.chosen_job import chosen_job
from jscaler.commands.options import Batch, Dtype, JobFile, Model, Remat, Sequence, Size, Stacked, use_platform
from jscaler.commands.progress import stages
from jscaler.commands.screen import screen, show
from jscaler.errors import DeviceError
from jscaler.estimate.fitting import Fit, Tried, batch_size, climb, with_memory
from jscaler.ir import Graph
from jscaler.plans.ladder import ladder
from jscaler.report.draw_layout import refuse_picture, save_picture
from jscaler.training.planned_job import PlannedJob

TARGET_HELP = "what it is to fit on: V100-32GB (one device), 8xH100-80GB, 4x8xV100-32GB, a built-in name or a .toml file"
PLANS_HELP = "try this plan in place of the ladder's; give it several times for several, the cheapest first"
CONFIRM_HELP = "compile what fits for the target, for XLA's own peak; on where JAX's CUDA plugin is at hand (extra aot)"
NOTHING = 3  # the exit code if nothing fits; 1 is an error, 2 a mistake in the options
Progress = Callable[[str], None]


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
    every: Annotated[bool, typer.Option("--all", help="try every rung; of those that fit the cheapest is chosen")] = False,
    confirm: Annotated[bool | None, typer.Option("--confirm/--no-confirm", help=CONFIRM_HELP)] = None,
    draw: Annotated[Path | None, typer.Option(help="write a picture of memory over the step: .png, .svg or .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
) -> None:
    """Try memory plans from the cheapest to the most drastic until one fits: peak, extra FLOPs, bytes moved.

    Estimates need no devices, compile nothing and allocate no model. Exit code 0 if something fits, 3 if nothing does.

    Example: jscaler fit --model gpt-1.3b --target V100-32GB --seq 4096 --dtype fp16

    Example: jscaler fit --job my_model.py:job --target 8xH100-80GB
    """
    from jscaler.estimate.fit_result import fit_table, reasons, verdict
    from jscaler.report.draw_fit import fit_figure
    from jscaler.runtime.target import find_target

    refuse_picture(draw)
    use_platform("cpu", None)
    cluster = with_memory(find_target(target))
    chosen = chosen_job(
        context, job, model=model, size=size, batch=batch, seq=seq, dtype=dtype,
        stacked=stacked_by_default(model, stacked), remat=remat,
    )  # fmt: skip
    planned = PlannedJob(chosen, "single", 1)
    with stages() as begin:
        begin("capturing the step")
        graph = planned.step.graph(*planned.arguments())
        check = _Check(confirm, cluster, planned)
        plans = plan or list(ladder(cluster.num_devices, batch_size(graph)))
        found = _climbed(graph, cluster, plans, every, check, begin, skim=not plan and not every)
    if draw is not None:
        save_picture(draw, fit_figure(found, planned.describe()), dpi=110)
    if as_json:
        record = {"model": planned.describe(), **found.as_json(), "picture": str(draw) if draw else None}
        typer.echo(json.dumps(record))
    else:
        console = screen()
        show(console, planned.describe())
        console.print(fit_table(found))
        lines = [*reasons(found), verdict(found), check.note, f"written: {draw}" if draw else ""]
        show(console, "\n".join(filter(None, lines)))
    if found.chosen is None:
        raise typer.Exit(NOTHING)


def _climbed(
    graph: Graph, cluster: Cluster, plans: list[str], every: bool, check: "_Check", begin: Progress, skim: bool
) -> Fit:
    """All rungs up to the first that fits, which is compiled; of ``every`` rung the cheapest that fits is."""
    tried: dict[str, Tried] = {}
    for one in climb(graph, cluster, plans, skim=skim, progress=begin):
        tried[one.plan] = one if every else check.peak_of(one, begin)
        if tried[one.plan].fits and not every:
            break
    found = Fit(cluster, tuple(tried.values()))
    while found.chosen is not None and (checked := check.peak_of(found.chosen, begin)) is not found.chosen:
        found = replace(found, tried=tuple(checked if one is found.chosen else one for one in found.tried))
    return found


@dataclass
class _Check:
    """Compiles for the target what fits by the estimate, unless nobody wants it, or nobody asked and it cannot be done."""

    wanted: bool | None
    cluster: Cluster
    job: PlannedJob
    note: str = ""

    def peak_of(self, one: Tried, begin: Progress) -> Tried:
        """``one`` with XLA's peak, where it fits by the estimate and XLA is asked; else ``one`` itself."""
        from jscaler.report.targets import plugin_installed
        from jscaler.runtime.target import compile_for

        wanted = plugin_installed() if self.wanted is None else self.wanted
        if not wanted or self.note or not one.fits or one.compiled_peak is not None:
            return one
        assert one.cost is not None

        def progress(stage: str) -> Any:
            begin(f"{one.plan}: {stage}")

        try:
            report = compile_for(one.cost.step, self.cluster, self._donated(), progress)
        except DeviceError as error:
            if self.wanted:
                raise
            self.note = f"not compiled: {error}"
            return one
        return replace(one, compiled_peak=report.memory.peak)

    def _donated(self) -> list[int]:
        """The positions of the state's leaves among the step's arguments."""
        owners = self.job.step.bind(*self.job.arguments()).owners
        return [i for i, owner in enumerate(owners) if owner == self.job.state_name]
