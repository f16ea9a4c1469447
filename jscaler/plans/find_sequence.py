"""The sequence, found by the dataflow: the dim of the data that attention mixes, and all else carries along.

    tokens [b, s] ──► norms, residuals, kernels: each position by itself ──► queries [b, s, …] · keys [b, t, …] ──► …

In the products of an attention's core, positions are one operand's own, where rows of the batch are both operands'; or they
are there twice, as queries' and as keys', which rotary positions of one table bring together. Where no core is in the graph
(a fused attention), the sequence is the dim behind the first that every product carries.

A dim that is sliced in front of all products is not split: what its slices leave is::

    tokens [b, s + 1] ──► tokens[:, :-1], tokens[:, 1:], each whole ──► embedding, logits, loss, split along s
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from jscaler.errors import PlanError, SplitError, divisors
from jscaler.ir import Op, PTensor
from jscaler.ir.walk import closure
from jscaler.plans.attention import cores_of, holds_contraction
from jscaler.plans.batch import data_inputs
from jscaler.plans.column_row_pairs import weights_of
from jscaler.plans.factors import Dims, can_be_split, reached, required
from jscaler.primitives import Planner
from jscaler.rules.reached_factors import all_reached_factors
from jscaler.text.units import counted

Place = tuple[PTensor, int]  # a dim of a tensor


@dataclass(frozen=True)
class _Axis:
    """A dim of an input, and the tensors and dims where it may be split: itself, or what its slices leave."""

    tensor: PTensor
    dim: int
    places: tuple[Place, ...]

    def divides(self, parts: int) -> bool:
        return all(tensor.shape[dim] % parts == 0 for tensor, dim in self.places)


def sequence_of(graph: Planner, given: Dims | None, parts: int, plan: str) -> list[Place]:
    """The tensors whose dims are the sequence, to be split into ``parts``: inputs, or what their slices leave.

    Args:
        given: ``{input: dim}``; by default the sequence is found.
        plan: what the argument ``sequence=`` is of.

    Raises:
        UnknownNameError: no input matches what is given.
        PlanError: nothing is found, or several dims of one input. It says which dims would be split, if they were given.
        SplitError: the sequence does not divide.
    """
    if given is not None:
        axes = [_axis(graph, *leaf) for leaf in required(graph, given, f"pass {plan}(sequence=...)")]
    else:
        axes = _found(graph)
        if not axes:
            raise PlanError(
                "no dim of the data is a sequence, which kernels carry position by position and attention mixes"
                f"{_remedy(graph, parts, plan)}; data: {_data(graph)}"
            )
    for axis in axes:
        if others := [a.dim for a in axes if a.tensor == axis.tensor and a.dim != axis.dim]:
            dims = " and ".join(map(str, [axis.dim, *others]))
            said = f"none divides into {parts} parts"
            if either := [a for a in axes if a.tensor == axis.tensor and a.divides(parts)]:
                said = f"pass {_argument(plan, either[0])} for one of them"
            raise PlanError(f"dims {dims} of '{axis.tensor.name}' may each be the sequence; {said}")
        _check_divides(graph, axis, parts)
    return [place for axis in axes for place in axis.places]


def axes_of(graph: Planner, given: Mapping[str, int | Sequence[int]] | None, remedy: str) -> list[Place]:
    """Tensors and dims of theirs along which inputs are axial, several of one input too: what is ``given``, or by default
    all that attention mixes and kernels carry along.

    Raises:
        UnknownNameError: no input matches what is given.
        PlanError: nothing is found.
    """
    if given is not None:
        pairs = [(pattern, dim) for pattern, dims in given.items() for dim in ([dims] if isinstance(dims, int) else dims)]
        axes = [_axis(graph, *one) for pattern, dim in pairs for one in required(graph, {pattern: dim}, remedy)]
    else:
        axes = _found(graph)
        if not axes:
            raise PlanError(
                "no dims of the data are axes, which attention mixes in turn, and kernels carry along; "
                f"{remedy} as {{input: (dim, dim)}}; data: {_data(graph)}"
            )
    return [place for axis in axes for place in axis.places]


def _found(graph: Planner) -> list[_Axis]:
    """All dims of data that attention mixes and kernels carry along."""
    return graph.graph.once("axes of data", lambda: _looked_for(graph))


def _looked_for(graph: Planner) -> list[_Axis]:
    cores = {op for core in cores_of(graph) for op in core if holds_contraction(op)}
    weights = weights_of(graph)

    def is_one(place: Place) -> bool:
        products = _products(graph, place)
        if not cores:
            return place[1] > 0 and bool(products) and all(_carries(graph, *own) for own in products.items())
        of_weights = {op: name for op, name in products.items() if any(t in weights for t in op.inputs)}
        mixed = any(
            _mixes(graph, op, names) for op, names in all_reached_factors(graph.graph, [place]).items() if op in cores
        )
        return mixed and any(_carries(graph, *own) for own in of_weights.items())

    return [axis for axis in _axes(graph) if any(map(is_one, axis.places))]


def _axes(graph: Planner) -> Iterable[_Axis]:
    return (_axis(graph, tensor, dim) for tensor in data_inputs(graph.graph) for dim in range(len(tensor.shape)))


def _axis(graph: Planner, tensor: PTensor, dim: int) -> _Axis:
    """The dim itself, if it reaches a product; else what its slices leave that reaches one, if anything does."""
    own = tensor, dim
    sliced = [] if _products(graph, own) else [place for place in _sliced(graph, own) if _products(graph, place)]
    return _Axis(tensor, dim, tuple(sliced) or (own,))


def _sliced(graph: Planner, start: Place) -> list[Place]:
    """The dims of results that are slices of a dim, or of such a slice, up to those that reach a product."""

    def onward(place: Place) -> Iterable[Place]:
        tensor, dim = place
        for op in graph.consumers.get(tensor, ()) if place == start or not _products(graph, place) else ():
            rule = graph.rule(op)
            name = rule.followed.get((op.inputs.index(tensor), dim))
            if op.kind == "backward" or name is None or rule.factors[name].kind != "blocked":
                continue
            read = {n for dims in rule.operands for names in dims for n in names}
            for out, dims in zip(op.outputs, rule.results, strict=True):
                for at, names in enumerate(dims):
                    if any(n not in read and rule.factors[n].kind == "blocked" for n in names):
                        yield out, at

    return [place for place in closure([start], onward) if place != start]


def _products(graph: Planner, place: Place) -> Mapping[Op, str]:
    """The contractions of the forward pass that a dim reaches, with its factor there."""
    return {op: name for op, name in graph.factor_of(*place).items() if op.kind == "forward" and holds_contraction(op)}


def _carries(graph: Planner, op: Op, name: str) -> bool:
    """Whether the op leaves the factor as it is."""
    return graph.rule(op).factors[name].kind == "parallel"


def _mixes(graph: Planner, op: Op, names: Set[str]) -> bool:
    """Whether a core's op mixes a dim, which is ``names`` there: two factors, positions of queries and of keys; one on two
    dims of a tensor; or one that is in the result, and of several operands one's own."""
    rule, (name, *others) = graph.rule(op), names
    if others or any(sum(name in own for own in dims) > 1 for dims in (*rule.operands, *rule.results)):
        return True
    carried = [any(name in own for own in dims) for dims in rule.operands if len(dims) > 1]
    return _carries(graph, op, name) and len(carried) > 1 and sum(carried) == 1


