"""The sequence is found in models whose names say nothing."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_steps import COLUMNS, collectives, gpt, mlp, planned

import jscaler
from jscaler import plans
from jscaler.errors import PlanError, UnknownNameError


def mix(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention: b q h d, b k h d, b k h d -> b q h d."""
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1), v)


class Layer(nn.Module):
    core: Callable[..., jax.Array] = mix

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm(name="before")(x)
        q, k, v = (nn.Dense(8, name=name)(h).reshape(*x.shape[:2], 4, 2) for name in ("left", "middle", "right"))
        x = x + nn.Dense(8, name="back")(self.core(q, k, v).reshape(x.shape))
        return x + nn.Dense(8, name="narrow")(nn.gelu(nn.Dense(16, name="wide")(nn.LayerNorm(name="behind")(x))))


class Words(nn.Module):
    """Tokens, and a number for each."""

    core: Callable[..., jax.Array] = mix

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(24, 8, name="words")(ids) + nn.Embed(8, 8, name="places")(jnp.arange(8))
        return nn.Dense(5, name="answer")(Layer(self.core, name="layer")(x).mean(1))


class Readings(nn.Module):
    """Vectors, whose answer is made of all positions in one row."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = Layer(name="layer")(nn.Dense(8, name="enter")(x))
        return nn.Dense(5, name="answer")(x.reshape(len(x), -1))


class Patches(nn.Module):
    """Images, whose rows of patches are rows of the positions."""

    token: bool = False

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(8, (2, 2), (2, 2), name="cut")(images).reshape(len(images), -1, 8)
        if self.token:
            x = jnp.concatenate([self.param("first", nn.initializers.ones, (1, 1, 8)).repeat(len(x), 0), x], 1)
        return nn.Dense(5, name="answer")(Layer(name="layer")(x).mean(1))


class Axes(nn.Module):
    """Attention along one dim, then along the other."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for name in ("rows", "columns"):
            h = nn.Dense(8, name=name)(x)
            x = x + jnp.einsum("rbij,rbjd->rbid", jax.nn.softmax(jnp.einsum("rbid,rbjd->rbij", h, h), -1), h)
            x = jnp.swapaxes(x, 1, 2)
        x = nn.Dense(8, name="narrow")(nn.gelu(nn.Dense(16, name="wide")(x)))
        return nn.Dense(5, name="answer")(x.mean((1, 2)))


fused = jscaler.op("b q h d, b k h d, b k h d -> b q h d")(mix)
draws = np.random.default_rng(0)
TOKENS = draws.integers(0, 24, (8, 8), np.int32)
VECTORS = draws.normal(size=(8, 8, 6)).astype(np.float32)
IMAGES = draws.normal(size=(8, 4, 4, 3)).astype(np.float32)
MODELS: dict[str, tuple[nn.Module, np.ndarray]] = {
    "words": (Words(), TOKENS),
    "a fused attention": (Words(fused), TOKENS),
    "readings": (Readings(), VECTORS),
    "patches": (Patches(), IMAGES),
}


def step_of(model: nn.Module, value_and_grad: Any) -> Callable[..., Any]:
    def train(variables: Any, given: jax.Array) -> Any:
        def loss_of(variables: Any) -> Any:
            logits: Any = model.apply(variables, given)
            return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[:, 0])

        loss, grads = value_and_grad(loss_of)(variables)
        return jax.tree.map(lambda p, g: p - 0.5 * g, variables, grads), loss

    return train


def lowered(plan: Any, model: nn.Module, data: np.ndarray, devices: int) -> tuple[Any, Any]:
    variables = model.init(jax.random.key(1), data)
    return jscaler.parallelize(plan, devices=devices)(step_of(model, jscaler.value_and_grad)).lower(
        variables, data
    ), variables


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_found(name: str) -> None:
    """What one layer reduces and gathers between heads or units and positions: two and two in each direction."""
    model, data = MODELS[name]
    ours, variables = lowered(plans.sequence_parallel(), model, data, 2)
    got = ours.compile()(variables, data)
    want = jax.jit(step_of(model, jax.value_and_grad))(variables, data)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)
    moved = Counter(kind for kind, t in collectives(ours.plan) if len(t.shape) == 3)
    assert moved == {"reduce_scatter": 4, "all_gather": 4}


@pytest.mark.parametrize("name", ["words", "patches"])
def test_megatron_finds_it_too(name: str) -> None:
    model, data = MODELS[name]
    ours, _ = lowered(plans.megatron(dp=2, tp=2, sequence=True, vocab=False), model, data, 4)
    moved = Counter(kind for kind, t in collectives(ours.plan) if len(t.shape) == 3)
    assert moved == {"reduce_scatter": 4, "all_gather": 4}


def test_it_is_what_was_named_before() -> None:
    found, named = (planned(plans.sequence_parallel(None, given), gpt(), 4) for given in (None, {"batch/tokens": 1}))
    assert found.digest == named.digest


MISTAKES: dict[str, tuple[nn.Module, np.ndarray, Any, type[Exception], str]] = {
    "arises inside": (
        Patches(token=True), IMAGES, True, PlanError,
        r"no dim of the data is a sequence.* pass megatron\(sequence=...\) as {input: dim}; .*data: given: f32\[8,4,4,3\]",
    ),
    "two of them": (
        Axes(), draws.normal(size=(4, 4, 4, 8)).astype(np.float32), True, PlanError,
        r"dims 1 and 2 of 'given' may each be the sequence; .* as {'given': 1}",
    ),
    "another name": (Words(), TOKENS, {"batch/tokens": 1}, UnknownNameError, "no input named 'batch/tokens'"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    model, data, sequence, error, message = MISTAKES[name]
    with pytest.raises(error, match=message):
        lowered(plans.megatron(tp=2, sequence=sequence), model, data, 2)


def test_data_without_positions_are_listed() -> None:
    with pytest.raises(PlanError, match=re.escape("data: batch/labels: i") + ".*" + re.escape("batch/x: f32[24,8]")):
        planned(plans.sequence_parallel(COLUMNS), mlp(), 4)
