"""Mixture of experts: who goes where, what is dropped, the balance of the load, and the train step under plans."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from step_numbers import assert_step_like_jit

from models.gpt import MLP
from models.moe import Experts, MoE, MoEConfig, route
from models.training import balanced_train_step, make_state

CONFIG = MoEConfig(hidden=16, layers=1, heads=2, sequence=8, vocabulary=32, experts=4)


def routed_by_hand(logits: np.ndarray, top_k: int, capacity: int) -> np.ndarray:
    """The combine weights (g s e c), token by token: all first choices before all second ones."""
    groups, tokens, experts = logits.shape
    combine = np.zeros((groups, tokens, experts, capacity))
    for g in range(groups):
        load = [0] * experts
        best = np.argsort(-logits[g], axis=-1, kind="stable")[:, :top_k]
        weights = np.exp(logits[g] - logits[g].max(-1, keepdims=True))
        for k in range(top_k):
            for s in range(tokens):
                expert = best[s, k]
                if load[expert] < capacity:
                    combine[g, s, expert, load[expert]] = weights[s, expert] / weights[s, best[s]].sum()
                load[expert] += 1
    return combine


@pytest.mark.parametrize(("top_k", "capacity"), [(1, 8), (2, 8), (2, 3), (3, 2)])
def test_tokens_go_to_their_best_experts_until_those_are_full(top_k: int, capacity: int) -> None:
    logits = np.random.default_rng(top_k).normal(size=(3, 8, 4)).astype(np.float32)
    dispatch, combine, _ = jax.jit(route, static_argnums=(1, 2))(logits, top_k, capacity)
    expected = routed_by_hand(logits, top_k, capacity)
    np.testing.assert_allclose(combine, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(dispatch, expected > 0)
    assert dispatch.sum((1,)).max() <= 1  # one token at each place


def test_the_balance_is_one_where_the_load_is_even_and_more_where_it_is_not() -> None:
    even = 10 * jax.nn.one_hot(jnp.arange(8) % 4, 4)[None]
    assert route(even, 2, 8)[2] == pytest.approx(1, rel=1e-5)
    assert route(10 * jax.nn.one_hot(jnp.zeros(8, int), 4)[None], 2, 8)[2] > 3.9


def test_equal_experts_with_room_for_all_are_one_mlp() -> None:
    config = MoEConfig(hidden=16, layers=1, heads=2, sequence=8, experts=4, capacity_factor=4.0)
    x = jax.random.normal(jax.random.key(0), (2, 8, 16))
    params = jax.jit(Experts(config).init)(jax.random.key(1), x)["params"]
    params = {**params, **{name: jnp.repeat(params[name][:1], 4, 0) for name in ("up", "down")}}
    zeros = {"up": {"bias": jnp.zeros(64)}, "down": {"bias": jnp.zeros(16)}}
    one = {name: {"kernel": params[name][0], **zeros[name]} for name in ("up", "down")}
    ours, theirs = jax.jit(Experts(config).apply)({"params": params}, x), jax.jit(MLP(config).apply)({"params": one}, x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_token_without_a_place_passes_by() -> None:
    config = MoEConfig(hidden=16, layers=1, heads=2, sequence=8, experts=4, capacity_factor=0.5)
    assert config.capacity == 2
    x = jax.random.normal(jax.random.key(0), (1, 1, 16)) + jnp.zeros((1, 8, 1))  # all want the same two experts
    out = Experts(config).apply(jax.jit(Experts(config).init)(jax.random.key(1), x), x)
    assert np.abs(out[0, :2]).max() > 0
    np.testing.assert_array_equal(out[0, 2:], 0)


def test_routing_is_float32_where_the_rest_is_bfloat16() -> None:
    config = MoEConfig(hidden=16, layers=1, heads=2, sequence=8, experts=4, dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (1, 8, 16), jnp.bfloat16)
    variables = jax.jit(Experts(config).init)(jax.random.key(1), x)
    out, seen = Experts(config).apply(variables, x, mutable=["losses", "intermediates"], capture_intermediates=True)
    assert out.dtype == jnp.bfloat16
    assert seen["losses"]["balance"].dtype == jnp.float32
    assert seen["intermediates"]["router"]["__call__"][0].dtype == jnp.float32


@pytest.mark.one_day_in(2)
def test_train_step_under_a_plan() -> None:
    with jax.enable_x64(True):
        model: nn.Module = MoE(MoEConfig(**{**CONFIG.__dict__, "dtype": jnp.float64, "param_dtype": jnp.float64}))
        state = make_state(model, 8, optax.adamw(1e-2))
        tokens = jax.random.randint(jax.random.key(5), (4, 9), 0, 32)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        assert_step_like_jit(balanced_train_step, state, batch, "data_parallel", 4)
