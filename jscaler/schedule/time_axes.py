"""Which axes of a plan's grids lie in time: their cells run one after another on the devices that they share.

A `TimeSplit` says so. So do the cells of a plain ``Split`` that a policy assigns to one device; what is left of the plan
then has one cell of an op on a device.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from jscaler.errors import PlanError
from jscaler.ir import Graph
from jscaler.ir.name import SHARED, has_mark, shared_axis
from jscaler.primitives import Assign, GridAxis, Order, Plan, Trans
from jscaler.primitives.algorithms import parts_text
from jscaler.primitives.plan import Index
from jscaler.schedule.assigned_cells import assignments, with_one_each
from jscaler.schedule.turns import Devices, Turns, devices_of_cells, taken_in_turn


@dataclass(frozen=True)
class TimeCut:
    """One op's part of a time axis.

    Attributes:
        axis: the name of the time axis.
        factor: what is split.
        parts: how many run one after another.
        blocks: contiguous blocks of the factor that devices own; each part takes a piece of every block.
        sizes: of the parts, where they are unequal.
    """

    axis: str
    factor: str
    parts: int
    blocks: int = 1
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Cells:
    """Some parts of an op along a time axis."""

    op: str
    axis: str
    numbers: range


@dataclass(frozen=True)
class CellOrder:
    """Parts in time, or a whole op by its path, run before others."""

    before: Cells | None
    after: Cells | None
    decision: Order


@dataclass(frozen=True)
class TimeAxes:
    """The time axes of a plan.

    Attributes:
        names: of the axes, outermost first.
        cuts: op path -> its cuts by name.
        plan: what is left: the decisions in space.
        orders: which cells in time run before which others.
        spanning: of the names those whose ops the plan places on several device groups.
        turns: the parts that lie on devices of their own.
    """

    names: tuple[str, ...]
    cuts: Mapping[str, Mapping[str, TimeCut]]
    plan: Plan
    orders: tuple[CellOrder, ...] = ()
    spanning: frozenset[str] = frozenset()
    turns: Turns = field(default_factory=Turns)

    def in_loops(self, name: str) -> bool:
        """Whether the parts of an axis are equal, and run in their own order, or as a table of device groups says."""
        named = any(c is not None and c.axis == name for order in self.orders for c in (order.before, order.after))
        return (not named or name in self.spanning) and all(
            own[name].sizes is None for own in self.cuts.values() if name in own
        )


def time_axes(graph: Graph, plan: Plan) -> TimeAxes:
    """Take ``plan`` apart; backward ops and clones have the cuts of their forward ops.

    Raises:
        PlanError: an op has two axes of one name, or ops have axes of one name that do not go together.
    """
    plan, turns = taken_in_turn(plan)
    plan = _assigned_at_once(plan)
    grids = _grids(plan)
    names = tuple(dict.fromkeys(a.time for d in plan.decisions if isinstance(d, Trans) for a in grids[d.op] if a.time))
    orders, plan = _cell_orders(graph, plan, grids)
    if not names:
        return TimeAxes((), {}, plan)
    known = {path: _cuts(path, axes) for path, axes in grids.items() if any(a.time for a in axes)}
    _check_counts(known)
    blocks = {name: max(c[name].blocks for c in known.values() if name in c) for name in names}
    places = _device_sets(plan, turns)
    free = known.keys() - places.keys()  # where it runs is open: it will lie as its neighbours do
    if len({own for path in known.keys() & places.keys() for own in places[path]}) > 1:
        blocks |= _common_blocks(graph, known)
        free = known.keys()
    else:
        blocks |= _align(graph, known)
    for path in free:
        known[path] = {n: dataclasses.replace(c, blocks=blocks.get(n, c.blocks)) for n, c in known[path].items()}
    cuts: dict[str, Mapping[str, TimeCut]] = {}
    for op in graph.ops:
        source = op.path
        if source not in grids and op.forward is not None:
            source = op.forward.path
        elif source not in grids and op.again is not None:
            source = op.again.path
        if source in known:
            cuts[op.path] = known[source]
    _check_rows(cuts, plan.alone)
    of_axis = {name: [p for p, own in known.items() if name in own and p in places] for name in names}
    spanning = frozenset(n for n, paths in of_axis.items() if len({own for p in paths for own in places[p]}) > 1)
    return TimeAxes(names, cuts, _in_space(plan, grids), orders, spanning, turns)


def _device_sets(plan: Plan, turns: Turns) -> dict[str, Devices]:
    """Op path -> the device groups that its cells lie on, at each of its turns."""
    return devices_of_cells(plan) | turns.devices


def orders_on_groups(graph: Graph, plan: Plan) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Pairs of (op, part) of which the first runs before the second, of time axes that span device groups.

    Raises:
        PlanError: a whole op is ordered against a part of one.
    """
    if not any(isinstance(d, Order) and (d.before_cells or d.after_cells) for d in plan.decisions):
        return []
    axes = time_axes(graph, plan)
    found = []
    for order in axes.orders:
        ends = order.before, order.after
        if not any(end is not None and end.axis in axes.spanning for end in ends):
            continue
        if order.before is None or order.after is None:
            raise PlanError(f"'{order.decision}': the parts run on several device groups; name a part of both ops")
        found += [((order.before.op, i), (order.after.op, j)) for i in order.before.numbers for j in order.after.numbers]
    return found


