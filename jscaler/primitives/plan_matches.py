"""Whether a finished plan fits a graph that its policy never saw: the same op paths and rules, or the first difference.

Sizes may differ: a plan for a small model fits a large one wherever its parts divide.
"""

import math

from jscaler.capture.bodies import BodyTable
from jscaler.errors import PlanError, PlanFitError, UnknownNameError, listing, near_names
from jscaler.ir import Graph, Op
from jscaler.ir.kinds import tensor_kinds
from jscaler.primitives.algorithms import Chunk, GridAxis, as_split, grid_axis
from jscaler.primitives.gradients import check_residuals, summing_dtype
from jscaler.primitives.made_for import OpRecord, RuleRecord
from jscaler.primitives.per_microbatch import needing_the_whole
from jscaler.primitives.plan import (
    Accumulation,
    Assign,
    Fuse,
    Index,
    OnDevices,
    Order,
    PerMicrobatch,
    Plan,
    Recompute,
    ReduceDtype,
    SaveResiduals,
    Shard,
    Store,
    Trans,
    named_ops,
)
from jscaler.primitives.recompute_regions import with_region
from jscaler.primitives.restructured import restructured
from jscaler.primitives.shard_checks import check_shard
from jscaler.primitives.stage_checks import check_on_devices
from jscaler.primitives.stores import check_store


def check_fits(plan: Plan, graph: Graph, bodies: BodyTable) -> None:
    """Compare ``graph`` with the one that ``plan`` was made for, and every decision with the op that it names.

    A plan that does not say what it was made for (``made_for`` is None) is held against the ops that it names alone.

    Raises:
        PlanFitError: they differ; it names the first difference.
    """
    try:
        graph = _fused(plan, graph, bodies)
        _compare(plan, graph)
        grids: dict[str, tuple[GridAxis, ...]] = {}
        assigned: set[str] = set()
        kinds, groups = tensor_kinds(graph), _groups(plan)
        _check_once(plan)
        for decision in plan.decisions:
            _check_ops(named_ops(decision), graph, str(decision))
            if isinstance(decision, Trans):
                if decision.op in assigned:
                    raise PlanError(f"'{decision.op}' is split after it was assigned to devices, by '{decision}'")
                alone = decision.op in plan.alone
                _check_trans(decision, graph[decision.op], graph, grids.get(decision.op, ()), alone)
                grids[decision.op] = decision.axes
            elif isinstance(decision, Shard):
                check_shard(graph, decision, groups, kinds)
            elif isinstance(decision, Store):
                check_store(graph, decision, plan.num_devices)
            elif isinstance(decision, Recompute):
                graph = with_region(graph, decision)
            elif isinstance(decision, PerMicrobatch):
                needing_the_whole(graph, decision.ops)
            elif isinstance(decision, SaveResiduals):
                check_residuals(graph[decision.op])
            elif isinstance(decision, ReduceDtype) or (isinstance(decision, Accumulation) and decision.dtype):
                summing_dtype(decision.dtype)
            elif isinstance(decision, OnDevices):
                check_on_devices(decision, plan.num_devices)
            elif isinstance(decision, Assign):
                _check_assign(decision, grids, plan.num_devices)
                assigned.add(decision.op)
            elif isinstance(decision, Order):
                _check_order(decision, graph, grids)
    except PlanFitError:
        raise
    except (PlanError, UnknownNameError) as error:
        raise PlanFitError(plan.name, str(error)) from error


def _fused(plan: Plan, graph: Graph, bodies: BodyTable) -> Graph:
    for decision in plan.decisions:
        if isinstance(decision, Fuse):
            _check_ops(decision.ops, graph, str(decision))
        graph = restructured(graph, [decision], bodies)
    return graph


def _check_ops(paths: tuple[str, ...], graph: Graph, decision: str) -> None:
    for path in paths:
        if path not in graph.by_path:
            raise PlanError(f"op '{path}' is not in the graph{_near(path, graph)}; '{decision}' names it")


def _compare(plan: Plan, graph: Graph) -> None:
    """The graph against the plan's record: op by op in the order of the program, then what the record lacks."""
    if plan.made_for is None:
        return
    added = [op.path for op in graph.forward() if op.path not in plan.made_for.by_path]
    missing = [op.path for op in plan.made_for.ops if op.path not in graph.by_path]
    counts = f"{len(missing)} of the plan's ops are missing, {len(added)} forward ops are new"
    for op in plan.made_for.ops:
        if op.path not in graph.by_path:
            raise PlanError(f"op '{op.path}' is not in the graph{_near(op.path, graph)}; {counts}")
        _compare_rule(op, graph)
    if added:
        raise PlanError(
            f"op '{added[0]}' is in the graph and was not in the one that the plan was made for; {counts}; to have them "
            "filled in, take dataclasses.replace(plan, made_for=None)"
        )


