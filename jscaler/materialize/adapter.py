"""``Adapter``: what brings a tensor from one layout to another, whatever their refinements, sizes and device orders.

Both layouts are viewed over a common refinement of their sub-dims; sizes that a cut does not divide are padded, where
one padding serves both sides. What has no common view goes through the full copy, or as regions from device to device.
Blocks of sizes of their own pass a path as blocks padded to the largest; to and from other blocks they travel as regions.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from jscaler.clusters import BYTES, CostModel
from jscaler.errors import PlanError
from jscaler.ir.mask import SubDims
from jscaler.materialize.bounds import bytes_at_least, pieces_at_least
from jscaler.materialize.canonical import canonical
from jscaler.materialize.layout import Layout, common_subdims, on_devices, without_values
from jscaler.materialize.mesh import DeviceMesh
from jscaler.materialize.notation import OpenLayout
from jscaler.materialize.search import Path, cheapest_path, runners_up
from jscaler.materialize.transitions import Transition, price_of, regions_between

MOST_DEVICES = 64  # groups up to which a point-to-point exchange is compared
MOST_ROUNDS = 64


@dataclass(frozen=True)
class Stage:
    """Steps over one view of the local part.

    Attributes:
        start: the layout at the first step; its sizes may be padded.
        steps: the transitions.
        view: the shape to see the part in before it is padded to ``start.local_sizes``.
        result: the shape to crop it to at the end.
    """

    start: Layout
    steps: tuple[Transition, ...]
    view: tuple[int, ...]
    result: tuple[int, ...]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """``start``, and what follows each step."""
        return tuple(itertools.accumulate(self.steps, lambda here, step: step.apply(here), initial=self.start))


@dataclass(frozen=True)
class Adapter:
    """The communication that turns the producers' layout into the consumers'.

    Attributes:
        source, target: the layouts; an open target order is decided here.
        stages: in order; none where nothing is to do.
        cost: in the cost model's unit.
    """

    source: Layout
    target: Layout
    stages: tuple[Stage, ...]
    cost: float

    @property
    def nothing(self) -> bool:
        """Whether the source's parts are the target's."""
        same = (self.source.memory, self.source.local_shape) == (self.target.memory, self.target.local_shape)
        return not self.stages and same

    @property
    def adds(self) -> bool:
        """Whether value shares are added on the way."""
        for before, step in self.walk:
            if step.line.shares == "joined" and step.combiner == "add":
                return True
            if step.kind == "point_to_point" and step.to is not None:
                left, right = (math.prod(n for n, c in layout.shares if c == "add") for layout in (before, step.to))
                if right < left:
                    return True
        return False

    @property
    def walk(self) -> Iterator[tuple[Layout, Transition]]:
        """Every step with the layout before it."""
        for stage in self.stages:
            yield from zip(stage.layouts, stage.steps, strict=False)

    @property
    def steps(self) -> tuple[Transition, ...]:
        return tuple(step for _, step in self.walk)

    def bytes(self, itemsize: int) -> float:
        """Bytes that each device sends, in the mean."""
        return sum(step.bytes(here, itemsize) for here, step in self.walk)

    def on_devices(self, numbers: Mapping[int, int]) -> "Adapter":
        """The same between devices that are called by other numbers."""
        stages = [
            dataclasses.replace(
                stage,
                start=on_devices(stage.start, numbers),
                steps=tuple(s if s.to is None else s._replace(to=on_devices(s.to, numbers)) for s in stage.steps),
            )
            for stage in self.stages
        ]
        return Adapter(on_devices(self.source, numbers), on_devices(self.target, numbers), tuple(stages), self.cost)

    def __str__(self) -> str:
        return "; ".join(map(str, self.steps)) or ("nothing" if self.nothing else f"copy to {self.target.memory}")


@lru_cache(maxsize=65536)
def find_adapter(source: Layout, target: Layout | OpenLayout, itemsize: int, cost: CostModel = BYTES) -> Adapter:
    """The cheapest adapter from ``source`` to ``target``. There always is one.

    Raises:
        PlanError: the layouts are of different shapes or on different devices.
    """
    _check(source, target)
    numbers = _renumbered(source.mesh, cost)
    if numbers is None:
        return _cheapest(source, target, itemsize, cost)
    first = on_devices(source, numbers)
    second = target if isinstance(target, OpenLayout) else on_devices(target, numbers)
    alike = find_adapter(first, second, itemsize, cost)  # on all groups that lie alike on hosts it is the same
    return alike.on_devices({number: device for device, number in numbers.items()})


@lru_cache(maxsize=4096)
def _renumbered(mesh: DeviceMesh, cost: CostModel) -> dict[int, int] | None:
    """By device its number among the first devices that stand to one another alike; None where it is one of these."""
    devices = sorted(mesh.devices)
    found = cost.renumbered(devices)
    return None if found == tuple(devices) else dict(zip(devices, found, strict=True))


def _cheapest(source: Layout, target: Layout | OpenLayout, itemsize: int, cost: CostModel) -> Adapter:
    if isinstance(target, OpenLayout):
        return min(_in_some_orders(source, target, itemsize, cost), key=lambda adapter: adapter.cost)
    if 0 in source.shape:
        return Adapter(source, target, (), 0.0)
    if source.uneven or target.uneven:
        return _between_sizes(source, target, itemsize, cost)
    direct = _direct(source, target, itemsize, cost)
    if direct is None or not (source.even and target.even):  # one padding for both sides may cost more than two
        copied = _through_copy(source, target, itemsize, cost)
        regular = copied if direct is None or copied.cost < direct.cost else direct
    else:
        regular = direct
    regions = _as_regions(source, target, itemsize, cost, regular.cost)
    return regions or regular


def alternatives(source: Layout, target: Layout | OpenLayout, itemsize: int, cost: CostModel, count: int) -> list[Adapter]:
    """The ``count`` cheapest adapters beside the best: paths that leave its path, and the exchange where that is a path.

    Where the best is a point-to-point exchange, the cheapest path of collectives is among them.
    """
    best = find_adapter(source, target, itemsize, cost)
    found: list[Adapter | None] = []
    if isinstance(target, OpenLayout):
        found += _in_some_orders(source, target, itemsize, cost)
        if _in_any_order(source, target, itemsize, cost) is None:
            return alternatives(source, best.target, itemsize, cost, count)
        found += [
            _adapter(source, path.layouts[-1], path, source, path.layouts[-1])
            for path in runners_up(source, target, itemsize, cost, count)
        ]
    else:
        found.append(_direct(source, target, itemsize, cost))
        found += _paths_beside(source, target, itemsize, cost, count)
        found += [_through_copy(source, target, itemsize, cost), _as_regions(source, target, itemsize, cost, math.inf)]
    others = {_way(adapter): adapter for adapter in found if adapter is not None and adapter.cost >= best.cost}
    others.pop(_way(best), None)
    return sorted(others.values(), key=lambda adapter: adapter.cost)[:count] if best.stages else []


def _way(adapter: Adapter) -> tuple[tuple[str, str], ...]:
    """What tells two adapters apart, whatever their meshes."""
    return tuple((step.kind, str(step.apply(here))) for here, step in adapter.walk)


def _paths_beside(source: Layout, target: Layout, itemsize: int, cost: CostModel, count: int) -> list[Adapter]:
    views = _common_views(source, target)
    if views is None:
        return []
    first, last, padded = views
    paths = runners_up(_over(first, padded), _over(last, padded), itemsize, cost, count)
    return [_adapter(source, target, path, first, last) for path in paths]


def _check(source: Layout, target: Layout | OpenLayout) -> None:
    shapes = [tuple(math.prod(dim) for dim in layout.subdims) for layout in (source, target)]
    if shapes[0] != shapes[1]:
        raise PlanError(
            f"'{source}' is of shape {shapes[0]} and '{target}' of shape {shapes[1]}; a layout changes no shape"
        )
    before = set(source.mesh.devices)
    if isinstance(target, OpenLayout):
        if target.num_devices != len(before):
            raise PlanError(f"'{target}' is for {target.num_devices} devices; '{source}' lies on {len(before)}")
        return
    after = set(target.mesh.devices)
    if before != after:
        raise PlanError(
            f"both layouts must lie on the same devices; {sorted(before - after)} are only in '{source}', "
            f"{sorted(after - before)} only in '{target}'"
        )


def _in_some_orders(source: Layout, target: OpenLayout, itemsize: int, cost: CostModel) -> list[Adapter]:
    """The order that the search finds by paths; the source's own order and that of the numbers, by any way."""
    found = _in_any_order(source, target, itemsize, cost)
    orders = dict.fromkeys([canonical(source).mesh.devices, tuple(sorted(source.mesh.devices))])
    given = [find_adapter(source, target.on(order), itemsize, cost) for order in orders]
    return [found, *given] if found is not None else given


