"""A backward loop with collectives does not begin before its cotangent is there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jscaler
from jscaler.flat_passes.before_loops import is_held
from jscaler.lower.flat_program import FlatLoop, FlatProgram

LAYERS, HIDDEN, ROWS, WORDS = 3, 8, 128, 1 << 16
State = dict[str, Any]


def step(p: State, batch: jax.Array) -> Any:
    """Layers with dropout, computed again in the backward; ``p["words"]`` says how large the loss is."""

    def layer(x: jax.Array, given: Any) -> Any:
        w, key = given
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.tanh(jnp.where(keep, x, 0.0) @ w), None

    def loss(p: State) -> jax.Array:
        keys = jax.random.split(jax.random.key(1), LAYERS)
        x, _ = lax.scan(jax.checkpoint(layer), batch @ p["in"], (p["w"], keys))
        return jax.nn.logsumexp(x @ p["words"], axis=1).mean()

    value, gradients = jscaler.value_and_grad(loss)(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value


def params(words: int = WORDS) -> State:
    first, layers, last = jax.random.split(jax.random.key(0), 3)
    return {
        "in": jax.random.normal(first, (HIDDEN, HIDDEN)),
        "w": jax.random.normal(layers, (LAYERS, HIDDEN, HIDDEN)) / HIDDEN,
        "words": jax.random.normal(last, (HIDDEN, words)),
    }


BATCH = np.linspace(-1, 1, ROWS * HIDDEN, dtype=np.float32).reshape(ROWS, HIDDEN)


def fenced(flat: FlatProgram) -> list[list[tuple[int, ...]]]:
    """Per loop the shapes that a fence right in front of it hands on."""
    before = [(flat.items[i - 1], item) for i, item in enumerate(flat.items) if isinstance(item, FlatLoop)]
    return [sorted(v.aval.shape for v in at.outvars) if is_held(at) else [] for at, _ in before]


@pytest.mark.parametrize(("plan", "devices", "waits"), [("zero1", 4, True), ("zero3", 4, True), ("single", 1, False)])
def test_the_backward_loop_s_stacks_wait(plan: str, devices: int, waits: bool) -> None:
    run = jscaler.parallelize(plan, devices=devices)(step)
    forward, backward = fenced(run.lower(params(), BATCH).plan.flat)
    assert not forward
    rows = ROWS // devices
    assert backward == ([(LAYERS,), (LAYERS, rows, HIDDEN), (rows, HIDDEN)] if waits else [])
    (ours, value), (whole, expected) = run(params(), BATCH), jax.jit(step)(params(), BATCH)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, whole)


def test_it_can_be_left_out() -> None:
    run = jscaler.parallelize("zero1", devices=4, without_passes=["stacks_with_carries"])(step)
    assert fenced(run.lower(params(), BATCH).plan.flat) == [[], []]


def test_nothing_waits_where_the_peak_is_in_the_loop() -> None:
    run = jscaler.parallelize("zero1", devices=4)(step)
    _, backward = fenced(run.lower(params(words=8), BATCH).plan.flat)
    assert (LAYERS, ROWS // 4, HIDDEN) not in backward
