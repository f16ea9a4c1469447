"""Adapters at the edges: open orders of uneven sizes, floats without infinity, sums of booleans, nothing to send."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jscaler
from bench.numeric import check_parts, deal
from jscaler import PlanError, Split
from jscaler.clusters import CLUSTERS, Cluster
from jscaler.errors import DeviceError
from jscaler.lower.emit_collectives import exchange
from jscaler.materialize import Adapter, DeviceMesh, Layout, find_adapter, parse_layout


def run(adapter: Adapter, parts: list[np.ndarray]) -> list[np.ndarray]:
    """What each device ends with, by position of the target; ``parts`` by position of the source."""
    count = len(parts)
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",))
    over = DeviceMesh(tuple(range(count)), (("x", count),))
    stacked = jax.device_put(np.stack([parts[p] for p in adapter.source.mesh.positions]), NamedSharding(mesh, P("x")))
    go = jax.shard_map(
        lambda x: exchange(adapter, x[0], over)[None], mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    ended = np.asarray(jax.jit(go)(stacked))
    return [ended[d] for d in adapter.target.mesh.devices]


def check(source: Any, target: Any, dtype: Any = "float32") -> Adapter:
    adapter = find_adapter(source, target, jnp.dtype(dtype).itemsize)
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 2 if dtype == "bool" else 5, source.shape).astype(jnp.dtype(dtype))
    check_parts(adapter.target, run(adapter, deal(source, whole, rng)), whole)
    return adapter


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        ((6,), "R1 V1 D(4)", "R2 V1 D(2) on any"),
        ((7, 10), "R1 V1 D(4,1)", "R1 V1 D(1,4) on any"),
        ((8,), "R4 V1 D(1)", "R1 V2·2 D(1) on any"),
        ((8, 8), "R1 V4 D(1,1)", "R2 V1 D(1,2) on any"),
    ],
)
def test_open_orders(shape: tuple[int, ...], source: str, target: str) -> None:
    check(parse_layout(source, shape), parse_layout(target, shape))


def test_an_open_order_keeps_its_memory_space() -> None:
    target = parse_layout("R4 V1 D(1) on any @host", (8,))
    assert str(target) == "R4 V1 D(1) on any @host"
    assert find_adapter(parse_layout("R1 V1 D(4)", (8,)), target, 4).target.memory == "host"


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e4m3fnuz, jnp.float8_e5m2], ids=lambda d: d.__name__)
@pytest.mark.parametrize("combiner", ["max", "min"])
def test_floats_without_infinity_are_masked_by_their_limits(dtype: Any, combiner: str) -> None:
    source = parse_layout("R4 V1 D(1,1)", (4, 4))
    target = parse_layout(f"R1 V4{combiner} D(1,1)", (4, 4))
    adapter = find_adapter(source, target, 1)
    whole = np.arange(16, dtype=np.float32).reshape(4, 4).astype(dtype)
    ended = [part.astype(np.float32) for part in run(adapter, [whole] * 4)]
    assert np.isfinite(ended).all() or dtype == jnp.float8_e5m2
    join = np.maximum if combiner == "max" else np.minimum
    np.testing.assert_array_equal(join.reduce(ended), whole.astype(np.float32))


@pytest.mark.parametrize("target", ["R4 V1 D(1,1)", "R1 V1 D(4,1)", "R1 V1 D(2,2)"])
def test_a_sum_of_booleans_is_their_or(target: str) -> None:
    source, wanted = parse_layout("R1 V4 D(1,1)", (4, 4)), parse_layout(target, (4, 4))
    parts = list(np.random.default_rng(0).random((4, 4, 4)) < 0.3)
    ended = run(find_adapter(source, wanted, 1), parts)
    assert ended[0].dtype == np.bool_
    check_parts(wanted, ended, np.any(parts, axis=0))


@pytest.mark.parametrize("target", ["R4 V1 D(1,1)", "R1 V1 D(1,4)", "R1 V4 D(1,1)"])
@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_tensors_without_elements(shape: tuple[int, ...], target: str) -> None:
    source, wanted = parse_layout("R1 V1 D(4,1)", shape), parse_layout(target, shape)
    adapter = find_adapter(source, wanted, 4)
    assert adapter.steps == ()
    ended = run(adapter, [np.zeros(source.local_shape, np.float32)] * 4)
    assert {part.shape for part in ended} == {wanted.local_shape}


def test_shares_listed_in_another_order_than_the_mesh() -> None:
    mesh = DeviceMesh((0, 1, 2, 3), (("x0", 2), ("x1", 2)))
    swapped = Layout(mesh, ((8,),), ((),), (("x1", "add"), ("x0", "add")))
    check(Layout.replicated(mesh, (8,)), swapped)
    check(swapped, Layout.replicated(mesh, (8,)))


@pytest.mark.parametrize(
    ("source", "target", "shapes", "message"),
    [
        (
            "R1 V1 D(4)",
            "R1 V1 D(4) on [4 5 6 7]",
            ((8,), (8,)),
            r"\[0, 1, 2, 3\] are only in .* \[4, 5, 6, 7\] only",
        ),
        ("R1 V1 D(4)", "R1 V1 D(2)", ((8,), (8,)), "same devices"),
        ("R1 V1 D(4)", "R1 V1 D(2) on any", ((8,), (8,)), "is for 2 devices; .* lies on 4"),
        ("R1 V1 D(4)", "R1 V1 D(4)", ((8,), (4,)), r"of shape \(8,\) and .* of shape \(4,\); a layout changes no shape"),
    ],
)
def test_layouts_that_do_not_fit_each_other(source: str, target: str, shapes: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        find_adapter(parse_layout(source, shapes[0]), parse_layout(target, shapes[1]), 4)


# any order, in plans


def square(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.named_scope("a"):
        y = x @ w
    with jax.named_scope("b"):
        return jnp.cos(y)


@pytest.mark.parametrize("shuffle", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_a_grid_in_any_order_joins_the_others_order(shuffle: tuple[bool, bool]) -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        orders = [np.random.default_rng(i).permutation(devices) if s else devices for i, s in enumerate(shuffle)]
        a, b = graph["a/dot"], graph["b/cos"]
        (rows,), (columns,) = graph.rule(a).results[0]
        grid = graph.op_trans(a, Split(rows, 2), Split(columns, 4))
        graph.op_assign(grid, orders[0].reshape(2, 4), any_order=True)
        graph.op_assign(graph.op_trans(b, Split(graph.rule(b).results[0][0][0], 8)), orders[1])

    x, w = jax.random.normal(jax.random.key(0), (8, 4)), jax.random.normal(jax.random.key(1), (4, 8))
    step = jscaler.parallelize(policy, devices=8)(square)
    np.testing.assert_allclose(step(x, w), square(x, w), rtol=1e-5, atol=1e-6)


def test_an_op_without_inputs_in_any_order() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        op = graph.ops[-1]
        graph.op_assign(graph.op_trans(op, Split(graph.rule(op).results[0][0][0], 8)), devices, any_order=True)

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, jnp.arange(64.0).reshape(8, 8) * 2

    x = jnp.ones(3)
    run_ = jscaler.parallelize(policy, devices=8)(step)
    assert run_.lower(x).plan.program.outputs[1][1].local_shape == (1, 8)
    np.testing.assert_array_equal(run_(x)[1], step(x)[1])


# what a user may get wrong


@pytest.mark.parametrize("cluster", [5, b"a100", [CLUSTERS["a100"]]], ids=str)
def test_what_is_no_cluster(cluster: Any) -> None:
    with pytest.raises(PlanError, match=r"cluster is a Cluster, a built-in one's name or a \.toml file, not"):
        jscaler.parallelize("single", cluster=cluster)


def test_a_cluster_by_its_path() -> None:
    with pytest.raises(DeviceError, match=r"cannot read the cluster file missing\.toml"):
        jscaler.parallelize("single", cluster=Path("missing.toml"))


def test_a_cluster_without_devices() -> None:
    link = CLUSTERS["cpu"].inside
    with pytest.raises(DeviceError, match="cluster 'none' has 1 hosts of 0 devices; give 1 or more"):
        Cluster("none", 1, 0, link, link)


@pytest.mark.parametrize(("dtype", "message"), [(None, "not None"), ("float64", "needs jax.config.update")])
def test_reduce_dtypes_that_are_not_at_hand(dtype: Any, message: str) -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        graph.reduce_dtype(dtype)

    with pytest.raises(PlanError, match=message):
        jscaler.parallelize(policy, devices=2)(square).lower(jnp.ones((2, 2)), jnp.ones((2, 2)))
