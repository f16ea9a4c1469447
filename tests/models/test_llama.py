"""The Llama: rotary positions, grouped queries, a tied head; right under plans, stacked or not, with recompute or not."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from of_the_day import of_the_day

import jscaler
from models.llama import Attention, Llama, LlamaConfig, rotary
from models.training import nnx_train_step

CONFIG = LlamaConfig(hidden=16, layers=2, heads=4, groups=2, units=24, sequence=8, vocabulary=32, theta=1e2)
TOKENS = jax.random.randint(jax.random.key(0), (4, 9), 0, 32)
BATCH = {"tokens": TOKENS[:, :-1], "labels": TOKENS[:, 1:]}


def test_rotary_positions_turn_pairs_by_their_distance() -> None:
    """A product of two turned vectors depends on how far apart they are, and on nothing else of where."""
    q, k = jax.random.normal(jax.random.key(1), (2, 8))
    turned = [rotary(jnp.broadcast_to(v, (1, 6, 1, 8)), 1e2)[0, :, 0] for v in (q, k)]
    products = turned[0] @ turned[1].T
    for distance in range(-4, 5):
        diagonal = jnp.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4)
    np.testing.assert_allclose(products[0, 0], q @ k, rtol=1e-4)


@pytest.mark.one_day_in(2)
def test_queries_of_a_group_share_keys_and_values() -> None:
    """As attention whose keys and values are repeated for each query head."""
    layer = Attention(CONFIG, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 5, 16))
    q, k = rotary(layer.query(x), layer.theta), rotary(layer.key(x), layer.theta)
    k, v = (jnp.repeat(own, 2, axis=2) for own in (k, layer.value(x)))
    expected = layer.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding(tied: bool) -> None:
    model = Llama(dataclasses.replace(CONFIG, tied=tied), nnx.Rngs(0))
    assert ("head" in nnx.state(model, nnx.Param)) == (not tied)
    logits = model(BATCH["tokens"])
    model.embed.embedding[...] = model.embed.embedding[...].at[7].set(3.0)
    assert bool((model(BATCH["tokens"])[..., 7] != logits[..., 7]).all()) == tied or not tied


PLANS = {
    "tensor_parallel": 2, "megatron(dp=2, tp=2, sequence=True, zero=1)": 4, "zero3": 4, "accumulate(2)": 1,
    "co_shard(2)": 1, "pipeline(2, 2)": 2, "pipeline(2, 2, 'zb_h1')": 2, "interlaced(2, 2)": 2, "vocab_parallel": 4,
    "recompute_layers": 1, "tensor_parallel()": 4, "megatron(dp=2, tp=4, zero=3)": 8,
    "pipeline(2, 2, plan=megatron(tp=4))": 8,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "loop": {},
    "tied": {"tied": True},
    "stacked": {"stacked": True},
    "stacked, remat": {"stacked": True, "remat": True},
}
# a scan whose checkpointed body returns its parameters, as nnx.remat does, was refused; so were
# two heads of keys and values on four devices
ALWAYS = [("interlaced(2, 2)", "stacked, remat"), ("tensor_parallel()", "stacked")]


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(("plan", "form"), of_the_day([(p, f) for p in PLANS for f in FORMS], 40, ALWAYS))
def test_plans_give_the_numbers_of_one_device(plan: str, form: str) -> None:
    config = dataclasses.replace(CONFIG, **FORMS[form])

    def state() -> tuple[Llama, Any]:
        model = Llama(config, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)

    def plain(state: Any, batch: Any) -> Any:
        return nnx_train_step(state, batch, nnx.value_and_grad)

    ours, theirs = state(), state()
    planned, reference = jscaler.parallelize(plan, devices=PLANS[plan])(nnx_train_step), nnx.jit(plain)
    for _ in range(2):
        np.testing.assert_allclose(planned(ours, BATCH)["loss"], reference(theirs, BATCH)["loss"], rtol=1e-5)
    for got, expected in zip(*(jax.tree.leaves(nnx.state(s[0], nnx.Param)) for s in (ours, theirs)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
