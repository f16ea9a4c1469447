"""What a program sends: bytes and seconds of every exchange, by the class of links that it crosses."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jscaler.clusters import Cluster
from jscaler.clusters.transition_kinds import sends
from jscaler.lower.flat_program import Exchange, FlatLoop, Item
from jscaler.lower.overlapped import exchanges_outside_loops
from jscaler.lower.program import Adapt, Compute, Extend, walk
from jscaler.lower.segment import Segment
from jscaler.lower.spanning_loop import Transfer
from jscaler.materialize import Layout
from jscaler.materialize.edges import messages
from jscaler.materialize.transitions import Transition, rounds_of

Moved = Mapping[str, tuple[int, float]]  # kind of collective -> how often, and bytes that each device sends
RESULTS = ""  # in place of an op's path: what is moved behind the last op


@dataclass(frozen=True)
class Traffic:
    """Bytes that are sent, all iterations of loops together.

    Attributes:
        inside: bytes that each device sends (in the mean) in collectives whose groups each stay inside a host.
        between: the same of collectives with groups that span hosts.
        leaving: bytes that leave the busiest host.
        seconds: one after the other, by the cluster's links.
        kinds: of collectives.
    """

    inside: float = 0.0
    between: float = 0.0
    leaving: float = 0.0
    seconds: float = 0.0
    kinds: Moved = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Bytes that each device sends."""
        return self.inside + self.between

    def repeated(self, times: int) -> "Traffic":
        """So many times all of it."""
        kinds = {kind: (times * n, times * nbytes) for kind, (n, nbytes) in self.kinds.items()}
        return Traffic(times * self.inside, times * self.between, times * self.leaving, times * self.seconds, kinds)


def sum_of(parts: Iterable[Traffic]) -> Traffic:
    """All of them."""
    every = list(parts)
    return Traffic(
        sum(p.inside for p in every),
        sum(p.between for p in every),
        sum(p.leaving for p in every),
        sum(p.seconds for p in every),
        summed(p.kinds for p in every),
    )


def summed(parts: Iterable[Moved]) -> Moved:
    """Counts and bytes of all of ``parts``."""
    total: dict[str, tuple[int, float]] = {}
    for part in parts:
        for kind, (count, sent) in part.items():
            known = total.get(kind, (0, 0.0))
            total[kind] = (known[0] + count, known[1] + sent)
    return total


def traffic_by_reader(segments: Iterable[Segment], cluster: Cluster) -> dict[str, Traffic]:
    """Op path -> what is moved in front of it; ``RESULTS`` for what is moved for the results.

    The links of a collective are added up: where several hosts are busy, ``leaving`` is that of the busiest in each.
    """
    every, priced = moved_by_reader(segments).items(), _Priced(cluster)
    return {path: sum_of(priced.of(*one) for one in moved) for path, moved in every if moved}


def moved_by_reader(segments: Iterable[Segment]) -> dict[str, list[tuple[Adapt | Extend, int, int]]]:
    """As `traffic_by_reader`: each adapter and halo exchange with its bytes per element, and how many times it runs."""
    table: dict[str, list[tuple[Adapt | Extend, int, int]]] = {}
    for segment in segments:
        # adapters that moved across a cast carry its narrow side; equal ones are made once
        itemsizes = {e.adapt.output: e.itemsize for e in segment.flat.exchanges}
        waiting: list[tuple[Adapt | Extend, int, int]] = []
        for task, times in walk(segment.program.tasks, segment.program.times):
            if isinstance(task, Compute):
                table.setdefault(task.op.path, []).extend(waiting)
                waiting = []
            elif task.output in itemsizes:
                waiting.append((task, itemsizes[task.output], times))
        table.setdefault(RESULTS, []).extend(waiting)
    return table


def traffic_in(items: Iterable[Item], cluster: Cluster) -> Traffic:
    """What items of a flat program send, those of loops as often as these run."""
    return sum_of(sent for _, sent in traffic_by_exchange(items, cluster))


