"""``Placement``: what each mesh axis means for one op; from it follow the layouts of its operands and results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jscaler.errors import PlanError, listing
from jscaler.ir import Graph, Op, Place, PTensor, Rule
from jscaler.ir.mask import Combiner
from jscaler.ir.rule import TensorFactors
from jscaler.materialize.layout import Layout
from jscaler.materialize.mesh import Axes, DeviceMesh, PlacedGrid
from jscaler.primitives import Assign, Chunk, GridAxis, Plan, Trans
from jscaler.primitives.algorithms import as_split, grid_axis, parts_text
from jscaler.schedule.assigned_cells import cell_places

Combiners = tuple[Combiner | None, ...]


@dataclass(frozen=True)
class RunnerUp:
    """The best that was not taken where something was filled in.

    Attributes:
        what: the placement that was not taken, as `Placement.describe` says it.
        axis: the mesh axis that was decided; empty where it was several at once.
        more: how much more it costs, in the cost model's unit.
    """

    what: str
    axis: str
    more: float


@dataclass(frozen=True)
class Placement:
    """The uses of a group's mesh axes in one op. Axes not named here replicate the op.

    Attributes:
        group: the devices that the op runs on.
        factors: factor -> the axes that split it, major first.
        sizes: factor -> the sizes of its parts, where they are unequal.
        chunks: factor -> the number of its parts that run one after another on every device.
        shares: axis -> per operand the combiner of the value shares that pass through the (linear) op along it.
        origin: who decided: ``policy``, ``mirrored`` (a backward after its forward) or ``filled``.
        runners_up: for every axis that was filled in by price, the best that was not taken.
    """

    group: DeviceMesh
    factors: Mapping[str, Axes] = field(default_factory=dict)
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, kw_only=True)
    chunks: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    shares: Mapping[str, Combiners] = field(default_factory=dict)
    origin: str = "policy"
    runners_up: tuple[RunnerUp, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What equal placements share."""
        uses = (self.factors, self.sizes, self.chunks, self.shares)
        return (self.group, *(tuple(use.items()) for use in uses), self.origin, self.runners_up)

    @property
    def parts(self) -> dict[str, int]:
        """How many parts each factor is split into."""
        return {f: self.group.size(axes) for f, axes in self.factors.items() if axes}

    def as_it_lies(self, op: Op) -> bool:
        """Whether ``op`` takes any part of its inputs, as they lie: it may, and no policy has placed it."""
        return bool(op.anywhere) and self.origin == "filled"

    def describe(self) -> str:
        """``a:8`` for factor a in eight parts, ``share:8`` for shares passed on, ``copy`` where all replicate."""
        used = [f"{f}:{parts_text(n, self.sizes.get(f))}" for f, n in self.parts.items()]
        used += [f"{f}:{n} chunks" for f, n in self.chunks.items()]
        if self.shares:
            used.append(f"share:{self.group.size(tuple(self.shares))}")
        return " ".join(used) or "copy"


def operand_layout(rule: Rule, placement: Placement, op: Op, index: int) -> Layout:
    """The layout in which ``op`` reads its input ``index``."""
    values: dict[str, Combiner | None] = {axis: combiners[index] for axis, combiners in placement.shares.items()}
    return _layout(rule, placement, rule.operands[index], op.inputs[index], values)


def result_layout(rule: Rule, placement: Placement, op: Op, index: int, passed: Mapping[str, Combiners]) -> Layout:
    """The layout in which ``op`` leaves its output ``index``; ``passed`` gives the combiners of passed-on shares."""
    values: dict[str, Combiner | None] = {axis: combiners[index] for axis, combiners in passed.items()}
    for factor, axes in placement.factors.items():
        values.update({axis: rule.shares.get((factor, index)) for axis in axes})
    return _layout(rule, placement, rule.results[index], op.outputs[index], values)


