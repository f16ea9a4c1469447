"""Attention in kernels is plain attention, and plans split it, carry it in stages and in loops over layers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from step_numbers import assert_step_like_jit

import jscaler
from jscaler.errors import DataError
from jscaler.xla_model.flops import flops_of
from models.flash import BLOCK, attention, flash
from models.gpt import GPT, GPTConfig
from models.training import make_state, train_step

CONFIG = GPTConfig(hidden=32, layers=2, heads=2, sequence=BLOCK, vocabulary=32, dropout=0.0, stacked=True)


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores), v)


def drawn(count: int, sequence: int = 3 * BLOCK) -> list[jax.Array]:
    return [jax.random.normal(key, (2, sequence, 2, 16)) for key in jax.random.split(jax.random.key(0), count)]


def test_values_and_gradients_are_those_of_plain_attention() -> None:
    *qkv, do = drawn(4)
    both = (jax.jit(lambda attend=attend: (attend(*qkv), jax.vjp(attend, *qkv)[1](do)))() for attend in (flash, plain))
    for ours, theirs in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.one_day_in(3)
def test_rows_and_heads_are_split_and_tokens_are_not() -> None:
    report = jscaler.verify_rule(attention, *drawn(3, BLOCK), parts=(2,))
    assert {check.factor for check in report.checks} == {"b", "h"}
    assert {"s", "k"} <= {factor for _, factor, _ in report.blocked}


def test_kernels_count_the_products_below_the_diagonal() -> None:
    b, s, h, d = shape = (2, 4 * BLOCK, 2, 16)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 4
    eqns = jax.make_jaxpr(lambda q, k, v, do: jax.vjp(flash, q, k, v)[1](do))(*args).eqns
    counted = [flops_of(eqn) for eqn in eqns if eqn.primitive.name == "pallas_call"]
    pairs = sum((i + 1) * BLOCK**2 for i in range(s // BLOCK))
    assert [(one.count, one.unit) for one in counted] == [(2.0 * n * b * h * d * pairs, "bfloat16") for n in (2, 4, 3)]


def test_a_sequence_that_blocks_do_not_divide_is_refused() -> None:
    with pytest.raises(DataError, match="96 tokens are no multiple of 64"):
        flash(*drawn(3, 96))


@pytest.mark.one_day_in(5)
@pytest.mark.parametrize(("plan", "devices"), [("megatron(dp=2, tp=2)", 4), ("pipeline(2, 2)", 2), ("co_shard(2)", 1)])
def test_a_step_with_flash_attention_is_that_of_one_device(plan: str, devices: int) -> None:
    config = dataclasses.replace(CONFIG, flash=True)
    state = make_state(GPT(config), config.sequence, optax.sgd(0.1))
    tokens = jax.random.randint(jax.random.key(1), (4, config.sequence), 0, config.vocabulary)
    assert_step_like_jit(train_step, state, {"tokens": tokens, "labels": tokens}, plan, devices, steps=1)
