"""The first of a model's layers: of a Python loop some of them, of a stack a range.

layers=3, a stack of 8      "layers[0:3]", which is computed again, and "layers[3:8]", whose activations are kept
layers=3, a Python loop     layer 0, 1 and 2
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jscaler.ir import Op
from jscaler.ir.loop import chain_of
from jscaler.plans.layers import stacks_of
from jscaler.primitives import Planner

Ops = tuple[Op, ...]


@dataclass(frozen=True)
class FirstLayers:
    """The layers that a policy wants apart before ops are named, by itself or by a plan around it; its ``first_layers``.

    Attributes:
        count: how many of each stage, from its first on.
        cut_stacks: cuts the stacks of a step without stages.
    """

    count: int
    cut_stacks: Callable[[Planner], None]


def cut_behind(graph: Planner, layers: Sequence[Ops], count: int) -> None:
    """Cut the stack in which the first ``count`` layers end, so that these are a loop of their own."""
    ends = {name: (count - start, length) for name, start, length, _ in _placed(graph, layers) if name is not None}
    for name, (first, length) in ends.items():
        if 0 < first < length:
            sizes = [first, length - first]
            graph.ranges(name, sizes[::-1] if graph.loops[name].reverse else sizes)


def first_of(graph: Planner, layers: Sequence[Ops], count: int) -> list[Ops]:
    """The first ``count`` of ``layers``; a stack counts as many as it has. Each stage and each gradient has its own."""
    return [layer for _, start, length, layer in _placed(graph, layers) if start + length <= count]


def count_of(graph: Planner, layers: Sequence[Ops]) -> int:
    """How many layers there are, of the gradient that has most."""
    return max((start + length for _, start, length, _ in _placed(graph, layers)), default=0)


def _placed(graph: Planner, layers: Sequence[Ops]) -> Iterator[tuple[str | None, int, int, Ops]]:
    """Each layer with its stack, if it is of one, how many layers stand in front, and how many it stands for; of a policy
    for some stages, theirs.
    """
    seen: Counter[object] = Counter()
    stacks = stacks_of(graph)
    starts: dict[str, int] = {}
    for layer in layers:
        around = [loop for loop in chain_of(layer[0].loop, graph.loops) if loop in stacks]
        stage = graph.stage_of.get(layer[0].path)
        if graph.stage_of and stage is None:
            continue  # of stages that have another plan
        stack, where = around[0] if around else None, (stage, layer[0].call)
        length = graph.loops[stack].length if stack is not None else 1
        start = seen[where] if stack is None else starts.setdefault(stack, seen[where])
        seen[where] = max(seen[where], start + length)
        yield stack, start, length, layer
