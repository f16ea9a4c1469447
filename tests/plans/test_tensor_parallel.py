"""Megatron's split: two all-reduces of activations per layer in the forward pass, two in the backward pass."""

import functools
from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from of_the_day import of_the_day
from plan_steps import (
    COLUMNS,
    Step,
    activations,
    assert_same_numbers,
    collectives,
    gpt,
    gpt_nnx,
    made_once,
    mlp,
    planned,
    with_arguments,
)

import jscaler
from jscaler.errors import PlanError, SplitError, UnknownNameError
from jscaler.plans import tensor_parallel

LAYERS = ("*/query/kernel", "*/key/kernel", "*/value/kernel", "*/up/kernel")


@pytest.mark.smoke
def test_two_all_reduces_each_way_per_layer() -> None:
    plan = planned(tensor_parallel(LAYERS), gpt(), 4)
    assert activations(plan) == {"all_reduce": 4}
    assert [k for k, t in collectives(plan) if t.shape] == ["all_reduce"] * 4  # and no gradient is sent at all


def test_the_same_in_nnx() -> None:
    assert activations(planned(tensor_parallel(LAYERS), gpt_nnx(), 4)) == {"all_reduce": 4}


def test_a_stack_of_layers_is_split_inside_its_loop() -> None:
    plan = planned(tensor_parallel(LAYERS), gpt(stacked=True, layers=3), 4)
    assert activations(plan) == {"all_reduce": 4}  # in the loop's body, which runs three times
    kernels = [layout for t, layout in plan.completed.inputs.items() if t.name.endswith("/query/kernel")]
    assert [layout.local_shape for layout in kernels] == [(3, 16, 1, 4)] * 2


def test_words_are_split_and_other_kernels_stored_in_parts() -> None:
    plan = planned(tensor_parallel(), gpt(), 4)
    moved = Counter((kind, tensor.shape) for kind, tensor in collectives(plan) if tensor.shape)
    layers = {("all_reduce", (8, 8, 16)): 4 + 2}  # and what is looked up, and the gradient that enters the logits' product
    losses = {("all_reduce", (8, 8)): 3}  # the largest logit, the sum of exponentials, the label's logit
    assert moved == {**layers, **losses, ("all_gather", (8, 16)): 1}  # the table of positions
    assert set(plan.plan.shards) == {"state/params/position/embedding"}
    assert "11 of 11 kernels (two dims and more) lie in parts\n" in plan.explain(["leaves"])
    named = planned(tensor_parallel(LAYERS), gpt(), 4).explain(["leaves"])
    assert "9 of 11 kernels (two dims and more) lie in parts; whole: state/params/" in named
    assert "embed/embedding (32, 16)" in named


def test_of_an_mlp_one_per_pair_and_none_into_the_first() -> None:
    plan = planned(tensor_parallel(COLUMNS), mlp(), 8)
    assert activations(plan) == {"all_reduce": 3}


def test_optimizer_state_lies_with_its_parameter() -> None:
    plan = planned(tensor_parallel(), gpt(optax.adamw(0.1)), 4)
    inputs = {t.name: layout for t, layout in plan.completed.inputs.items()}
    for kernel in ("attn/query/kernel", "attn/query/bias", "attn/out/kernel", "mlp/up/kernel", "mlp/down/kernel"):
        layouts = [layout for name, layout in inputs.items() if name.endswith(f"block_0/{kernel}")]
        assert len(layouts) == 3  # the parameter and Adam's two moments
        assert {str(layout) for layout in layouts} == {str(layouts[0])}
        assert any(layouts[0].cuts), kernel


class Fused(nn.Module):
    """A block whose queries, keys and values are one kernel, flat or (d, 3, h, k), and gate and up another."""

    flat: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # b s d -> b s d
        dense = functools.partial(nn.DenseGeneral, use_bias=not self.flat, param_dtype=x.dtype, dtype=x.dtype)
        if self.flat:
            parts = jnp.split(dense(48, name="qkv")(x), 3, axis=-1)
            q, k, v = (part.reshape(*x.shape[:2], 4, 4) for part in parts)
        else:
            q, k, v = jnp.moveaxis(dense((3, 4, 4), name="qkv")(x), 2, 0)
        weights = nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k))
        mixed = jnp.einsum("bhst,bthk->bshk", weights, v)
        x = x + dense(16, axis=(-2, -1), name="out")(mixed)
        units = dense(32 if self.flat else (2, 16), name="wi")(x)
        gate, up = jnp.split(units, 2, axis=-1) if self.flat else jnp.moveaxis(units, 2, 0)
        return x + dense(16, name="wo")(nn.silu(gate) * up)


