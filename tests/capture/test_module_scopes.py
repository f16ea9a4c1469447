"""Ops of an nnx program are named by the parameters that they read, much as linen's scopes would name them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jscaler
from models.gpt import GPTConfig
from models.gpt_nnx import GPT


def paths(step: Any, *args: Any) -> list[str]:
    return [op.path for op in jscaler.parallelize("single", devices=1)(step).graph(*args).forward()]


def test_ops_of_the_nnx_gpt() -> None:
    def step(model: GPT, batch: Any) -> Any:
        def loss(model: GPT) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(model(batch), batch).mean()

        return jscaler.nnx.grad(loss)(model)

    config = GPTConfig(hidden=8, layers=1, heads=2, sequence=4, vocabulary=16)
    assert paths(step, GPT(config, nnx.Rngs(0)), jnp.ones((2, 4), jnp.int32)) == [
        "embed/gather",
        "position/gather",
        "position/add",
        "dropout/add",
        "div",
        "dropout/random_bits",
        "blocks/0/norm1/rsqrt",
        "blocks/0/attn/query/dot",
        "blocks/0/attn/query/add",
        "blocks/0/attn/key/dot",
        "blocks/0/attn/key/add",
        "blocks/0/attn/value/dot",
        "blocks/0/attn/value/add",
        "blocks/0/attn/dot",
        "blocks/0/attn/dropout/add",
        "blocks/0/attn/exp",
        "blocks/0/attn/dropout/random_bits",
        "blocks/0/attn/dot.1",
        "blocks/0/attn/transpose",
        "blocks/0/attn/out/dot",
        "blocks/0/attn/out/add",
        "blocks/0/add",
        "blocks/0/norm2/rsqrt",
        "blocks/0/mlp/up/dot",
        "blocks/0/mlp/up/add",
        "blocks/0/mlp/tanh",
        "blocks/0/mlp/down/dot",
        "blocks/0/mlp/down/add",
        "blocks/0/dropout/add",
        "blocks/0/div",
        "blocks/0/dropout/random_bits",
        "norm/rsqrt",
        "embed.1/dot",
        "loss/where",
        "loss/gather",
        "loss/div",
    ]


def test_any_tree_of_parameters_will_do_and_scopes_of_the_user_are_kept() -> None:
    params = {"up": {"kernel": jnp.ones((3, 4))}, "down": {"kernel": jnp.ones((4, 2))}}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x.astype(jnp.float32) @ params["up"]["kernel"]) @ params["down"]["kernel"])

    def scoped(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("mine"):
            return loss(params, x)

    x = jnp.ones((5, 3), jnp.float16)
    assert paths(lambda params, x: jscaler.grad(loss)(params, x), params, x) == [
        "up/dot",
        "tanh",
        "down/dot",
        "loss/reduce_sum",
    ]
    assert paths(lambda params, x: jscaler.grad(scoped)(params, x), params, x)[0] == "dot"
    flat = {"kernel": jnp.ones((3, 4))}
    assert paths(lambda p, x: jscaler.grad(lambda p: jnp.sum(x @ p["kernel"]))(p), flat, x)[0] == "loss/dot"


class Vision(nnx.Module):
    """Patches, a BatchNorm, a class token, and flax's own attention, whose softmax stands under ``vmap``."""

    def __init__(self, rngs: nnx.Rngs):
        self.patch = nnx.Conv(3, 8, (4, 4), strides=(4, 4), rngs=rngs)
        self.normed = nnx.BatchNorm(8, rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, 8)))
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.normed(self.patch(x))).reshape(len(x), -1, 8)
        x = jnp.concatenate([jnp.tile(self.token[...], (len(x), 1, 1)), x], 1)
        return self.norm(x + self.attention(x))[:, 0]


def test_statistics_are_their_norm_s_and_transformations_are_no_scopes() -> None:
    def step(model: Vision, batch: jax.Array) -> Any:
        return jscaler.nnx.grad(lambda model: (model(batch) ** 2).mean())(model)

    found = paths(step, Vision(nnx.Rngs(0)), jnp.ones((2, 8, 8, 3)))
    names = [path for path in found if "stop_gradient" not in path]
    assert names[:2] == ["patch/conv", "patch/add"]
    assert [path for path in names if path.startswith("normed/")] == ["normed/rsqrt"]
    assert [path for path in names if path.startswith("norm/")] == ["norm/rsqrt"]
    products = [path for path in names if "dot" in path]
    assert products == [*(f"attention/{name}/dot" for name in ("query", "key", "value")), "attention/dot",
                        "attention/dot.1", "attention/out/dot"]  # fmt: skip


def test_a_module_under_vmap_has_its_own_name() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        def one(row: jax.Array) -> jax.Array:
            with jax.named_scope("layer"):
                return jnp.tanh(row @ params["kernel"])

        with jax.named_scope("model"):
            return jax.vmap(one)(x).sum()

    found = paths(lambda params, x: jscaler.grad(loss)(params, x), {"kernel": jnp.ones((3, 4))}, jnp.ones((5, 3)))
    assert found == ["layer/dot", "layer/tanh", "reduce_sum"]
