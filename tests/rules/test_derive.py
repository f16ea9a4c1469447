"""Rules of whole functions: hand-written ones, why factors are blocked, and random programs, forward and backward."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given
from jax import lax
from of_the_day import drawn
from parts import backward, check, check_both, check_splits, fragment, why_blocked

from jscaler import UnknownPrimitiveWarning
from jscaler.errors import divisors
from jscaler.rules.factor_states import Blocked, interpret
from jscaler.verification.whole_against_parts import FragmentInParts

rng = np.random.default_rng(3)


def real(*shape: int) -> np.ndarray:
    return rng.normal(size=shape)


def layer_norm(x: jax.Array, axis: int = -1) -> jax.Array:
    centred = x - x.mean(axis, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(axis, keepdims=True) + 1e-3)


def attention(x: jax.Array, qkv: jax.Array, out: jax.Array) -> jax.Array:
    batch, length, _ = x.shape
    q, k, v = jnp.moveaxis((x @ qkv).reshape(batch, length, 3, 2, 2), 2, 0)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(batch, length, 4) @ out


x = real(4, 6)
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, str]] = {
    # name: function, operands, rule, the kinds of its factors (p, r, b) in the rule's order
    "linear": (lambda x, w, c: x @ w + c, (x, real(6, 3), real(3)), "a b, b c, c -> a c", "pbp"),
    "linear, bias apart": (lambda x, w: x @ w, (x, real(6, 3)), "a b, b c -> a c", "prp"),
    "mean": (lambda x: x.mean(), (x,), "a b -> ·", "rr"),
    "mean of squares": (lambda x: (x**2).mean(), (x,), "a b -> ·", "rr"),
    "square of mean": (lambda x: x.mean() ** 2, (x,), "a b -> ·", "bb"),
    "norm": (lambda x: jnp.sqrt((x**2).sum()), (x,), "a b -> ·", "bb"),
    "softmax": (lambda x: jax.nn.softmax(x), (x,), "a b -> a b", "pb"),
    "layer norm": (layer_norm, (x,), "a b -> a b", "pb"),
    "maximum": (lambda x: x.max(0), (x,), "a b -> b", "rp"),
    "two uses of one tensor": (lambda x: x @ x.T, (x,), "a b -> a a", "br"),
    "two uses of one factor": (lambda x: x * x, (x,), "a b -> a b", "pp"),
    "heads": (lambda x, w: (x @ w).reshape(4, 3, 2), (x, real(6, 6)), "a b, b (c d) -> a c d", "prpp"),
    "nothing": (lambda x: x, (x,), "a b -> a b", "pp"),
    "a constant": (lambda x: 1.0, (x,), "a b -> ·", "pp"),
}
LETTERS = {"p": "parallel", "r": "reduction", "b": "blocked"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rule(name: str) -> None:
    fun, args, rule, kinds = FUNCTIONS[name]
    made = check_both(fun, *args)
    assert str(made.rule) == rule
    assert [f.kind for f in made.rule.factors.values()] == [LETTERS[k] for k in kinds]


BLOCKED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int, str]] = {
    # name: function, operands, the blocked dim of the first operand, why
    "softmax": (jax.nn.softmax, (x,), 1, "a partial max of it meets"),
    "layer norm": (layer_norm, (x,), 1, "a partial add of it meets"),
    "x @ x.T": (lambda x: x @ x.T, (x,), 0, "it is on two dims of one tensor"),
    "gram of one factor": (lambda x: jnp.einsum("ij,kj->ik", x, x), (x,), 0, "it is on two dims of one tensor"),
    "exp of a sum": (lambda x: jnp.exp(x.sum(0)), (x,), 0, "a partial add of it meets 'exp'"),
    "bias added to a sum": (lambda x, c: x.sum(0) + c, (x, real(6)), 0, "a partial add of it meets 'add'"),
    "narrowed": (lambda x: x.sum(0).astype(jnp.float32), (x,), 0, "a partial add of it meets 'convert_element_type'"),
    "sum of a maximum": (lambda x: x.max(0) * 2, (x,), 0, "a partial max of it meets 'mul'"),
    "a sum times itself": (lambda x: x.sum(0) * x.sum(0), (x,), 0, "a partial add of it meets 'mul'"),
    "a sum against its summands": (lambda x: x.sum(0) * x, (x,), 0, "a partial add of it meets"),
    "array constant": (
        lambda x: x * lax.optimization_barrier(jnp.asarray(CONSTANT)),
        (x,),
        0,
        "it indexes an array constant",
    ),
}
CONSTANT = real(4, 6)


@pytest.mark.parametrize("name", BLOCKED)
def test_blocked(name: str) -> None:
    fun, args, dim, reason = BLOCKED[name]
    made = check(fun, *args)
    assert reason in why_blocked(made, 0, dim)


def test_a_reshape_that_mixes_dims_blocks_them() -> None:
    made = check(lambda x: x.reshape(6, 6), real(4, 9))
    assert [f.size for f in made.rule.factors.values() if f.kind == "parallel"] == [2, 3]  # its ends, which both sides have
    blocked = {f.reason for f in made.rule.factors.values() if f.kind == "blocked"}
    assert blocked == {"at reshape a reshape mixes it with its neighbour"}


@pytest.mark.smoke
def test_attention() -> None:
    args = (real(2, 3, 4), real(4, 12), real(4, 4))
    made = check_both(attention, *args)
    assert str(made.rule) == "a b c, c (d e f), (e f) g -> a b g"
    kind = {f.name: f.kind for f in made.rule.factors.values()}
    assert (kind["a"], kind["e"], kind["g"]) == ("parallel", "reduction", "parallel")
    assert kind["b"] == kind["c"] == "blocked"
    check_splits(made, args, [{"a": 2, "e": 2}, {"g": 4, "e": 2}])


def test_cross_entropy() -> None:
    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 6, dtype=logits.dtype)).mean()

    made = check_both(loss, real(2, 3, 6), rng.integers(0, 6, (2, 3)))
    assert [f.kind for f in made.rule.factors.values()] == ["reduction", "reduction", "blocked"]


# Unknown primitives.


def test_an_unknown_primitive_blocks_its_dims_with_one_warning_that_names_it() -> None:
    spd = np.eye(4) * 3 + 0.1
    with pytest.warns(UnknownPrimitiveWarning, match="'hessenberg'") as caught:
        made = fragment(lambda a: lax.linalg.hessenberg(a), spd)
    assert len(caught) == 1
    assert made.open == {}
    assert {f.reason for f in made.rule.factors.values()} == {"at hessenberg there is no rule"}


def test_the_same_unknown_primitive_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        fragment(lambda a: (lax.erf_inv(a), lax.linalg.hessenberg(a), lax.linalg.hessenberg(a + 1)), np.eye(4))
    assert [w.category for w in caught] == [UnknownPrimitiveWarning]


@pytest.mark.filterwarnings("ignore::jscaler.UnknownPrimitiveWarning")
def test_what_an_unknown_primitive_does_not_touch_can_be_split() -> None:
    made = check(lambda a, x: (lax.linalg.hessenberg(a), jnp.tanh(x)), np.eye(4), x)
    assert made.open == {"c": 4, "d": 6}


@pytest.mark.filterwarnings("ignore::jscaler.UnknownPrimitiveWarning")
def test_a_partial_sum_does_not_pass_an_unknown_primitive() -> None:
    made = check(lambda a: lax.linalg.hessenberg(a.sum(0)), np.stack([np.eye(4)] * 2))
    assert why_blocked(made, 0, 0) == "a partial add of it meets 'hessenberg'"


@pytest.mark.filterwarnings("ignore::jscaler.UnknownPrimitiveWarning")
@pytest.mark.parametrize(
    "fun",
    [
        lambda x: lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(6), x),
        lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
        lambda x: lax.fori_loop(0, 3, lambda i, v: v * 2, x) + x,
    ],
    ids=["scan", "cond", "while"],
)
def test_control_flow_never_crashes(fun: Callable[..., Any]) -> None:
    check(fun, x)


# Value shares of the inputs.


def test_shares_of_inputs_pass_what_is_linear() -> None:
    analysis = fragment(lambda x, w: (x @ w).reshape(12) * 2.0, x, real(6, 3)).analysis
    left, right = analysis.jaxpr.invars
    (result,) = analysis.jaxpr.outvars
    assert interpret(analysis, (), {left: "add"})[result] == "add"
    assert interpret(analysis, (), {right: "add"})[result] == "add"
    with pytest.raises(Blocked, match="partial add"):
        interpret(analysis, (), {left: "add", right: "add"})
    with pytest.raises(Blocked, match="partial max"):
        interpret(analysis, (), {left: "max"})
    for type_, passes in ((jnp.float32, True), (jnp.int32, False)):  # an integer's division rounds each share
        halves = fragment(lambda x: jax.lax.div(x, jnp.full((4,), 2, x.dtype)), jnp.ones(4, type_)).analysis
        share = {halves.jaxpr.invars[0]: "add"}
        with nullcontext() if passes else pytest.raises(Blocked, match="partial add"):
            assert interpret(halves, (), share)[halves.jaxpr.outvars[0]] == "add"


# Random programs. A program is a list of steps; a step names an operation and picks its operand and its details by
# number, so that a failing program shrinks to a short one.

Step = tuple[int, int, int]
KEY = np.array([3, 4], np.uint32)
Pool = list[jax.Array]


def same_shape(pool: Pool, like: jax.Array, detail: int) -> jax.Array:
    found = [v for v in pool if v.shape == like.shape]
    return found[detail % len(found)]


def contract(pool: Pool, a: jax.Array, detail: int) -> jax.Array:
    pairs = [(b, i, j) for b in pool for i in range(a.ndim) for j in range(b.ndim) if a.shape[i] == b.shape[j]]
    pairs = [(b, i, j) for b, i, j in pairs if a.ndim + b.ndim < 6]
    b, i, j = pairs[detail % len(pairs)]
    return jnp.tensordot(a, b, (i, j))


def regroup(pool: Pool, a: jax.Array, detail: int) -> jax.Array:
    n = a.size
    shapes = [
        (n,),
        *((d, n // d) for d in (2, 3, 4, 6) if n % d == 0),
        *((d, 2, n // d // 2) for d in (2, 3) if n % (2 * d) == 0),
    ]
    return a.reshape(shapes[detail % len(shapes)])


def spread(pool: Pool, a: jax.Array, detail: int) -> jax.Array:
    return jnp.broadcast_to(
        jnp.expand_dims(a, detail % (a.ndim + 1)), np.insert(a.shape, detail % (a.ndim + 1), 2 + detail % 2)
    )


def drop(pool: Pool, a: jax.Array, detail: int) -> jax.Array:
    mask = jax.random.bits(jax.random.wrap_key_data(KEY), a.shape, ("uint32", "uint8")[detail % 2]) % 3 > 0
    return jnp.where(mask, a * 1.5, 0)


def look_up(pool: Pool, a: jax.Array, detail: int) -> jax.Array:
    axis = detail % a.ndim
    return jnp.take(a, jnp.arange(3) * 5 % a.shape[axis], axis)


def cross_entropy(pool: Pool, a: jax.Array, detail: int) -> jax.Array:
    labels = jnp.argmax(lax.stop_gradient(jnp.roll(a, 1, -1)), -1)
    return -(jax.nn.one_hot(labels, a.shape[-1], dtype=a.dtype) * jax.nn.log_softmax(a)).sum(-1)


def ramp(pool: Pool, a: jax.Array, detail: int) -> jax.Array:
    return a * jnp.arange(1.0, 1 + a.size).reshape(a.shape) / a.size


STEPS: tuple[Callable[[Pool, jax.Array, int], jax.Array], ...] = (
    lambda pool, a, d: (jnp.tanh, jnp.negative, jax.nn.relu, jnp.sin, lambda v: v * 3, lambda v: v + 1)[d % 6](a),
    lambda pool, a, d: (jnp.add, jnp.multiply, jnp.subtract, jnp.maximum)[d % 4](a, same_shape(pool, a, d // 4)),
    lambda pool, a, d: a.sum(d % a.ndim, keepdims=d % 2 == 1),
    lambda pool, a, d: a.mean(d % a.ndim),
    lambda pool, a, d: a.max(d % a.ndim),
    lambda pool, a, d: jnp.moveaxis(a, d % a.ndim, 0),
    lambda pool, a, d: jax.nn.softmax(a, d % a.ndim),
    lambda pool, a, d: layer_norm(a, d % a.ndim),
    lambda pool, a, d: jnp.cumsum(a, d % a.ndim),
    lambda pool, a, d: jnp.concatenate([a, same_shape(pool, a, d)], d % a.ndim),
    lambda pool, a, d: a / (1 + a.sum(d % a.ndim, keepdims=True) ** 2),
    contract, contract, regroup, regroup, spread, drop, look_up, cross_entropy, ramp,
)  # fmt: skip

INPUTS = (real(2, 3, 4), real(4, 6), real(6, 2), real(6))
steps = st.lists(st.tuples(*(st.integers(0, 59) for _ in range(3))), min_size=1, max_size=5)


def program(chosen: list[Step]) -> Callable[..., Any]:
    def run(*args: jax.Array) -> Any:
        pool = list(args)
        for step, operand, detail in chosen:
            a = pool[-1 - operand % len(pool)]
            if a.ndim and a.size <= 200:
                pool.append(STEPS[step % len(STEPS)](pool, a, detail))
        return pool[len(args) :][-2:] or pool[:1]

    return run


def splits_of(made: FragmentInParts, pick: int) -> list[dict[str, int]]:
    """Every open factor in its smallest or its largest number of parts, and one pair of factors."""
    single = [{f: divisors(size)[(-1, 1)[(pick + i) % 2]]} for i, (f, size) in enumerate(made.open.items())]
    names = sorted(made.open)
    if len(names) < 2:
        return single
    first, second = names[pick % len(names)], names[(pick + 1) % len(names)]
    return [*single, {first: made.open[first], second: made.open[second]}]


@pytest.mark.one_day_in(2)
@drawn(20, suppress_health_check=[HealthCheck.too_slow])
@given(steps, st.integers(0, 9))
def test_random_programs(chosen: list[Step], pick: int) -> None:
    fun = program(chosen)
    made = fragment(fun, *INPUTS)
    check_splits(made, INPUTS, splits_of(made, pick))
    pair = backward(fun, *INPUTS)
    assert pair is not None
    made = fragment(pair[0], *pair[1])
    check_splits(made, pair[1], splits_of(made, pick))
