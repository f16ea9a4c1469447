"""Experts are found in models whose names say nothing."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_steps import collectives

import jscaler
from jscaler import plans
from jscaler.errors import PlanError
from jscaler.plans.find_experts import find_experts

NORMAL = nn.initializers.normal(0.3)


def places(scores: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """Of ``scores`` (g s e) dispatch and combine (g s e c): each token to its best expert, if that has room."""
    likely = jax.nn.softmax(scores)
    chosen = jax.nn.one_hot(jnp.argmax(likely, -1), scores.shape[-1], dtype=jnp.int32)
    held = jax.nn.one_hot(jnp.cumsum(chosen, 1) - 1, room) * chosen[..., None]
    return held, held * (likely * chosen).sum(-1)[..., None, None]


def gated(self: nn.Module, x: jax.Array, scores: jax.Array) -> jax.Array:
    """Two kernels beside each other, dispatched to by a product."""
    first, beside = (self.param(name, NORMAL, (4, 8, 16)) for name in ("w1", "w3"))
    dispatch, combine = places(scores, 4)
    h = jnp.einsum("gsec,gsd->egcd", dispatch, x)
    h = nn.silu(jnp.einsum("egcd,edf->egcf", h, first)) * jnp.einsum("egcd,edf->egcf", h, beside)
    return jnp.einsum("gsec,egcd->gsd", combine, jnp.einsum("egcf,efd->egcd", h, self.param("w2", NORMAL, (4, 16, 8))))


def picking(self: nn.Module, x: jax.Array, scores: jax.Array) -> jax.Array:
    """Each expert looks up its best tokens. Kernels lie with the hidden units first."""
    first, second = self.param("a", NORMAL, (4, 16, 8)), self.param("b", NORMAL, (4, 8, 16))
    weight, rows = jax.lax.top_k(jnp.swapaxes(jax.nn.softmax(scores), 1, 2), 4)  # g e c
    h = nn.gelu(jnp.einsum("gecd,efd->gecf", jnp.take_along_axis(x[:, None], rows[..., None], 2), first))
    return jnp.einsum(
        "gecd,gecs->gsd", jnp.einsum("gecf,edf->gecd", h, second) * weight[..., None], jax.nn.one_hot(rows, 8)
    )


class Two(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8, name="second")(nn.gelu(nn.Dense(16, name="first")(x)))


def mapped(self: nn.Module, x: jax.Array, scores: jax.Array) -> jax.Array:
    """A module for each expert, with biases."""
    dispatch, combine = places(scores, 4)
    many = nn.vmap(Two, variable_axes={"params": 0}, split_rngs={"params": True}, axis_size=4)(name="many")
    return jnp.einsum("gsec,egcd->gsd", combine, many(jnp.einsum("gsec,gsd->egcd", dispatch, x)))


def blocks(self: nn.Module, x: jax.Array, scores: jax.Array) -> jax.Array:
    """No experts: a kernel in blocks, for each slice of the channels."""
    h = jnp.einsum("bshd,hdf->bshf", x.reshape(*x.shape[:2], 4, 2), self.param("w1", NORMAL, (4, 2, 16)))
    return jnp.einsum("bshf,hfd->bshd", nn.gelu(h), self.param("w2", NORMAL, (4, 16, 2))).reshape(x.shape) * scores[..., :1]


class Layer(nn.Module):
    work: Callable[..., jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        h = nn.LayerNorm(name="before")(x)
        return x + self.work(self, h, nn.Dense(4, name="scores")(h)), None


class Model(nn.Module):
    work: Callable[..., jax.Array]
    stacked: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        layer = Layer
        if self.stacked:
            layer = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = layer(self.work, name="mix")(nn.Embed(24, 8, name="words")(tokens), None)
        return nn.Dense(5, name="answer")(x.mean(1))


TOKENS = np.random.default_rng(0).integers(0, 24, (8, 8), np.int32)


def step_of(model: nn.Module, value_and_grad: Any) -> Callable[..., Any]:
    def train(params: Any, tokens: jax.Array) -> Any:
        def loss_of(params: Any) -> Any:
            logits: Any = model.apply({"params": params}, tokens)
            return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[:, 0])

        loss, grads = value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

    return train


MODELS: dict[str, tuple[Model, list[tuple[str, int, int]]]] = {  # and kernels, with the dims of experts and hidden units
    "gated": (Model(gated), [("w1", 0, 2), ("w3", 0, 2)]),
    "gated, stacked": (Model(gated, stacked=True), [("w1", 1, 3), ("w3", 1, 3)]),
    "picking": (Model(picking), [("a", 0, 1)]),
    "mapped": (Model(mapped), [("many/first/kernel", 0, 2)]),
}


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_first_kernels_are_found_and_experts_lie_apart(name: str) -> None:
    model, kernels = MODELS[name]
    params = model.init(jax.random.key(1), TOKENS)["params"]
    found: list[Any] = []

    def policy(graph: Any, devices: np.ndarray) -> None:
        found.extend((k.tensor.name.removeprefix("params/mix/"), k.expert, k.hidden) for k in find_experts(graph, ""))
        plans.expert_parallel()(graph, devices)

    lowered = jscaler.parallelize(policy, devices=4)(step_of(model, jscaler.value_and_grad)).lower(params, TOKENS)
    assert found == kernels
    cut = {t.name for t, layout in lowered.plan.completed.inputs.items() if any(layout.cuts)} - {"tokens"}
    assert all(name.startswith("params/mix/") for name in cut)
    assert {f"params/mix/{name}" for name, _, _ in kernels} < cut  # and the last ones
    if name.startswith("gated"):
        moved = Counter(kind for kind, t in collectives(lowered.plan) if len(t.shape) == 4 and "params" not in t.name)
        assert moved == {"all_to_all": 4}
    got = lowered.compile()(params, TOKENS)
    want = jax.jit(step_of(model, jax.value_and_grad))(params, TOKENS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)


def test_blocks_of_a_kernel_are_no_experts() -> None:
    model = Model(blocks)
    params = model.init(jax.random.key(1), TOKENS)["params"]
    step = jscaler.parallelize(plans.expert_parallel(), devices=4)(step_of(model, jscaler.value_and_grad))
    with pytest.raises(
        PlanError, match=r"no kernel has experts.*pass expert_parallel\(experts=...\); .* params/mix/w1: f32"
    ):
        step.lower(params, TOKENS)