def traffic_by_exchange(items: Iterable[Item], cluster: Cluster) -> Iterator[tuple[Exchange, Traffic]]:
    """The same for each exchange by itself."""
    priced = _Priced(cluster)
    for one, times in _exchanges(items, 1):
        yield one, priced.of(one.adapt, one.itemsize, times)


def outer_traffic(items: Sequence[Item], cluster: Cluster) -> Traffic:
    """The same without what is sent in loops."""
    priced = _Priced(cluster)
    return sum_of(priced.of(one.adapt, one.itemsize, times) for one, times in exchanges_outside_loops(items))


def _exchanges(items: Iterable[Item], times: int) -> Iterator[tuple[Exchange, int]]:
    """The exchanges among ``items`` and in their loops, and how often each runs."""
    for item in items:
        if isinstance(item, Exchange):
            yield item, times
        elif isinstance(item, FlatLoop):
            yield from _exchanges(item.items, times * item.loop.length)


@dataclass
class _Priced:
    """What adapters send, equal layers' worked out once: they share their adapters."""

    cluster: Cluster
    memo: dict[tuple[int, str | None, int], Traffic] = field(default_factory=dict)

    def of(self, task: Adapt | Extend, itemsize: int, times: int) -> Traffic:
        key = (id(task), None, itemsize) if isinstance(task, Extend) else (id(task.adapter), task.reduce_dtype, itemsize)
        if key not in self.memo:
            self.memo[key] = traffic_of(task, itemsize, 1, self.cluster)
        return self.memo[key].repeated(times)


def traffic_of(task: Adapt | Extend, itemsize: int, times: int, cluster: Cluster) -> Traffic:
    """What one adapter or halo exchange sends."""
    if isinstance(task, Extend):
        count = len(task.layout.mesh.devices)
        parts = [
            _messages("halo", [(pairs, elements * itemsize)], count, cluster)
            for pairs, elements in messages(task.layout, task.edges)
        ]
    else:
        own = task.sent_itemsize(itemsize)
        parts = [_transition(layout, step, own, cluster) for layout, step in task.adapter.walk if sends(step.kind)]
    return replace(sum_of(parts), seconds=task.price(itemsize, cluster)).repeated(times)


def traffic_of_hop(transfer: Transfer, times: int, cluster: Cluster) -> Traffic:
    """What a group sends in so many hops to another; their seconds are not its own, since it computes beside."""
    crossing, itemsize = transfer.crossing, transfer.tensor.itemsize
    numbers = np.array(crossing.devices)
    rounds = [(numbers[np.array(move.pairs)], move.size * itemsize) for move in crossing.hop.rounds]
    return _messages("send", rounds, len(crossing.source.mesh.devices), cluster).repeated(times)


def _transition(layout: Layout, step: Transition, itemsize: int, cluster: Cluster) -> Traffic:
    sent = step.bytes(layout, itemsize)
    count = len(layout.mesh.devices)
    if step.to is not None:
        return _messages(step.kind, [(r.pairs, r.size * itemsize) for r in rounds_of(layout, step)], count, cluster)
    crossing = cluster.crossing(step.kind, layout.mesh.groups(step.axes))
    kinds = {step.kind: (1, sent)}
    if crossing:
        return Traffic(between=sent, leaving=crossing * sent, kinds=kinds)
    return Traffic(inside=sent, kinds=kinds)


def _messages(kind: str, rounds: Iterable[tuple[np.ndarray, float]], count: int, cluster: Cluster) -> Traffic:
    """Rounds of messages of given sizes between pairs of devices."""
    inside, between, leaving = 0.0, 0.0, 0.0
    for pairs, nbytes in rounds:
        hosts = cluster.hosts_of(np.asarray(pairs).reshape(-1, 2))
        across = hosts[hosts[:, 0] != hosts[:, 1]]
        between += len(across) * nbytes / count
        inside += (len(hosts) - len(across)) * nbytes / count
        leaving += (np.bincount(across[:, 0]).max() if len(across) else 0) * nbytes
    return Traffic(inside, between, leaving, 0.0, {kind: (1, inside + between)})
