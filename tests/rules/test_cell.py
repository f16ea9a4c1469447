"""One part of unequal parts: its own rows, where they lie in the whole, and the bits that the whole draws there."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from parts import fragment

import jscaler
from jscaler import TimeSplit
from jscaler.capture.bodies import BodyTable
from jscaler.capture.jaxprs import fingerprint, make_jaxpr
from jscaler.ir import Op, PTensor
from jscaler.rules.analysis import analyse
from jscaler.rules.cell import Cell
from jscaler.rules.localize import Localizer
from jscaler.rules.part_forms import cell_parts
from jscaler.rules.rule_book import RuleBook


def places(x: jax.Array, key: jax.Array) -> jax.Array:
    """What depends on where a row lies."""
    rows = lax.broadcasted_iota(x.dtype, x.shape, 0)
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, rows) + x.mean(1, keepdims=True)


def reduced(x: jax.Array, key: jax.Array) -> jax.Array:
    """Sums and a maximum over the rows, and a product that contracts them."""
    return jnp.stack([x.sum(), x.max(), (x.T @ x).sum(), jnp.log(jnp.exp(x).sum(1)).mean()])


def looked_up(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rows of a table by number, and a loop over columns."""
    table = jnp.tanh(x.T)
    picked = table[(jnp.abs(x[:, 0]) * 10).astype(jnp.int32) % 3]
    return lax.scan(lambda c, column: (jnp.sin(c + column), c), x[:, 0], x.T)[0][:, None] * picked.sum(1, keepdims=True)


def filled(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rows by number, of which some are not there: one part alone fills those in."""
    return x.at[jnp.asarray([0, 9, 7, -1, 5, 30])].get(mode="fill", fill_value=7.0)


@pytest.mark.parametrize("fun", [places, reduced, looked_up, filled])
@pytest.mark.parametrize("sizes", [(5, 3), (1, 6, 1)])
def test_parts_make_the_whole(fun: Any, sizes: tuple[int, ...]) -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        rows = graph.factor_of("x", 0)
        split = [
            op
            for op in graph.select("*", kind=None)
            if op in rows
            and graph.rule(op).factors[rows[op]].kind != "blocked"
            and not graph.rule(op).factors[rows[op]].even_only
        ]
        assert split
        for op in split:
            graph.op_trans(op, TimeSplit(rows[op], sizes=sizes))

    with jax.enable_x64(True):
        x, key = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3))), jax.random.key(3)
        made = jscaler.parallelize(policy, devices=1)(fun).lower(x, key)
        jscaler.verify(made)
        assert any(path.endswith(f"[{len(sizes) - 1}]") for path in made.plan.graph.by_path)
        np.testing.assert_allclose(made.compile()(x, key), jax.jit(fun)(x, key), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [(5, 3), (4, 4), (1, 6, 1)])
def test_what_differs_in_shapes_alone_is_what_a_trace_gives(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(mu: jax.Array, gradient: jax.Array, rate: jax.Array) -> tuple[jax.Array, ...]:
        mu = 0.9 * mu + jnp.where(rate > 0, gradient, jnp.zeros((8, 3)))
        return mu, jnp.sqrt(jnp.abs(mu)) / rate, jnp.square(gradient).sum(), mu.T.reshape(3, 8)

    made = fragment(update, jnp.ones((8, 3)), jnp.ones((8, 3)), jnp.ones(()))
    (leaf,) = made.analysis.leaves(made.analysis.jaxpr.invars[0])[0]
    for number, size in enumerate(sizes):
        cell = Cell(made.analysis, [leaf], sizes, number)
        traced = Localizer.run(cell)
        assert not cell.located, "it does not ask where it lies"
        with monkeypatch.context() as untraced:
            untraced.delattr(Localizer, "evaluate")
            own = cell.run()
        assert [v.aval.shape for v in own.outvars] == [(size, 3), (size, 3), (), (3, size)]
        assert fingerprint(own) == fingerprint(make_jaxpr(traced.eqns, traced.invars[:3], traced.outvars, traced))


@pytest.mark.parametrize("sizes", [(5, 3), (4, 4), (1, 6, 1)])
def test_what_differs_in_sizes_alone_has_the_rule_of_the_whole(sizes: tuple[int, ...]) -> None:
    def update(mu: jax.Array, gradient: jax.Array, table: jax.Array) -> tuple[jax.Array, ...]:
        mu = 0.9 * mu + jnp.where(gradient > 0, gradient, jnp.zeros((8, 3)))
        return mu, jnp.sqrt(jnp.abs(mu)), jnp.square(gradient).sum(), jnp.max(mu, 0), jnp.sort(table, 1) * mu[:, :1]

    bodies = BodyTable()
    whole = bodies.traced(update, [jax.typeof(jnp.ones(shape)) for shape in ((8, 3), (8, 3), (8, 5))])
    ends = [tuple(PTensor(f"{v}", v.aval) for v in vs) for vs in (whole.jaxpr.invars, whole.jaxpr.outvars)]
    book, op = RuleBook(bodies), Op("update", "update", *ends, whole)
    factor = book.rule(op).operands[0][0][0]
    found = cell_parts(op, factor, sizes, book, book.bodies)
    assert found is not None
    untraced = [found.of(number) in book._rules for number in range(len(sizes))]
    assert untraced == [size > 1 for size in sizes], "known without an analysis, but where a dim is gone"
    for number in range(len(sizes)):
        body, names = found.of(number)
        assert body is not None
        part = dataclasses.replace(op, body=body, named=names)
        known, anew = book.rule(part), RuleBook(book.bodies).rule(part)
        assert known == anew
        assert [*known.factors] == [*anew.factors]
        analysed = analyse(body.jaxpr)
        for var in (*body.jaxpr.invars, *body.jaxpr.outvars):
            sizes_of = [[book.analysis(part).atoms.size[leaf] for leaf in dim] for dim in book.analysis(part).leaves(var)]
            assert sizes_of == [[analysed.atoms.size[leaf] for leaf in dim] for dim in analysed.leaves(var)]
