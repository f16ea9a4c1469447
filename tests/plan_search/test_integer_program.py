"""The integer program against closed forms, and against all choices tried one after another."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from brute import best
from small_models import drawn, graph_of, links_alone, mlp, splits_products

import jscaler
from bench.plan_program import columns_and_rows
from bench.predicted import gpt
from jscaler.clusters import Cluster, find_cluster
from jscaler.estimate.prices import Prices
from jscaler.plan_search.program import fill
from jscaler.plan_search.program.fill import program_of
from jscaler.plan_search.program.realised import policy_of
from jscaler.primitives.plan import Recompute
from jscaler.spaces import any_split, space_of
from jscaler.stages import transform

ALPHA = 1e-3  # relative: what a scalar loss adds, and the least that a step takes


def all_reduce(nbytes: float, devices: int, bandwidth: float = 1e9) -> float:
    return 2 * (devices - 1) / devices * nbytes / bandwidth


@pytest.mark.parametrize(("layers", "batch", "hidden", "devices"), [(4, 1024, 128, 4), (6, 128, 1024, 4), (4, 768, 96, 3)])
def test_layers_on_one_axis(layers: int, batch: int, hidden: int, devices: int) -> None:
    """Many rows: data parallel, L gradients are reduced. Wide layers: columns and rows, L - 1 activations are."""
    prices = Prices(mlp(layers, batch, hidden), links_alone(1, devices))
    found = fill(prices, splits_products, (devices,))
    rows, wide = layers * all_reduce(4 * hidden**2, devices), (layers - 1) * all_reduce(4 * batch * hidden, devices)
    assert found.seconds == pytest.approx(min(rows, wide), rel=ALPHA)
    assert found.proved
    assert found.bound == pytest.approx(found.seconds)
    plan = transform(prices.captured, found.policy, devices, cost=prices.cluster)
    assert prices.of(plan).seconds == pytest.approx(found.seconds, rel=ALPHA)


@pytest.mark.parametrize("mesh", [(4, 8), (8, 4), (3, 4)])
def test_layers_on_two_axes(mesh: tuple[int, int]) -> None:
    """Rows over hosts, whose links are slow, and columns within each: L AR0(4 H² / m1) + (L - 1) AR1(4 B H / m0)."""
    layers, batch, hidden = 4, 192, 384

    def rows_outside(planner: Any, devices: Any) -> None:
        for op in planner.forward():
            copies = "never" if "dot" in op.path else "any"
            planner.op_trans(op, any_split(0, "batch", copies=copies), any_split(1, never="batch", copies=copies))

    slow = 1e7
    prices = Prices(mlp(layers, batch, hidden), links_alone(*mesh, between=slow))
    found = fill(prices, rows_outside, mesh)
    gradients = layers * all_reduce(4 * hidden**2 / mesh[1], mesh[0], slow)
    activations = (layers - 1) * all_reduce(4 * batch * hidden / mesh[0], mesh[1])
    assert found.seconds == pytest.approx(gradients + activations, rel=ALPHA)
    assert fill(prices, splits_products, mesh).seconds <= found.seconds * (1 + 1e-6)


def test_regions_that_overlap_with_what_stands_between_are_one() -> None:
    """``p`` is read again far behind, and ``q`` stands between, whose own region goes on beside that."""

    def loss(params: Any, x: Any) -> Any:
        with jax.named_scope("p"):
            p = jnp.sin(x @ params[0])
        with jax.named_scope("q"):
            q = jnp.cos(p @ params[1])
        with jax.named_scope("t"):
            t = q @ params[2]
        return jnp.mean((p + q @ params[3]) @ params[4] + t)

    def step(params: Any, x: Any) -> Any:
        value, grads = jscaler.value_and_grad(loss)(params, x)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    prices = Prices(graph_of(step, [square] * 5, square), links_alone(1, 2))
    policy = policy_of(prices.tables.folded, (2,), {}, {}, {"p/sin", "q/cos"}, set(), in_parts=False)
    plan = transform(prices.captured, policy, 2, cost=prices.cluster)
    (region,) = (one for one in plan.decisions if isinstance(one, Recompute))
    assert {"p/sin", "q/dot", "q/cos", "t/dot"} <= {*region.ops}


def cluster_of(seed: int, devices: int) -> Cluster:
    if seed % 2:
        return links_alone(1, devices)
    return dataclasses.replace(find_cluster("8xA100-80GB"), devices_per_host=devices)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5, 7, 9, 11])  # others take seconds; bench.plan_program has 200
def test_nothing_is_better_than_what_is_found(seed: int) -> None:
    mesh = [(4,), (2,), (3,), (2, 2)][seed % 4]
    prices = Prices(drawn(seed, 2 if len(mesh) == 1 else 1), cluster_of(seed, math.prod(mesh)))
    program = program_of(prices, space_of(splits_products, prices.graph, mesh), mesh, 1)
    found = program.solve(20.0, 0.0)
    assert found is not None
    assert found.objective == pytest.approx(best(program)[0], rel=1e-6)


def test_equal_inputs_give_equal_plans() -> None:
    def found() -> str:
        prices = Prices(drawn(3), links_alone(1, 4))
        plan = transform(prices.captured, fill(prices, None, (2, 2)).policy, 4, cost=prices.cluster)
        return str(plan.decisions)

    assert found() == found()


SIZES = {"batch": 32, "hidden": 512, "heads": 8, "sequence": 512, "vocabulary": 8192, "layers": 8}


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize(("stacked", "share"), [(True, None), (False, 0.6)])
def test_a_found_plan_costs_what_is_said(stacked: bool, share: float | None) -> None:
    """A stack and a Python loop, with and without a limit: the program's seconds and bytes are those of the plan."""
    step, args = gpt(**{**SIZES, "stacked": stacked, "dropout": 0.0})
    prices = Prices(graph_of(step, *args), find_cluster("8xA100-80GB"))
    most = None if share is None else share * prices.of("accumulate(2, data_parallel())").peak
    found = fill(prices, columns_and_rows, (4, 2), 2, memory=most)
    cost = jscaler.cost(prices.graph, found.policy, prices.cluster)
    assert found.seconds == pytest.approx(found.price.seconds, rel=0.1)
    assert found.peak == pytest.approx(found.price.peak, rel=0.15)
    assert found.price.seconds == pytest.approx(cost.seconds.total, rel=0.05)
    assert found.bound <= found.seconds * (1 + 1e-9)
    assert share is None or found.price.peak <= (most or 0.0)
