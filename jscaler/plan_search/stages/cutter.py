"""Which layers, how many devices and which of several plans each stage of a pipeline has: exactly, over tables of seconds
and bytes. It knows nothing of models.

    T = fill + max over stages of ((m - 1)·t + once, (m - 1)·round / under way)

``t`` is what a micro-batch takes in a stage, forward and backward; ``fill`` its way through all stages and back, hops
included; ``round`` its way from a stage on. A stage with n stages from it on, itself included, has ``under_way[n - 1]``
micro-batches under way: no more are on that way at a time, and what it holds grows with these. So stages are put together
from the last to the first, by dynamic programming over layers, devices and stages, for stages whose part of the maximum is
below a limit. The limit goes down from one solution to the next. (After Tarnawski et al., Piper, NeurIPS 2021, whose
replicas take micro-batches in turn, and who minimise the maximum alone.)

That is near what a step takes. No order of the blocks takes less than ``lower``, where a stage does its first forwards
while the first micro-batch is behind it, only whole rounds count, and nothing that is done once:

    T = fill + max over stages of ((m - 1)·t - (under way - 1)·forward, ⌊(m - 1) / under way⌋·round)
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jscaler.ir.walk import grouped

Stages = tuple[tuple[int, int, int], ...]  # of each its first layer, the one behind its last, the number of its choice


@dataclass(frozen=True)
class Choice:
    """What a stage may be: its number of devices, and what it takes and holds: ``[i, j]`` is of layers i to before j.

    Attributes:
        devices: how many it has.
        seconds: for a micro-batch, forward and backward; inf where it may not be.
        once: seconds once a step.
        held: bytes on a device, whatever is under way.
        kept: bytes for each micro-batch that is under way.
        forward: seconds of the forward alone.
        replicas: how many of it take micro-batches in turn; each counts as a stage for those under way.
    """

    devices: int
    seconds: np.ndarray
    forward: np.ndarray
    once: np.ndarray
    held: np.ndarray
    kept: np.ndarray
    replicas: int = 1


@dataclass(frozen=True)
class Cut:
    """What was found.

    Attributes:
        seconds: of a step; of `slowest_stage` of the slowest stage.
    """

    seconds: float
    stages: Stages


@dataclass(frozen=True)
class Chain:
    """Layers in a row, to be cut into stages.

    Attributes:
        layers: how many.
        devices: how many there are.
        choices: of each stage.
        microbatches: in a step.
        under_way: micro-batches under way in the last stage, in the one before, and so on; none has fewer than one behind.
        hops: by the devices of a stage, seconds for a micro-batch from there to the next stage and back: within a host, and
            to another, each by the first layer of the next stage.
        memory: bytes of a device; None for no limit.
        counts: how many stages there may be.
        per_host: devices of a host; a stage lies on one host, or on whole hosts.
        lower: whether `seconds` are a lower bound, and not near what a step takes.
    """

    layers: int
    devices: int
    choices: Sequence[Choice]
    microbatches: int
    under_way: Sequence[int]
    hops: Mapping[int, np.ndarray]
    memory: float | None = None
    counts: Collection[int] = range(1, 1 << 30)
    per_host: int = 1 << 30
    lower: bool = False

    @cached_property
    def _groups(self) -> list["_Group"]:
        """Choices of as many devices and replicas."""
        found = grouped(((one.devices, one.replicas), number) for number, one in enumerate(self.choices))
        return [_Group(self, *key, numbers) for key, numbers in found.items()]

    @cached_property
    def _most(self) -> int:
        """The most stages."""
        return max([n for n in range(min(len(self.under_way), self.devices) + 1) if n in self.counts], default=0)

    @cached_property
    def _thresholds(self) -> np.ndarray:
        """All parts of the maximum that a stage may have."""
        every = [group.slow(1)[np.isfinite(group.slow(1)) & (group.fits > 0)] for group in self._groups]
        return np.unique(np.concatenate([*every, np.empty(0)]))

    def cut(self) -> Cut | None:
        """Stages on all devices whose step takes least, each with one replica; None where nothing fits."""
        easiest = self._shortest(math.inf)
        if easiest is None:
            return None
        lowest = self._thresholds[self._lowest()]
        best = min((one for one in (easiest, self._shortest(lowest)) if one is not None), key=lambda one: one.seconds)
        limit = best.seconds - self._ways(easiest.stages)[0]
        while self.lower or limit > lowest:
            limit = float(np.nextafter(limit, -math.inf))  # also where it is 0, or rounded otherwise than `_shortest` does
            if (found := self._shortest(limit)) is None:
                break
            best = min(best, found, key=lambda one: one.seconds)
            # a lower limit leaves no less to fill
            limit = min(limit, self._slowest(found.stages), best.seconds - self._ways(found.stages)[0])
        return best

    def slowest_stage(self) -> Cut | None:
        """Stages on some of the devices, the slowest of which takes least for a micro-batch; None where nothing fits."""
        if not len(self._thresholds) or self._fewest(math.inf) is None:
            return None
        threshold = self._thresholds[self._lowest()]
        stages = self._fewest(threshold)
        assert stages is not None
        return Cut(float(threshold), stages)

    def _lowest(self) -> int:
        """The place of the lowest threshold for which there are enough devices."""
        first, last = 0, len(self._thresholds) - 1
        while first < last:
            middle = (first + last) // 2
            if self._fewest(self._thresholds[middle]) is None:
                first = middle + 1
            else:
                last = middle
        return first

    def _fewest(self, threshold: float) -> Stages | None:
        """Stages on the fewest devices; None where these are too many."""
        groups, ends = self._groups, self.layers + 1
        reach = np.array([np.where(g.slow(1) <= threshold, g.fits, 0).max(0) for g in groups])
        needed = np.full((self._most + 1, ends), math.inf)
        needed[0, self.layers] = 0.0
        nothing = np.full(ends, math.inf)
        for count in range(1, self._most + 1):
            behind = np.array([needed[count - g.replicas] if g.replicas <= count else nothing for g in groups])
            own = np.array([g.devices for g in groups])[:, None] + behind
            needed[count] = np.where(reach >= count, own[:, None, :], math.inf).min((0, 2))
        ways = [(needed[count, 0], count) for count in range(1, self._most + 1) if count in self.counts]
        least, count = min(ways, default=(math.inf, 0))
        if least > self.devices:
            return None
        start, found = 0, list[tuple[int, int, int]]()
        while count:
            group, stop = next(
                (g, j)
                for n, g in enumerate(groups)
                for j in range(start + 1, ends)
                if g.replicas <= count <= reach[n, start, j]
                and g.devices + needed[count - g.replicas, j] == needed[count, start]
            )
            found.append((start, stop, group.best(start, stop, count, threshold)))
            count, start = count - group.replicas, stop
        return tuple(found)

    def _shortest(self, threshold: float) -> Cut | None:
        """Stages on all devices, none slower than the threshold, that a micro-batch goes through fastest."""
        ends, unit = self.layers + 1, math.gcd(self.devices, *(group.devices for group in self._groups))
        left = self.devices // unit
        least = np.full((self._most + 1, left + 1, ends), math.inf)
        least[0, 0, self.layers] = 0.0
        which = np.zeros(least.shape, int)
        for count in range(1, self._most + 1):
            for number, group in enumerate(self._groups):
                own = group.devices // unit
                if group.replicas > count or own > left:
                    continue
                behind = least[count - group.replicas, : left + 1 - own]
                if count > group.replicas:
                    behind = behind + self._hops_behind(group.devices, unit)[: left + 1 - own]
                ways = group.fastest(count, threshold)[None] + behind[:, None, :]
                stop = ways.argmin(2)
                value = np.take_along_axis(ways, stop[..., None], 2)[..., 0]
                starts = self.devices - unit * np.arange(own, left + 1)
                legal = np.array([self._is_legal(int(start), group.devices) for start in starts])
                better = (value < least[count, own:]) & legal[:, None]
                least[count, own:][better] = value[better]
                which[count, own:][better] = (number * ends + stop)[better]
            if often := self.rounds(count):
                least[count][often * least[count] > threshold] = math.inf
        ends_at = [(least[count, left, 0], count) for count in range(1, self._most + 1) if count in self.counts]
        fastest, count = min(ends_at, default=(math.inf, 0))
        if not math.isfinite(fastest):
            return None
        start, stages = 0, list[tuple[int, int, int]]()
        while count:
            number, stop = divmod(int(which[count, left, start]), ends)
            group = self._groups[number]
            stages.append((start, stop, group.best(start, stop, count, threshold)))
            count, left, start = count - group.replicas, left - group.devices // unit, stop
        return Cut(self.seconds(tuple(stages)), tuple(stages))

    def _is_legal(self, start: int, devices: int) -> bool:
        """Whether a stage of so many devices may begin with one: it lies on one host, or on whole ones."""
        if devices > self.per_host:
            return start % self.per_host == 0
        return start // self.per_host == (start + devices - 1) // self.per_host

    def _hops_behind(self, devices: int, unit: int) -> np.ndarray:
        """Seconds behind a stage of so many devices, by what it leaves of them to others, and the first layer of these."""
        own = np.pad(self.hops[devices], ((0, 0), (0, 1)))
        first = self.devices - unit * np.arange(self.devices // unit + 1)
        return own[(first % self.per_host == 0).astype(int)]

    def _ways(self, stages: Stages) -> list[float]:
        """What a micro-batch takes from each stage on and back, hops included."""
        found, way, first = list[float](), 0.0, self.devices
        for start, stop, number in reversed(stages):
            one = self.choices[number]
            hop = self.hops[one.devices][int(first % self.per_host == 0), stop] if stop < self.layers else 0.0
            way, first = way + float(one.seconds[start, stop] + hop), first - one.devices
            found.append(way)
        return found[::-1]

    def rounds(self, count: int) -> float:
        """How often a micro-batch waits for another to come back to a stage with so many from it on."""
        often = (self.microbatches - 1) / self.under_way[count - 1]
        return math.floor(often) if self.lower else often

    def slow(self, one: Choice, count: int) -> np.ndarray:
        """What other micro-batches than the first take in a stage with so many from it on."""
        is_one = np.isfinite(one.seconds)
        whole = (self.microbatches - 1) * np.where(is_one, one.seconds, 0.0)
        if not self.lower:
            return np.where(is_one, whole + one.once, math.inf)
        return np.where(is_one, whole - (self.under_way[count - 1] - 1 if count > 1 else 0) * one.forward, math.inf)

    def _slowest(self, stages: Stages) -> float:
        """What other micro-batches than the first take."""
        counts = range(len(stages), 0, -1)
        slow = (self.slow(self.choices[n], count)[i, j] for count, (i, j, n) in zip(counts, stages, strict=True))
        rounds = (self.rounds(count) * way for count, way in zip(counts, self._ways(stages), strict=True))
        return float(max(*slow, *rounds))

    def seconds(self, stages: Stages) -> float:
        """Of a step."""
        return self._ways(stages)[0] + self._slowest(stages)

    def peaks(self, stages: Stages) -> Iterator[float]:
        """Bytes on a device of each stage."""
        behind = sum(self.choices[number].replicas for *_, number in stages)
        for start, stop, number in stages:
            one = self.choices[number]
            yield float(one.held[start, stop] + self.under_way[-(-behind // one.replicas) - 1] * one.kept[start, stop])
            behind -= one.replicas


class _Group:
    """Choices of as many devices and replicas.

    Attributes:
        fits: with how many replicas from it on, its own included, it fits; those of equal stages behind count.
    """

    def __init__(self, chain: Chain, devices: int, replicas: int, numbers: Sequence[int]):
        self.chain, self.devices, self.replicas, self.numbers = chain, devices, replicas, numbers
        empty, own = np.tri(chain.layers + 1, dtype=bool), [chain.choices[number] for number in numbers]
        self.choices = [replace(one, seconds=np.where(empty, math.inf, one.seconds)) for one in own]
        self.seconds = np.array([one.seconds for one in self.choices])
        held, kept = (np.array([getattr(one, what) for one in own]) for what in ("held", "kept"))
        room = np.where(np.isfinite(self.seconds), math.inf if chain.memory is None else chain.memory - held, -1.0)
        under_way = np.where(kept > 0, np.floor(room / np.where(kept > 0, kept, 1.0)), np.where(room < 0, -1.0, math.inf))
        self.fits = replicas * np.searchsorted(np.asarray(chain.under_way), under_way, side="right")
        self._slow: dict[int, np.ndarray] = {}

    def slow(self, count: int) -> np.ndarray:
        """Of each choice what other micro-batches than the first take, with so many replicas from it on."""
        key = count if self.chain.lower else 1
        if key not in self._slow:
            self._slow[key] = np.array([self.chain.slow(one, key) for one in self.choices])
        return self._slow[key]

    def fastest(self, count: int, threshold: float) -> np.ndarray:
        """Seconds of the fastest choice that fits with so many replicas from it on."""
        return np.where((self.slow(count) <= threshold) & (self.fits >= count), self.seconds, math.inf).min(0)

    def best(self, start: int, stop: int, count: int, threshold: float) -> int:
        """The number of that choice."""
        at = slice(None), start, stop
        may = (self.slow(count)[at] <= threshold) & (self.fits[at] >= count)
        return self.numbers[int(np.where(may, self.seconds[at], math.inf).argmin())]
