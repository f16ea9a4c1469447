"""Which ops of a module have to be one op, so that each micro-batch has for itself what they hand to each other.

importance = x.mean(0)        reads rows: runs on each micro-batch
spread = importance.std()     reads no row, so no loop over micro-batches takes it; nor is it linear, so what it makes
                              of the micro-batches' mean is not the mean of what it makes of each
"""

from collections.abc import Mapping, Sequence

from jax.extend import core

from jscaler.ir import Op, PTensor
from jscaler.ir.walk import closure
from jscaler.lax_primitives import known
from jscaler.primitives import Planner


def groups_alone(
    graph: Planner, selected: Sequence[str], rows: Mapping[str, str], outside: bool = False
) -> list[tuple[str, ...]]:
    """The ops to be fused: those that see rows, and what reads what they make of all rows.

    Unless it is linear in that; or sees rows itself and runs alone as they do; or nobody runs alone: then what is made of
    all rows is the whole batch's (a covariance, or a mask's count).

    Args:
        selected: paths of the module's ops, in the order of the program.
        rows: by path of what sees rows of the batch their factor.
        outside: whether ops that are not selected join, which make of all rows what a selected one reads.
    """
    own = set(selected)
    paths = [op.path for op in graph.ops if op.kind == "forward"] if outside else selected
    made_by: dict[PTensor, frozenset[str]] = {}  # what is made of all rows, and the ops that it is made by
    groups: list[frozenset[str]] = []
    for op in (graph.graph[path] for path in paths):
        read = [i for i, tensor in enumerate(op.inputs) if tensor in made_by]
        behind = frozenset({op.path}).union(*(made_by[op.inputs[i]] for i in read))
        made = op.outputs
        if op.path in rows:
            results = zip(op.outputs, graph.rule(op).results, strict=True)
            made = tuple(t for t, dims in results if not any(rows[op.path] in dim for dim in dims))
            joins = len({_runs_alone(graph, path, rows) for path in behind if path in rows}) > 1
            behind = behind if joins else frozenset({op.path})
        elif read:
            joins = not is_affine(op, read)
        else:
            continue
        for tensor in closure(made, graph.graph.flow.targets):
            made_by[tensor] = made_by.get(tensor, frozenset()) | behind
        if joins and op.path in own:
            shared = [group for group in groups if not group.isdisjoint(behind)]
            groups = [group for group in groups if group not in shared] + [behind.union(*shared)]
    return [tuple(path for path in paths if path in group) for group in groups]


def _runs_alone(graph: Planner, path: str, rows: Mapping[str, str]) -> bool:
    return graph.rule(graph.graph[path]).factors[rows[path]].reopens


def is_affine(op: Op, operands: Sequence[int]) -> bool:
    """Whether ``op`` makes of the mean of several values, at these operands, the mean of what it makes of each."""
    assert op.body is not None
    moves = {op.body.jaxpr.invars[i] for i in operands}
    for eqn in op.body.jaxpr.eqns:
        found = [i for i, v in enumerate(eqn.invars) if isinstance(v, core.Var) and v in moves]
        if not found:
            continue
        name, one = eqn.primitive.name, known(eqn.primitive)
        if not one.counts or (name == "mul" and len(found) > 1) or (name == "div" and found != [0]):
            return False
        moves.update(eqn.outvars)
    return True
