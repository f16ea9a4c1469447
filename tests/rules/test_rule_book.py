"""The rule book: one rule per body, backward ops share factor names with their forward, shares pass linear ops."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler.capture.bodies import BodyTable
from jscaler.capture.jaxprs import evaluate, fingerprint, trace_flat
from jscaler.capture.residuals import with_backward_bodies
from jscaler.ir import Body, Graph, Op, PTensor
from jscaler.rules.rule_book import RuleBook

rng = np.random.default_rng(4)
COMBINE = {"add": np.add, "max": np.maximum, "min": np.minimum}


def op_of(fun: Any, *args: Any) -> Op:
    jaxpr = trace_flat(lambda *xs: jax.tree.leaves(fun(*xs)), [jax.typeof(x) for x in args])
    inputs = tuple(PTensor(f"x{i}", v.aval) for i, v in enumerate(jaxpr.invars))
    return Op("op", "forward", inputs, tuple(PTensor(f"y{i}", v.aval) for i, v in enumerate(jaxpr.outvars)), Body(jaxpr))


def mlp_graph() -> Graph:
    def step(params: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            with jax.named_scope("up"):
                h = jnp.tanh(x @ p["up"])
            with jax.named_scope("down"):
                return ((h @ p["down"]) ** 2).mean()

        return jscaler.grad(loss)(params)

    params = {"up": np.ones((4, 6), np.float32), "down": np.ones((6, 2), np.float32)}
    return jscaler.parallelize("single", devices=1)(step).graph(params, np.ones((3, 4), np.float32))


def test_equal_bodies_share_one_rule() -> None:
    book, op = RuleBook(), op_of(jnp.dot, np.ones((2, 3)), np.ones((3, 4)))
    twin = Op("twin", "forward", op.inputs, op.outputs, op.body)
    assert book.rule(op) is book.rule(twin)
    assert book.local(op, {"b": 3})[0] is book.local(twin, {"b": 3})[0]


def test_without_a_split_the_local_body_is_the_same_program() -> None:
    book, op = RuleBook(), op_of(jnp.dot, np.ones((2, 3)), np.ones((3, 4)))
    local, indices = book.local(op, {"a": 1})
    assert indices == ()
    assert fingerprint(local) == fingerprint(op.body.jaxpr)


@pytest.mark.smoke
def test_a_backward_op_shares_factor_names_with_its_forward() -> None:
    """A name that both have is the same index; what it reduces is two in the backward (of x and of w)."""
    graph = mlp_graph()
    full = with_backward_bodies(graph, BodyTable())
    for op in full.ops:
        if op.forward is None:
            continue
        forward, rule = graph.rule(op.forward), full.rule(op)
        dims = [d for tensor in (*rule.operands, *rule.results) for d in tensor]
        given = {t: forward.operands[i] for i, t in enumerate(op.forward.inputs)}
        given |= {t: forward.results[i] for i, t in op.cotangents}
        given |= {t: forward.operands[i] for t, i in zip(op.outputs, op.gradients, strict=True)}
        expected = [d for tensor in (*op.inputs, *op.outputs) for d in given[tensor]]
        for mine, theirs in zip(dims, expected, strict=True):
            assert all(a == b for a, b in zip(mine, theirs, strict=True) if a in forward.factors), op.path
        carried = {f for tensor in forward.results for d in tensor for f in d}
        assert carried <= rule.factors.keys(), op.path


def test_a_handle_has_its_forwards_factors_before_it_has_a_body() -> None:
    graph = mlp_graph()
    for handle in graph.backward():
        if handle.forward is not None:
            assert handle.body is None
            assert graph.rule(handle).factors.keys() == graph.rule(handle.forward).factors.keys()


FUNCTIONS = {
    "identity": (lambda x: x * 1.0, (3, 4)),
    "scale": (lambda x: -2.0 * x.T, (3, 4)),
    "cast up": (lambda x: x.astype(jnp.float64).reshape(2, 6), (3, 4)),
    "shift": (lambda x: x + 1.0, (3, 4)),
    "sum": (lambda x: x.sum(0), (3, 4)),
    "relu": (lambda x: jnp.maximum(x, 0), (3, 4)),
    "largest": (lambda x: x.max(0), (3, 4)),
    "add": (lambda x, y: x + y, (3, 4), (3, 4)),
    "subtract": (lambda x, y: x - y, (3, 4), (3, 4)),
    "multiply": (lambda x, y: x * y, (3, 4), (3, 4)),
    "divide": (lambda x, y: x / y, (3, 4), (3, 4)),
    "maximum": (lambda x, y: jnp.maximum(x, y), (3, 4), (3, 4)),
    "minimum": (lambda x, y: jnp.minimum(x, y), (3, 4), (3, 4)),
    "matmul": (lambda x, y: x @ y, (3, 4), (4, 2)),
    "two results": (lambda x, y: (x * 2, x * y, y), (3, 4), (3, 4)),
    "negate": (lambda x: -x, (3, 4)),
    "select": (lambda x, y: jnp.where(jnp.arange(4) > 1, x, y), (3, 4), (3, 4)),
    "square": (lambda x: x * x, (3, 4)),
    "barrier": (lambda x, y: jax.lax.optimization_barrier((x, y)), (3, 4), (3, 4)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_shares_pass_only_where_the_results_join_to_the_whole(name: str) -> None:
    """For every way in which inputs may be shares: if they pass, the parts' results join to the whole's."""
    fun, *shapes = FUNCTIONS[name]
    values = [rng.normal(size=s) for s in shapes]
    op, book = op_of(fun, *values), RuleBook()
    passed = 0
    for partial in itertools.product((None, "add", "max", "min"), repeat=len(values)):
        joined = book.passes(op, partial)
        if joined is None:
            continue
        passed += any(partial)
        shares = [_shares(x, combiner) if combiner else (x, x) for x, combiner in zip(values, partial, strict=True)]
        whole = evaluate(op.body.jaxpr, values)
        parts = [evaluate(op.body.jaxpr, [s[i] for s in shares]) for i in (0, 1)]
        for expected, combiner, a, b in zip(whole, joined, *parts, strict=True):
            found = COMBINE[combiner](a, b) if combiner else a
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12, err_msg=f"{partial} -> {joined}")
    assert passed or name in {"shift", "relu", "largest", "square", "barrier"}


def _shares(x: Any, combiner: str) -> tuple[Any, Any]:
    """Two values that ``combiner`` joins to ``x``."""
    if combiner == "add":
        share = rng.normal(size=x.shape)
        return share, x - share
    away = -1.0 if combiner == "max" else 1.0
    mine = rng.random(x.shape) < 0.5
    return np.where(mine, x, x + away), np.where(mine, x + away, x)
