"""Grouped queries over more devices than keys and values have heads: these heads lie on several devices each."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losing import losing
from of_the_day import of_the_day

import jscaler
from jscaler.errors import SplitError
from jscaler.estimate.works import works
from jscaler.plans import tensor_parallel

ROWS, SEQUENCE, HIDDEN, HEAD = 4, 8, 16, 4


def softmax_of(scores: jax.Array) -> jax.Array:  # ... s t -> ... s t
    return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9))


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:  # b s h d, b t h d, b t h d -> b s h d
    return jnp.einsum("bhst,bthd->bshd", softmax_of(jnp.einsum("bshd,bthd->bhst", q, k)), v)


def repeated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return plain(q, *(jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v)))


def broadcast(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    b, s, g, d = k.shape
    return plain(q, *(jnp.broadcast_to(x[:, :, :, None], (b, s, g, q.shape[2] // g, d)).reshape(q.shape) for x in (k, v)))


def grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    by_head = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])  # b s g r d
    weights = softmax_of(jnp.einsum("bsgrd,btgd->bgrst", by_head, k))
    return jnp.einsum("bgrst,btgd->bsgrd", weights, v).reshape(q.shape)


def dealt(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Neighbouring query heads have different keys."""
    by_head = q.reshape(*q.shape[:2], -1, *k.shape[2:])  # b s r g d
    weights = softmax_of(jnp.einsum("bsrgd,btgd->bgrst", by_head, k))
    return jnp.einsum("bgrst,btgd->bsrgd", weights, v).reshape(q.shape)


Form = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
FORMS: list[Form] = [grouped, repeated, broadcast, dealt, functools.partial(jax.nn.dot_product_attention, is_causal=True)]


def made(form: Form, heads: int, shared: int, flat: bool = False, layers: int = 0) -> tuple[Any, Any, Any]:
    """A step by some ``value_and_grad``, its state and batch; a stack of ``layers`` if there are some."""
    draws = np.random.default_rng(0)
    wide = {"q": heads, "k": shared, "v": shared}
    shapes = {name: (HIDDEN, count * HEAD) if flat else (HIDDEN, count, HEAD) for name, count in wide.items()}
    shapes["o"] = (heads * HEAD, HIDDEN) if flat else (heads, HEAD, HIDDEN)
    stack = (layers,) if layers else ()
    params = {name: draws.normal(size=stack + shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    batch = {name: draws.normal(size=(ROWS, SEQUENCE, HIDDEN)).astype(np.float32) for name in ("x", "y")}

    def layer(x: jax.Array, p: Any) -> jax.Array:
        normal = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-3)
        if flat:
            q, k, v = ((normal @ p[name]).reshape(*x.shape[:2], -1, HEAD) for name in "qkv")
            return x + form(q, k, v).reshape(*x.shape[:2], -1) @ p["o"]
        q, k, v = (jnp.einsum("bsm,mhd->bshd", normal, p[name]) for name in "qkv")
        return x + jnp.einsum("bshd,hdm->bsm", form(q, k, v), p["o"])

    def step_by(value_and_grad: Any) -> Callable[..., Any]:
        def train(state: Any, batch: Any) -> Any:
            def loss_of(params: Any) -> jax.Array:
                x = batch["x"]
                x = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)[0] if layers else layer(x, params)
                return ((x - batch["y"]) ** 2).mean()

            loss, grads = value_and_grad(loss_of)(state["params"])
            moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
            return {"params": jax.tree.map(lambda p, m: p - 0.02 * m, state["params"], moments), "moments": moments}, loss

        return train

    return step_by, {"params": params, "moments": jax.tree.map(np.zeros_like, params)}, batch


def assert_same_numbers(step: Any, one: Any, state: Any, batch: Any) -> Any:
    """After each of several steps; the state behind them."""
    one, got, want = jax.jit(one), state, state
    for _ in range(3):
        (got, loss), (want, expected) = step(got, batch), one(want, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)
    return got