def _in_any_order(source: Layout, target: OpenLayout, itemsize: int, cost: CostModel) -> Adapter | None:
    """A path to the cheapest order; None where the views differ or a cut does not divide."""
    even = source.even and all(size % n == 0 for size, n in zip(source.sizes, target.cuts, strict=False))
    if source.subdims != target.subdims or not even or target.uneven or 0 in source.sizes:
        return None
    path = cheapest_path(source, target, itemsize, cost)
    if path is None:
        return None
    end = dataclasses.replace(path.layouts[-1], memory=target.memory)
    return _adapter(source, end, path, source, end)


def _direct(source: Layout, target: Layout, itemsize: int, cost: CostModel) -> Adapter | None:
    """One path over a common view."""
    views = _common_views(source, target)
    if views is None:
        return None
    first, last, padded = views
    path = cheapest_path(_over(first, padded), _over(last, padded), itemsize, cost)
    return path and _adapter(source, target, path, first, last)


def _common_views(source: Layout, target: Layout) -> tuple[Layout, Layout, SubDims] | None:
    """Both layouts over a common refinement, and the sizes that it is padded to; None where there is none."""
    first, last = _refined_alike(source, target)
    if first is None or last is None:
        return None
    padded = _common_padding(first, last)
    return None if padded is None else (first, last, padded)