def _align(graph: Graph, known: dict[str, dict[str, TimeCut]]) -> dict[str, int]:
    """Give ops of one axis that are split among unequal numbers of devices the same rows, where these divide: else each
    part would be brought from the one's rows to the other's, and they would run in loops apart.

    Returns:
        The blocks of the axes for which that was done.
    """
    names = dict.fromkeys(name for own in known.values() for name in own)
    uneven = {name for name in names if len({own[name].blocks for own in known.values() if name in own}) > 1}
    common = _common_blocks(graph, {path: {n: c for n, c in own.items() if n in uneven} for path, own in known.items()})
    for path, own in known.items():
        known[path] = {n: dataclasses.replace(c, blocks=common.get(n, c.blocks)) for n, c in own.items()}
    return common


def _common_blocks(graph: Graph, known: Mapping[str, Mapping[str, TimeCut]]) -> dict[str, int]:
    """Blocks for all ops of an axis that are split among unequal numbers of devices: they hand parts to each other."""
    found: dict[str, int] = {}
    for name in dict.fromkeys(name for own in known.values() for name in own):
        cuts = {path: own[name] for path, own in known.items() if name in own}
        blocks = math.lcm(*(cut.blocks for cut in cuts.values()))
        sizes = [graph.rule(graph[path]).factors[cut.factor].size for path, cut in cuts.items() if path in graph.by_path]
        parts = next(iter(cuts.values())).parts
        if all(size % (blocks * parts) == 0 for size in sizes):
            found[name] = blocks
    return found


def _cell_orders(graph: Graph, plan: Plan, grids: Mapping[str, tuple[GridAxis, ...]]) -> tuple[tuple[CellOrder, ...], Plan]:
    """The orders of single cells, and the plan without them."""
    found = [d for d in plan.decisions if isinstance(d, Order) and (d.before_cells or d.after_cells)]
    if not found:
        return (), plan
    orders = tuple(
        CellOrder(_cells(graph, d.before, d.before_cells, grids), _cells(graph, d.after, d.after_cells, grids), d)
        for d in found
    )
    return orders, dataclasses.replace(plan, decisions=tuple(d for d in plan.decisions if d not in found))


