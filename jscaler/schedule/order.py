"""Order constraints and data dependencies together form a DAG; a cycle is found here, before anything is compiled."""

import itertools
from collections.abc import Sequence
from graphlib import CycleError

from jscaler.errors import OrderError
from jscaler.ir import Graph, Nest, Op, flat
from jscaler.ir.loop import Item
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
    name = {index: item.path if isinstance(item, Op) else item.loop.name for index, item in enumerate(items)}
    home = {op.path: name[i] for i, item in enumerate(items) for op in flat([item])}
    made = {t: home[op.path] for item in items for op in flat([item]) for t in op.outputs}
    made |= {t: item.loop.name for item in items if isinstance(item, Nest) for t in (*item.tensors(), *item.loop.results)}
    before: dict[str, set[str]] = {}
    for index, item in enumerate(items):
        reads = item.inputs if isinstance(item, Op) else item.reads()
        before[name[index]] = {made[t] for t in reads if t in made} - {name[index]}
    for order in orders:
        first, second = home.get(order.before), home.get(order.after)
        if first is not None and second is not None and (first != second or order.before == order.after == first):
            before[second].add(first)
    position = {path: i for i, path in name.items()}
    try:
        found = [items[position[path]] for path in in_order(before, key=position.__getitem__)]
    except CycleError as error:
        raise _cyclic(error.args[1], orders) from None
    return [i if isinstance(i, Op) else Nest(i.loop, tuple(_ordered(graph, i.items, orders))) for i in found]


def _cyclic(cycle: Sequence[str], orders: Sequence[Order]) -> OrderError:
    asked = {(o.before, o.after) for o in orders}
    arrows = [f"{a} {'<' if (a, b) in asked else '->'} {b}" for a, b in itertools.pairwise(cycle)]
    return OrderError(
        f"the order is cyclic: {'; '.join(arrows)} ('<' was asked by op_order, '->' is data); "
        "drop one of the op_order calls"
    )
