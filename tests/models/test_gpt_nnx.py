"""The nnx GPT is the linen GPT: same shapes, same logits, tied embedding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jscaler
from models import gpt, gpt_nnx
from models.gpt import GPTConfig
from models.training import make_state, train_step

CONFIG = GPTConfig(hidden=16, layers=2, heads=2, sequence=8, vocabulary=32)
TOKENS = jax.random.randint(jax.random.key(0), (3, 8), 0, 32)


@pytest.mark.one_day_in(2)
def test_same_logits_as_linen() -> None:
    params = jax.jit(gpt.GPT(CONFIG).init)(jax.random.key(1), TOKENS)["params"]
    model = gpt_nnx.GPT(CONFIG, nnx.Rngs(0))
    model.eval()
    before = model(TOKENS)
    gpt_nnx.copy_linen(model, params)
    expected = jax.jit(gpt.GPT(CONFIG).apply)({"params": params}, TOKENS)
    np.testing.assert_allclose(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
    assert not np.allclose(before, expected)
    copied = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert sum(p.size for p in jax.tree.leaves(copied)) == sum(p.size for p in jax.tree.leaves(params))


def test_the_head_is_the_embedding() -> None:
    model = gpt_nnx.GPT(CONFIG, nnx.Rngs(0))
    assert model.head is model.embed
    assert "head" not in nnx.state(model, nnx.Param)


@pytest.mark.one_day_in(2)
def test_dropout_is_drawn_in_training_only() -> None:
    model = gpt_nnx.GPT(CONFIG, nnx.Rngs(0))
    model.train()
    assert not np.allclose(model(TOKENS), model(TOKENS))
    model.eval()
    np.testing.assert_array_equal(model(TOKENS), model(TOKENS))


@pytest.mark.one_day_in(2)
def test_dtypes() -> None:
    config = GPTConfig(hidden=16, layers=1, heads=2, sequence=8, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    model = gpt_nnx.GPT(config, nnx.Rngs(0))
    assert {p.dtype for p in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(jnp.bfloat16)}
    assert model(TOKENS).dtype == jnp.float32


@pytest.mark.one_day_in(3)
def test_five_steps_of_adamw_are_linen_s() -> None:
    """Under data_parallel; in float64, which AdamW needs where a true gradient is 0."""

    @jscaler.parallelize("data_parallel", devices=4, donate_argnames=("model", "optimizer"))
    def nnx_step(model: gpt_nnx.GPT, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
        def loss_fn(model: gpt_nnx.GPT) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["labels"]).mean()

        loss, grads = jscaler.nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    with jax.enable_x64(True):
        config = dataclasses.replace(CONFIG, layers=1, dropout=0.0, dtype=jnp.float64, param_dtype=jnp.float64)
        chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))
        state = make_state(gpt.GPT(config), 8, chain)
        model = gpt_nnx.GPT(config, nnx.Rngs(0))
        gpt_nnx.copy_linen(model, state.params)
        optimizer = nnx.Optimizer(model, chain, wrt=nnx.Param)
        linen_step = jax.jit(lambda state, batch: train_step(state, batch, jax.value_and_grad))
        for i in range(5):
            tokens = jax.random.randint(jax.random.key(i), (4, 9), 0, 32)
            batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
            state, metrics = linen_step(state, batch)
            np.testing.assert_allclose(nnx_step(model, optimizer, batch), metrics["loss"], rtol=1e-10)
        expected = gpt_nnx.GPT(config, nnx.Rngs(0))
        gpt_nnx.copy_linen(expected, state.params)
        for ours, theirs in zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, expected)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-10)
        assert model.head.embedding[...].sharding.num_devices == 4
