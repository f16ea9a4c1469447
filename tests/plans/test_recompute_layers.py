"""Layers computed again around other plans: same numbers, exactly one more forward of each layer, and its collectives."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from of_the_day import of_the_day
from plan_steps import assert_same_numbers, gpt, gpt_nnx, made_once, mlp, planned, repeated, with_arguments

import jscaler
from jscaler import PlanError, UnknownNameError
from jscaler.plans import by_name, recompute_layers, single, tensor_parallel
from jscaler.report.targets import described_devices
from jscaler.runtime.target import WITHOUT_GPU
from jscaler.stages import Captured, lower, transform


@made_once
def stacked() -> Any:
    return gpt(layers=2, stacked=True)


@made_once
def unrolled() -> Any:
    return gpt(layers=2)


def more(plan: str, inner: str, make: Callable[..., Any], devices: int = 4) -> dict[str, int]:
    """What runs more often under ``plan`` than under ``inner``."""
    before, after = repeated(planned(by_name(inner), make(), devices)), repeated(planned(by_name(plan), make(), devices))
    kinds = ("dot_general", "tanh", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    return {k: after[k] - before[k] for k in kinds if after[k] != before[k]}


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(
    ("inner", "make", "devices"),
    of_the_day(
        [
            ("single()", unrolled, 1),
            ("data_parallel()", gpt_nnx, 4),
            ("tensor_parallel()", stacked, 4),
            ("megatron(dp=2, tp=2, sequence=True)", gpt, 4),
            ("zero3()", gpt, 2),
        ]
    ),
)
def test_numbers_are_those_of_one_device(inner: str, make: Callable[..., Any], devices: int) -> None:
    assert_same_numbers(by_name(f"recompute_layers({inner})"), make, devices)


CO_SHARD = "recompute_layers(co_shard(2))", "co_shard(2, plan=recompute_layers())", "recompute_layers(co_shard(2), every=2)"
STAGED = "pipeline(2, 2, '1f1b+R', plan=co_shard(2))", "pipeline(2, 2, plan=recompute_layers(co_shard(2)))"


@pytest.mark.parametrize("plan", [*CO_SHARD, *STAGED])
def test_a_layer_may_cut_through_what_is_computed_again_already(plan: str) -> None:
    """Of a chain without residuals: what co-shard computes again begins in one layer and ends in the next."""
    assert_same_numbers(by_name(plan), mlp, 2 if plan in STAGED else 1)


# Of a layer's eight dots the last is not needed again, nor what the last all-reduce makes.
@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("make", of_the_day([unrolled, stacked], 2))
def test_every_layer_runs_once_more(make: Callable[..., Any]) -> None:
    layers = 2
    dots = {"dot_general": 7 * layers}
    assert more("recompute_layers()", "single()", make, 1).items() >= dots.items()
    for inner in ("tensor_parallel()", "tensor_parallel"):
        assert more("recompute_layers(tensor_parallel())", inner, make).items() >= {**dots, "all_reduce": layers}.items()
    kept = more("recompute_layers(tensor_parallel(), keep='*/attn/out/dot')", "tensor_parallel()", make)
    assert kept.items() >= {"dot_general": 6 * layers}.items()
    assert "all_reduce" not in kept


@pytest.mark.one_day_in(2)
def test_with_sequences_split_activations_are_gathered_again_but_what_is_kept_is_not_scattered() -> None:
    inner = "megatron(dp=2, tp=2, sequence=True)"
    again = more(f"recompute_layers({inner})", inner, stacked)
    assert (again["reduce_scatter"], again["all_gather"]) == (2, 4)
    kept = more(f"recompute_layers({inner}, keep='*/attn/out/dot')", inner, stacked)
    assert (kept.get("reduce_scatter"), kept["all_gather"]) == (None, 4)


def test_layers_in_a_row_keep_one_activation_together() -> None:
    step = planned(recompute_layers(every=2), unrolled(), 1)
    fences = [op for op in step.graph.ops if op.anywhere == "fence"]
    assert len(fences) == 1
    assert not any(t.name.startswith("block_0/add.1") for t in fences[0].inputs)  # what the second layer reads
    assert (
        more("recompute_layers(every=2)", "single()", unrolled, 1)["dot_general"] == 15
    )  # the first layer's last dot, too
    with pytest.raises(PlanError, match="the layers of loop 'scan' are one body, run 2 times"):
        planned(recompute_layers(every=2), stacked(), 1)
    with pytest.raises(PlanError, match="every is 0"):
        planned(recompute_layers(every=0), unrolled(), 1)


def test_what_nnx_computes_between_modules_belongs_to_their_layer() -> None:
    graph = planned(recompute_layers(), gpt_nnx(), 1).source
    members = {op.path for op in graph.forward() if op.remat}
    assert {"params/blocks/0/norm1/rsqrt", "dot", "exp", "dot.1", "rest/blocks/0/attn/dropout/random_bits"} <= members
    assert members.isdisjoint({"params/embed/gather", "params/embed.1/dot"})


class ConvBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Conv(4, (3, 3), param_dtype=x.dtype)(nn.relu(nn.Conv(4, (3, 3), param_dtype=x.dtype)(x)))


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for name in ("early", "late"):
            x = ConvBlock(name=name)(x)
        return nn.Dense(2, param_dtype=x.dtype)(x.mean((1, 2)))


@made_once
def convnet() -> Any:
    x = np.asarray(np.random.default_rng(0).normal(size=(4, 4, 4, 4)), jax.numpy.zeros(()).dtype)
    return with_arguments(ConvNet(), optax.sgd(0.1), {"x": x, "labels": np.arange(4) % 2}, x)


def test_modules_that_a_pattern_names_are_layers() -> None:
    assert_same_numbers(by_name("recompute_layers(data_parallel(), on=['early', 'late'])"), convnet, 2)
    once = repeated(planned(single(), convnet(), 1))["conv_general_dilated"]
    again = repeated(planned(recompute_layers(on=["early", "late"]), convnet(), 1))["conv_general_dilated"]
    assert again - once == 2  # the second convolution's result is not needed
    with pytest.raises(UnknownNameError, match="no module named 'blok'"):
        planned(recompute_layers(on="blok"), convnet(), 1)
    found = repeated(planned(recompute_layers(), convnet(), 1))["conv_general_dilated"]
    assert found == again  # the dataflow shows them, too
    with pytest.raises(PlanError, match="no stack of layers"):
        planned(recompute_layers(), mlp(layers=1), 1)


def test_explain_shows_what_is_computed_again_and_what_is_kept() -> None:
    step = planned(recompute_layers(tensor_parallel(), keep="*/attn/out/dot"), unrolled(), 4)
    text = step.explain(["ops"])
    assert "again     block_*/mlp/up/dot@again" in text
    assert "block_*/again ×2, 18 of 23 ops; kept: what enters it, and 'block_*/attn/out/dot'" in text
    assert "×2, 19 of 23 ops; kept: what enters it\n" in planned(recompute_layers(), stacked(), 1).explain(["ops"])


@pytest.mark.aot
@pytest.mark.parametrize("layers_in_a_loop", [False, True])
def test_temporaries_are_those_of_jax_checkpoint(layers_in_a_loop: bool) -> None:
    sizes: dict[str, Any] = {"hidden": 256, "layers": 3, "heads": 8, "sequence": 256, "stacked": layers_in_a_loop}
    devices = described_devices("1xH100-80GB")

    def temporaries(plan: Any, **changes: Any) -> int:
        step, (state, batch) = gpt(optax.adam(1e-3), **sizes, **changes)
        batch = {k: jax.ShapeDtypeStruct((8, 256), v.dtype) for k, v in batch.items()}
        if plan is not None:
            lowered = jscaler.parallelize(plan, devices=devices, donate_argnames="state")(step).lower(state, batch)
            return lowered.lowered.compile(WITHOUT_GPU).memory_analysis().temp_size_in_bytes
        sharding = jax.sharding.SingleDeviceSharding(devices[0])
        structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (state, batch))
        jitted = jax.jit(step, donate_argnums=0, out_shardings=sharding)
        found = jitted.lower(*structs).compile(WITHOUT_GPU).memory_analysis()
        assert found is not None
        return found.temp_size_in_bytes

    ours = temporaries(recompute_layers())
    assert ours <= 1.02 * temporaries(None, remat=True)
    assert ours < 0.6 * temporaries(single())


# -- the first layers alone


@made_once
def three() -> Any:
    return gpt(layers=3, stacked=True)


@made_once
def written_out() -> Any:
    return gpt(layers=3)


@made_once
def eight() -> Any:
    return gpt(layers=8, stacked=True)


@made_once
def four() -> Any:
    return gpt(layers=4, stacked=True)


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize(
    ("plan", "make", "devices"),
    of_the_day(
        [
            ("recompute_layers(zero3(), layers=2)", three, 2),
            ("accumulate(2, recompute_layers(zero1(), layers=1))", three, 2),
            ("recompute_layers(megatron(dp=1, tp=2, sequence=True), layers=1)", written_out, 2),
            ("pipeline(2, 2, plan=recompute_layers(zero1(), layers=1))", four, 4),
            ("pipeline(2, 2, 'interleaved', chunks=2, plan=recompute_layers(layers=1))", eight, 2),
            ("pipeline(2, 2, plan=recompute_layers(layers=1), layers=[3, 1])", four, 2),
        ],
        3,
    ),
)
def test_numbers_where_the_first_layers_run_again(plan: str, make: Callable[..., Any], devices: int) -> None:
    assert_same_numbers(by_name(plan), make, devices)


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("make", [three, written_out])
def test_so_many_layers_run_once_more_as_are_asked_for(make: Callable[..., Any]) -> None:
    dots = [more(f"recompute_layers(layers={n})", "single()", make, 1)["dot_general"] for n in (1, 2, 3, 7)]
    assert dots == [7, 14, 21, 21]  # of three layers


def test_so_many_layers_of_each_stage_run_once_more() -> None:
    step, arguments = four()
    graph = jscaler.parallelize("single")(step).graph(*arguments)
    inner = "single()", "recompute_layers(layers=1)", "recompute_layers()"  # of two layers in each stage
    none, some, every = (jscaler.cost(graph, f"pipeline(2, 2, plan={plan})", "2xH100-80GB").total_flops for plan in inner)
    assert some - none == pytest.approx((every - none) / 2)


def test_unequal_stages_whose_first_layers_run_again_are_in_the_order_of_the_table() -> None:
    """One of three layers of the first stage runs again, and the one of the second: ranges of 1, 2 and 1 layers."""
    step, arguments = four()
    graph = jscaler.parallelize("single")(step).graph(*arguments)
    plan = transform(Captured.of(graph), by_name("pipeline(2, 2, plan=recompute_layers(layers=1), layers=[3, 1])"), 2)
    names = [block.names for block in lower(Captured.of(graph), plan).blocks]
    assert {stage for own in names for stage, _ in own} == {0, 1}


def test_memory_is_between_that_of_none_and_that_of_all() -> None:
    shapes = {"up": jax.ShapeDtypeStruct((6, 16, 16), "float32"), "down": jax.ShapeDtypeStruct((6, 16, 16), "float32")}

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            def layer(x: jax.Array, kernels: Any) -> tuple[jax.Array, None]:
                return x + jnp.tanh(jnp.tanh(x @ kernels["up"]) @ kernels["down"]), None

            return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

        value, gradients = jscaler.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    def temporaries(plan: str) -> int:
        lowered = jscaler.parallelize(by_name(plan), devices=1)(step).lower(
            shapes, jax.ShapeDtypeStruct((512, 16), "float32")
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    plans = "recompute_layers()", "recompute_layers(layers=4)", "recompute_layers(layers=2)", "single"
    found = [temporaries(plan) for plan in plans]
    assert found == sorted({*found})


@pytest.mark.parametrize("plan", ["recompute_layers(layers=3)", "accumulate(2, recompute_layers(layers=3), 'x')"])
def test_the_first_layers_of_a_loop_that_runs_backwards(plan: str) -> None:
    def step(params: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        def loss(params: Any) -> jax.Array:
            return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params, reverse=True)[0] ** 2).mean()

        value, gradients = value_and_grad(loss)(params)
        return params - 0.1 * gradients, value

    params, x = jax.random.normal(jax.random.key(0), (8, 4, 4)), jnp.ones((4, 4))
    train = jscaler.parallelize(by_name(plan), devices=1)(step)
    again = {op.path for op in train.lower(params, x).graph.ops if op.path.endswith("again")}
    assert again
    assert all("[5:8]" in path for path in again)
    want = jax.jit(lambda params, x: step(params, x, jax.value_and_grad))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), train(params, x), want)


def test_first_layers_are_single_layers() -> None:
    with pytest.raises(PlanError, match="layers=2 are single layers; leave every=2 out"):
        recompute_layers(every=2, layers=2)


def test_plans_around_it_cut_the_stack_first() -> None:
    step = planned(by_name("accumulate(2, selective_recompute(recompute_layers(layers=1)))"), stacked(), 1)
    again = {op.path for op in step.graph.ops if op.path.endswith("again")}
    assert any("mlp" in path and "[0:1]" in path for path in again)
    assert not any("mlp" in path and "[1:2]" in path for path in again)
