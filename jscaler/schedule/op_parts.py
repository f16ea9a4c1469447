"""One part, in time, of an op: its body at the part's shapes, and which part of each tensor it reads and leaves.

y (8 rows) = f(x (8 rows), w)        four parts in time        y' (2 rows) = f'(x' (2 rows), w)
                                                               x' is Sliced; w is read whole; a sum over rows is Summed
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jscaler.capture.bodies import BodyTable
from jscaler.capture.jaxprs import evaluate
from jscaler.errors import PlanError
from jscaler.ir import Body, FactorNames, Op, PTensor, Rule
from jscaler.ir.mask import Combiner
from jscaler.ir.rule import NamedDims, TensorFactors
from jscaler.lax_primitives import is_cast
from jscaler.rules.factor_states import INDEPENDENT, SPLIT
from jscaler.rules.part_forms import Form, OpPart, Own, Sliced, Summed
from jscaler.rules.per_microbatch_rules import OWN, results_alone
from jscaler.rules.rule_book import RuleBook
from jscaler.schedule.time_axes import TimeCut

IN_TIME, REST = ".time", ".rest"  # what is cut off a factor's name: the index of the part; the rows in a block


def op_part(
    op: Op,
    cut: TimeCut,
    book: RuleBook,
    bodies: BodyTable,
    known: dict[int, Body],
    alone: Mapping[PTensor, Form] | None = None,
) -> OpPart | None:
    """The part of ``op`` that ``cut`` makes; None where it has no such factor, or needs it whole. Equal ops have one.

    Args:
        known: the bodies of parts, by jaxpr; filled here.
        alone: of an op that runs on each part alone, where it needs the whole: what is known of the tensors it reads.
    """
    rule = book.rule(op)
    if alone is not None:
        return _part(op, rule, cut, book, bodies, known, alone)
    key = ("part", op.body, rule.key, cut)
    if key not in book.memo:
        book.memo[key] = _part(op, rule, cut, book, bodies, known, None)
    return book.memo[key]


def _part(
    op: Op,
    rule: Rule,
    cut: TimeCut,
    book: RuleBook,
    bodies: BodyTable,
    known: dict[int, Body],
    alone: Mapping[PTensor, Form] | None,
) -> OpPart | None:
    if cut.factor + REST in rule.factors:  # a time axis further out cut every block into parts: this one cuts those
        cut = dataclasses.replace(cut, factor=cut.factor + REST, blocks=1)
    factor = rule.factors.get(cut.factor)
    if factor is None or any(name == cut.factor for name, _, _ in rule.halos):
        return None
    if factor.kind == "blocked" and (alone is None or not factor.reopens):
        return None
    if factor.size % cut.parts:
        return None
    blocks = cut.blocks if factor.size % (cut.parts * cut.blocks) == 0 else 1
    finer = dataclasses.replace(op, named=_refined(rule, cut, blocks))
    seen = book.rule(finer)
    name = cut.factor + IN_TIME
    if name not in seen.factors or (seen.factors[name].kind == "blocked" and alone is None):
        return None
    inputs: list[Form] = [_sliced(seen, dims, name) for dims in seen.operands]
    if alone is not None:
        inputs = [_as_it_is(op, t, form, alone) for t, form in zip(op.inputs, inputs, strict=True)]
    if seen.factors[name].kind == "blocked":
        outputs = _outputs_alone(finer, seen, name, inputs, book)
    else:
        shares: list[Combiner | None] = [seen.shares.get((name, i)) for i in range(len(op.outputs))]
        sliced = [_sliced(seen, dims, name) for dims in seen.results]
        outputs = [Summed(c) if c is not None else form for c, form in zip(shares, sliced, strict=True)]
    jaxpr, indexed = book.in_turn(finer, name, cut.parts)
    left = tuple(_without(seen, dims, name) for dims in (*seen.operands, *seen.results))
    if indexed:
        left = (*left[: len(op.inputs)], (), *left[len(op.inputs) :])
    named = FactorNames(left, tuple(f for f in seen.factors if f != name))
    if id(jaxpr) not in known:
        known[id(jaxpr)] = bodies.intern(jaxpr)
    return OpPart(tuple(inputs), tuple(outputs), known[id(jaxpr)], named, indexed)


def like_its_forward(op: Op, part: OpPart, forward: OpPart, bodies: BodyTable) -> OpPart:
    """The part of a backward op that runs alone, whose rows are those of its forward.

    A gradient that is one for all rows (of a mean's square) has rows of no relation to those that it is made of, and is
    made whole: the part has a slice of it.

    Raises:
        PlanError: a tensor's rows cannot be told from others.
    """
    assert op.forward is not None
    assert part.body is not None
    assert part.named is not None
    cotangents = [(t, forward.outputs[i]) for i, t in op.cotangents if t in op.inputs]
    lost = [t.name for t, form in cotangents if isinstance(form, Sliced) and part.inputs[op.inputs.index(t)] != form]
    wanted = [forward.inputs[i] for i in op.gradients]
    cut = {i: f for i, f in enumerate(wanted) if isinstance(f, Sliced) and part.outputs[i] != f}
    if not cut and not lost:
        return part
    first = len(part.named.tensors) - len(op.outputs)
    tensors = list(part.named.tensors)
    for i, form in cut.items():
        names = tensors[first + i][form.dim]
        lost += [op.outputs[i].name] if len(names) != 1 or isinstance(part.outputs[i], Sliced) else []
        tensors[first + i] = tuple(
            ((names[0][0], form.blocks * form.rows),) if d == form.dim and names else own
            for d, own in enumerate(tensors[first + i])
        )
    if lost:
        parts = next(form.parts for form in (*forward.inputs, *forward.outputs) if isinstance(form, Sliced))
        raise PlanError(
            f"'{op.forward.path}' cannot run on each of {parts} micro-batches alone: in its gradient '{lost[0]}' has rows "
            "that cannot be told from those it is made of; a policy of one's own fuses the op with what makes its rows "
            "(graph.fuse)"
        )
    jaxpr = part.body.jaxpr

    def run(*args: jax.Array) -> list[jax.Array]:
        results = evaluate(jaxpr, args[: len(jaxpr.invars)])
        return [cut[i].take(x, args[-1]) if i in cut else x for i, x in enumerate(results)]

    avals = [v.aval for v in jaxpr.invars]
    if not part.indexed:
        avals.append(jax.typeof(np.zeros((), np.int32)))
        tensors.insert(first, ())
    outputs = tuple(cut.get(i, form) for i, form in enumerate(part.outputs))
    named = FactorNames(tuple(tensors), part.named.reserved)
    return OpPart(part.inputs, outputs, bodies.traced(run, avals), named, indexed=True)


def _as_it_is(op: Op, tensor: PTensor, form: Form, made: Mapping[PTensor, Form]) -> Form:
    """In which form an op that runs alone reads what another such op has made: its own values, and their gradients."""
    found = made.get(tensor)
    is_gradient = op.kind == "backward" and any(tensor == t for _, t in op.cotangents)
    return found if form is None and (isinstance(found, Own) or (is_gradient and found == Summed("add"))) else form


def _outputs_alone(op: Op, seen: Rule, name: str, inputs: Sequence[Form], book: RuleBook) -> list[Form]:
    """The forms of what an op makes of a part alone. Gradients of what all parts share add up; the rest is its own."""
    states = {Sliced: SPLIT, Summed: "add", Own: OWN}
    given = [states.get(type(form), INDEPENDENT) for form in inputs]
    results = results_alone(book.analysis(op), book.groups(op)[name], given)

    def form(index: int) -> Form:
        if results[index] == SPLIT:
            return _sliced(seen, seen.results[index], name)
        if results[index] == INDEPENDENT:
            return None
        return Own() if op.forward is None and index not in op.added else Summed("add")

    return [form(index) for index in range(len(op.outputs))]


def _refined(rule: Rule, cut: TimeCut, blocks: int) -> FactorNames:
    """The names of an op whose factor is seen as blocks, parts in time, and rows."""

    def sub_dims(name: str) -> list[tuple[str, int]]:
        size = rule.factors[name].size
        if name != cut.factor:
            return [(name, size)]
        rows = size // (blocks * cut.parts)
        outer = [(name, blocks), (name + IN_TIME, cut.parts), (name + REST, rows)]
        found = outer if blocks > 1 else [outer[1], (name, rows)]
        return [(n, s) for n, s in found if s > 1]

    tensors = tuple(
        tuple(tuple(s for f in dim for s in sub_dims(f)) for dim in dims) for dims in (*rule.operands, *rule.results)
    )
    return FactorNames(tensors, tuple(rule.factors))


def _sliced(rule: Rule, dims: TensorFactors, name: str) -> Sliced | None:
    place = rule.dim_of(dims, name)
    if place is None:
        return None
    dim, blocks, rows = place
    return Sliced(dim, blocks, rule.factors[name].size, rows)


def _without(rule: Rule, dims: TensorFactors, name: str) -> NamedDims:
    return tuple(tuple((f, rule.factors[f].size) for f in dim if f != name) for dim in dims)


def _is_cheap(op: Op) -> bool:
    assert op.body is not None
    join = op.kind == "backward" and op.forward is None and op.again is None
    cast = all(map(is_cast, op.body.jaxpr.eqns))
    return join or cast or not any(t.shape for t in op.outputs)


def passed_on(op: Op, forms: Mapping[PTensor, Form], book: RuleBook, inside: bool = False) -> OpPart | None:
    """How an op that no plan splits goes on with parts: a fence takes anything, a linear op passes sums on.

    Only what costs next to nothing is done for every part: joins, casts, scalars.

    Args:
        inside: whether it stands in a loop over layers that runs part by part: whatever it costs, it has no other place.
    """
    inputs = tuple(forms.get(t) for t in op.inputs)
    if op.anywhere == "fence":
        return OpPart(inputs, inputs)
    if op.anywhere == "sum":  # a sum of summands, or of parts, if both are
        alike = inputs[0] == inputs[1] and (inputs[0] == Summed("add") or (inside and isinstance(inputs[0], Sliced)))
        return OpPart(inputs, inputs[1:]) if alike else None
    if op.body is None or not all(f is None or f == Summed("add") for f in inputs) or not (inside or _is_cheap(op)):
        return None
    made = book.passes(op, ["add" if f is not None else None for f in inputs])
    if made is None or any(m not in (None, "add") for m in made):
        return None
    named = book.rule(op).names() if op.forward is not None else None  # its forward op may stand outside
    return OpPart(inputs, tuple(Summed("add") if m else None for m in made), named=named)
