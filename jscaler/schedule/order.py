"""Order constraints and data dependencies together form a DAG; a cycle is found here, before anything is compiled."""

import heapq
import itertools
from collections.abc import Sequence

from jscaler.errors import OrderError
from jscaler.ir import Graph, Op
from jscaler.primitives import Order


def ordered_ops(graph: Graph, orders: Sequence[Order]) -> tuple[Op, ...]:
    """The ops in an execution order that respects data and ``orders``, otherwise the graph's own order.

    Raises:
        OrderError: the constraints and the dataflow form a cycle; the message names its ops.
        UnknownNameError: a constraint names no op.
    """
    if not orders:
        return graph.ops
    position = {op.path: i for i, op in enumerate(graph.ops)}
    before: dict[str, set[str]] = {
        op.path: {graph.producer[t].path for t in op.inputs if t in graph.producer} for op in graph.ops
    }
    for order in orders:
        before[graph[order.after].path].add(graph[order.before].path)
    waiting = {path: len(sources) for path, sources in before.items()}
    after: dict[str, list[str]] = {path: [] for path in before}
    for path, sources in before.items():
        for source in sources:
            after[source].append(path)
    ready = [position[path] for path, count in waiting.items() if not count]
    heapq.heapify(ready)
    result = []
    while ready:
        op = graph.ops[heapq.heappop(ready)]
        result.append(op)
        for path in after[op.path]:
            waiting[path] -= 1
            if not waiting[path]:
                heapq.heappush(ready, position[path])
    if len(result) < len(graph.ops):
        _raise_cycle({path for path, count in waiting.items() if count}, before, orders)
    return tuple(result)


def _raise_cycle(stuck: set[str], before: dict[str, set[str]], orders: Sequence[Order]) -> None:
    walk = [min(stuck)]
    while walk[-1] not in walk[:-1]:
        walk.append(min(s for s in before[walk[-1]] if s in stuck))
    cycle = walk[walk.index(walk[-1]) :][::-1]
    asked = {(o.before, o.after) for o in orders}
    arrows = [f"{a} {'<' if (a, b) in asked else '->'} {b}" for a, b in itertools.pairwise(cycle)]
    raise OrderError(
        f"the order is cyclic: {'; '.join(arrows)} ('<' was asked by op_order, '->' is data); "
        "drop one of the op_order calls"
    )
