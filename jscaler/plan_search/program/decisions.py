"""The decisions of a plan that an integer program found, each with what forbids it: so that the rest is solved again."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jscaler.plan_search.program.choices import Node
from jscaler.plan_search.program.fill import Filled
from jscaler.plan_search.program.linear import Row
from jscaler.spaces.space_planner import SpacePlanner

AGAIN = {True: "computed again", False: "saved"}


@dataclass(frozen=True)
class Decision:
    """One decision of a plan.

    Attributes:
        template: how it is said: ``"{} of 'mlp/up' over x1"``.
        name: what a plan decides: ``"units"``.
        forbidden: the row without which the plan could not decide as it does.
    """

    template: str
    name: Callable[[Filled], str]
    forbidden: Row

    def of(self, found: Filled) -> str:
        """The decision of a plan in words."""
        return self.template.format(self.name(found))


def decisions(found: Filled) -> Iterator[Decision]:
    """How ops are split, how parameters lie, and what runs again: in turn, the largest of each first.

    Only those with another choice; of ops that compute the same and are split alike the first.
    """
    kinds = _splits(found), _modes(found), _again(found)
    for row in itertools.zip_longest(*kinds):
        yield from (one for one in row if one is not None)


def _splits(found: Filled) -> Iterator[Decision]:
    filling, program = found.filling, found.filling.program
    dims = SpacePlanner(filling.prices.graph, filling.mesh, batch=filling.batch).dims
    taken = {
        node: next(choice for choice in node.choices if choice.by_axis == found.choices[node.name])
        for node in program.nodes.by_name.values()
        if node.name in found.choices
    }
    seen: set[object] = set()
    for node in sorted(taken, key=lambda node: -program.seconds.of(node, taken[node])):
        for axis, factor in enumerate(taken[node].by_axis):
            key = node.op.body, axis, factor
            own = zip(node.choices, program.takes[node.name], strict=True)
            same = {variable: 1.0 for choice, variable in own if choice.by_axis[axis] == factor}
            if key in seen or len(same) == len(node.choices):
                continue
            seen.add(key)

            def name(other: Filled, node: Node = node, axis: int = axis) -> str:
                return dims.name(node.op, other.choices[node.name][axis])

            where = f" over {program.nodes.mesh.names[axis]}" if len(filling.mesh) > 1 else ""
            yield Decision(f"{{}} of '{node.name}'{where}", name, (same, 0.0, 0.0))


def _modes(found: Filled) -> Iterator[Decision]:
    program = found.filling.program
    leaves = program.leaves.by_name
    seen: set[object] = set()
    for leaf in sorted(program.modes, key=lambda leaf: -leaves[leaf].count * leaves[leaf].tensor.nbytes):
        mode, states = found.zero[leaf], program.modes[leaf]
        same = {variable: 1.0 for state, own in states.items() if state.zero == mode for variable in own}
        key = leaves[leaf].tensor.shape, mode
        if key in seen or len(same) == sum(map(len, states.values())):
            continue
        seen.add(key)
        yield Decision(f"{{}} of '{leaf}'", lambda other, leaf=leaf: _mode(other.zero[leaf]), (same, 0.0, 0.0))


def _again(found: Filled) -> Iterator[Decision]:
    """Of what runs again; and of what does not nothing, which memory says."""
    program = found.filling.program
    if program.again is None:
        return
    seconds = {name: sum(program.linear.costs[v] for v in program.takes[name]) for name in found.recomputed}
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        forbidden = {program.again.runs[name]: 1.0}, 0.0, 0.0
        yield Decision(f"'{name}' {{}}", lambda other, name=name: AGAIN[name in other.recomputed], forbidden)


def _mode(zero: int) -> str:
    return f"ZeRO {zero}" if zero else "no ZeRO"