def _cells(graph: Graph, path: str, index: Index | None, grids: Mapping[str, tuple[GridAxis, ...]]) -> Cells | None:
    if index is None:
        return None
    forward = graph[path].forward if path in graph.by_path else None
    axes = grids.get(path) or grids.get(forward.path if forward is not None else "", ())
    own = zip(axes, index, strict=False)  # axes that the op was given later are meant whole
    parts = [(axis, range(*box)) for axis, box in own if box != (0, axis.parts)]
    if len(parts) != 1 or not parts[0][0].time:
        inside = ", ".join(str(axis) for axis, _ in parts)
        raise PlanError(
            f"op_order names cells of '{path}' along {inside}; only the cells along one time axis run in an order: those "
            "in space run at once, on devices of their own"
        )
    return Cells(path, parts[0][0].time, parts[0][1])


def _assigned_at_once(plan: Plan) -> Plan:
    """``plan`` with one decision in place of several that assign the cells of an op, where cells share devices."""
    grids = {d.op: d.axes for d in plan.decisions if isinstance(d, Trans)}
    joined = {op: _joined(grids[op], own) for op, own in assignments(plan, grids).items() if len(own) > 1}
    return with_one_each(plan, {op: whole for op, whole in joined.items() if whole is not None})


def _joined(axes: Sequence[GridAxis], own: Sequence[Assign]) -> Assign | None:
    """One decision for all cells; None where some are missing or assigned twice, or all lie on devices of their own."""
    shape = [1 if a.time else a.parts for a in axes]
    places = np.full(shape, None, object)
    for decision in own:
        index = tuple(slice(0, 1) if a.time else slice(*cut) for a, cut in zip(axes, decision.index, strict=True))
        box = places[index]
        if any(place is not None for place in box.flat) or box.size != len(decision.places):
            return None
        places[index] = np.array([*decision.places, None], object)[:-1].reshape(box.shape)
    found = tuple(places.flat)
    if None in found or len(set(found)) == len(found):
        return None
    return Assign(own[0].op, tuple((0, a.parts) for a in axes), found)


def _grids(plan: Plan) -> dict[str, tuple[GridAxis, ...]]:
    """The axes of every op's grid, those in time marked."""
    grids = {d.op: d.axes for d in plan.decisions if isinstance(d, Trans)}
    for path, axes in grids.items():
        for axis in axes:
            if axis.time.rstrip("0123456789+") == SHARED:  # a user's own axis
                raise PlanError(
                    f"'{path}': a time axis cannot be called '{axis.time}', as those of cells that share devices are; give "
                    "it another name"
                )
    shared: dict[tuple[int, tuple[GridAxis, ...]], tuple[GridAxis, ...]] = {}  # many ops lie on one array of places
    twice: dict[int, bool] = {}
    for decision in plan.decisions:
        if not isinstance(decision, Assign):
            continue
        places = decision.places
        if id(places) not in twice:
            twice[id(places)] = len(set(places)) < len(places)
        if twice[id(places)]:
            axes = grids[decision.op]
            key = (id(decision.places), axes)
            if key not in shared:
                shared[key] = _marked(decision, axes)
            grids[decision.op] = shared[key]
    return grids


def _marked(decision: Assign, axes: tuple[GridAxis, ...]) -> tuple[GridAxis, ...]:
    """``axes``, those in time along which the places of ``decision`` are the same."""
    if decision.index != tuple((0, a.parts) for a in axes):
        return axes
    places = np.array(decision.devices).reshape([1 if a.time else a.parts for a in axes])
    found = list(axes)
    for i, axis in enumerate(axes):
        if places.shape[i] > 1 and axis.factor is not None and (places == places.take([0], i)).all():
            if axis.algorithm:
                raise PlanError(f"'{decision.op}': the cells along {axis} share devices, and only plain parts run in turn")
            number = sum(has_mark(a.time, "shared") for a in found) + 1
            parts = parts_text(axis.parts, axis.sizes)  # ops with as many parts alone share a loop
            found[i] = dataclasses.replace(axis, time=shared_axis(number, parts))
    return tuple(found)


