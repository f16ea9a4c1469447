"""``Phase``: a stretch of a step.

All of it; or, where the ops of a loop over micro-batches lie on several groups, what stands in front of that loop, its body
(of one that takes several micro-batches in an iteration, which take turns on the groups: what it does for each), and what
stands behind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jscaler.errors import PlanError
from jscaler.ir import Graph, Loop, Nest, Op, PTensor
from jscaler.ir.between_loops import Between, between_loops
from jscaler.ir.loop import Item, chain_of, made_by, reads_of
from jscaler.ir.walk import closure
from jscaler.materialize import Completed, DeviceMesh


@dataclass(frozen=True)
class Phase:
    """A stretch of the step: ``items`` in order; of a loop over groups those of its body, at one of its turns."""

    items: tuple[Item, ...]
    loop: Loop | None = None
    first: int = 0  # of the phases of its loop


def ops_of(item: Item) -> list[Op]:
    return [item] if isinstance(item, Op) else list(item.ops())


def find_phases(
    graph: Graph, items: Sequence[Item], completed: Completed, after: Mapping[str, Sequence[str]]
) -> list[Phase]:
    """One phase; or more, where a loop lies on several groups: what it needs runs in front of it."""
    spanning = [item for item in items if isinstance(item, Nest) and len(_groups(item, completed)) > 1]
    if not spanning:
        return [Phase(tuple(items))]
    nest = _checked(graph, spanning, completed)
    maker = {t: item for item in items for t in made_by(item)}
    of_op = {op.path: item for item in items for op in ops_of(item)}

    def needs(item: Item) -> list[Item]:
        found = [maker[t] for t in reads_of(item) if t in maker]
        found += [of_op[p] for op in ops_of(item) for p in after.get(op.path, ()) if p in of_op]
        return [other for other in found if other is not item]

    needed = {id(item) for item in closure([nest], needs)}
    before = tuple(item for item in items if id(item) in needed and item is not nest)
    behind = tuple(item for item in items if id(item) not in needed)
    turns = (tuple(i for i in nest.items if ops_of(i)[0].turn == turn) for turn in range(nest.loop.turns))
    return [Phase(before), *(Phase(own, nest.loop, 1) for own in turns), Phase(behind)]


def _checked(graph: Graph, spanning: Sequence[Nest], completed: Completed) -> Nest:
    """The one loop over groups that there may be.

    Raises:
        PlanError: there are two; it is the model's own, or has such a loop in it; it takes what another leaves.
    """
    nest, *others = spanning
    inner = next((i for i in nest.items if isinstance(i, Nest) and len(_groups(i, completed)) > 1), None)
    own = inner or next((other for other in spanning if not other.loop.time), None)
    taken = next((x.stack for x in nest.loop.xs if not _counts(graph, x.stack)), None)
    if not others and own is None and taken is None:
        return nest
    if time := (inner or nest).loop.time:
        between = between_loops(graph, {name: loop for name, loop in graph.loops.items() if loop.time == time})
        around = chain_of(between.op.loop, graph.loops) if between is not None else ()
        if between is not None and {graph.loops[n].time for n in around} | {o.loop.time for o in others} <= {"", time}:
            raise _apart(between)
    if own is not None:
        (one, first), (other, second), *_ = _groups(own, completed).items()
        cuts = ["x".join(str(size) for _, size in group.axes) for group in (one, other)]
        turned = f" (in another order and cut {cuts[1]}, not {cuts[0]})" if set(one.devices) == set(other.devices) else ""
        raise PlanError(
            f"the loop '{own.loop.name}' has ops on several device groups, '{first.path}' on {list(one.devices)} and "
            f"'{second.path}' on {list(other.devices)}{turned}: only the loop over micro-batches may, outermost; place all "
            "ops of this one on one group, or cut it into ranges, one for each group (graph.ranges)"
        )
    if others:
        one, other = nest.loop, others[0].loop
        remedy = "" if one.time == other.time else "give the ops of both one time axis, or else "
        raise PlanError(
            f"two loops have ops on several device groups, '{one.name}' and '{other.name}': one loop over micro-batches "
            f"may; {remedy}place those of one on a single group"
        )
    assert taken is not None
    first = {group: op.path for group, op in _groups(nest, completed).items()}
    ops = ", ".join(f"'{path}' on devices {list(group.devices)}" for group, path in first.items())
    raise PlanError(
        f"the loop '{nest.loop.name}' has ops on several device groups ({ops}) and takes slices of '{taken.name}', which "
        "another loop leaves: place the ops of this loop on one group; or give the ops of both loops one time axis, and no "
        "op in between that needs all parts"
    )


def _counts(graph: Graph, stack: PTensor) -> bool:
    """Whether a loop's stack is but the numbers of its iterations."""
    maker = graph.producer.get(stack)
    return maker is not None and not maker.inputs and len(stack.shape) == 1


def _apart(between: Between) -> PlanError:
    """Why the loops of a time axis cannot be one, by the op between them."""
    said = "stages run micro-batch by micro-batch, in one loop, and this step needs several"
    is_update = between.op.kind == "update"
    waits = "a gradient is taken at what it changes" if is_update else "the backward of each waits for it"
    error = PlanError(f"{said}: {between}, and {waits}")
    error.alone = () if is_update else between.ops
    error.apart = True
    return error


def _groups(item: Item, completed: Completed) -> dict[DeviceMesh, Op]:
    """The groups of an item, each with an op that lies there."""
    return {completed.group_of(completed.ops[op.path].placement.group): op for op in ops_of(item)}
