"""Pipeline parallelism: the model in stages on groups of devices, the batch in micro-batches that follow each other through
them, around another plan on the devices of each stage. (Huang et al., GPipe, 2019; Narayanan et al., PipeDream, 2019, and
1F1B with a flush, 2021.)

::

    devices 0 1   stage 0   F0 F1 F2 F3 .. B0 F4 B1 F5 B2 ..        time ──►
    devices 2 3   stage 1      F0 F1 F2 B0 F3 B1 F4 B2 ..

The numbers are those of the whole batch. A stage has its parameters, their updates and optimizer state, and the activations
of the micro-batches that are under way. Stages are cut where few tensors cross and work is balanced.
"""

import fnmatch
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jscaler.clusters.device import DeviceKind, find_kind
from jscaler.errors import PlanError, UnknownNameError, divisors
from jscaler.ir import Nest, Op, PTensor
from jscaler.ir.loop import Item, flat, made_by, reads_of
from jscaler.ir.walk import closure
from jscaler.plans.accumulate import accumulate
from jscaler.plans.layers import modules_of
from jscaler.plans.single import single
from jscaler.primitives import SCHEDULES, Planner
from jscaler.xla_model.work import work_of

BALANCED_FOR = "H100-80GB"  # whose times balance stages, where no cluster says what its devices are


def pipeline(
    stages: int,
    microbatches: int,
    schedule: str = "1f1b",
    plan: Callable[..., Any] | None = None,
    at: Sequence[str] | None = None,
    batch: str = "batch",
    accumulate_dtype: Any = None,
    per_microbatch: Any = None,
) -> Callable[..., None]:
    """``plan`` on the devices of each stage, and micro-batches that follow each other through the stages.

    Args:
        stages: how many; must divide the number of devices. Neighbours share a stage.
        microbatches: how many; must divide each device's part of the batch.
        schedule: ``"1f1b"`` or ``"gpipe"``; any other is a table's text, see `Table`.
        plan: the policy for the devices of one stage, given as many numbers from 0 on; `single` by default.
        at: shell patterns of the modules with which the second stage begins, the third, and so on; by default stages are
            balanced by the seconds of their forward ops on the cluster's devices, as `jscaler.cost` has them.
        batch, accumulate_dtype, per_microbatch: as for `accumulate`.

    Raises (when the plan is made):
        PlanError: stages do not divide the devices; the model has too few places to be cut.
        UnknownNameError: no module, or no input, is called so.
        SplitError: the batch does not divide.

    Example:
        >>> @jscaler.parallelize(plans.pipeline(4, 8, plan=plans.data_parallel()), devices=8)
        ... def train_step(state, batch): ...
    """
    inner = plan or single()
    if not isinstance(stages, int) or stages < 1:
        raise PlanError(f"pipeline: stages is a positive whole number, not {stages!r}")
    if len(schedule.split()) < 2 and schedule not in SCHEDULES:
        raise UnknownNameError("schedule", schedule, SCHEDULES)

    def policy(graph: Planner, devices: np.ndarray) -> None:
        if devices.size % stages:
            legal = divisors(devices.size)
            raise PlanError(f"pipeline: {devices.size} devices do not divide into {stages} stages; legal: {legal}")
        accumulate(microbatches, in_stages, batch, accumulate_dtype, per_microbatch)(graph, devices)

    def in_stages(graph: Planner, devices: np.ndarray) -> None:
        grid = devices.reshape(stages, -1)
        if stages == 1:
            inner(graph, devices)
            return
        found = find_stages(graph, stages, at)
        for stage, own in enumerate(grid):
            graph.on_devices([path for path, where in found.items() if where == stage], own)
        graph.on_stages(inner, _of_all(graph, found), grid)
        graph.schedule(schedule)

    policy.__name__ = "pipeline"
    return policy


def find_stages(graph: Planner, stages: int, at: Sequence[str] | None = None) -> dict[str, int]:
    """The stage of every forward op that is not made of the batch, keys and literals alone.

    Raises:
        PlanError: there are too few places where the model can be cut.
        UnknownNameError: no module is called so.
    """
    known = _known_everywhere(graph)
    items = [item for item in graph.tree if next(flat([item])).kind == "forward" and not set(made_by(item)) <= known]
    cuts = _named(items, at, stages) if at is not None else _balanced(graph, items, stages, known)
    bounds = [0, *cuts, len(items)]
    found = {}
    for stage, (first, stop) in enumerate(itertools.pairwise(bounds)):
        found.update((op.path, stage) for op in flat(items[first:stop]))
    return found


def _named(items: Sequence[Item], at: Sequence[str], stages: int) -> list[int]:
    """The places of the first ops of the modules that begin stages."""
    if len(at) != stages - 1:
        raise PlanError(
            f"pipeline: {stages} stages begin at {stages - 1} modules behind the first, and at= names {len(at)}"
        )
    found = []
    for pattern in at:
        inside = [i for i, item in enumerate(items) if any(_is_in(op.path, pattern) for op in flat([item]))]
        if not inside:
            modules = sorted({module for op in flat(items) for module in modules_of(op.path)})
            raise UnknownNameError("module", pattern, modules, "; stages begin at modules")
        found.append(inside[0])
    if found != sorted(set(found)) or found[0] == 0:
        raise PlanError(
            f"pipeline: stages begin at {', '.join(at)}, which do not follow each other in the model; a stage is empty"
        )
    return found