def _remedy(graph: Planner, parts: int, plan: str) -> str:
    """Which dims of the data could be given: those along which most products of kernels are split, if they divide."""
    weights = weights_of(graph)
    products = [op for op in graph.forward() if holds_contraction(op) and any(t in weights for t in op.inputs)]

    def split(axes: Iterable[_Axis]) -> int:
        table = reached(graph, [place for axis in axes for place in axis.places], parts)
        able = [op for op in products if op in table and can_be_split(graph, op, table[op], parts)]
        return sum(_carries(graph, op, table[op]) for op in able)

    fit = [axis for axis in _axes(graph) if axis.dim > 0 and axis.divides(parts) and 2 * split([axis]) >= len(products) > 0]
    found = list({axis.tensor: axis for axis in reversed(fit)}.values())[::-1]  # of each input the first
    if found:
        count = f"{split(found)} of {counted(len(products), 'product')}"
        return f"; pass {_argument(plan, *found)}, which splits {count} of kernels"
    return (
        "; where positions arise inside (patches with a token in front of them), give the step what is made so, or leave "
        "the sequence whole"
    )


def _argument(plan: str, *axes: _Axis) -> str:
    return f"{plan}(sequence={ {axis.tensor.name: axis.dim for axis in axes} })"


def _data(graph: Planner) -> str:
    return ", ".join(map(str, data_inputs(graph.graph))) or "none"


def _check_divides(graph: Planner, axis: _Axis, parts: int) -> None:
    """Raises SplitError where a place of ``axis`` does not divide; says which slices would."""
    for tensor, dim in axis.places:
        size = tensor.shape[dim]
        if size % parts == 0:
            continue
        legal = "legal: " + ", ".join(map(str, divisors(size)))
        if tensor != axis.tensor:
            whole = axis.tensor.shape[axis.dim]
            raise SplitError(axis.tensor.name, f"dim {axis.dim}", size, parts, f"{legal}; its {whole} are sliced to these")
        fits = [t.shape[d] for t, d in _sliced(graph, (tensor, dim)) if t.shape[d] % parts == 0]
        if fits:
            legal += f"; its slices of {max(fits)} divide: give the model one of these, and do not cut its results"
        raise SplitError(tensor.name, f"dim {dim}", size, parts, legal)
