"""Prices by tables against ``jscaler.cost``: exact where nothing is split, near where it is, and in its order."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest

import jscaler
from bench.predicted import gpt
from jscaler.clusters import find_cluster
from jscaler.errors import DeviceError, PlanError
from jscaler.estimate.prices import NoPriceError, Prices
from jscaler.ir import Graph
from jscaler.plans import by_name
from jscaler.stages import Captured, transform

SIZES = {"batch": 32, "hidden": 512, "heads": 8, "sequence": 512, "vocabulary": 8192, "layers": 8}
FORMS = {"stack": {"stacked": True}, "loop": {"stacked": False}}
CLUSTER = find_cluster("8xA100-80GB")
PLANS = (
    "data_parallel", "zero3", "megatron(dp=2, tp=4)", "megatron(dp=4, tp=2, sequence=True, zero=1)",
    "accumulate(4, zero2())", "accumulate(4, recompute_layers(megatron(dp=2, tp=4)))", "co_shard(4, plan=data_parallel())",
    "selective_recompute(data_parallel())", "pipeline(2, 8, plan=data_parallel())",
    "megatron(dp=1, tp=2, pp=4, microbatches=8)",
    "pipeline(4, 8, schedule='zb_h1', plan=recompute_layers(data_parallel()))",
    "pipeline(2, 8, plan=recompute_layers(data_parallel(), layers=2))",
)  # fmt: skip


@functools.cache
def graph(form: str) -> Graph:
    step, args = gpt(**{**SIZES, **FORMS[form]})
    return jscaler.parallelize("single", devices=1, donate_argnums=0)(step).graph(*args)


@functools.cache
def prices(form: str) -> Prices:
    return Prices(graph(form), CLUSTER)


@pytest.mark.parametrize("form", FORMS)
def test_one_device_is_exact(form: str) -> None:
    """Nothing is split: the tables are the program, each op with its own kernels; layers that one stands for are equal."""
    one = find_cluster("1xA100-80GB")
    found, cost = Prices(graph(form), one).of("single"), jscaler.cost(graph(form), "single", one)
    assert found.seconds == pytest.approx(cost.seconds.total, rel=1e-9 if form == "stack" else 2e-3)
    assert found.peak == pytest.approx(cost.memory.peak, rel=1e-7 if form == "stack" else 0.03)
    assert found.sending == 0.0


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize("form", FORMS)
def test_prices_are_near_costs(form: str) -> None:
    pairs = [(prices(form).of(plan), jscaler.cost(graph(form), plan, CLUSTER)) for plan in PLANS]
    seconds = [found.seconds / (cost.seconds.total or math.nan) for found, cost in pairs]
    peaks = [found.peak / cost.memory.peak for found, cost in pairs]
    assert all(0.9 < ratio < 1.1 for ratio in seconds), dict(zip(PLANS, seconds, strict=True))
    assert sum(abs(ratio - 1) for ratio in seconds) / len(seconds) < 0.05
    assert all(0.9 < ratio < 1.3 for ratio in peaks), dict(zip(PLANS, peaks, strict=True))
    for (found, cost), (other, dearer) in itertools.pairwise(pairs):
        apart = (cost.seconds.total or 0.0) / (dearer.seconds.total or math.nan)
        if not 0.85 < apart < 1.18:
            assert (found.seconds < other.seconds) == (apart < 1)


@pytest.mark.parametrize("form", FORMS)
def test_a_loop_costs_what_a_stack_costs(form: str) -> None:
    """Planning work does not grow with layers that are equal: one stands for the others."""
    tables = prices(form).tables
    assert len(tables.folded.graph.ops) < 400
    assert bool(tables.folded.counts) == (form == "loop")


def test_plans_share_what_they_have_in_common() -> None:
    found = Prices(graph("stack"), CLUSTER)
    for plan in ("zero1", "accumulate(2, zero1())", "accumulate(4, zero1())"):
        found.of(plan)
    tables = found.tables
    assert len(tables._skeletons) == len(tables._programs) == 1
    found.of("recompute_layers(zero1())")
    assert len(tables._skeletons) == len(tables._programs) == 2


def test_what_treats_equal_layers_in_several_ways_is_priced_layer_by_layer() -> None:
    def half(planner: Any, devices: Any) -> None:
        jscaler.plans.data_parallel()(planner, devices)
        layers = list(planner.select("block_[0-3]/mlp/*", kind="forward"))
        planner.recompute(layers[: len(layers) // 4])

    found = prices("loop")
    plan = transform(Captured.of(graph("loop")), half, 8, cost=CLUSTER)
    assert found._unfolded is not found.tables
    price, cost = found.of(plan), jscaler.cost(graph("loop"), half, CLUSTER)
    assert price.seconds == pytest.approx(cost.seconds.total, rel=0.05)
    assert price.peak == pytest.approx(cost.memory.peak, rel=0.1)


def test_stages_that_compute_the_same_part_of_their_layers_again_have_a_price() -> None:
    """It lies between those of none and of all; where parts differ, ``jscaler.cost`` has one."""
    found, staged = prices("stack"), "pipeline(2, 8, layers={}, plan={})"
    plan = staged.format([4, 4], "recompute_layers(data_parallel(), layers=1)")
    price, cost = found.of(plan), jscaler.cost(graph("stack"), plan, CLUSTER)
    assert price.seconds == pytest.approx(cost.seconds.total, rel=0.03)
    assert price.peak == pytest.approx(cost.memory.peak, rel=0.1)
    none, all_ = (found.of(staged.format([4, 4], own)) for own in ("data_parallel()", "recompute_layers(data_parallel())"))
    assert price.seconds == pytest.approx(0.75 * none.seconds + 0.25 * all_.seconds)
    with pytest.raises(NoPriceError, match="other parts of equal layers"):
        found.of(staged.format([5, 3], "recompute_layers(data_parallel(), layers=1)"))


def test_regions_of_several_layers_and_shards_that_say_when() -> None:
    """A region over two layers is none of the one that stands for them; a shard's word goes before the plan's."""

    def each_time(planner: Any, devices: Any) -> None:
        for tensor in (t for t in planner.graph.inputs if "params" in t.name and t.shape[0] % 8 == 0):
            planner.shard(tensor, 0, devices, each_time=True)
        jscaler.plans.data_parallel()(planner, devices)

    for plan in ("recompute_layers(every=4)", jscaler.plans.accumulate(4, each_time)):
        made = transform(Captured.of(graph("loop")), by_name(plan) if isinstance(plan, str) else plan, 8, cost=CLUSTER)
        found, cost = prices("loop").of(made), jscaler.cost(graph("loop"), made, CLUSTER)
        assert found.seconds == pytest.approx(cost.seconds.total, rel=0.1)
        assert found.peak == pytest.approx(cost.memory.peak, rel=0.15)


def test_what_has_no_price() -> None:
    with pytest.raises(NoPriceError, match="groups of 'interlaced' are not equal parts"):
        prices("stack").of("interlaced(4, 8)")
    with pytest.raises(NoPriceError, match="one micro-batch"):
        prices("stack").of("pipeline(2, 1)")
    with pytest.raises(PlanError):
        prices("stack").of("megatron(dp=3, tp=2)")
    nobody = dataclasses.replace(CLUSTER, device=None)
    with pytest.raises(DeviceError, match="does not say what its devices are"):
        Prices(graph("stack"), nobody)
