"""The sequence, found by the dataflow: the dim of the data that attention mixes, and all else carries along.

    tokens [b, s] ──► norms, residuals, kernels: each position by itself ──► queries [b, s, …] · keys [b, t, …] ──► …

In the products of an attention's core, positions are one operand's own, where rows of the batch are both operands'. Where
no core is in the graph (a fused attention), the sequence is the dim behind the first that every product carries.
"""

from collections.abc import Mapping, Sequence

from jscaler.errors import PlanError
from jscaler.ir import Op, PTensor
from jscaler.plans.attention import cores_of, holds_contraction
from jscaler.plans.batch import data_inputs
from jscaler.plans.column_row_pairs import weights_of
from jscaler.plans.factors import Dims, required
from jscaler.primitives import Planner


def sequence_of(graph: Planner, given: Dims | None, remedy: str) -> list[tuple[PTensor, int]]:
    """Inputs, and which dim of theirs is the sequence: what is ``given``, or by default is found.

    Raises:
        UnknownNameError: no input matches what is given.
        PlanError: nothing is found, or several dims of one input.
    """
    if given is not None:
        return required(graph, given, remedy)
    found = _found(
        graph,
        "no dim of the data is a sequence, which kernels carry position by position and attention mixes; "
        f"{remedy} as {{input: dim}}; where positions arise inside (patches with a token in front of them), give the "
        "step what is made so, or leave the sequence whole",
    )
    for tensor, dim in found:
        if others := [d for t, d in found if t == tensor and d != dim]:
            dims = " and ".join(map(str, [dim, *others]))
            raise PlanError(
                f"dims {dims} of '{tensor.name}' may each be the sequence; {remedy} as {{'{tensor.name}': {dim}}}"
            )
    return found


def axes_of(graph: Planner, given: Mapping[str, int | Sequence[int]] | None, remedy: str) -> list[tuple[PTensor, int]]:
    """Inputs and dims of theirs along which they are axial, several of one input too: what is ``given``, or by default all
    that attention mixes and kernels carry along.

    Raises:
        UnknownNameError: no input matches what is given.
        PlanError: nothing is found.
    """
    if given is not None:
        pairs = [(pattern, dim) for pattern, dims in given.items() for dim in ([dims] if isinstance(dims, int) else dims)]
        return [one for pattern, dim in pairs for one in required(graph, {pattern: dim}, remedy)]
    none = "no dims of the data are axes, which attention mixes in turn, and kernels carry along; "
    return _found(graph, f"{none}{remedy} as {{input: (dim, dim)}}")


def _found(graph: Planner, none: str) -> list[tuple[PTensor, int]]:
    """All dims of data that attention mixes and kernels carry along; raises PlanError, which says ``none``, without any."""
    data = data_inputs(graph.graph)
    cores = {op for core in cores_of(graph) for op in core if holds_contraction(op)}
    weights = weights_of(graph)
    found: list[tuple[PTensor, int]] = []
    for tensor in data:
        for dim in range(len(tensor.shape)):
            reach = graph.factor_of(tensor.name, dim)
            products = {op: name for op, name in reach.items() if op.kind == "forward" and holds_contraction(op)}
            of_weights = {op: name for op, name in products.items() if any(t in weights for t in op.inputs)}
            mixed = any(_is_of_one(graph, op, name) for op, name in products.items() if op in cores)
            if (mixed and any(_carry(graph, of_weights))) if cores else (dim and products and all(_carry(graph, products))):
                found.append((tensor, dim))
    if not found:
        raise PlanError(f"{none}; data: {', '.join(map(str, data)) or 'none'}")
    return found


def _carry(graph: Planner, products: Mapping[Op, str]) -> list[bool]:
    """Whether each leaves the factor as it is."""
    return [graph.rule(op).factors[name].kind == "parallel" for op, name in products.items()]


def _is_of_one(graph: Planner, op: Op, name: str) -> bool:
    """Whether the factor is in the result, and of several operands one's own."""
    rule = graph.rule(op)
    carried = [any(name in names for names in dims) for dims in rule.operands if len(dims) > 1]
    return rule.factors[name].kind == "parallel" and len(carried) > 1 and sum(carried) == 1