def _refined_alike(source: Layout, target: Layout) -> tuple[Layout | None, Layout | None]:
    """Both layouts over a common refinement of their sub-dims; None where a cut does not fall on its boundaries."""
    if source.subdims == target.subdims:  # also where a cut divides nothing
        return source, target
    subdims = common_subdims(source.subdims, target.subdims)
    return (source.refined(subdims), target.refined(subdims)) if subdims is not None else (None, None)


def _adapter(source: Layout, target: Layout, path: Path, first: Layout, last: Layout) -> Adapter:
    stages = (Stage(path.start, path.steps, first.local_sizes, last.local_sizes),) if path.steps else ()
    return Adapter(source, target, stages, path.cost)


def _between_sizes(source: Layout, target: Layout, itemsize: int, cost: CostModel) -> Adapter:
    """From or to blocks of sizes of their own: nothing, a path over padded blocks, or an exchange from device to device.

    Raises:
        PlanError: only an exchange would do, and the group is too large for one.
    """
    if _same_parts(source, target):
        return Adapter(source, target, (), 0.0)
    direct = _direct(source, target, itemsize, cost)
    regions = _as_regions(source, target, itemsize, cost, direct.cost if direct is not None else math.inf)
    found = regions or direct
    return found if found is not None else _through_regions(source, target, itemsize, cost)


def _same_parts(source: Layout, target: Layout) -> bool:
    """Whether every device holds what it wants."""
    if source.local_sizes != target.local_sizes or source.subdims != target.subdims:
        return False
    place = {d: i for i, d in enumerate(target.mesh.devices)}
    return all(source.mask(i) == target.mask(place[d]) for i, d in enumerate(source.mesh.devices))