def _layout(
    rule: Rule,
    placement: Placement,
    factors: TensorFactors,
    tensor: PTensor,
    values: Mapping[str, Combiner | None],
) -> Layout:
    cuts: list[Axes] = []
    subdims: list[tuple[int, ...]] = []
    sizes: dict[int, tuple[int, ...]] = {}
    for dim, size in zip(factors, tensor.shape, strict=True):
        own = [placement.factors.get(f, ()) for f in dim]
        if any(own):
            sizes.update({len(cuts) + i: placement.sizes[f] for i, f in enumerate(dim) if f in placement.sizes})
            subdims.append(tuple([rule.factors[f].size for f in dim]))
            cuts += own
        else:  # refined are only the dims whose factors are split: a coarse layout is a cheap layout to search
            subdims.append((size,))
            cuts.append(())
    shares = tuple([(axis, values[axis]) for axis in placement.group.names if values.get(axis)]) if values else ()
    return Layout(placement.group, tuple(subdims), tuple(cuts), shares).with_sizes(sizes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Decided:
    """The decisions of a plan on one op: its grid and the device of each cell."""

    axes: tuple[GridAxis, ...]
    places: tuple[Place, ...]
    any_order: bool = False

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(p.device for p in self.places)

    @property
    def parts(self) -> dict[str, int]:
        """Factor -> the number of its parts in the grid."""
        found: dict[str, int] = {}
        for axis in self.axes:
            if axis.factor is not None:
                found[axis.factor] = found.get(axis.factor, 1) * axis.parts
        return found

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of the parts of each factor that is split into unequal ones."""
        return {a.factor: a.sizes for a in self.axes if a.factor is not None and a.sizes is not None}


def decided_placements(graph: Graph, plan: Plan) -> dict[str, Decided]:
    """The plan's decisions per op, checked for completeness.

    Raises:
        UnknownNameError: a decision names an op that the graph lacks.
        PlanError: a cell is assigned twice or not at all, or an op that has no cells.
    """
    grids: dict[str, tuple[GridAxis, ...]] = {}
    assigned: dict[str, list[Assign]] = {}
    unordered = {d.op for d in plan.decisions if isinstance(d, Assign) and d.any_order}
    for decision in plan.decisions:
        if isinstance(decision, Trans):
            op, axes = graph[decision.op], decision.axes
            for i, axis in enumerate(axes):  # a saved plan meets a graph that its policy never saw
                if axis.factor is not None:
                    grid_axis(op, graph.rule(op), as_split(axis), axes[:i])
            for axis in decision.chunks:
                assert axis.factor is not None
                grid_axis(op, graph.rule(op), Chunk(axis.factor, axis.parts), axes)
            grids[op.path] = axes
        elif isinstance(decision, Assign):
            assigned.setdefault(decision.op, []).append(decision)
    for path in sorted(assigned.keys() - grids.keys()):
        raise PlanError(
            f"'{graph[path].path}' is assigned to devices before it is split; a Trans comes first, if of no axes"
        )
    chunked = chunked_ops(plan)
    table = {}
    for path, axes in grids.items():
        if path in chunked and not axes and path not in assigned:
            continue  # how it is chunked was decided, and where it runs was not
        table[path] = Decided(axes, _places(path, axes, assigned.get(path, [])), path in unordered)
    return table


def _places(path: str, axes: Sequence[GridAxis], decisions: Sequence[Assign]) -> tuple[Place, ...]:
    """The place of every cell of a grid, row-major."""
    whole = tuple((0, a.parts) for a in axes)
    if len(decisions) == 1 and decisions[0].index == whole:
        return decisions[0].places  # shared by all that lies there
    return tuple(cell_places(path, axes, decisions).flat)


def chunked_ops(plan: Plan) -> dict[str, dict[str, int]]:
    """Op -> the factor along which it runs in chunks, and how many."""
    return {
        d.op: {a.factor: a.parts for a in d.chunks if a.factor is not None and a.parts > 1}
        for d in plan.decisions
        if isinstance(d, Trans) and d.chunks
    }


def check_devices(table: Mapping[str, Decided]) -> None:
    """Every op has one cell on each device of its group.

    Raises:
        PlanError: an op stacks cells on one device (a time axis), or runs in host memory.
    """
    for path, decided in _by_places(table).values():
        hosted = [str(p) for p in decided.places if p.space != "device"]
        if hosted:
            raise PlanError(
                f"'{path}' is assigned to {listing(hosted)}: ops cannot run in host memory; use the device's own"
            )
        if len(set(decided.devices)) < len(decided.devices):
            raise PlanError(
                f"'{path}' has {len(decided.devices)} cells on {len(set(decided.devices))} devices: cells that share a "
                "device run one after another (a time axis), which jscaler cannot lower yet; give each cell its own device"
            )


def _by_places(table: Mapping[str, Decided]) -> dict[int, tuple[str, Decided]]:
    """The first op that lies in each array of places; arrays that a policy used again are one object."""
    found: dict[int, tuple[str, Decided]] = {}
    for path, decided in table.items():
        found.setdefault(id(decided.places), (path, decided))
    return found


def placed_grids(table: Mapping[str, Decided]) -> dict[str, PlacedGrid]:
    """The grids as the mesh sees them."""
    devices = {array: decided.devices for array, (_, decided) in _by_places(table).items()}
    return {p: PlacedGrid(p, tuple(a.parts for a in d.axes), devices[id(d.places)]) for p, d in table.items()}


def placement_of(decided: Decided, group: DeviceMesh, covered: Sequence[Axes]) -> Placement:
    """The policy's placement of an op on ``group``, its grid axes written as mesh axes."""
    factors: dict[str, Axes] = {}
    for axis, names in zip(decided.axes, covered, strict=True):
        if axis.factor is not None and names:
            factors[axis.factor] = factors.get(axis.factor, ()) + names
    return Placement(group, factors, sizes=decided.sizes)
