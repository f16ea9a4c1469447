"""Whether reasons are true: what a search says of a constraint or a decision, against a search without it."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jscaler import spaces as s
from jscaler.clusters import Cluster
from jscaler.ir import Graph
from jscaler.plan_search.engine import search_graph
from jscaler.plan_search.found import Found, Reason
from jscaler.spaces.built_in import AnySpace
from jscaler.spaces.space import Opening

SPLIT = re.compile(r"(?P<dim>.+) of '(?P<op>[^']+)'(?: over x(?P<axis>\d+))?")
SECONDS = 1000.0  # for a search
Check = tuple[Reason, float, float]  # a reason, seconds of the other plan as it says, and as they were found
AGAIN = re.compile(r"'(?P<op>[^']+)' computed again")


@dataclass(frozen=True)
class Without:
    """A space without some of its points."""

    space: Any
    keep: Callable[[s.Point], bool]

    def points(self, at: s.Setting) -> Iterator[s.Point]:
        return filter(self.keep, self.space.points(at))

    def unlimited(self) -> Iterator[Any]:
        return iter(())


def checked(
    graph: Graph, cluster: Cluster, spaces: Sequence[AnySpace], memory: float | None, found: Found
) -> Iterator[Check]:
    """For each reason what was said of the seconds, and what a second search finds."""
    assert found.chosen is not None
    for reason in found.why:
        limit = None if reason.what.startswith("memory=") else memory
        other = spaces if limit is not memory else without(spaces, reason, found)
        second = search_graph(graph, cluster, [[one] for one in other], seconds=SECONDS, memory=limit)
        seconds = math.inf if second.chosen is None else second.chosen.seconds
        yield reason, found.chosen.seconds + reason.seconds, seconds


def without(spaces: Sequence[AnySpace], reason: Reason, found: Found) -> Sequence[Any]:
    """The spaces without a limit, or without what a reason is of."""
    wider = [(text, other) for space in spaces for text, other in space.unlimited() if text == reason.what]
    assert found.chosen is not None
    point = found.chosen.point
    if isinstance(point.opening, Opening) and reason.what.startswith(("op_assign(", "recompute(")):
        return [s.OpenSpace(untied(point.opening.policy), [point.opening.mesh], [point.opening.microbatches])]
    if reason.seconds < 0:
        return [*spaces, *(other for _, other in wider)]
    if isinstance(point.opening, Opening) and (split := SPLIT.fullmatch(reason.what) or AGAIN.fullmatch(reason.what)):
        opening = point.opening
        policy = other_policy(opening.policy, split.groupdict(), opening.microbatches)
        return [s.OpenSpace(policy, mesh=[opening.mesh], microbatches=[opening.microbatches])]
    name = reason.what.partition("=")[0]
    own = next(own for own in point.numbers if own.removeprefix("plan.") == name)
    return [Without(space, lambda other: other.numbers.get(own) not in (None, point.numbers[own])) for space in spaces]


def untied(policy: Callable[..., Any]) -> Callable[..., Any]:
    """A policy with holes without its constraint between ops."""

    def free(graph: Any, devices: Any) -> None:
        policy(graph, devices)
        graph.space.ties.clear()
        graph.space.as_one.clear()

    return free


def other_policy(policy: Callable[..., Any], said: dict[str, str | None], microbatches: int) -> Callable[..., Any]:
    """A policy with holes that decides one thing otherwise."""

    def otherwise(graph: Any, devices: Any) -> None:
        policy(graph, devices)
        op, dim = said["op"], said.get("dim")
        if dim is None:
            graph.space.again.discard(op)
        elif "ZeRO" in dim:
            modes = {"no ZeRO": None, "ZeRO 1": "zero1", "ZeRO 2": "zero2", "ZeRO 3": "zero3"}
            same = {dim, "ZeRO 2"} if microbatches == 1 and dim == "ZeRO 1" else {dim}  # of one micro-batch they are one
            graph.shard(op, s.one_of(*(mode for text, mode in modes.items() if text not in same)))
        else:
            axis = int(said.get("axis") or 0)
            splits = graph.space.splits[op]
            named = {graph.dims.name(graph[op], factor): factor for factor in splits[axis]}
            graph.space.splits[op] = (*splits[:axis], splits[axis] - {named[dim]}, *splits[axis + 1 :])

    return otherwise
