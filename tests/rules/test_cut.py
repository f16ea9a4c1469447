"""Pieces of a fragment: one after another they give the whole, and the opened factor can be split in each of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from of_the_day import of_the_day

from jscaler.capture.jaxprs import evaluate, inline, trace_flat
from jscaler.rules.analysis import analyse
from jscaler.rules.cut import Piece, cut
from jscaler.rules.derive import derive_rule
from tests.rules.parts import backward, check_both, fragment

X = np.random.default_rng(0).normal(size=(4, 6))
W = np.random.default_rng(1).normal(size=6)
LABELS = np.array([0, 5, 2, 3])


def layer_norm(x: Any, w: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3) * w


def cross_entropy(x: Any, labels: Any) -> Any:
    picked = (x * (labels[:, None] == jnp.arange(6))).sum(-1)
    return jax.nn.logsumexp(x, axis=-1) - picked


def batch_norm(x: Any, w: Any) -> Any:
    mean, square = x.mean(0), (x * x).mean(0)
    return (x - mean) * jax.lax.rsqrt(square - mean * mean + 1e-3) * w, mean


def two_results_of_one_value(x: Any) -> Any:
    y = x - x.sum(1, keepdims=True)
    return y, y, x, jnp.float32(3.0)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, int]]] = {
    "softmax": (jax.nn.softmax, (X,), (0, 1)),
    "log_softmax": (jax.nn.log_softmax, (X,), (0, 1)),
    "layer_norm": (layer_norm, (X, W), (0, 1)),
    "cross_entropy": (cross_entropy, (X, LABELS), (0, 1)),
    "batch_norm": (batch_norm, (X, W), (0, 0)),
    "results": (two_results_of_one_value, (X,), (0, 1)),
}


def pieces_of(fun: Callable[..., Any], args: tuple[Any, ...], place: tuple[int, int]) -> tuple[str, tuple[Piece, ...], Any]:
    jaxpr = inline(trace_flat(lambda *xs: jax.tree.leaves(fun(*xs)), [jax.typeof(x) for x in args]))
    analysis = analyse(jaxpr)
    rule, groups = derive_rule(analysis)
    (name,) = rule.operands[place[0]][place[1]]
    assert rule.factors[name].kind == "blocked"
    assert rule.factors[name].reopens
    assert rule.factors[name].splittable
    return name, cut(analysis, groups, (name,)), jaxpr


def run_pieces(pieces: tuple[Piece, ...], jaxpr: Any, args: tuple[Any, ...]) -> list[Any]:
    env = dict(zip(jaxpr.invars, args, strict=True))
    for piece in pieces:
        made = evaluate(piece.jaxpr, [env[v] for v in piece.jaxpr.invars])
        pairs = zip(piece.jaxpr.outvars, made, strict=True)
        env.update({v: x for v, x in pairs if not hasattr(v, "val")})
    return [v.val if hasattr(v, "val") else env[v] for v in jaxpr.outvars]


# the gradient of "results" has no inner reduction that something nonlinear meets
@pytest.mark.parametrize(
    ("name", "back"), of_the_day([(n, b) for n in FUNCTIONS for b in (False, True) if (n, b) != ("results", True)])
)
def test_pieces_give_the_whole_and_can_be_split(name: str, back: bool) -> None:
    fun, args, place = FUNCTIONS[name]
    if back:
        pair = backward(fun, *args)
        assert pair is not None
        fun, args = pair
    factor, pieces, jaxpr = pieces_of(fun, args, place)
    both = jax.jit(lambda *xs: (run_pieces(pieces, jaxpr, xs), evaluate(jaxpr, xs)))(*args)
    for ours, whole in zip(*both, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-6, atol=1e-6)
    assert len(pieces) > 1
    env = dict(zip(jaxpr.invars, args, strict=True))
    carried = 0
    for piece in pieces:
        values = [np.asarray(env[v]) for v in piece.jaxpr.invars]
        run = jax.jit(lambda *xs, p=piece: evaluate(p.jaxpr, xs))
        made = check_both(lambda *xs, p=piece: evaluate(p.jaxpr, xs), *values)
        results = zip(piece.jaxpr.outvars, run(*values), strict=True)
        env.update({v: x for v, x in results if not hasattr(v, "val")})
        names = {n for tensor in piece.named.tensors for dim in tensor for n, _ in dim}
        carried += factor in names
        assert all(f.kind != "blocked" for f in made.rule.factors.values())
    assert carried >= 2


def test_two_factors_at_once() -> None:
    def both(x: Any) -> Any:
        return jax.nn.softmax(x, axis=0) * jax.nn.softmax(x, axis=1)

    analysis = analyse(inline(trace_flat(lambda x: [both(x)], [jax.typeof(X)])))
    rule, groups = derive_rule(analysis)
    pieces = cut(analysis, groups, tuple(rule.factors))
    (whole,) = run_pieces(pieces, analysis.jaxpr, (X,))
    np.testing.assert_allclose(whole, both(X), rtol=1e-6)
    for piece in pieces:
        rule_of_piece, _ = derive_rule(analyse(piece.jaxpr))
        assert all(f.kind != "blocked" for f in rule_of_piece.factors.values())


def test_what_no_cut_frees_says_why() -> None:
    made = fragment(lambda x: x @ x.T + x.sum(), X)
    factor = made.rule.factors[made.rule.results[0][0][0]]
    assert not factor.splittable or factor.kind != "blocked"
    walked = fragment(lambda x: jnp.sort(x, axis=1), X).rule.factors
    assert [f.splittable for f in walked.values()] == [True, False]
