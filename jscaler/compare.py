"""A plan side by side with the same split given to ``jax.jit`` (GSPMD): numbers, time, collectives, memory."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich.table import Table

from jscaler.api import Parallelized
from jscaler.clusters.timing import interleaved, median_ratio
from jscaler.lower.emit import physical_mesh
from jscaler.lower.gspmd import constrained_step
from jscaler.lower.step_plan import StepPlan
from jscaler.report.hlo import Totals, totals
from jscaler.runtime.compiled import Lowered
from jscaler.runtime.executable import executable, input_structs, shardings
from jscaler.runtime.executable import lowered as lowered_segments
from jscaler.stages import lower
from jscaler.text.tables import table
from jscaler.text.units import readable_bytes

Arguments = Callable[[int], tuple[Any, ...]]


@dataclass(frozen=True)
class Side:
    """One way to run the step: collectives and memory of its executable, and what it took to make it."""

    compile_seconds: float
    step_seconds: float
    collectives: dict[str, Totals]
    memory: dict[str, int]
    flops: float


@dataclass(frozen=True)
class Comparison:
    """A plan against GSPMD. Differences are the largest absolute ones after ``steps`` steps."""

    plan: str
    devices: int
    steps: int
    ours: Side
    gspmd: Side
    loss_difference: float
    gradient_difference: float
    parameter_difference: float
    time_ratio: float

    @property
    def compile_ratio(self) -> float:
        return self.ours.compile_seconds / self.gspmd.compile_seconds

    def as_json(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        return {**dataclasses.asdict(self), "compile_ratio": self.compile_ratio}


def compare(step: Parallelized, arguments: Arguments, steps: int = 5, rounds: int = 10) -> Comparison:
    """Run ``step`` and its GSPMD twin in one process, in turn.

    Args:
        step: a parallelized step that returns the next version of its state.
        arguments: the arguments of the i-th call; of the state, those of call 0 are used.
        steps: how many optimizer steps the numbers are compared after.
        rounds: how many timed runs of each.
    """
    started = time.perf_counter()
    lowered = step.lower(*arguments(0))
    mine = lowered.compile()
    ours_seconds = time.perf_counter() - started
    plan = lowered.plan
    started = time.perf_counter()
    other = twin(lowered)
    twin_seconds = time.perf_counter() - started
    leaves = [step.leaves(*arguments(i)) for i in range(steps)]
    numbers = _differences(lowered, leaves)
    times = race(lowered, (mine.flat, other), leaves[0], rounds)
    return Comparison(
        plan.name,
        plan.plan.num_devices,
        steps,
        _side(mine, ours_seconds, float(np.median(times[0]))),
        _side(other, twin_seconds, float(np.median(times[1]))),
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
    return [jax.device_put(jax.numpy.copy(x), s) for x, s in zip(leaves, shardings_, strict=True)]


def twin(lowered: Lowered, options: Mapping[str, Any] | None = None) -> Any:
    """The same split, compiled by ``jax.jit`` through GSPMD, with the same donation; ``options`` are the compiler's."""
    return _compile_twin(lowered.plan, lowered, lowered.executable.donated, options)


def _compile_twin(
    plan: StepPlan, lowered: Lowered, donated: Sequence[int], options: Mapping[str, Any] | None = None
) -> Any:
    mesh = physical_mesh(plan.program.group, lowered.devices)  # GSPMD partitions for one group
    inputs, outputs = shardings(plan, lowered.devices)
    fun = constrained_step(plan.source, plan.layouts, mesh, plan.completed.gradients, plan.refetched)
    jitted = jax.jit(fun, in_shardings=inputs, out_shardings=list(outputs), donate_argnums=tuple(donated))
    return jitted.lower(*input_structs(plan.graph.inputs, inputs)).compile(dict(options or {}))


