"""A plan side by side with the same split given to ``jax.jit`` (GSPMD): numbers, time, collectives, memory.

GSPMD has no stages: beside a pipeline stands the split of one of its stages, over all devices.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich.table import Table

from jscaler.api import Parallelized, PlanLike
from jscaler.clusters.timing import interleaved, median_ratio
from jscaler.errors import CaptureError, check_count
from jscaler.estimate.live import LiveTensors
from jscaler.estimate.memory import held_arguments
from jscaler.estimate.waiting import Waiting, devices_alike
from jscaler.lower.step_plan import StepPlan
from jscaler.report.hlo import Totals, totals
from jscaler.report.plan_shardings import plan_shardings
from jscaler.report.target_report import send_rows
from jscaler.runtime.compiled import Compiled, Lowered
from jscaler.runtime.dispatch import place
from jscaler.runtime.executable import executable, input_structs
from jscaler.runtime.executable import lowered as lowered_segments
from jscaler.stages import lower
from jscaler.text.device_list import devices_text
from jscaler.text.tables import printed, table
from jscaler.text.units import counted, readable_bytes

TEXT_WIDTH = 120  # columns of a comparison as text


@dataclass(frozen=True)
class Side:
    """One way to run the step: collectives and memory of its executables, and what it took to make them.

    Attributes:
        plan, digest: whose split it is.
        collectives: of a step, by the devices that send most.
        memory: bytes of a device of those that hold most, by what `jax` calls them; ``peak`` is what is held at once.
        peaks: the devices that hold alike -> the same at their worst moment, where these are several.
        flops: of a step, on a device of those that compute most.
    """

    plan: str
    digest: str
    compile_seconds: float
    step_seconds: float
    collectives: dict[str, Totals]
    memory: dict[str, int]
    peaks: dict[str, int]
    flops: float


@dataclass(frozen=True)
class Comparison:
    """A plan against GSPMD; ``print`` it for a table. Differences are the largest absolute ones after ``steps`` steps.

    Attributes:
        plan: its name.
        devices: how many.
        steps: after how many the numbers are compared.
        ours, gspmd: both sides: seconds, bytes, FLOPs, collectives.
        loss_difference, gradient_difference: of what ``jscaler.value_and_grad`` gives; 0 where the step has none.
        parameter_difference: of the state that the step hands on.
        result_difference: of all else that it returns.
        time_ratio: seconds of a step by seconds of GSPMD's, the median of pairs that ran in turn.

    Example:
        >>> double = jscaler.parallelize("single", devices=1)(lambda x: 2 * x)
        >>> found = jscaler.compare(double, jnp.ones(4), steps=1, rounds=1)
        >>> found.result_difference, found.compile_ratio > 0, found.as_json()["devices"]
        (0.0, True, 1)
    """

    plan: str
    devices: int
    steps: int
    ours: Side
    gspmd: Side
    loss_difference: float
    gradient_difference: float
    parameter_difference: float
    result_difference: float
    time_ratio: float

    @property
    def compile_ratio(self) -> float:
        """Seconds of lowering and compiling by seconds of GSPMD's."""
        return self.ours.compile_seconds / self.gspmd.compile_seconds

    def as_json(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        return {**dataclasses.asdict(self), "compile_ratio": self.compile_ratio}

    def __str__(self) -> str:
        """Both sides and their ratio, row by row."""
        return printed([comparison_table(self)], TEXT_WIDTH)


def compare(step: Any, *args: Any, steps: int = 5, rounds: int = 10, beside: PlanLike | None = None) -> Comparison:
    """Run a parallelized step beside ``jax.jit``'s own partitioner (GSPMD) given the same split, in one process, in turn.

    Beside a step on several device groups (a pipeline), for which GSPMD has no word, stands what it does in each stage,
    over all devices.

    Args:
        step: what `parallelize` has made of a step, as it is, lowered or compiled.
        args: its arguments, arrays. They are copied, so that a step which donates leaves the caller's own alone.
        steps: how many steps the numbers are compared after; each goes on from the state that the one before has returned.
        rounds: how many timed runs of each side.
        beside: the plan whose split GSPMD gets; by default the step's own.

    Returns:
        A `Comparison`: seconds, FLOPs, memory, collectives and differences of both sides. ``print`` it, or take its fields.

    Raises:
        CaptureError: ``step`` is not parallelized, or its arguments are no arrays.
        DeviceError: there are fewer devices than the plan is for.
        PlanError: ``beside`` has several device groups; or what `parallelize` would raise for it.

    Example:
        >>> import jax.numpy as jnp
        >>> @jscaler.parallelize("data_parallel", devices=1)
        ... def step(params, batch):
        ...     loss, gradient = jscaler.value_and_grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(params)
        ...     return {"w": params["w"] - 0.1 * gradient["w"]}, loss
        >>> found = jscaler.compare(step, {"w": jnp.ones((8, 4))}, jnp.ones((16, 8)), rounds=1)
        >>> found.parameter_difference < 1e-6
        True
    """
    lowered = step.lowered if isinstance(step, Compiled) else step
    step = lowered.step if isinstance(lowered, Lowered) else lowered
    if not isinstance(step, Parallelized):
        raise CaptureError(
            f"compare takes a step that jscaler.parallelize has made, and its arguments, not a {type(step).__name__}: "
            "compare(jscaler.parallelize(plan, devices=8)(train_step), state, batch)"
        )
    return compare_calls(step, [args] * check_count("compare: steps", steps), rounds, beside)


def compare_calls(
    step: Parallelized, calls: Sequence[tuple[Any, ...]], rounds: int = 10, beside: PlanLike | None = None
) -> Comparison:
    """`compare`, with the arguments of each call; of the state, those of the first are used."""
    check_count("compare: rounds", rounds)
    for args in calls:
        step.bind(*args).check_arrays()
    started = time.perf_counter()
    lowered = step.lower(*calls[0])
    mine = lowered.compile()
    ours_seconds = time.perf_counter() - started
    other = step.without_stages() if beside is None else step.under(beside)
    split = lowered if other is step else other.lower(*calls[0])
    started = time.perf_counter()
    theirs = twin(split)
    twin_seconds = time.perf_counter() - started
    leaves = [step.leaves(*args) for args in calls]
    numbers = _differences(lowered, split, leaves)
    times = interleaved([_Loop(mine.flat, lowered, leaves[0]), _Loop(theirs, split, leaves[0])], rounds)
    return Comparison(
        lowered.plan.name,
        lowered.plan.plan.num_devices,
        len(calls),
        _side(lowered, mine.segments, ours_seconds, float(np.median(times[0]))),
        _side(split, [theirs], twin_seconds, float(np.median(times[1]))),
        *numbers,
        median_ratio(*times),
    )


def race(lowered: Lowered, executables: Sequence[Any], leaves: Sequence[Any], rounds: int) -> list[list[float]]:
    """Seconds per step of each executable of ``lowered``'s plan, run in turn from the same flat arguments.

    Each is called with flat leaves and returns all of the step's flat results.
    """
    return interleaved([_Loop(run, lowered, leaves) for run in executables], rounds)


class _Loop:
    """A training loop on one batch: each call runs a step and keeps the next state, so that inputs may be donated."""

    def __init__(self, run: Any, lowered: Lowered, leaves: Sequence[Any]):
        self.run = run
        self.next_version = lowered.captured.graph.next_version
        self.inputs = _placed(leaves, lowered)

    def __call__(self) -> Any:
        outputs = self.run(*self.inputs)
        for output, position in self.next_version.items():
            self.inputs[position] = outputs[output]
        return outputs


def _placed(leaves: Sequence[Any], lowered: Lowered) -> list[Any]:
    """Copies of ``leaves`` in the plan's layout (copies, since a step may consume them)."""
    shardings_ = lowered.executable.in_shardings
    return [place(jax.numpy.copy(x), s) for x, s in zip(leaves, shardings_, strict=True)]


def twin(lowered: Lowered, options: Mapping[str, Any] | None = None) -> Any:
    """The same split, compiled by ``jax.jit`` through GSPMD, with the same donation; ``options`` are the compiler's."""
    return _compile_twin(lowered.plan, lowered, lowered.executable.donated, options)


def _compile_twin(
    plan: StepPlan, lowered: Lowered, donated: Sequence[int], options: Mapping[str, Any] | None = None
) -> Any:
    made = plan_shardings(plan, lowered.devices)
    ins, outs = made.in_shardings, made.out_shardings
    jitted = jax.jit(made.constrained_step, in_shardings=ins, out_shardings=outs, donate_argnums=tuple(donated))
    return jitted.lower(*input_structs(plan.graph.inputs, ins)).compile(dict(options or {}))


def _differences(lowered: Lowered, split: Lowered, leaves: Sequence[Sequence[Any]]) -> tuple[float, float, float, float]:
    """Largest loss, gradient, parameter and other difference after as many steps as there are ``leaves``, under the plan
    of ``lowered`` and in the GSPMD twin of ``split``.

    Both sides run a step that also returns its loss and gradients.
    """
    graph = lowered.captured.graph
    probes = [t for call in graph.calls for t in (call.loss, *call.gradients)]
    ours = _probed(lowered)
    made = executable(ours, lowered.devices, ())
    mine = [one.compile() for one in lowered_segments(ours, made)]
    sides = (
        (lambda *leaves: made.run(mine, leaves), lowered),
        (_compile_twin(ours if split is lowered else _probed(split), split, ()), split),
    )
    results = []
    for run, one in sides:
        state: dict[int, Any] = {}
        outputs: Sequence[Any] = []
        for given in leaves:
            outputs = run(*_placed([state.get(i, x) for i, x in enumerate(given)], one))
            state = {i: outputs[o] for o, i in graph.next_version.items()}
        results.append(outputs)
    count = len(graph.outputs)
    losses = [count + sum(1 + len(c.gradients) for c in graph.calls[:i]) for i in range(len(graph.calls))]
    gradients = [i for i in range(count, count + len(probes)) if i not in losses]
    others = [i for i in range(count) if i not in graph.next_version]
    return (
        _largest(results, losses),
        _largest(results, gradients),
        _largest(results, list(graph.next_version)),
        _largest(results, others),
    )


def _probed(lowered: Lowered) -> StepPlan:
    """The plan of ``lowered`` for the step that returns losses and gradients, too."""
    graph = lowered.captured.graph
    probes = [t for call in graph.calls for t in (call.loss, *call.gradients)]
    names = tuple(f"probe/{i}" for i in range(len(probes)))
    probed = dataclasses.replace(graph, outputs=(*graph.outputs, *probes), output_names=(*graph.output_names, *names))
    return lower(dataclasses.replace(lowered.captured, graph=probed), lowered.plan.plan, lowered.cost)


def _largest(results: Sequence[Sequence[Any]], indices: Sequence[int]) -> float:
    floating = [i for i in indices if jax.numpy.issubdtype(results[0][i].dtype, jax.numpy.floating)]
    pairs = [(np.asarray(results[0][i], np.float64), np.asarray(results[1][i], np.float64)) for i in floating]
    return max((float(np.abs(a - b).max()) for a, b in pairs if a.size), default=0.0)


def _side(lowered: Lowered, compiled: Sequence[Any], compile_seconds: float, step_seconds: float) -> Side:
    """The figures of one side, whose blocks were ``compiled``."""
    step, blocks = lowered.plan, [_sizes(one) for one in compiled]
    donated = lowered.executable.ins.numbers(lowered.executable.donated)
    needs = [sizes["output"] - sizes["alias"] + sizes["temp"] for sizes in blocks]
    if len(blocks) == 1:
        (sizes,) = blocks
        memory, peaks = {**sizes, "peak": sizes["argument"] + needs[0]}, dict[str, int]()
    else:
        every = [
            (run.devices, held_arguments(step, run.devices[0]), run.waiting, needs[run.block])
            for run in Waiting(step, LiveTensors(step.graph), frozenset(donated)).worst(needs).values()
        ]
        sums = [(devices, sum(held.values()), sum(waits.values()), own) for devices, held, waits, own in every]
        peaks = {devices_text(devices): sum(parts) for devices, *parts in sums}
        fullest = max(sums, key=lambda one: sum(one[1:]))
        _, arguments, waiting, temporaries = fullest
        memory = {"argument": arguments, "waiting": waiting, "temp": temporaries, "peak": sum(fullest[1:])}
    shares = [_share(step, compiled, devices) for devices in devices_alike(step)]
    collectives = max((found for found, _ in shares), key=lambda found: sum(one.nbytes for one in found.values()))
    flops = max(flops for _, flops in shares)
    return Side(step.plan.name, step.digest, compile_seconds, step_seconds, collectives, memory, peaks, flops)


def _sizes(compiled: Any) -> dict[str, int]:
    memory = compiled.memory_analysis()
    return {f: int(getattr(memory, f"{f}_size_in_bytes", 0)) for f in ("argument", "output", "temp", "alias")}


def _share(step: StepPlan, compiled: Sequence[Any], devices: Sequence[int]) -> tuple[dict[str, Totals], float]:
    """Collectives, and FLOPs, of a step on each of some devices that do alike."""
    found: dict[str, Totals] = {}
    flops = 0.0
    for number, (block, one) in enumerate(zip(step.blocks, compiled, strict=True)):
        if devices[0] not in block.group.devices:
            continue
        runs = step.runs_of(number)
        flops += runs * float((one.cost_analysis() or {}).get("flops", 0.0))
        for kind, total in totals(one.as_text()).items():
            found[kind] = found.get(kind, Totals(0, 0, 0)).plus(total, runs)
    for row in send_rows(step):
        if devices[0] in row.groups[0]:
            sent = Totals(row.launches, row.launches, round(row.sent))
            found[row.kind] = found.get(row.kind, Totals(0, 0, 0)).plus(sent)
    return found, flops


def comparison_table(result: Comparison) -> Table:
    """A plan and its GSPMD twin, column by column."""
    title = f"plan {result.plan} on {counted(result.devices, 'device')}, {counted(result.steps, 'step')}"
    ours, gspmd = result.ours, result.gspmd
    split = "same split" if gspmd.digest == ours.digest else f"split of {gspmd.plan} over all"
    rows: list[tuple[str, str, str, str]] = [
        _row("step time", ours.step_seconds, gspmd.step_seconds, _milliseconds, result.time_ratio),
        _row("trace to executable", ours.compile_seconds, gspmd.compile_seconds, _milliseconds),
        _row("FLOPs per device", ours.flops, gspmd.flops, lambda f: f"{f:.4g}"),
    ]
    for name in dict.fromkeys((*ours.memory, *gspmd.memory)):
        rows.append(_row(f"memory: {name}", ours.memory.get(name, 0), gspmd.memory.get(name, 0), readable_bytes))
    for devices, peak in ours.peaks.items():
        rows.append(_row(f"memory: peak on {devices}", peak, gspmd.memory["peak"], readable_bytes))
    for kind in sorted({*ours.collectives, *gspmd.collectives}):
        mine, theirs = (_collective(side, kind) for side in (ours, gspmd))
        rows.append((f"{kind} (count, bytes)", *mine[:1], *theirs[:1], _ratio(mine[1], theirs[1])))
    for what, value in (
        ("loss", result.loss_difference),
        ("gradient", result.gradient_difference),
        ("parameter", result.parameter_difference),
        ("result", result.result_difference),
    ):
        rows.append((f"largest {what} difference", f"{value:.3g}", "", ""))
    return table(title, ("measured", "jscaler", f"jax.jit, {split}", "ratio"), rows)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def _row(name: str, mine: float, theirs: float, show: Any, ratio: float | None = None) -> tuple[str, str, str, str]:
    return name, show(mine), show(theirs), f"{ratio:.3f}" if ratio else _ratio(mine, theirs)


def _collective(side: Side, kind: str) -> tuple[str, int]:
    found = side.collectives.get(kind)
    return (f"{found.count}, {readable_bytes(found.nbytes)}", found.nbytes) if found else ("none", 0)


def _ratio(mine: float, theirs: float) -> str:
    return f"{mine / theirs:.3f}" if theirs else ""
