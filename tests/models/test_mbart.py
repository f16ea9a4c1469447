"""mBART: its layers by their formulas, stacked and rematerialised ones, few bits, and its train step under plans."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from formulas import dense, norm, shaken, softmax, stacked
from of_the_day import of_the_day
from step_numbers import assert_step_like_jit

import jscaler
from models.master import make_master_state, master_step
from models.mbart import MBart, MBartConfig
from models.text import load_bytes, pair_at
from models.training import make_state, translation_loss, translation_train_step

TINY = MBartConfig(hidden=8, layers=2, heads=2, sequence=6, vocabulary=11)
SOURCE = jnp.arange(12).reshape(2, 6) % 11
TOKENS = 3 * jnp.arange(10).reshape(2, 5) % 11  # of another length


def attention(own: Any, x: np.ndarray, y: np.ndarray, causal: bool) -> np.ndarray:
    q, k, v = (dense(own[name], of) for name, of in (("query", x), ("key", y), ("value", y)))
    mixed = np.zeros_like(q)
    for b, s, h in np.ndindex(*q.shape[:3]):
        seen = s + 1 if causal else y.shape[1]
        weights = softmax(k[b, :seen, h] @ q[b, s, h] / np.sqrt(q.shape[-1]))
        mixed[b, s, h] = weights @ v[b, :seen, h]
    return np.einsum("bshk,hkd->bsd", mixed, own["out"]["kernel"]) + own["out"]["bias"]


def layer(own: Any, x: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
    y = norm(own["norm1"], x)
    x = x + attention(own["attn"], y, y, causal=memory is not None)
    if memory is not None:
        x = x + attention(own["cross"], norm(own["norm_cross"], x), memory, causal=False)
    up = dense(own["mlp"]["up"], norm(own["norm2"], x))
    gelu = up / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    return x + dense(own["mlp"]["down"], gelu)


def side(own: Any, x: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
    for i in range(TINY.layers):
        x = layer(own[f"layer_{i}"], x, memory)
    return norm(own["norm"], x)


def logits(own: Any, source: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    table, places = own["embed"]["embedding"], own["position"]["embedding"]
    x = table[source] + places[: source.shape[1]]
    y = table[tokens] + places[TINY.sequence :][: tokens.shape[1]]
    return side(own["decoder"], y, side(own["encoder"], x, None)) @ table.T


@functools.cache
def made() -> Any:
    return shaken(jax.jit(MBart(TINY).init)(jax.random.key(0), SOURCE, TOKENS)["params"])


def apply(config: MBartConfig, params: Any) -> jax.Array:
    return jax.jit(MBart(config).apply)({"params": params}, SOURCE, TOKENS)


@pytest.mark.one_day_in(2)
def test_logits_are_those_of_the_formulas() -> None:
    own = jax.tree.map(lambda p: np.asarray(p, np.float64), made())
    expected = logits(own, np.asarray(SOURCE), np.asarray(TOKENS))
    np.testing.assert_allclose(apply(TINY, made()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("remat", of_the_day([False, True], 2))
def test_stacked_and_rematerialised_layers_are_the_same_model(remat: bool) -> None:
    params = dict(made())
    for name in ("encoder", "decoder"):
        layers = stacked([params[name][f"layer_{i}"] for i in range(TINY.layers)])
        params[name] = {"layers": layers, "norm": params[name]["norm"]}
    ours = apply(dataclasses.replace(TINY, stacked=True, remat=remat), params)
    np.testing.assert_allclose(ours, apply(TINY, made()), rtol=1e-5, atol=1e-5)


def test_sixteen_bits_give_nearly_the_same_logits_in_32() -> None:
    few = apply(dataclasses.replace(TINY, dtype=jnp.bfloat16), made())
    assert few.dtype == jnp.float32
    np.testing.assert_allclose(few, apply(TINY, made()), rtol=0.1, atol=0.3)


PLANS = [
    "data_parallel", "megatron(dp=2, tp=2, vocab=False)",
    'pipeline(2, 2, "interlaced", data_parallel(), at=["encoder/layer_0", "decoder/layer_0", "decoder/norm"])',
]  # fmt: skip


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize("plan", of_the_day(PLANS, 3))
def test_train_step_under_a_plan(plan: str) -> None:
    with jax.enable_x64(True):
        config = dataclasses.replace(TINY, layers=1, dtype=jnp.float64, param_dtype=jnp.float64)
        state = make_state(MBart(config), [(6,), (6,)], optax.sgd(0.1, momentum=0.9))
        assert_step_like_jit(translation_train_step, state, pair_at(load_bytes() % 11, 0, 8, 6), plan, 4)


@pytest.mark.one_day_in(2)
def test_masters_of_sixteen_bits() -> None:
    """A step in float16 with its loss scaled, data parallel, is nearly one in 32 bits."""
    batch = pair_at(load_bytes() % 11, 0, 4, 6)
    state = make_master_state(MBart(dataclasses.replace(TINY, layers=1)), (SOURCE, TOKENS), optax.sgd(0.1), scale=1024.0)
    step = functools.partial(master_step, dtype=jnp.float16, loss=translation_loss)
    done, metrics = jscaler.parallelize("data_parallel", devices=4)(step)(state, batch)
    expected = jax.jit(functools.partial(translation_loss, state.apply_fn))(state.params, batch)
    assert metrics["loss"] == pytest.approx(float(expected), rel=1e-2)
    moved = jax.tree.map(lambda new, old: bool(jnp.any(new != old)), done.params, state.params)
    assert moved["embed"]["embedding"]
    assert moved["decoder"]["layer_0"]["cross"]["query"]["kernel"]
