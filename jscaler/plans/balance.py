"""Where a row of ops, loops and layers is cut into stages, such that few tensors go across and the slowest is fastest.

Cuts are chosen by dynamic programming, from those places where the fewest tensors go across; if groups of devices have
several stages, or are unlike, by `jscaler.plans.chunk_cuts`. Seconds are those of ops and their backwards at the peaks of
the cluster's devices: a launch for each op would make one layer of a small model as long as another. Of unlike devices they
are as reached, with launches: of a small model these make a fast device as slow as another.
(After Narayanan et al., PipeDream, 2019, who measure layers.)
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jscaler.clusters.device import DeviceKind, find_kind
from jscaler.errors import PlanError
from jscaler.ir import Body, Nest, Op, PTensor
from jscaler.ir.loop import Item, flat, made_by, reads_of
from jscaler.plans.attention import holds_contraction
from jscaler.plans.chunk_cuts import StageOrder, cuts_of_chunks, shares_of
from jscaler.plans.layers import weights_of
from jscaler.plans.stage_groups import BALANCED_FOR, Speed
from jscaler.primitives import Planner
from jscaler.xla_model.work import work_of

UNEVEN = 1.5  # what a slowest stage may take longer, so that fewer tensors cross
MANY_BYTES = 8  # times as many as cross at most places: logits, beside what goes from layer to layer
EVEN = 1.02  # what a step may take longer, so that loops over layers are cut into equal ranges
LITTLE = 0.25  # of an even share of the work: a stage with less might as well not be

Cost = tuple[float, ...]  # compared number by number


@dataclass(frozen=True)
class Unit:
    """What lies in one stage: an op, a loop, or an iteration of a loop over layers."""

    item: Item
    iteration: int = 0
    of: int = 1  # iterations that may lie apart

    @property
    def key(self) -> tuple[int, int]:
        return id(self.item), self.iteration

    @property
    def ops(self) -> Iterator[Op]:
        return flat([self.item])


def balanced(
    graph: Planner,
    units: Sequence[Unit],
    stages: int,
    known: set[PTensor],
    order: StageOrder | None = None,
    speeds: Sequence[Speed] = (),
) -> list[int]:
    """The first of `cuts_and_places`."""
    return cuts_and_places(graph, units, stages, known, order, speeds)[0]


def cuts_and_places(
    graph: Planner,
    units: Sequence[Unit],
    stages: int,
    known: set[PTensor],
    order: StageOrder | None = None,
    speeds: Sequence[Speed] = (),
) -> tuple[list[int], list[int]]:
    """Cuts with the fewest tensors across, which leave the slowest stage fastest; of equal ones as `bottleneck` says.

    What all layers read alike (an encoder's result) does not count. More tensors, or far larger ones, go across where a
    step would else take half as long again.

    Equal ranges of a loop over layers are taken where that costs no more than `EVEN`: their stages are one program, and
    if each group has one, a parameter is one ``jax.Array``. If layers do not divide, the first ranges have one more.

    Args:
        order: if groups have several stages, or are unlike, that in which these run: it is fastest for the cuts.
        speeds: of the group of each stage, if they are unlike.

    Returns:
        the cuts, and the places at which as few tensors go across, with work between them.
    """
    device = (graph.cluster is not None and graph.cluster.device) or find_kind(BALANCED_FOR)
    row = tuple(unit.key for unit in units)  # of items that the graph keeps
    key, memo = ("cuts", row, stages, frozenset(known), order, tuple(speeds), device), graph.graph.memo
    if key not in memo:
        memo[key] = _cuts_and_places(graph, units, stages, known, order, speeds, device)
    cuts, places = memo[key]
    return [*cuts], [*places]


def _cuts_and_places(
    graph: Planner, units: Sequence[Unit], stages: int, known: set[PTensor], order: StageOrder | None,
    speeds: Sequence[Speed], device: DeviceKind,
) -> tuple[list[int], list[int]]:  # fmt: skip
    counts, nbytes = _crossing(graph, units, known)
    rows = {speed: _sums(units, speed) for speed in speeds or [Speed(device.at_peaks())]}
    sums = np.array([rows[speed] for speed in speeds]) if speeds else next(iter(rows.values()))
    step = max if order is None else order.seconds

    def taken(cuts: Sequence[int]) -> float:
        return step(shares_of(sums, cuts))

    best: list[int] | None = None
    allowed: set[int] = set()
    every = np.broadcast_to(sums, (stages, len(units) + 1))
    least = step([max(1 / float((1 / every[:, -1]).sum()), float(np.diff(every).min(0).max()))] * stages)
    little = LITTLE * sums[..., -1] / stages
    for places in _places(counts, nbytes, every[0]):
        found = bottleneck(sums, places, nbytes, stages)
        if found is not None and order is not None:
            by_group = cuts_of_chunks(sums, places, nbytes, order.groups, found, little)
            found = min(*by_group, found, key=taken)
        if found is not None and (best is None or taken(found) * UNEVEN < taken(best)):
            best, allowed = found, set(places)
        if best is not None and taken(best) <= least * UNEVEN:
            break
    if best is not None:
        places = sorted(allowed)
        even = (cuts for cuts in _even(units, places, sums, nbytes, stages) if set(cuts) <= allowed)
        most = taken(best) * EVEN
        work = [i for i, place in enumerate(places) if not i or every[0, place] - every[0, places[i - 1]] > 0]
        return next((cuts for cuts in even if taken(cuts) <= most), best), [places[i] for i in work]
    raise PlanError(
        f"pipeline: the model's forward pass is {len(units)} ops, layers and loops in a row, too few for {stages} stages "
        "with work in each; a loop is cut where it takes a stack of parameters apart, layer by layer (nn.scan, lax.scan)"
    )


def places_and_bytes(graph: Planner, units: Sequence[Unit], known: set[PTensor], least: int) -> list[tuple[int, int]]:
    """Where a row may be cut with work in between: places that the fewest tensors cross, of which there are ``least``, if
    any are as many; with the bytes that cross there, of the whole batch."""
    counts, nbytes = _crossing(graph, units, known)
    device = (graph.cluster is not None and graph.cluster.device) or find_kind(BALANCED_FOR)
    sums, found = _sums(units, Speed(device.at_peaks())), list[int]()
    for places in _places(counts, nbytes, sums):
        ends = [0.0, *(sums[place] for place in places), sums[-1]]
        found = [place for i, place in enumerate(places) if ends[i + 1] > ends[i] and ends[i + 1] < sums[-1]]
        if len(found) >= least:
            break
    return [(place, nbytes[place]) for place in found]


def _places(counts: Sequence[int], nbytes: Sequence[int], sums: np.ndarray) -> Iterator[list[int]]:
    """Where a row may be cut, those places first that few tensors cross, and of these those that no large ones do."""
    for count in sorted(set(counts[1:])):
        places = [i for i in range(1, len(counts)) if counts[i] <= count and sums[i] > 0]
        usual = MANY_BYTES * np.median([nbytes[i] for i in places]) if places else 0.0
        small = [i for i in places if nbytes[i] <= usual]
        yield small
        if small != places:
            yield places


def _even(
    units: Sequence[Unit], places: Sequence[int], sums: np.ndarray, nbytes: Sequence[int], stages: int
) -> Iterator[list[int]]:
    """Cuts into ranges as equal as can be: of the one loop over layers; or of several, each over some of the stages."""
    stacks = [i for i, unit in enumerate(units) if unit.of > 1 and unit.iteration == 0]
    if len(stacks) == 1 and units[stacks[0]].of >= stages:
        least, more = divmod(units[stacks[0]].of, stages)
        sizes = [least + (stage < more) for stage in range(stages)]
        yield [stacks[0] + own for own in itertools.accumulate(sizes[:-1])]
    for parts in range(stages if stacks else 0, 1, -1):
        even = [i for i in places if units[i].of == 1 or units[i].iteration * parts % units[i].of == 0]
        found = bottleneck(sums, even, nbytes, stages)
        if found is not None and _is_equal(units, found):
            yield found


def _is_equal(units: Sequence[Unit], cuts: Sequence[int]) -> bool:
    """Whether each loop over layers lies in ranges of one size."""
    sizes: dict[int, list[int]] = {}
    for start, stop in itertools.pairwise([0, *cuts, len(units)]):
        for item, own in itertools.groupby(units[start:stop], key=lambda unit: id(unit.item)):
            sizes.setdefault(item, []).append(len(list(own)))
    return all(len(set(own)) == 1 for own in sizes.values())


def bottleneck(sums: np.ndarray, places: Sequence[int], nbytes: Sequence[int], stages: int) -> list[int] | None:
    """Cuts at ``places`` by dynamic programming: for the least slowest stage, then for the fewest stages with little to do,
    then for the fewest bytes, then for stages as equal as can be.

    None where there are too few places with work in between.
    """

    sums = np.broadcast_to(sums, (stages, sums.shape[-1]))
    fastest = _slowest(sums, places)
    if fastest == math.inf:
        return None
    return _fewest(sums, places, nbytes, fastest * (1 + 1e-9))  # equal stages' sums differ by what is rounded


def _slowest(sums: np.ndarray, places: Sequence[int]) -> float:
    """The work of the slowest stage, at least; infinite where no cuts leave work for each."""
    ends = np.array([*places, sums.shape[-1] - 1])
    best = sums[0, ends]
    for stage in sums[1:]:
        own = stage[ends] - stage[ends][:, None]  # row: where the stage begins
        later = (own > 0) & (ends > ends[:, None])
        best = np.where(later, np.maximum(own, best[:, None]), math.inf).min(0)
    return float(best[-1])


def _fewest(sums: np.ndarray, places: Sequence[int], nbytes: Sequence[int], most: float) -> list[int]:
    """Of the cuts into stages of at most ``most`` work the best by what else `bottleneck` compares.

    Args:
        sums: of each stage.
    """
    little, last = LITTLE * sums[:, -1] / len(sums), sums.shape[-1] - 1
    least = [last]  # where each stage ends at the earliest, so that those behind it have at most that
    for stage in sums[:0:-1]:
        least.append(int(np.searchsorted(stage, stage[least[-1]] - most * (1 + 1e-9))))
    least.reverse()

    def with_stage(stage: int, start: int, stop: int, before: Cost, cuts: list[int]) -> tuple[Cost, list[int]]:
        own = sums[stage, stop] - sums[stage, start]
        few, sent, squares = before
        return (few + (own < little[stage]), sent + (nbytes[stop] if stop < last else 0.0), squares + own**2), [*cuts, stop]

    best: dict[int, tuple[Cost, list[int]]] = {0: ((0.0, 0.0, 0.0), [])}
    for stage, own in enumerate(sums):
        found: dict[int, tuple[Cost, list[int]]] = {}
        for stop in places if stage < len(sums) - 1 else [last]:
            if stop >= least[stage]:
                work = ((start, own[stop] - own[start]) for start in best if start < stop)
                starts = [start for start, done in work if done <= most and (done > 0 or not stage)]
                if starts:
                    found[stop] = min(with_stage(stage, start, stop, *best[start]) for start in starts)
        best = found
    return best[last][1][:-1]


def _crossing(graph: Planner, units: Sequence[Unit], known: set[PTensor]) -> tuple[list[int], list[int]]:
    """In front of each unit how many tensors go across, and their bytes."""
    across, passes = _across(graph, units, known), _passing_by(graph, units)
    counts = [sum(i not in passes.get(t, ()) for t in tensors) for i, tensors in enumerate(across)]
    return counts, [sum(t.nbytes for t in tensors) for tensors in across]


def _across(graph: Planner, units: Sequence[Unit], known: set[PTensor]) -> list[list[PTensor]]:
    """In front of each unit: what those before it make and those from it on read."""
    start = {id(unit.item): i - unit.iteration for i, unit in enumerate(units)}
    ends = {item: i + units[i].of - 1 for item, i in start.items()}
    every = [(unit.item, i) for i, unit in enumerate(units) if unit.iteration == 0]
    place = {t: ends[id(item)] for item, _ in every for t in made_by(item)}
    last = dict(place)
    for item, i in every:
        throughout = set(reads_of(item)) if isinstance(item, Op) else {t for one in item.items for t in reads_of(one)}
        last.update((t, i) for t in reads_of(item) if t in place)
        last.update((t, ends[id(item)]) for t in throughout if t in place)
    across: list[list[PTensor]] = [[] for _ in units]
    for tensor, first in place.items():
        if tensor not in known:
            for i in range(first + 1, last[tensor] + 1):
                across[i].append(tensor)
    for i, unit in enumerate(units):
        if unit.iteration and isinstance(unit.item, Nest):
            across[i] += [c.inside for c in unit.item.loop.carries if c.inside is not c.out]
    return across


def _passing_by(graph: Planner, units: Sequence[Unit]) -> dict[PTensor, set[int]]:
    """In front of which units a tensor passes by that layers read alike: those behind read it as those before did, and a
    product with a kernel stands between."""
    weights = weights_of(graph)

    def has_kernel(item: Item) -> bool:
        return isinstance(item, Nest) or (holds_contraction(item) and not weights.isdisjoint(item.inputs))

    products = [*itertools.accumulate((has_kernel(unit.item) for unit in units), initial=0)]
    items = {id(unit.item): unit.item for unit in units}
    read = {key: set(reads_of(item)) - set(made_by(item)) for key, item in items.items()}
    readers: dict[PTensor, list[tuple[int, int]]] = {}
    for i, unit in enumerate(units):
        for tensor in read[id(unit.item)]:
            readers.setdefault(tensor, []).append((i, id(unit.item.body if isinstance(unit.item, Op) else unit.item)))
    found: dict[PTensor, set[int]] = {}
    for tensor, own in readers.items():
        last = max({key: i for i, key in reversed(own)}.values())  # that reads it as none before did
        for (one, _), (other, _) in itertools.pairwise(pair for pair in own if pair[0] >= last):
            loop = isinstance(units[one].item, Nest)
            places = (i for i in range(one + 1, other + 1) if loop or products[i] > products[one + 1])
            found.setdefault(tensor, set()).update(places)
    return found


def _sums(units: Sequence[Unit], speed: Speed) -> np.ndarray:
    """Seconds of all units in front of each."""
    of_body: dict[Body, tuple[float, bool]] = {}
    of_item = {id(unit.item): _seconds(unit.item, speed, of_body) for unit in units}
    return np.concatenate([[0.0], np.cumsum([of_item[id(unit.item)] / unit.of for unit in units])])


def _seconds(item: Item, speed: Speed, known: dict[Body, tuple[float, bool]]) -> float:
    """Of all iterations of a loop, forward and backward; equal layers' bodies are the same."""
    if isinstance(item, Nest):
        return item.loop.length * sum(_seconds(one, speed, known) for one in item.items)
    if item.body is None:
        return 0.0
    if item.body not in known:
        work = work_of(item.body.jaxpr)
        known[item.body] = speed.seconds(work), work.flops > 0
    forward, is_product = known[item.body]
    return forward * _times(item, is_product)


def _times(op: Op, is_product: bool) -> int:
    """How often a micro-batch does about as much as ``op``: the gradient of each operand of a product is a product as
    large, and what is checkpointed runs again."""
    if op.backward is None:
        return 1
    return 1 + (min(2, len(op.backward.gradients)) if is_product else 1) + bool(op.remat)
