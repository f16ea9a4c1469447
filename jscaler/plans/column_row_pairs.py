"""Kernels that are cut by columns, found by the dataflow: their columns reach the rows of other kernels unit by unit.

    x ──► kernel [:, units] ──► work of each unit by itself ──► kernel [units, :] ──► Σ

Such is a feed-forward pair by any name, a gate beside it, the heads of attention (scores and softmax are a head's own),
two convolutions with a BatchNorm between, the experts' hidden units. The first kernel in the dataflow is cut by columns,
and those that its columns meet by rows; what follows begins anew.
"""

from collections.abc import Iterable, Mapping, Sequence

from jscaler.errors import PlanError, PlanWarning, listing, warn
from jscaler.ir import Op, PTensor
from jscaler.ir.kinds import learned, read_by_a_loss
from jscaler.ir.walk import closure
from jscaler.plans.attention import holds_contraction
from jscaler.plans.factors import Dims, Factors, by_dim, column, is_much, reached, required, select
from jscaler.plans.layers import weights_of
from jscaler.primitives import Planner

ATTENTION = ("query", "key", "value", "qkv", "q_proj", "k_proj", "v_proj")
FEED_FORWARD = ("up", "gate", "up_proj", "gate_proj", "wi", "wi_*", "fc1", "fc_in", "intermediate")
# Kernels that are cut by columns whatever the dataflow says: of a flat query-key-value kernel it says less than the name.
COLUMNS = tuple(f"*/{name}/kernel" for name in (*ATTENTION, *FEED_FORWARD))


def columns_of(graph: Planner, columns: Dims | Sequence[str] | None, parts: int, remedy: str) -> list[tuple[PTensor, int]]:
    """The kernels that are cut by columns into ``parts``, and those dims: what matches, or by default is found.

    By default those that are called as Flax models call them, and then all that the dataflow shows to be the first of a
    pair. A `PlanWarning` names those found whose columns do not divide: they are not split.

    Raises:
        UnknownNameError: no kernel matches.
        PlanError: nothing is found.
    """
    if columns is not None:
        return required(graph, by_dim(columns), remedy)
    named = select(graph, by_dim(COLUMNS))
    found = find_columns(graph, reached(graph, named, parts))
    left = [(t, dim) for t, dim in found if t.shape[dim] % parts]
    if is_much(graph, [tensor for tensor, _ in left]):
        told = listing([f"{t.name} ({t.shape[dim]})" for t, dim in left])
        warn(
            f"columns that do not divide into {parts} parts are not split, and what they make is copied: {told}",
            PlanWarning,
        )
    leaves = named + [pair for pair in found if pair not in left]
    if not leaves:
        kernels = [t.name for t in graph.inputs if len(t.shape) > 1]
        raise PlanError(
            f"no kernel's columns reach the rows of another with each unit by itself between; {remedy}; of two dims and "
            f"more are: {listing(kernels) if kernels else 'none'}"
        )
    return leaves


def find_columns(graph: Planner, taken: Iterable[Op] = ()) -> list[tuple[PTensor, int]]:
    """Kernels and the dims of theirs that are columns of a pair, in the order of the dataflow.

    Args:
        taken: ops that are split already: kernels that they read have their place.
    """
    read = [t for t in learned(graph.graph) if read_by_a_loss(graph.graph, t)]  # a teacher's kernels, too
    weights = weights_of(graph, read)
    found: list[tuple[PTensor, int]] = []
    table: Factors = dict.fromkeys(taken, "")
    products = {t: paths for t in graph.inputs if t in weights and (paths := products_of(graph, t, weights))}
    for kernel in sorted(products, key=lambda t: min(map(graph.position.__getitem__, products[t]))):
        if any(graph.by_path[path] in table for path in products[kernel]):
            continue
        dim = column(graph, kernel)
        reach = graph.factor_of(kernel.name, dim) if dim is not None else {}
        if meets_rows(graph, kernel, reach, weights):
            assert dim is not None
            found.append((kernel, dim))
            table.update(reach)
    return found


def meets_rows(graph: Planner, kernel: PTensor, reach: Mapping[Op, str], weights: set[PTensor]) -> bool:
    """Whether the columns of ``kernel`` reach rows of other kernels, and all on the way is each unit's own."""
    own = products_of(graph, kernel, weights)
    rows = False
    for op, name in reach.items():
        if op.kind != "forward" or all(t in weights for t in op.inputs if t.shape):
            continue
        rule = graph.rule(op)
        if rule.factors[name].kind == "parallel":
            continue
        carried = [t for t, dims in zip(op.inputs, rule.operands, strict=True) if any(name in dim for dim in dims)]
        if rule.factors[name].kind != "reduction" or op.path in own or not holds_contraction(op):
            return False
        if not any(t in weights for t in carried):
            return False
        rows = True
    return rows


def products_of(graph: Planner, kernel: PTensor, weights: set[PTensor]) -> list[str]:
    """The forward ops that contract ``kernel`` with activations: it, its slice in a loop over layers, or a cast of them."""

    def onward(tensor: PTensor) -> Iterable[PTensor]:
        yield from graph.graph.flow.neighbours(tensor)
        for op in graph.consumers.get(tensor, ()):
            if op.kind == "forward":
                yield from (t for t in op.outputs if t in weights)

    readers = (op for t in closure([kernel], onward) for op in graph.consumers.get(t, ()))
    return [op.path for op in readers if op.kind == "forward" and _contracts_activations(op, weights)]


def _contracts_activations(op: Op, weights: set[PTensor]) -> bool:
    return holds_contraction(op) and not all(t in weights for t in op.inputs if t.shape)
