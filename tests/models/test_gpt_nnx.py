"""The nnx GPT is the linen GPT: same shapes, same logits, tied embedding."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import gpt, gpt_nnx
from models.gpt import GPTConfig

CONFIG = GPTConfig(hidden=16, layers=2, heads=2, sequence=8, vocabulary=32)
TOKENS = jax.random.randint(jax.random.key(0), (3, 8), 0, 32)


def test_same_logits_as_linen() -> None:
    params = gpt.GPT(CONFIG).init(jax.random.key(1), TOKENS)["params"]
    model = gpt_nnx.GPT(CONFIG, nnx.Rngs(0))
    model.eval()
    before = model(TOKENS)
    gpt_nnx.copy_linen(model, params)
    expected = gpt.GPT(CONFIG).apply({"params": params}, TOKENS)
    np.testing.assert_allclose(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
    assert not np.allclose(before, expected)
    copied = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert sum(p.size for p in jax.tree.leaves(copied)) == sum(p.size for p in jax.tree.leaves(params))


def test_the_head_is_the_embedding() -> None:
    model = gpt_nnx.GPT(CONFIG, nnx.Rngs(0))
    assert model.head is model.embed
    assert "head" not in nnx.state(model, nnx.Param)


def test_dropout_is_drawn_in_training_only() -> None:
    model = gpt_nnx.GPT(CONFIG, nnx.Rngs(0))
    model.train()
    assert not np.allclose(model(TOKENS), model(TOKENS))
    model.eval()
    np.testing.assert_array_equal(model(TOKENS), model(TOKENS))


def test_dtypes() -> None:
    config = GPTConfig(hidden=16, layers=1, heads=2, sequence=8, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    model = gpt_nnx.GPT(config, nnx.Rngs(0))
    assert {p.dtype for p in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(jnp.bfloat16)}
    assert model(TOKENS).dtype == jnp.float32
