"""Adapters stand on the narrow side of the casts next to them; sums stay in the dtype that the plan says."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losing import losing
from lower.steps import MOMENTUM, make_batch, make_state, make_step, mlp_loss, planned

import jscaler
from jscaler import PlanError, Split, plans
from jscaler.clusters import CLUSTERS
from jscaler.lower.flat_program import FlatProgram

ON_FOUR = np.arange(4)


def rows(graph: Any, path: str, devices: np.ndarray) -> None:
    """Cut the rows of ``path``'s result."""
    op = graph[path]
    graph.op_assign(graph.op_trans(op, Split(graph.rule(op).results[0][0][0], devices.size)), devices)


def columns(graph: Any, path: str, devices: np.ndarray) -> None:
    op = graph[path]
    graph.op_assign(graph.op_trans(op, Split(graph.rule(op).results[0][1][0], devices.size)), devices)


def carried(flat: FlatProgram) -> list[tuple[str, str]]:
    """Kind and dtype of what every exchange carries."""
    return [(step.kind, str(getattr(e.input.aval, "dtype", ""))) for e in flat.exchanges for step in e.adapt.adapter.steps]


def narrowing(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.named_scope("make"):
        y = jnp.sin(x)
    with jax.named_scope("use"):
        return y.astype(jnp.bfloat16) @ w


def widening(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.named_scope("make"):
        y = jnp.cos(x.astype(jnp.bfloat16)).astype(jnp.float32)
    with jax.named_scope("use"):
        return y @ w.astype(jnp.float32)


def read_twice(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The wide value is read too: it is what must travel."""
    with jax.named_scope("make"):
        y = jnp.sin(x)
    with jax.named_scope("use"):
        return y.astype(jnp.bfloat16) @ w, jnp.tanh(y)


def lowered(step: Any, use: str = "use/dot") -> Any:
    def policy(graph: Any, devices: np.ndarray) -> None:
        rows(graph, next(o.path for o in graph.ops if o.path.startswith("make/")), devices)
        columns(graph, use, devices)

    x = jax.random.normal(jax.random.key(0), (8, 16))
    w = jax.random.normal(jax.random.key(1), (16, 8), jnp.bfloat16)
    run = jscaler.parallelize(policy, devices=4)(step)
    found = run.lower(x, w)
    jscaler.verify(found)
    for ours, theirs in zip(jax.tree.leaves(run(x, w)), jax.tree.leaves(jax.jit(step)(x, w)), strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=0.06)
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("step", [narrowing, widening], ids=lambda f: f.__name__)
def test_a_gather_carries_the_narrow_side_of_a_cast(step: Any) -> None:
    found = lowered(step)
    assert carried(found.plan.flat) == [("all_gather", "bfloat16")]
    assert "1× all_gather 192 B" in found.plan.explain()  # 3/4 of 8 · 16 · 2 bytes
    assert re.search(r"all_gather.*\(tensor<2x16xbf16>\) -> tensor<8x16xbf16>", found.lowered.as_text())


def test_a_gather_stays_where_the_wide_value_is_read_too() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        rows(graph, "make/sin", devices)
        columns(graph, "use/dot", devices)
        columns(graph, "use/tanh", devices)

    x = jax.random.normal(jax.random.key(0), (8, 16))
    run = jscaler.parallelize(policy, devices=4)(read_twice)
    found = run.lower(x, jnp.ones((16, 8), jnp.bfloat16))
    assert ("all_gather", "float32") in carried(found.plan.flat)
    jscaler.verify(found)


def test_sums_are_not_moved_to_fewer_bits() -> None:
    """A partial product in float32 that is cast to bfloat16 behind: added in float32."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("dot"):
            y = x @ w
        with jax.named_scope("cast"):
            return jnp.sin(y.astype(jnp.bfloat16))

    def policy(graph: Any, devices: np.ndarray) -> None:
        op = graph["dot/dot"]
        graph.op_assign(graph.op_trans(op, Split(("x", 1), devices.size)), devices)

    plan = jscaler.parallelize(policy, devices=4)(step).lower(jnp.ones((8, 16)), jnp.ones((16, 8))).plan
    assert {dtype for kind, dtype in carried(plan.flat) if kind in ("all_reduce", "reduce_scatter")} == {"float32"}


# reduce_dtype


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16, np.dtype("float32")], ids=str)
def test_gradients_are_added_in_the_dtype_that_the_plan_asks_for(dtype: Any) -> None:
    plan = planned(plans.data_parallel(reduce_dtype=dtype), 8)
    name = jnp.dtype(dtype).name
    assert f"reduce_dtype {name}" in str(plan.plan)
    asked = {a.reduce_dtype for a in plan.program.adapters if a.tensor.shape and a.adapter.source.values}
    assert asked == ({None} if name == plan.graph.inputs[0].dtype.name else {name})
    jscaler.verify(plan)


def test_reducing_in_fewer_bits_sends_half_and_loses_little() -> None:
    def step(params: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jscaler.value_and_grad(lambda p: jnp.square(batch @ p).mean())(params)
        return params - 0.1 * gradient, loss

    params, batch = jax.random.normal(jax.random.key(0), (16, 32)), jax.random.normal(jax.random.key(1), (8, 16))
    runs = {d: jscaler.parallelize(plans.data_parallel(reduce_dtype=d), devices=4)(step) for d in (None, "bfloat16")}
    texts = {d: run.lower(params, batch).lowered.as_text() for d, run in runs.items()}
    assert "tensor<16x32xbf16>" in texts["bfloat16"]
    assert "bf16" not in texts[None]
    exact, narrow = (run(params, batch)[0] for run in runs.values())
    np.testing.assert_allclose(exact, jax.jit(step)(params, batch)[0], rtol=1e-5, atol=1e-6)
    assert 0 < np.abs(narrow - exact).max() < 1e-2


@pytest.mark.parametrize("dtype", ["int32", "nonsense", 3], ids=str)
def test_reduce_dtype_is_a_floating_dtype(dtype: Any) -> None:
    with pytest.raises(PlanError, match="reduce_dtype is a floating dtype like 'bfloat16', not"):
        planned(plans.data_parallel(reduce_dtype=dtype), 4)


# any order


def test_a_grid_in_any_order_takes_the_order_that_its_inputs_have() -> None:
    """Producers on a transposed grid: a consumer with a fixed order moves its input, one of open order does not."""

    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("a"):
            y = jnp.sin(x)
        with jax.named_scope("b"):
            return jnp.cos(y)

    def policy(any_order: bool) -> Any:
        def place(graph: Any, devices: np.ndarray) -> None:
            a, b = graph["a/sin"], graph["b/cos"]
            first, second = (graph.rule(a).results[0][d][0] for d in (0, 1))
            graph.op_assign(graph.op_trans(a, Split(first, 2), Split(second, 2)), devices.reshape(2, 2).T)
            first, second = (graph.rule(b).results[0][d][0] for d in (0, 1))
            grid = graph.op_trans(b, Split(first, 2), Split(second, 2))
            graph.op_assign(grid, devices.reshape(2, 2), any_order=any_order)

        return place

    x = jnp.arange(64.0).reshape(8, 8)
    fixed, free = (jscaler.parallelize(policy(open_), devices=4)(step) for open_ in (False, True))
    assert len(fixed.lower(x).plan.program.adapters) == 1
    assert free.lower(x).plan.program.adapters == ()
    assert "any order of [d0 d1 d2 d3]" in str(free.lower(x).plan.plan)
    np.testing.assert_allclose(free(x), step(x), rtol=1e-6)


def test_part_of_a_grid_cannot_be_in_any_order() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        op = graph["up/dot"]
        grid = graph.op_trans(op, Split(("batch/x", 0), 4))
        graph.op_assign(grid[:2], devices[:2], any_order=True)

    with pytest.raises(PlanError, match=r"part of a grid, .*cannot be assigned in any order; assign the whole grid"):
        planned(policy, 4)


# clusters


def test_a_cluster_prices_the_adapters() -> None:
    x = jnp.ones((16, 8))
    for cluster in ("h100", CLUSTERS["v100-nvlink-ib100"]):
        run = jscaler.parallelize(lambda graph, devices: None, devices=4, cluster=cluster)(lambda x: jnp.sin(x))
        np.testing.assert_allclose(run(x), jnp.sin(x), rtol=1e-6)
    with pytest.raises(jscaler.UnknownNameError, match=r"no cluster named 'h10'.*did you mean 'h100'"):
        jscaler.parallelize("single", cluster="h10")


@losing
def test_plans_under_a_cluster_keep_their_numbers() -> None:
    step, batch = make_step(mlp_loss, MOMENTUM), make_batch()
    run = jscaler.parallelize(kernels_crosswise, devices=8, cluster="h100")(step)
    assert "µs" in run.lower(make_state(MOMENTUM), batch).plan.explain()
    ours, theirs = run(make_state(MOMENTUM), batch), jax.jit(step)(make_state(MOMENTUM), batch)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def kernels_crosswise(graph: Any, devices: np.ndarray) -> None:
    """Two neighbours that cut different dims; the rest is filled in."""
    for path, factor in (("up/dot", ("kernel", 1)), ("down/dot", ("kernel", 1))):
        graph.op_assign(graph.op_trans(graph[path], Split(factor, devices.size)), devices)
