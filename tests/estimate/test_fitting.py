"""``jscaler.fit``: the first rung that fits, all of them, what is not legal, and what is missing."""

import dataclasses
import math
from typing import Any

import jax
import pytest
from report.stand_in import ROWS, arguments, step

import jscaler
from jscaler.clusters import Cluster, find_cluster
from jscaler.errors import DeviceError, UnknownNameError
from jscaler.estimate.fit_result import bars, stretches, verdict
from jscaler.estimate.fitting import Fit, batch_size
from jscaler.ir import Graph
from jscaler.plans.ladder import ladder

MIB = 1 << 20


@pytest.fixture(scope="module")
def graph() -> Graph:
    return jscaler.parallelize("single")(step).graph(*arguments())


def devices(count: int, memory: int) -> Cluster:
    return dataclasses.replace(find_cluster(f"{count}xH100-80GB"), memory=memory)


def peak(graph: Graph, plan: str, count: int) -> int:
    return jscaler.cost(graph, plan, devices(count, 0)).memory.peak


def test_the_first_that_fits_is_chosen_and_nothing_is_tried_behind_it(graph: Graph) -> None:
    needed = [peak(graph, plan, 4) for plan in ("data_parallel", "zero1", "zero3")]
    assert needed[0] > needed[1] > needed[2]
    for number, memory in enumerate(needed):
        found = jscaler.fit(graph, devices(4, memory))
        assert found.chosen is found.tried[-1]
        assert [one.plan for one in found.tried] == ["data_parallel", "zero1", "zero3"][: number + 1]
        assert [one.peak for one in found.tried] == needed[: number + 1]
        assert found.chosen.headroom == 0


def test_the_cheapest_of_all(graph: Graph) -> None:
    found = jscaler.fit(graph, devices(4, peak(graph, "zero1", 4)), ["zero3", "zero1", "data_parallel"], every=True)
    assert [one.fits for one in found.tried] == [True, True, False]
    assert found.chosen.plan == "zero1"  # a ladder in the wrong order is put right by what plans cost


def test_flops_are_those_of_all_devices_against_one(graph: Graph) -> None:
    found = jscaler.fit(graph, devices(4, 1), ["data_parallel", "single"])
    assert [one.flops_ratio for one in found.tried] == pytest.approx([1.0, 4.0])  # single copies everything


def test_what_is_not_legal_says_why(graph: Graph) -> None:
    found = jscaler.fit(graph, devices(3, 1 << 40), ["data_parallel", "megatron(dp=2, tp=2)", "single"])
    assert [one.cost is None for one in found.tried] == [True, True, False]
    assert "SplitError" in found.tried[0].why
    assert "into 3 parts" in found.tried[0].why
    assert "PlanError" in found.tried[1].why
    record = found.as_json()
    assert (record["fits"], record["chosen"], record["tried"][0]["fits"]) == (True, 2, False)
    assert "not legal (1)" in str(found)
    assert "(2) PlanError" in str(found)
    with pytest.raises(UnknownNameError, match="no plan named 'zero9'"):
        jscaler.fit(graph, devices(3, 1 << 40), ["single", "zero9"])