def _near(path: str, graph: Graph) -> str:
    known = list(graph.by_path)
    near = near_names(path, known) or near_names(path.rsplit("/", 1)[-1], known)
    return f"; did you mean '{near[0]}'?" if near else ""


def _compare_rule(op: OpRecord, graph: Graph) -> None:
    if op.rule is None:
        return
    found = RuleRecord.of(graph.rule(graph[op.path]))
    for name, kind in op.rule.kinds.items():
        if name not in found.kinds:
            raise PlanError(f"op '{op.path}' has no factor '{name}': its rule is '{found}' here, and was '{op.rule}'")
        if found.kinds[name] != kind:
            reason = graph.rule(graph[op.path]).factors[name].reason
            why = f" ({reason})" if reason else ""
            raise PlanError(f"factor '{name}' of op '{op.path}' is {found.kinds[name]} here{why}, and was {kind}")
    if found.text != op.rule.text or found.kinds != op.rule.kinds:
        raise PlanError(f"the rule of op '{op.path}' is '{found}' here, and was '{op.rule}'")


def _check_once(plan: Plan) -> None:
    """Whether a leaf is sharded and stored in one way."""
    found: dict[tuple[type, str], Shard | Store] = {}
    for decision in plan.decisions:
        if isinstance(decision, (Shard, Store)):
            first = found.setdefault((type(decision), decision.leaf), decision)
            if first != decision:
                raise PlanError(f"of '{decision.leaf}' two things are said: '{first}' and '{decision}'")


def _groups(plan: Plan) -> set[frozenset[int]]:
    """The sets of devices that the plan puts ops on, and all devices."""
    stages = [own for d in plan.decisions if isinstance(d, OnDevices) for own in (d.devices, d.turned or d.devices)]
    placed = [d.devices for d in plan.decisions if isinstance(d, Assign)]
    return set(map(frozenset, [range(plan.num_devices), *dict.fromkeys([*stages, *placed])]))


def _check_trans(decision: Trans, op: Op, graph: Graph, before: tuple[GridAxis, ...], alone: bool) -> None:
    """``before`` is the grid that an earlier decision made of the op, which is split further."""
    rule = graph.rule(op)
    if decision.axes[: len(before)] != before:
        raise PlanError(f"'{op.path}' is split into {list(map(str, before))} before, and '{decision}' is not part of that")
    for i, axis in enumerate(decision.axes):
        if axis.factor is not None:
            grid_axis(op, rule, as_split(axis), decision.axes[:i], alone)
            if axis.sizes is not None and len(axis.sizes) != axis.parts:
                raise PlanError(f"'{op.path}' is split into {axis.parts} parts of the sizes {list(axis.sizes)}")
        elif axis.parts < 1:
            raise PlanError(f"'{op.path}' is copied {axis.parts} times")
    for axis in decision.chunks:
        if axis.factor is None:
            raise PlanError(f"'{op.path}' runs in chunks of no factor")
        grid_axis(op, rule, Chunk(axis.factor, axis.parts), decision.axes)


def _check_assign(decision: Assign, grids: dict[str, tuple[GridAxis, ...]], num_devices: int) -> None:
    if decision.op not in grids:
        raise PlanError(f"'{decision.op}' is assigned to devices before it is split; a Trans comes first, if of no axes")
    axes = grids[decision.op]
    _check_cells(decision.op, decision.index, axes)
    cells = math.prod(stop - start for (start, stop), axis in zip(decision.index, axes, strict=True) if not axis.time)
    all_cells = math.prod(stop - start for start, stop in decision.index)  # counted so where they take turns on devices
    if len(decision.places) not in (cells, all_cells):
        raise PlanError(f"{cells} cells of '{decision.op}' are assigned to {len(decision.places)} places")
    wrong = sorted({p.device for p in decision.places if not 0 <= p.device < num_devices})
    if wrong:
        raise PlanError(f"'{decision.op}' is assigned to devices {listing([str(d) for d in wrong])} of {num_devices}")


def _check_order(decision: Order, graph: Graph, grids: dict[str, tuple[GridAxis, ...]]) -> None:
    for path, cells in ((decision.before, decision.before_cells), (decision.after, decision.after_cells)):
        if cells is not None:
            forward = graph[path].forward
            own = grids.get(path, ()) or (grids.get(forward.path, ()) if forward is not None else ())
            _check_cells(path, cells, own)


def _check_cells(path: str, cells: Index, axes: tuple[GridAxis, ...]) -> None:
    shape = [axis.parts for axis in axes]
    inside = len(cells) == len(shape) and all(0 <= a < b <= parts for (a, b), parts in zip(cells, shape, strict=True))
    if not inside:
        raise PlanError(f"the cells {list(map(list, cells))} of '{path}' are none of its grid {shape}")