@made_once
def fused(flat: bool) -> tuple[Step, tuple[Any, Any]]:
    draws = np.random.default_rng(0)
    x = np.asarray(draws.normal(size=(4, 8, 16)), jnp.zeros(()).dtype)
    return with_arguments(Fused(flat), optax.sgd(1e-4, momentum=0.9), {"x": x, "labels": draws.integers(0, 16, (4, 8))}, x)


FLAT, FOUR_DIMS = functools.partial(fused, True), functools.partial(fused, False)


@pytest.mark.parametrize("make", [FLAT, FOUR_DIMS])
def test_fused_kernels_are_split_by_heads_and_units(make: Any) -> None:
    plan = planned(tensor_parallel(), make(), 4)
    attention = [op for op in plan.graph.forward() if op.path.startswith("dot")]
    assert len(attention) == 2  # scores and mix
    for op in attention:
        assert sum(map(bool, plan.completed.ops[op.path].placement.factors.values())) == 1, op.path
    found = activations(plan)
    assert found.pop("all_reduce") == 3  # out, wo, and the gradient in front of wi; none in front of the first kernel
    # A flat kernel lies in columns: what it makes is dealt to heads (and units), each way once.
    assert sum(found.values()) == (4 if make is FLAT else 0)


@pytest.mark.parametrize(("make", "columns"), of_the_day([(gpt_nnx, None), (mlp, COLUMNS), (FLAT, None)], 2))
def test_the_numbers_are_those_of_one_device(make: object, columns: object) -> None:
    assert_same_numbers(tensor_parallel(columns) if columns else tensor_parallel(), make, 4)  # type: ignore[arg-type]


def test_columns_are_found_whatever_the_rank() -> None:
    by_dim = planned(tensor_parallel({"*/query/kernel": -2, "*/up/kernel": -1}), gpt(), 4)
    found = planned(tensor_parallel(["*/query/kernel", "*/up/kernel"]), gpt(), 4)
    assert by_dim.digest == found.digest


@made_once
def clipped(by_example: bool) -> tuple[Step, tuple[Any, Any]]:
    """An MLP by the norm of all gradients as one vector: of the batch's, or of each example's."""

    def step(params: Any, batch: Any) -> Any:
        def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ p["wide"]) @ p["narrow"] + p["bias"] - y) ** 2)

        def by_norm(x: jax.Array, y: jax.Array) -> Any:
            value, grads = jscaler.value_and_grad(loss)(params, x, y)
            length = jnp.linalg.norm(jnp.concatenate([g.ravel() for g in jax.tree.leaves(grads)]))
            return value, jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / length), grads)

        found = (jax.vmap(by_norm) if by_example else by_norm)(batch["x"], batch["y"])
        loss_, grads = jax.tree.map(lambda x: x.mean(0), found) if by_example else found
        return jax.tree.map(lambda p, g: p - g, params, grads), loss_

    draws, dtype = np.random.default_rng(0), jnp.zeros(()).dtype
    shapes = {"wide": (8, 16), "narrow": (16, 8), "bias": (8,)}
    params = {name: np.asarray(draws.normal(size=shape), dtype) for name, shape in shapes.items()}
    return step, (params, {k: np.asarray(draws.normal(size=(8, n)), dtype) for k, n in (("x", 8), ("y", 8))})


@pytest.mark.parametrize("by_example", [False, True])
def test_columns_are_found_whatever_is_done_with_gradients(by_example: bool) -> None:
    plan = planned(tensor_parallel(), clipped(by_example), 4)
    layouts = {t.name: layout.local_shape for t, layout in plan.completed.inputs.items()}
    assert layouts["params/wide"] == (8, 4)
    assert layouts["params/narrow"] == (4, 8)
    assert_same_numbers(tensor_parallel(), functools.partial(clipped, by_example), 4)


def test_mistakes() -> None:
    with pytest.raises(SplitError, match=r"attn/key/kernel' cannot .* 'dim 1' of size 4 into 8 parts; legal: 1, 2, 4"):
        planned(tensor_parallel(), gpt(), 8)
    with pytest.raises(UnknownNameError, match=r"pass tensor_parallel\(columns=\.\.\.\)"):
        planned(tensor_parallel("*/up/kernel"), mlp(), 4)
    with pytest.raises(PlanError, match=r"has no dim 2; give one from -2 to 1"):
        planned(tensor_parallel({"*/layer_0/kernel": 2}), mlp(), 4)
