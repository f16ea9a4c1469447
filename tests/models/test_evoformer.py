"""The Evoformer: every part by its algorithm, recycling, stacked and rematerialised blocks, few bits, steps under plans."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from formulas import dense, norm, shaken, sigmoid, softmax, stacked
from of_the_day import of_the_day
from step_numbers import assert_step_like_jit, assert_trees_close

from models.alignments import MASKED, alignment_at
from models.evoformer import Block, Evoformer, EvoformerConfig, EvoformerStack
from models.training import evoformer_loss, evoformer_train_step, make_state

TINY = EvoformerConfig(
    c_m=8, c_z=4, layers=2, msa_heads=2, pair_heads=2, pair_head_size=3, outer=3, bins=6, apart=2, recycles=1
)  # fmt: skip
SEQUENCES, RESIDUES = 3, 5
BATCH = alignment_at(0, 4, SEQUENCES, RESIDUES, TINY.bins)


def tables() -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(1)
    return draws.normal(size=(2, SEQUENCES, RESIDUES, 8)), draws.normal(size=(2, RESIDUES, RESIDUES, 4))


def projected(own: Any, x: np.ndarray) -> tuple[np.ndarray, ...]:
    q, k, v, gate = (dense(own[name], x) for name in ("query", "key", "value", "gate"))
    return q / np.sqrt(q.shape[-1]), k, v, sigmoid(gate)


def out(own: Any, mixed: np.ndarray) -> np.ndarray:
    return np.einsum("...hk,hkc->...c", mixed, own["out"]["kernel"]) + own["out"]["bias"]


def row_attention(own: Any, m: np.ndarray, z: np.ndarray) -> np.ndarray:  # Algorithm 7
    q, k, v, mixed = projected(own["attn"], norm(own["norm"], m))
    bias = dense(own["bias"], norm(own["norm_pair"], z))
    for b, s, i, h in np.ndindex(*q.shape[:4]):
        mixed[b, s, i, h] *= softmax(k[b, s, :, h] @ q[b, s, i, h] + bias[b, i, :, h]) @ v[b, s, :, h]
    return out(own["attn"], mixed)


def column_attention(own: Any, m: np.ndarray, z: np.ndarray) -> np.ndarray:  # Algorithm 8
    q, k, v, mixed = projected(own["attn"], norm(own["norm"], m))
    for b, s, i, h in np.ndindex(*q.shape[:4]):
        mixed[b, s, i, h] *= softmax(k[b, :, i, h] @ q[b, s, i, h]) @ v[b, :, i, h]
    return out(own["attn"], mixed)


def transition(own: Any, x: np.ndarray) -> np.ndarray:  # Algorithms 9 and 15
    return dense(own["down"], np.maximum(dense(own["up"], norm(own["norm"], x)), 0))


def outer_product(own: Any, m: np.ndarray, z: np.ndarray) -> np.ndarray:  # Algorithm 10
    m = norm(own["norm"], m)
    left, right = dense(own["left"], m), dense(own["right"], m)
    made = np.zeros(z.shape)
    for b, i, j in np.ndindex(*z.shape[:3]):
        mean = sum(np.outer(left[b, s, i], right[b, s, j]) for s in range(m.shape[1])) / m.shape[1]
        made[b, i, j] = np.sum(mean[:, :, None] * own["out"]["kernel"], (0, 1)) + own["out"]["bias"]
    return made


def triangle(own: Any, m: np.ndarray, z: np.ndarray, outgoing: bool) -> np.ndarray:  # Algorithms 11 and 12
    z = norm(own["norm"], z)
    left, right = (sigmoid(dense(own[f"{name}_gate"], z)) * dense(own[name], z) for name in ("left", "right"))
    joined = np.zeros(z.shape)
    for b, i, j, u in np.ndindex(*z.shape[:3], z.shape[1]):
        joined[b, i, j] += left[b, i, u] * right[b, j, u] if outgoing else left[b, u, i] * right[b, u, j]
    return sigmoid(dense(own["out_gate"], z)) * dense(own["out"], norm(own["norm_joined"], joined))


def starting(own: Any, m: np.ndarray, z: np.ndarray) -> np.ndarray:  # Algorithm 13
    z = norm(own["norm"], z)
    q, k, v, mixed = projected(own["attn"], z)
    bias = dense(own["bias"], z)
    for b, i, j, h in np.ndindex(*q.shape[:4]):
        mixed[b, i, j, h] *= softmax(k[b, i, :, h] @ q[b, i, j, h] + bias[b, j, :, h]) @ v[b, i, :, h]
    return out(own["attn"], mixed)


def ending(own: Any, m: np.ndarray, z: np.ndarray) -> np.ndarray:  # Algorithm 14
    z = norm(own["norm"], z)
    q, k, v, mixed = projected(own["attn"], z)
    bias = dense(own["bias"], z)
    for b, i, j, h in np.ndindex(*q.shape[:4]):
        mixed[b, i, j, h] *= softmax(k[b, :, j, h] @ q[b, i, j, h] + bias[b, :, i, h]) @ v[b, :, j, h]
    return out(own["attn"], mixed)


PARTS: dict[str, Any] = {  # in the order of algorithm 6; those of the alignment first
    "row_attention": row_attention,
    "column_attention": column_attention,
    "msa_transition": lambda own, m, z: transition(own, m),
    "outer_product": outer_product,
    "outgoing": functools.partial(triangle, outgoing=True),
    "incoming": functools.partial(triangle, outgoing=False),
    "starting": starting,
    "ending": ending,
    "pair_transition": lambda own, m, z: transition(own, z),
}


@functools.cache
def block() -> tuple[Any, Any]:
    """Parameters of a block, and by part what it has made of `tables`; all in 64 bits."""
    with jax.enable_x64(True):
        model = Block(dataclasses.replace(TINY, dtype=jnp.float64, param_dtype=jnp.float64))
        own = shaken(jax.jit(model.init, static_argnums=3)(jax.random.key(0), *tables(), False)["params"])
        run = jax.jit(lambda p: model.apply({"params": p}, *tables(), False, capture_intermediates=True, mutable=True))
        _, seen = run(own)
    made = {name: np.asarray(own["__call__"][0]) for name, own in seen["intermediates"].items() if name in PARTS}
    return jax.tree.map(np.asarray, own), {**made, "": jax.tree.map(np.asarray, seen["intermediates"]["__call__"][0])}


@pytest.mark.one_day_in(2)
def test_every_part_is_as_its_algorithm_says() -> None:
    own, made = block()
    m, z = tables()
    for name, part in PARTS.items():
        expected = part(own[name], m, z)
        np.testing.assert_allclose(made[name], expected, rtol=1e-9, atol=1e-9, err_msg=name)
        m, z = (m + expected, z) if expected.shape == m.shape else (m, z + expected)
    np.testing.assert_allclose(made[""][0], m, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(made[""][1], z, rtol=1e-9, atol=1e-9)


@functools.cache
def params() -> Any:
    return shaken(jax.jit(Evoformer(TINY).init)(jax.random.key(0), BATCH["msa"], BATCH["target"])["params"])


@functools.cache
def whole() -> Any:
    return jax.jit(Evoformer(TINY).apply)({"params": params()}, BATCH["msa"], BATCH["target"])


def as_one_scan(**changes: Any) -> Any:
    """What `whole` is, of the model with stacked blocks."""
    own, config = params(), dataclasses.replace(TINY, stacked=True, **changes)
    rest = {name: leaf for name, leaf in own["stack"].items() if not name.startswith("block_")}
    blocks = stacked([own["stack"][f"block_{i}"] for i in range(TINY.layers)])
    variables = {"params": {**own, "stack": {**rest, "blocks": blocks}}}
    return jax.jit(Evoformer(config).apply)(variables, BATCH["msa"], BATCH["target"])


@pytest.mark.one_day_in(3)
def test_what_is_embedded_and_recycled_is_as_its_algorithms_say() -> None:
    """With no blocks; the second pass reads what the first has made."""
    none, own = dataclasses.replace(TINY, layers=0), jax.tree.map(np.asarray, params()["stack"])
    msa, target = BATCH["msa"], BATCH["target"]
    table = {name: own[name]["embedding"] for name in ("embed", "target", "left", "right", "between")}
    place = np.arange(RESIDUES)
    between = np.clip(place[:, None] - place, -2, 2) + 2
    first, pairs = np.zeros((4, RESIDUES, 8)), np.zeros((4, RESIDUES, RESIDUES, 4))
    for given in ((None, None), None):
        m = table["embed"][msa] + table["target"][target][:, None]
        z = table["left"][target][:, :, None] + table["right"][target][:, None] + table["between"][between]
        m[:, 0] += norm(own["norm_first"], first)
        z += norm(own["norm_pairs"], pairs)
        run = jax.jit(lambda first, pairs: EvoformerStack(none).apply({"params": own}, msa, target, first, pairs, False))
        ours = run(*(given or (first.astype(np.float32), pairs.astype(np.float32))))
        np.testing.assert_allclose(ours[0], m, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(ours[1], z, rtol=1e-5, atol=1e-5)
        first, pairs = m[:, 0], z


@pytest.mark.one_day_in(3)
def test_only_the_last_pass_has_a_gradient() -> None:
    config = dataclasses.replace(TINY, layers=1)
    own, stack = params(), EvoformerStack(config)
    msa, target = BATCH["msa"], BATCH["target"]
    m, z = jax.jit(lambda own: stack.apply({"params": own}, msa, target, None, None, False))(own["stack"])

    def last(own: Any) -> jax.Array:
        m_, z_ = stack.apply({"params": own["stack"]}, msa, target, m[:, 0], z, False)
        read = {"tokens": m_, "distances": z_ + z_.swapaxes(1, 2)}
        logits = tuple(x @ own[name]["kernel"] + own[name]["bias"] for name, x in read.items())
        return evoformer_loss(lambda *_, **__: logits, own, BATCH)

    expected = jax.jit(jax.value_and_grad(last))(own)
    ours = jax.jit(jax.value_and_grad(lambda p: evoformer_loss(Evoformer(config).apply, p, BATCH)))(own)
    assert_trees_close(jax.tree.map(lambda x: x / 10, ours), jax.tree.map(lambda x: x / 10, expected))


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("remat", of_the_day([False, True], 2))
def test_stacked_and_rematerialised_blocks_are_the_same_model(remat: bool) -> None:
    for one, other in zip(as_one_scan(remat=remat), whole(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.one_day_in(2)
def test_sixteen_bits_give_nearly_the_same_logits_in_32() -> None:
    for few, many in zip(as_one_scan(dtype=jnp.bfloat16), whole(), strict=True):
        assert few.dtype == jnp.float32
        assert jnp.mean(jnp.abs(few - many)) < 0.1 * jnp.std(many)


def test_alignments_are_masked_in_equal_shares() -> None:
    batch = alignment_at(3, 4, 8, 10, 6)
    assert np.array_equal(batch["msa"] == MASKED, batch["weights"] > 0)
    np.testing.assert_allclose(batch["weights"].mean((1, 2)), 1, rtol=1e-6)
    assert np.array_equal(np.where(batch["weights"] > 0, batch["labels"], batch["msa"]), batch["labels"])
    assert np.array_equal(batch["labels"][:, 0], batch["target"])
    assert 0 <= batch["distances"].min() <= batch["distances"].max() < 6


PLANS = [("data_parallel", 4, 1), ('pipeline(2, 2, "3f1b", chunks=2)', 2, 2)]


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize(("plan", "devices", "layers"), of_the_day(PLANS, 2))
def test_train_step_under_a_plan(plan: str, devices: int, layers: int) -> None:
    """Also in the order of 3F1B, which a warning would say that it does not go with."""
    with jax.enable_x64(True):
        changes: dict[str, Any] = {"layers": layers, "stacked": layers > 1}
        config = dataclasses.replace(TINY, dtype=jnp.float64, param_dtype=jnp.float64, **changes)
        state = make_state(Evoformer(config), [(SEQUENCES, RESIDUES), (RESIDUES,)], optax.sgd(0.1))
        state = state.replace(params=shaken(state.params))
        assert_step_like_jit(evoformer_train_step, state, BATCH, plan, devices)