def _through_regions(source: Layout, target: Layout, itemsize: int, cost: CostModel) -> Adapter:
    """Value shares joined in the source's blocks, then a full copy, then the target's blocks and shares."""
    num_devices = len(source.mesh.devices)
    if num_devices > MOST_DEVICES:
        raise PlanError(
            f"from '{source}' to '{target}': uneven blocks travel from device to device, which is planned for groups of at "
            f"most {MOST_DEVICES} devices; there are {num_devices}. Split this factor, or its neighbours', evenly"
        )
    joined = without_values(source)
    bare = without_values(target)
    copies = [Layout(x.mesh, x.subdims, ((),) * len(x.cuts), memory=x.memory) for x in (joined, bare)]
    stages: tuple[Stage, ...] = ()
    total = 0.0
    for before, after in ((source, joined), (joined, copies[0]), (copies[1], bare), (bare, target)):
        if not _same_parts(before, after):
            found = _direct(before, after, itemsize, cost) or _exchanged(before, after, itemsize, cost)
            stages, total = (*stages, *found.stages), total + found.cost
    return Adapter(source, target, stages, total)


def _exchanged(source: Layout, target: Layout, itemsize: int, cost: CostModel) -> Adapter:
    step = Transition("point_to_point", to=target)
    stage = Stage(source, (step,), source.local_sizes, target.local_sizes)
    return Adapter(source, target, (stage,), price_of(source, step, itemsize, cost))


def _through_copy(source: Layout, target: Layout, itemsize: int, cost: CostModel) -> Adapter:
    """Gather all in the source's view, cut in the target's."""
    stages: tuple[Stage, ...] = ()
    total = 0.0
    bare = dataclasses.replace(source, cuts=((),) * len(source.cuts), values=())
    copy = dataclasses.replace(target, cuts=((),) * len(target.cuts), values=())
    for before, after in ((source, bare), (copy, target)):
        found = _direct(before, after, itemsize, cost)
        assert found is not None, f"no path from {before} to {after}"
        stages, total = (*stages, *found.stages), total + found.cost
    return Adapter(source, target, stages, total)


def _as_regions(source: Layout, target: Layout, itemsize: int, cost: CostModel, most: float) -> Adapter | None:
    """A point-to-point exchange, where it costs less than ``most``."""
    num_devices = len(source.mesh.devices)
    rounds = max(0, pieces_at_least(source, target) - 2)  # beside the first; a piece may be the device's own
    least = cost.floor(bytes_at_least(source, target, itemsize)) + rounds * cost.floor(1e-9)
    nested = any(len({c for _, c in layout.values}) > 1 for layout in (source, target))
    if num_devices > MOST_DEVICES or nested or most <= least + 2 * cost.local_step:
        return None
    first, last = _refined_alike(source, target)
    before, after = (first, last) if first is not None and last is not None else (source, target)
    if before.subdims != after.subdims and not (before.even and after.even):
        return None
    if len(regions_between(before, after).rounds) > MOST_ROUNDS:
        return None
    found = _exchanged(before, after, itemsize, cost)
    return None if found.cost >= most else dataclasses.replace(found, source=source, target=target)


def _common_padding(first: Layout, last: Layout) -> SubDims | None:
    """Sub-dim sizes under which the blocks of both layouts keep their starts; None where there are none."""
    padded = []
    own, theirs = dict(first.uneven), dict(last.uneven)
    for index, (size, a, b) in enumerate(zip(first.sizes, first.cuts, last.cuts, strict=True)):
        if index in own or index in theirs:
            if own.get(index) != theirs.get(index):
                return None
            padded.append(len(own[index]) * max(own[index]))
            continue
        wanted = {p * -(-size // p) for p in (first.mesh.size(a), last.mesh.size(b)) if p > 1} or {size}
        if len(wanted) > 1:
            return None
        padded.append(wanted.pop())
    rest = iter(padded)
    return tuple(tuple(next(rest) for _ in dim) for dim in first.subdims)


def _over(layout: Layout, subdims: SubDims) -> Layout:
    return dataclasses.replace(layout.level, subdims=subdims)
