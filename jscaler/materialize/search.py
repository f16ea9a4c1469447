"""The cheapest path of transitions from one layout to another on the same devices: Dijkstra over axis assignments."""

import heapq
import itertools
from functools import lru_cache

from jscaler.materialize.layout import Layout, common_subdims
from jscaler.materialize.transitions import Transition, transitions_from

STEP_BYTES = 1e-3  # what a transition costs beside its bytes: fewer steps win among equals


@lru_cache(maxsize=65536)
def cheapest_path(source: Layout, target: Layout, itemsize: int) -> tuple[tuple[Transition, ...], float]:
    """The transitions from ``source`` to ``target`` over the same sub-dims, and the bytes each device sends.

    Always finds one: everything can be reduced and gathered, then sliced and masked.
    """
    assert source.mesh == target.mesh
    assert source.subdims == target.subdims
    if source == target:
        return (), 0.0
    wanted = {combiner for _, combiner in target.values} | {combiner for _, combiner in source.values}
    count = itertools.count()
    queue: list[tuple[float, int, Layout, tuple[Transition, ...]]] = [(0.0, next(count), source, ())]
    done: set[Layout] = set()
    while queue:
        cost, _, here, path = heapq.heappop(queue)
        if here == target:
            return path, sum(_bytes(source, path, itemsize))
        if here in done:
            continue
        done.add(here)
        for step in transitions_from(here):
            if step.kind == "value_mask" and step.combiner not in wanted:
                continue
            beyond = step.apply(here)
            if beyond not in done:
                more = step.bytes(here, itemsize) + STEP_BYTES
                heapq.heappush(queue, (cost + more, next(count), beyond, (*path, step)))
    raise AssertionError(f"no path from {source} to {target}")


def _bytes(layout: Layout, path: tuple[Transition, ...], itemsize: int) -> list[float]:
    sent = []
    for step in path:
        sent.append(step.bytes(layout, itemsize))
        layout = step.apply(layout)
    return sent


Stage = tuple[Layout, tuple[Transition, ...]]


@lru_cache(maxsize=65536)
def adapter_stages(source: Layout, target: Layout, itemsize: int) -> tuple[tuple[Stage, ...], float]:
    """Transitions from ``source`` to ``target``, whose refinements may differ; and the bytes each device sends.

    A stage is a layout to view the local part through (reshape to its refined shape), and the steps from there.
    Where a cut falls on no common boundary, the tensor is gathered in its own refinement first.
    """
    subdims = common_subdims(source.subdims, target.subdims)
    if subdims is not None:
        a, b = source.refined(subdims), target.refined(subdims)
        if a is not None and b is not None:
            path, cost = cheapest_path(a, b, itemsize)
            return ((a, path),) if path else (), cost
    bare = Layout(source.mesh, source.subdims, ((),) * len(source.cuts), source.values)
    down, first = cheapest_path(source, bare, itemsize)
    whole = Layout(target.mesh, target.subdims, ((),) * len(target.cuts), source.values)
    up, second = cheapest_path(whole, target, itemsize)
    stages = tuple(stage for stage in ((source, down), (whole, up)) if stage[1])
    return stages, first + second