def flops_of(plan: Any) -> float:
    """Of the products of one device."""
    return sum(times * sum(work.products.values()) for _, times, work in works(plan))


SIZES = [(4, 2, 4), (8, 2, 8), (8, 4, 8), (8, 2, 4)]  # query heads, heads of keys and values, devices


@pytest.mark.parametrize(
    ("form", "size", "flat"),
    of_the_day([(f, s, flat) for f in FORMS for s in SIZES for flat in (False, True)], 8, [(grouped, SIZES[0], False)]),
)
def test_only_the_products_of_keys_and_values_are_copied(form: Form, size: tuple[int, int, int], flat: bool) -> None:
    heads, shared, devices = size
    step_by, state, batch = made(form, heads, shared, flat)
    step = jscaler.parallelize("tensor_parallel", devices=devices)(step_by(jscaler.value_and_grad))
    plan = step.lower(state, batch).plan
    got = assert_same_numbers(step, step_by(jax.value_and_grad), state, batch)
    assert not plan.lost.ops
    own = {name: got["params"][name].size // got["params"][name].addressable_shards[0].data.size for name in "qkvo"}
    if form is dealt and heads // shared == devices:  # neighbours have different keys: all heads of these everywhere
        return
    assert own == {"q": devices, "k": shared, "v": shared, "o": devices}
    whole = jscaler.parallelize("single", devices=1)(step_by(jscaler.value_and_grad)).lower(state, batch).plan
    product = 2 * ROWS * SEQUENCE * HIDDEN * shared * HEAD  # with one kernel; its gradient's takes as many
    most = flops_of(whole) + 2 * 2 * product * (devices // shared - 1)
    if form is dealt:
        assert devices * flops_of(plan) <= most
    else:
        assert devices * flops_of(plan) == most
        assert set(plan.report.total) == {"all_reduce"}


def test_of_one_head_of_keys_and_values_no_more_than_its_products_are_copied() -> None:
    """Its kernels lie in parts, which are put together."""
    step_by, state, batch = made(grouped, 4, 1)
    step = jscaler.parallelize("tensor_parallel", devices=4)(step_by(jscaler.value_and_grad))
    plan = step.lower(state, batch).plan
    got = assert_same_numbers(step, step_by(jax.value_and_grad), state, batch)
    whole = jscaler.parallelize("single", devices=1)(step_by(jscaler.value_and_grad)).lower(state, batch).plan
    assert 4 * flops_of(plan) <= flops_of(whole) + 2 * 2 * (2 * ROWS * SEQUENCE * HIDDEN * HEAD) * 3
    assert all(4 * kernel.addressable_shards[0].data.size == kernel.size for kernel in got["params"].values())


@losing
@pytest.mark.parametrize("shared", [2, 3])
def test_heads_that_the_devices_do_not_divide_are_copied(shared: int) -> None:
    """And said to be; in a stack here."""
    step_by, state, batch = made(grouped, 12, shared, layers=2)
    step = jscaler.parallelize("tensor_parallel", devices=4)(step_by(jscaler.value_and_grad))
    assert_same_numbers(step, step_by(jax.value_and_grad), state, batch)
    found = step.lower(state, batch).plan.lost.ops
    assert bool(found) == (shared == 3)
    assert not found or "of size 3 does not divide into 4 parts" in found[0].why


def test_numbers_of_devices_that_heads_allow() -> None:
    step_by, state, batch = made(grouped, 12, 3)
    columns = {"state/params/[qkv]": 1}
    with pytest.raises(SplitError, match=r"params/k' cannot .* 'dim 1' of size 3 into 4 parts; legal: 1, 3, 6, 12"):
        jscaler.parallelize(tensor_parallel(columns), devices=4)(step_by(jscaler.value_and_grad)).lower(state, batch)
    for devices in (3, 6):
        step = jscaler.parallelize(tensor_parallel(columns), devices=devices)(step_by(jscaler.value_and_grad))
        plan = step.lower(state, batch).plan
        assert set(plan.report.total) == {"all_reduce"}
        assert not plan.lost.ops