@pytest.mark.parametrize("share", [3, 200])
def test_what_is_far_too_large_is_not_worked_out(graph: Graph, share: int) -> None:
    on = devices(4, peak(graph, "data_parallel", 4) // share)
    found, every = jscaler.fit(graph, on), jscaler.fit(graph, on, ladder(4, ROWS))
    skipped = [one for one in found.tried if one.guess is not None]
    assert skipped
    costs = {one.plan: one for one in every.tried}
    assert not any(costs[one.plan].fits for one in skipped)
    assert "too large" in str(found)
    assert found.as_json()["tried"][found.tried.index(skipped[0])]["by_tables"]["peak"] > on.memory
    if every.chosen is not None:
        assert found.chosen is not None
        assert found.chosen.plan == every.chosen.plan
    assert found.smallest is not None
    assert every.smallest is not None
    assert found.smallest.peak <= 1.2 * every.smallest.peak  # the least is tried after all, if nothing fits


@pytest.mark.one_day_in(2)
def test_what_is_missing_and_what_would_help(graph: Graph) -> None:
    found = jscaler.fit(graph, devices(4, 30_000))
    assert found.chosen is None
    assert found.smallest is min((one for one in found.tried if one.cost), key=lambda one: one.peak)
    text = verdict(found)
    assert text.startswith(f"nothing fits: the least is {found.smallest.plan} with ")
    assert "a smaller --batch" in text
    assert "spread them over more devices" not in text
    state = jscaler.fit(graph, devices(1, 20_000), ["single"])
    assert "spread them over more devices, --target 2xH100-80GB" in verdict(state)
    near = jscaler.fit(graph, devices(1, int(peak(graph, "single", 1) / 1.1)), ["single"])
    assert "this may fit" in verdict(near)


def test_one_that_nearly_fits_is_an_estimate(graph: Graph) -> None:
    found = jscaler.fit(graph, devices(1, peak(graph, "single", 1)))
    assert "it may not fit" in verdict(found)
    assert found.chosen is not None
    sure = dataclasses.replace(found, tried=(dataclasses.replace(found.chosen, compiled_peak=5000),))
    assert "the peak is XLA's own" in verdict(sure)
    over = dataclasses.replace(found.chosen, compiled_peak=found.cluster.memory + 1)
    assert Fit(found.cluster, (over,)).chosen is None


def test_a_warning_of_a_plan_stands_with_it(graph: Graph) -> None:
    state, batch = {"w": jax.ShapeDtypeStruct((5, 7), "float32")}, {"x": jax.ShapeDtypeStruct((8, 5), "float32")}
    odd = jscaler.parallelize("single")(odd_step).graph(state, batch)
    found = jscaler.fit(odd, devices(4, 1 << 30), ["zero1"])
    assert found.chosen is not None
    assert "nothing is sharded" in found.chosen.why


def odd_step(state: Any, batch: Any) -> Any:
    loss, gradients = jscaler.value_and_grad(lambda p: ((batch["x"] @ p["w"]) ** 2).mean())(state)
    return {"w": state["w"] - gradients["w"]}, loss


def test_the_ladder_of_a_batch(graph: Graph) -> None:
    assert batch_size(graph) == ROWS
    found = jscaler.fit(graph, devices(1, 1), every=True)
    assert [one.plan for one in found.tried] == list(ladder(1, ROWS))


def test_clusters(graph: Graph) -> None:
    alone = jscaler.fit(graph, "V100-32GB").cluster
    assert (alone.num_devices, alone.memory) == (1, find_cluster("8xV100-32GB").memory)
    with pytest.raises(DeviceError, match="does not say how much memory"):
        jscaler.fit(graph, "cpu")
    with pytest.raises(UnknownNameError, match="no cluster named 'V100-33GB'"):
        jscaler.fit(graph, "V100-33GB")


def test_moments_add_up_by_kind(graph: Graph) -> None:
    held = jscaler.cost(graph, "zero1", devices(4, MIB)).held
    memory = held.memory
    assert all(sum(m.kinds.values()) == m.nbytes for m in held.timeline)
    fullest = max(held.timeline, key=lambda m: m.nbytes)
    assert fullest.kinds["parameter"] == memory.parameters
    assert fullest.kinds["optimizer"] == memory.optimizer
    assert fullest.kinds.get("gradient", 0) == memory.gradients
    assert fullest.kinds.get("activation", 0) == memory.activations
    assert fullest.kinds.get("temporary", 0) == memory.temporaries


def test_launches_are_kernels_and_collectives(graph: Graph) -> None:
    one, four = jscaler.cost(graph, "single", devices(1, MIB)), jscaler.cost(graph, "data_parallel", devices(4, MIB))
    collectives = sum(count for count, _ in four.sent.kinds.values())
    assert collectives > 0
    assert four.launches - collectives >= one.launches > 0
    assert one.as_json()["launches"] == one.launches


def test_bars_keep_the_fullest_moment_of_each_stretch() -> None:
    assert bars([0, 1, 7, 2, 8, 9], 8, width=3).plain == "▁▇▲"
    assert bars([4], 8).plain == "▄"
    parts = stretches(10, 4)
    assert [i for part in parts for i in part] == list(range(10))
    assert {len(part) for part in parts} <= {math.floor(10 / 4), math.ceil(10 / 4)}