def _is_in(path: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(part, pattern) for part in (*modules_of(path), path))


def _balanced(graph: Planner, items: Sequence[Item], stages: int, known: set[PTensor]) -> list[int]:
    """Cuts with the fewest tensors across, which leave the slowest stage fastest; of equal ones those with fewer bytes."""
    across = _across(graph, items, known)
    device = graph.device or find_kind(BALANCED_FOR)
    seconds = [sum(_seconds(op, device) for op in flat([item])) for item in items]
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    for count in sorted({len(tensors) for tensors in across[1:]}):
        places = [i for i in range(1, len(items)) if len(across[i]) <= count and sums[i] > 0]
        best = _bottleneck(sums, places, [sum(t.nbytes for t in tensors) for tensors in across], stages)
        if best is not None:
            return best
    raise PlanError(
        f"pipeline: the model's forward pass is {len(items)} ops and loops in a row, too few for {stages} stages with "
        "work in each; layers in one loop (nn.scan, lax.scan) are not cut: write them as a Python loop"
    )


def _bottleneck(sums: np.ndarray, places: Sequence[int], nbytes: Sequence[int], stages: int) -> list[int] | None:
    """Cuts at ``places`` by dynamic programming; None where there are too few with work in between."""
    end = len(sums) - 1
    best: dict[int, tuple[float, float, list[int]]] = {i: (sums[i], float(nbytes[i]), [i]) for i in places}

    def ways_to(i: int, sent_here: float) -> list[tuple[float, float, list[int]]]:
        """One stage more, which ends at ``i``."""
        return [
            (max(slowest, sums[i] - sums[j]), sent + sent_here, [*cuts, i])
            for j, (slowest, sent, cuts) in best.items()
            if j < i and sums[i] > sums[j]
        ]

    for _ in range(stages - 2):
        best = {i: min(ways) for i in places if (ways := ways_to(i, nbytes[i]))}
    ways = ways_to(end, 0.0)
    return min(ways)[2][:-1] if ways else None


def _across(graph: Planner, items: Sequence[Item], known: set[PTensor]) -> list[list[PTensor]]:
    """In front of each item: what those before it make and those from it on read."""
    place = {t: i for i, item in enumerate(items) for t in made_by(item)}
    last = dict(place)
    for i, item in enumerate(items):
        last.update((t, i) for t in reads_of(item) if t in place)
    across: list[list[PTensor]] = [[] for _ in items]
    for tensor, first in place.items():
        if tensor not in known:
            for i in range(first + 1, last[tensor] + 1):
                across[i].append(tensor)
    return across


def _known_everywhere(graph: Planner) -> set[PTensor]:
    """What is made of the batch, keys and literals alone: any stage can make it."""
    trained = {t for call in graph.calls for t in call.wrt}
    known = {t for t in graph.inputs if t not in trained} | {t for t, _ in graph.constants}
    for item in graph.tree:
        if all(t in known for t in reads_of(item) if t not in set(made_by(item))) and not _is_heavy(item):
            known.update(made_by(item))
    return known


def _is_heavy(item: Item) -> bool:
    return isinstance(item, Nest) or (item.backward is not None) or bool(work_of(item.body.jaxpr).flops if item.body else 0)


def _seconds(op: Op, device: DeviceKind) -> float:
    return work_of(op.body.jaxpr).seconds(device) if op.body is not None else 0.0


def _of_all(graph: Planner, stage_of: Mapping[str, int]) -> dict[str, int]:
    """The stage of every input and update too: of the first forward op that a leaf reaches; of an update its operands'.

    What is made of the batch, keys and literals alone has none: the stage that reads it makes it.
    """
    found = dict(stage_of)

    def behind(tensor: PTensor) -> list[PTensor]:
        readers = [op for op in graph.consumers.get(tensor, ()) if op.path not in stage_of and op.kind == "forward"]
        return [t for op in readers for t in op.outputs]

    for leaf in graph.inputs:
        readers = [op for t in closure([leaf], behind) for op in graph.consumers.get(t, ())]
        stages = [stage_of[op.path] for op in readers if op.path in stage_of]
        found[leaf.name] = min(stages, default=0)
    of_tensor = {leaf: found[leaf.name] for leaf in graph.inputs}
    for op in graph.ops:
        source = op.forward.path if op.forward is not None else op.path
        made = [of_tensor[t] for t in op.inputs if t in graph.producer and t in of_tensor]
        stage = stage_of[source] if source in stage_of else next(iter(made), None)
        if stage is None and op.kind == "update":
            stage = next((of_tensor[t] for t in op.inputs if t in of_tensor), 0)
        if stage is not None:
            of_tensor.update(dict.fromkeys(op.outputs, stage))
            if op.kind == "update":
                found[op.path] = stage
    return found