def _differences(lowered: Lowered, leaves: Sequence[Sequence[Any]]) -> tuple[float, float, float]:
    """Largest loss, gradient and parameter difference after as many steps as there are ``leaves``.

    Both sides run a step that also returns its loss and gradients.
    """
    graph = lowered.captured.graph
    probes = [t for call in graph.calls for t in (call.loss, *call.gradients)]
    names = tuple(f"probe/{i}" for i in range(len(probes)))
    probed = dataclasses.replace(graph, outputs=(*graph.outputs, *probes), output_names=(*graph.output_names, *names))
    both = lower(dataclasses.replace(lowered.captured, graph=probed), lowered.plan.plan, lowered.cost)
    ours = executable(both, lowered.devices, ())
    mine = [one.compile() for one in lowered_segments(both, ours)]
    sides = (lambda *leaves: ours.run(mine, leaves), _compile_twin(both, lowered, ()))
    results = []
    for run in sides:
        state: dict[int, Any] = {}
        outputs: Sequence[Any] = []
        for given in leaves:
            outputs = run(*_placed([state.get(i, x) for i, x in enumerate(given)], lowered))
            state = {i: outputs[o] for o, i in graph.next_version.items()}
        results.append(outputs)
    count = len(graph.outputs)
    losses = [count + sum(1 + len(c.gradients) for c in graph.calls[:i]) for i in range(len(graph.calls))]
    gradients = [i for i in range(count, count + len(probes)) if i not in losses]
    return (
        _largest(results, losses),
        _largest(results, gradients),
        _largest(results, list(graph.next_version)),
    )


def _largest(results: Sequence[Sequence[Any]], indices: Sequence[int]) -> float:
    floating = [i for i in indices if jax.numpy.issubdtype(results[0][i].dtype, jax.numpy.floating)]
    pairs = [(np.asarray(results[0][i], np.float64), np.asarray(results[1][i], np.float64)) for i in floating]
    return max((float(np.abs(a - b).max()) for a, b in pairs if a.size), default=0.0)


def _side(compiled: Any, compile_seconds: float, step_seconds: float) -> Side:
    memory = compiled.memory_analysis()
    fields = ("argument", "output", "temp", "alias")
    sizes = {f: int(getattr(memory, f"{f}_size_in_bytes", 0)) for f in fields} if memory else {}
    flops = float((compiled.cost_analysis() or {}).get("flops", 0.0))
    return Side(compile_seconds, step_seconds, totals(compiled.as_text()), sizes, flops)


def comparison_table(result: Comparison) -> Table:
    """A plan and its GSPMD twin, column by column."""
    title = f"plan {result.plan} on {result.devices} device(s), {result.steps} steps"
    ours, gspmd = result.ours, result.gspmd
    rows: list[tuple[str, str, str, str]] = [
        _row("step time", ours.step_seconds, gspmd.step_seconds, _milliseconds, result.time_ratio),
        _row("trace to executable", ours.compile_seconds, gspmd.compile_seconds, _milliseconds),
        _row("FLOPs per device", ours.flops, gspmd.flops, lambda f: f"{f:.4g}"),
    ]
    for name in ("argument", "output", "temp", "alias"):
        rows.append(_row(f"memory: {name}", ours.memory.get(name, 0), gspmd.memory.get(name, 0), readable_bytes))
    for kind in sorted({*ours.collectives, *gspmd.collectives}):
        mine, theirs = (_collective(side, kind) for side in (ours, gspmd))
        rows.append((f"{kind} (count, bytes)", *mine[:1], *theirs[:1], _ratio(mine[1], theirs[1])))
    for what, value in (
        ("loss", result.loss_difference),
        ("gradient", result.gradient_difference),
        ("parameter", result.parameter_difference),
    ):
        rows.append((f"largest {what} difference", f"{value:.3g}", "", ""))
    return table(title, ("", "jscaler", "jax.jit, same split", "ratio"), rows)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def _row(name: str, mine: float, theirs: float, show: Any, ratio: float | None = None) -> tuple[str, str, str, str]:
    return name, show(mine), show(theirs), f"{ratio:.3f}" if ratio else _ratio(mine, theirs)


def _collective(side: Side, kind: str) -> tuple[str, int]:
    found = side.collectives.get(kind)
    return (f"{found.count}, {readable_bytes(found.nbytes)}", found.nbytes) if found else ("none", 0)


def _ratio(mine: float, theirs: float) -> str:
    return f"{mine / theirs:.3f}" if theirs else ""
