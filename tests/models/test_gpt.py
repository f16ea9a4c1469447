"""The GPT is causal, and the same with its layers stacked or computed again."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from of_the_day import of_the_day
from step_numbers import assert_step_like_jit

from jscaler.errors import UnknownNameError
from models import make_model
from models.gpt import GPT, SIZES, GPTConfig
from models.training import make_state, train_step


def test_a_later_token_does_not_change_earlier_logits() -> None:
    model = GPT(GPTConfig(hidden=16, layers=2, heads=2, sequence=8))
    tokens = jnp.arange(8)[None]
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    apply = jax.jit(model.apply)
    before, after = (apply(params, tokens.at[0, 5].set(t)) for t in (5, 99))
    np.testing.assert_array_equal(before[0, :5], after[0, :5])
    assert not np.allclose(before[0, 5:], after[0, 5:])


def test_unknown_names_suggest_the_near_one() -> None:
    with pytest.raises(UnknownNameError, match=r"no model named 'gtp'; did you mean 'gpt'"):
        make_model("gtp", "nano")
    with pytest.raises(UnknownNameError, match=r"no size named 'mimi' of model gpt; did you mean 'mini'"):
        make_model("gpt", "mimi")
    assert set(SIZES) >= {"nano", "mini"}


def stacked(params: dict[str, Any], layers: int) -> dict[str, Any]:
    """The parameters of a GPT with its layers as a Python loop, as those of a stacked one."""
    rest = {name: leaf for name, leaf in params.items() if not name.startswith("block_")}
    return {**rest, "blocks": jax.tree.map(lambda *p: jnp.stack(p), *(params[f"block_{i}"] for i in range(layers)))}


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("remat", of_the_day([False, True], 2))
def test_stacked_and_rematerialised_layers_are_the_same_model(remat: bool) -> None:
    config = GPTConfig(hidden=16, layers=3, heads=2, sequence=8, vocabulary=32, remat=remat)
    tokens = jnp.arange(16).reshape(2, 8)
    params = jax.jit(GPT(dataclasses.replace(config, remat=False)).init)(jax.random.key(0), tokens)["params"]
    expected = jax.jit(GPT(config).apply)({"params": params}, tokens)
    model = GPT(dataclasses.replace(config, stacked=True))
    ours = stacked(params, 3)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, ours)
    np.testing.assert_allclose(jax.jit(model.apply)({"params": ours}, tokens), expected, rtol=1e-5, atol=1e-5)


def test_stacked_layers_are_drawn_apart() -> None:
    model = GPT(GPTConfig(hidden=16, layers=3, heads=2, sequence=8, vocabulary=32, stacked=True))
    kernel = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]["blocks"]["mlp"]["up"]["kernel"]
    assert kernel.shape == (3, 16, 64)
    assert len(np.unique(np.asarray(kernel[:, 0, 0]))) == 3


@pytest.mark.one_day_in(2)
@pytest.mark.filterwarnings("ignore::jscaler.UnknownPrimitiveWarning")  # a scan may still be copied
def test_stacked_and_rematerialised_train_step_under_a_plan() -> None:
    config = GPTConfig(hidden=16, layers=2, heads=2, sequence=8, vocabulary=32, stacked=True, remat=True)
    tokens = jax.random.randint(jax.random.key(5), (4, 9), 0, 32)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    assert_step_like_jit(train_step, make_state(GPT(config), 8, optax.sgd(0.1)), batch, "data_parallel", 4)
