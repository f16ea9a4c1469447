"""One part of an op: what is cut off each tensor, and that all parts together make the whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from of_the_day import of_the_day

from jscaler.capture.bodies import BodyTable
from jscaler.capture.jaxprs import evaluate, trace_flat
from jscaler.ir import Body, Op, PTensor
from jscaler.rules.part_forms import Form, OpPart, Sliced, Summed
from jscaler.rules.rule_book import RuleBook
from jscaler.schedule.op_parts import op_part
from jscaler.schedule.time_axes import TimeCut

JOIN = {"add": np.add, "max": np.maximum, "min": np.minimum}
FORMS = [(d, b, p, r) for d in range(3) for b in (1, 2) for p in (1, 3) for r in (1, 2)]


@pytest.mark.smoke
@pytest.mark.parametrize(("dim", "blocks", "parts", "rows"), of_the_day(FORMS))
def test_parts_are_rows_of_every_block_and_merge_to_the_whole(dim: int, blocks: int, parts: int, rows: int) -> None:
    sizes = [2, 3, 5]
    sizes[dim] = blocks * parts * rows
    whole = np.arange(np.prod(sizes)).reshape(sizes)
    form = Sliced(dim, blocks, parts, rows)
    pieces = np.asarray(jax.jit(lambda x: lax.map(lambda i: form.take(x, i), jnp.arange(parts, dtype=jnp.int32)))(whole))
    for i, piece in enumerate(pieces):
        own = [(b * parts + i) * rows + r for b in range(blocks) for r in range(rows)]
        np.testing.assert_array_equal(piece, whole.take(own, dim))
        assert piece.shape == form.shape(sizes)
    np.testing.assert_array_equal(jax.jit(form.merge)(pieces), whole)


def test_a_form_moves_with_the_dims_in_front() -> None:
    form = Sliced(1, 2, 4, 3)
    assert form.shifted(1) == Sliced(2, 2, 4, 3)
    assert form.shifted(-1) == Sliced(0, 2, 4, 3)
    assert Sliced(0, 2, 4, 3).shifted(-1) is None  # a stack that is cut along its layers has no such slices


# -- ops

RNG = np.random.default_rng(3)


def draw(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def dropout(x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(jax.random.key(3), 0.5, x.shape), x, 0)


def halves(x: Any) -> Any:
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([-b, a], -1)


# op, its arguments; results are checked for every factor that can be cut, every number of parts and blocks
OPS: dict[str, tuple[Any, tuple[np.ndarray, ...]]] = {
    "dot": (jnp.dot, (draw(8, 4), draw(4, 12))),
    "batched dot": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (draw(4, 2, 8), draw(4, 8, 3))),
    "row maximum": (lambda x: x.max(1), (draw(6, 8),)),
    "maximum of all": (lambda x: x.max(), (draw(6, 8),)),
    "softmax": (lambda x: jax.nn.softmax(x, -1), (draw(4, 8),)),
    "layer norm": (lambda x, g: (x - x.mean(-1, keepdims=True)) * g, (draw(4, 8), draw(8))),
    "heads": (lambda x: x.reshape(2, 4, 3).transpose(1, 0, 2), (draw(2, 12),)),
    "look up": (lambda t, i: t[i], (draw(6, 4), RNG.integers(0, 6, (8, 2)))),
    "dropout": (dropout, (draw(8, 6),)),
    "halves": (halves, (draw(4, 8),)),
    "iota": (lambda x: x + lax.broadcasted_iota(jnp.float32, x.shape, 0), (draw(8, 3),)),
    "causal mask": (lambda x: jnp.where(jnp.tril(jnp.ones((8, 8), bool)), x, -1.0), (draw(2, 8, 8),)),
    "two results": (lambda x: (x.sum(0), jnp.tanh(x), x.min(1)), (draw(8, 4),)),
    "attention": (
        lambda q, k, v: jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k), -1) @ v.transpose(1, 0, 2),
        (draw(4, 2, 3), draw(4, 2, 3), draw(4, 2, 3)),
    ),
}


def op_of(fun: Any, args: Any) -> Op:
    jaxpr = trace_flat(lambda *xs: jax.tree.leaves(fun(*xs)), [jax.typeof(x) for x in args])
    inputs = tuple(PTensor(f"x{i}", v.aval) for i, v in enumerate(jaxpr.invars))
    return Op("op", "forward", inputs, tuple(PTensor(f"y{i}", v.aval) for i, v in enumerate(jaxpr.outvars)), Body(jaxpr))


def in_turn(part: OpPart, parts: int, args: Any) -> list[np.ndarray]:
    """What all parts make, stacked."""

    def one(index: Any, args: Any) -> Any:
        assert part.body is not None
        pieces = [form.take(x, index) if isinstance(form, Sliced) else x for x, form in zip(args, part.inputs, strict=True)]
        return evaluate(part.body.jaxpr, [*pieces, index] if part.indexed else pieces)

    def run(*args: Any) -> Any:
        return lax.map(lambda index: one(index, args), jnp.arange(parts, dtype=jnp.int32))

    return [np.asarray(y) for y in jax.jit(run)(*args)]


def joined(pieces: np.ndarray, form: Form) -> Any:
    if isinstance(form, Sliced):
        return jax.jit(form.merge)(pieces)
    if isinstance(form, Summed):
        return JOIN[form.combiner].reduce(pieces)
    for piece in pieces[1:]:
        np.testing.assert_array_equal(piece, pieces[0])  # the same for all parts
    return pieces[0]


@pytest.mark.parametrize("case", of_the_day(OPS))
def test_all_parts_make_the_whole(case: str) -> None:
    fun, args = OPS[case]
    op, book, bodies = op_of(fun, args), RuleBook(), BodyTable()
    whole, known, tried = [np.asarray(y) for y in jax.tree.leaves(jax.jit(fun)(*args))], {}, 0
    for name, factor in book.rule(op).factors.items():
        for parts, blocks in ((2, 1), (2, 2), (4, 1)):
            part = op_part(op, TimeCut("time", name, parts, blocks), book, bodies, known)
            if part is None:
                assert factor.kind == "blocked" or factor.size % parts or not factor.splittable, (name, parts)
                continue
            tried += 1
            stacks = in_turn(part, parts, args)
            for k, form in enumerate(part.outputs):
                got = joined(stacks[k], form)
                np.testing.assert_allclose(got, whole[k], rtol=2e-5, atol=2e-6, err_msg=f"{name} in {parts}, {blocks}")
    assert tried


def test_forms_of_a_dot() -> None:
    op, book, bodies = op_of(jnp.dot, (draw(8, 4), draw(4, 12))), RuleBook(), BodyTable()
    row, mid, column = book.rule(op).operands[0][0][0], book.rule(op).operands[0][1][0], book.rule(op).operands[1][1][0]
    known: dict[int, Body] = {}
    rows = op_part(op, TimeCut("t", row, 2, 2), book, bodies, known)
    sums = op_part(op, TimeCut("t", mid, 2), book, bodies, known)
    columns = op_part(op, TimeCut("t", column, 3), book, bodies, known)
    assert rows is not None
    assert sums is not None
    assert columns is not None
    assert (rows.inputs, rows.outputs) == ((Sliced(0, 2, 2, 2), None), (Sliced(0, 2, 2, 2),))
    assert (sums.inputs, sums.outputs) == ((Sliced(1, 1, 2, 2), Sliced(0, 1, 2, 2)), (Summed("add"),))
    assert (columns.inputs, columns.outputs) == ((None, Sliced(1, 1, 3, 4)), (Sliced(1, 1, 3, 4),))
    assert rows.named is not None
    assert rows.named.tensors[0][0] == ((row, 2), (row + ".rest", 2))  # blocks are the plan's, the rest runs in turn


def test_what_cannot_run_in_parts_has_none() -> None:
    book, bodies = RuleBook(), BodyTable()
    blocked = op_of(lambda x: jnp.sort(x, -1), (draw(4, 8),))
    name = book.rule(blocked).operands[0][1][0]
    assert op_part(blocked, TimeCut("t", name, 2), book, bodies, {}) is None
    assert op_part(blocked, TimeCut("t", "none such", 2), book, bodies, {}) is None
    dot = op_of(jnp.dot, (draw(8, 4), draw(4, 12)))
    assert op_part(dot, TimeCut("t", book.rule(dot).operands[0][0][0], 3), book, bodies, {}) is None
    shift = op_of(lambda x: lax.conv(x, jnp.ones((1, 1, 3)), (1,), "SAME"), (draw(2, 1, 8),))
    (slid, _, _), *_ = book.rule(shift).halos
    assert op_part(shift, TimeCut("t", slid, 2), book, bodies, {}) is None


def test_equal_parts_share_a_body() -> None:
    book, bodies, known = RuleBook(), BodyTable(), dict[int, Body]()
    op = op_of(jnp.tanh, (draw(8, 4),))
    name = book.rule(op).operands[0][0][0]
    first, second = (op_part(op, TimeCut("t", name, 2), book, bodies, known) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.body is second.body
