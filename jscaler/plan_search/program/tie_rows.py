"""Constraints between ops as rows of the integer program: of each shared dim and mesh axis, which of the ops it splits."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from jscaler.errors import PlanError
from jscaler.plan_search.program.choices import Node, Nodes
from jscaler.plan_search.program.linear import Linear, TimeIsOverError
from jscaler.spaces.allowed import options_text
from jscaler.spaces.ties import Shared, Tie

SECONDS = 10.0  # for a solver that looks whether constraints go together


class TieRow(NamedTuple):
    """That an axis splits two nodes along a dim of both or neither, or not both of them.

    Attributes:
        axis: its number.
        ends: each a node, and the factors that the dim is there.
    """

    tie: Tie
    axis: int
    ends: tuple[tuple[Node, Collection[str]], ...]

    def terms(self, takes: Mapping[str, list[int]]) -> tuple[dict[int, float], float, float]:
        """The row, and its bounds."""
        found: dict[int, float] = {}
        for number, (node, factors) in enumerate(self.ends):
            sign = -1.0 if self.tie.alike and number else 1.0
            for choice, variable in zip(node.choices, takes[node.name], strict=True):
                if choice.by_axis[self.axis] in factors:
                    found[variable] = found.get(variable, 0.0) + sign
        return found, *((0.0, 0.0) if self.tie.alike else (0.0, 1.0))


def tie_rows(nodes: Nodes, ties: Iterable[Tie]) -> Iterator[TieRow]:
    """The rows of constraints; equal layers, which choose alike, have one."""
    for tie in ties:
        seen: set[object] = set()
        for shared in tie.dims:
            own = _by_node(nodes, shared)
            kinds = [kind for path in shared if (kind := nodes.folded.kind(path)) in nodes.by_name]
            if not tie.alike and len(set(kinds)) < len(kinds):
                raise PlanError(f"{tie.text}: some of these ops are in equal layers, which split alike; name one layer's")
            key = frozenset((node.name, factors) for node, factors in own)
            if key in seen:
                continue
            seen.add(key)
            pairs = itertools.pairwise(own) if tie.alike else [own]
            for axis, ends in itertools.product(range(len(nodes.shape)), pairs):
                yield TieRow(tie, axis, tuple(ends))


def check_ties(nodes: Nodes, rows: list[TieRow]) -> None:
    """Raises PlanError, which names what would have to give way, where the constraints leave no choice."""
    linear, takes = Linear(), dict[str, list[int]]()
    for node in dict.fromkeys(node for row in rows for node, _ in row.ends):
        takes[node.name] = [linear.variable(whole=True) for _ in node.choices]
        linear.one_of(takes[node.name])
    broken: dict[int, TieRow] = {}
    for row in rows:
        terms, least, most = row.terms(takes)
        slack = linear.variable(1.0, whole=True)
        linear.row({**terms, slack: -float(len(row.ends))}, most=most)
        linear.row({**terms, slack: float(len(row.ends))}, least=least)
        broken[slack] = row
    try:
        found = linear.solve(SECONDS, 0.0) if rows else None
    except TimeIsOverError:
        return  # the whole program will tell
    if found is None or found.objective < 0.5:
        return
    row = next(row for variable, row in broken.items() if found.takes(variable))
    open_ = (f"'{node.name}' {options_text(choice.by_axis[row.axis] for choice in node.choices)}" for node, _ in row.ends)
    dims = (f"{' or '.join(sorted(factors))} of '{node.name}'" for node, factors in row.ends)
    remedy = "the dim that they share for all, or a copy" if row.tie.alike else "another dim, or a copy, for all but one"
    raise PlanError(
        f"{row.tie.text} leaves nothing over axis {row.axis} of a mesh of {nodes.shape}: other holes leave "
        f"{' and '.join(open_)}; the nearest that is legal: open {remedy} (it is {', '.join(dims)})"
    )


def _by_node(nodes: Nodes, shared: Shared) -> list[tuple[Node, frozenset[str]]]:
    """The nodes of ops, each with the factors that a dim is there; what follows a parameter chooses nothing."""
    found: dict[str, frozenset[str]] = {}
    for path, factors in shared.items():
        name = nodes.folded.kind(path)
        if name in nodes.by_name:
            found[name] = found.get(name, frozenset()) | factors
    return [(nodes.by_name[name], factors) for name, factors in found.items()]
