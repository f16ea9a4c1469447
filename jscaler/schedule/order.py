"""Order constraints and data dependencies together form a DAG; a cycle is found here, before anything is compiled."""

import itertools
from collections.abc import Sequence
from graphlib import CycleError

from jscaler.errors import OrderError
from jscaler.ir import Graph, Nest, Op, flat
from jscaler.ir.loop import Item, item_name, made_by, reads_of
from jscaler.ir.walk import in_order
from jscaler.primitives import Order


def ordered_ops(graph: Graph, orders: Sequence[Order]) -> tuple[Op, ...]:
    """The ops in an execution order that respects data and ``orders``, otherwise the graph's own order.

    Raises:
        OrderError: the constraints and the dataflow form a cycle; the message names its ops.
        UnknownNameError: a constraint names no op.
    """
    if not orders:
        return graph.ops
    for path in (p for order in orders for p in (order.before, order.after)):
        _ = graph[path]  # raises where no op is called so, wherever the other stands
    return tuple(flat(_ordered(graph, graph.tree, orders)))


def _ordered(graph: Graph, items: Sequence[Item], orders: Sequence[Order]) -> list[Item]:
    """The items of the program or of one loop's body; a loop is one item, and its own items are ordered in it."""
    try:
        found = [items[i] for i in in_order(dependencies(items, orders), key=int)]
    except CycleError as error:
        raise _cyclic([item_name(items[i]) for i in error.args[1]], orders) from None
    return [i if isinstance(i, Op) else Nest(i.loop, tuple(_ordered(graph, i.items, orders))) for i in found]


def dependencies(items: Sequence[Item], orders: Sequence[Order]) -> dict[int, set[int]]:
    """For which others each of the items of one level waits: for data, and as ``orders`` say."""
    home = {op.path: i for i, item in enumerate(items) for op in flat([item])}
    made = {t: i for i, item in enumerate(items) for t in made_by(item)}
    found = {i: {made[t] for t in reads_of(item) if t in made} - {i} for i, item in enumerate(items)}
    for order in orders:
        first, second = home.get(order.before), home.get(order.after)
        if first is not None and second is not None:
            apart = first != second or order.before == order.after == item_name(items[first])
            found[second] |= {first} if apart else set()
    return found


def _cyclic(cycle: Sequence[str], orders: Sequence[Order]) -> OrderError:
    asked = {(o.before, o.after) for o in orders}
    arrows = [f"{a} {'<' if (a, b) in asked else '->'} {b}" for a, b in itertools.pairwise(cycle)]
    return OrderError(
        f"the order is cyclic: {'; '.join(arrows)} ('<' was asked by op_order, '->' is data); "
        "drop one of the op_order calls"
    )