def _check_counts(known: Mapping[str, Mapping[str, TimeCut]]) -> None:
    """Ops whose axes have one name run in one loop, so they have as many parts."""
    first: dict[str, tuple[str, TimeCut]] = {}
    for path, own in known.items():
        for name, cut in own.items():
            other, before = first.setdefault(name, (path, cut))
            if before.parts != cut.parts:
                raise PlanError(
                    f"the time axis '{name}' has {before.parts} parts of '{before.factor}' in '{other}' and {cut.parts} "
                    f"parts of '{cut.factor}' in '{path}'; ops of one axis run in one loop: give them as many parts, or "
                    "the axes names of their own"
                )


def _check_rows(cuts: Mapping[str, Mapping[str, TimeCut]], alone: Set[str]) -> None:
    """What parts have for themselves goes from op to op of those that run alone, whose parts are the same rows then."""
    first: dict[str, tuple[str, TimeCut]] = {}
    for path in (path for path in cuts if path in alone):
        for name, cut in cuts[path].items():
            other, before = first.setdefault(name, (path, cut))
            if before.blocks != cut.blocks:
                raise PlanError(
                    f"'{other}' and '{path}' run on each part of '{name}' alone, and their parts are not the same rows: a "
                    f"part of the first has a piece of each of {before.blocks} blocks that devices own, one of the second "
                    f"of {cut.blocks}; split both between as many devices"
                )


def _cuts(path: str, axes: Sequence[GridAxis]) -> dict[str, TimeCut]:
    found: dict[str, TimeCut] = {}
    for i, axis in enumerate(axes):
        if not axis.time:
            continue
        if axis.time in found:
            parts = " and ".join(str(a.parts) for a in axes if a.time == axis.time)
            raise PlanError(
                f"'{path}' has two time axes that are called '{axis.time}', of {parts} parts; give each a name of its own, "
                "or have one of all parts (a pipeline cuts its micro-batches itself, without accumulate inside)"
            )
        assert axis.factor is not None
        around = axes[:i] if has_mark(axis.time, "shared") else axes
        blocks = math.prod(a.parts for a in around if a.factor == axis.factor and not a.time)
        found[axis.time] = TimeCut(axis.time, axis.factor, axis.parts, blocks, axis.sizes)
    return found


def _in_space(plan: Plan, grids: Mapping[str, tuple[GridAxis, ...]]) -> Plan:
    """``plan`` without its time axes; an op that has no others, and no devices, is left open."""
    assigned = {d.op for d in plan.decisions if isinstance(d, Assign)}
    decisions = []
    for decision in plan.decisions:
        if isinstance(decision, Trans) and any(a.time for a in grids[decision.op]):
            axes = tuple(a for a, now in zip(decision.axes, grids[decision.op], strict=False) if not now.time)
            if axes or decision.chunks or decision.op in assigned:
                decisions.append(dataclasses.replace(decision, axes=axes))
        elif isinstance(decision, Assign) and any(a.time for a in grids[decision.op]):
            decisions.append(_once(decision, grids[decision.op]))
        else:
            decisions.append(decision)
    return dataclasses.replace(plan, decisions=tuple(decisions))


def _once(decision: Assign, axes: Sequence[GridAxis]) -> Assign:
    """``decision`` on the cells in space."""
    sizes = [stop - start for start, stop in decision.index]
    index = tuple(cut for cut, axis in zip(decision.index, axes, strict=True) if not axis.time)
    count = math.prod(n for n, axis in zip(sizes, axes, strict=True) if not axis.time)
    places = decision.places
    if len(places) > count:
        shape = [n if not a.time or has_mark(a.time, "shared") else 1 for n, a in zip(sizes, axes, strict=True)]
        numbers = np.arange(len(places)).reshape(shape)
        for i, axis in enumerate(axes):
            numbers = numbers.take([0], i) if axis.time else numbers
        places = tuple(places[i] for i in numbers.ravel())
    return dataclasses.replace(decision, index=index, places=places)
