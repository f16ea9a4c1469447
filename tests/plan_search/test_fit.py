"""``jscaler.fit``: the fastest that fits, all others, what is not legal, and what is missing."""

import dataclasses
from typing import Any

import jax
import pytest
from report.stand_in import ROWS, arguments, step

import jscaler
from jscaler import Found
from jscaler import spaces as s
from jscaler.clusters import Cluster, find_cluster
from jscaler.errors import DeviceError, UnknownNameError
from jscaler.ir import Graph
from jscaler.plan_search.found import found_table, verdict
from jscaler.plans import by_name
from jscaler.text.tables import printed

PLANS = ["zero3", "zero1", "data_parallel"]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return jscaler.parallelize("single")(step).graph(*arguments())


def devices(count: int, memory: int) -> Cluster:
    return dataclasses.replace(find_cluster(f"{count}xH100-80GB"), memory=memory)


def peak(graph: Graph, plan: str, count: int) -> int:
    return jscaler.cost(graph, plan, devices(count, 0)).memory.peak


def text(found: Found) -> str:
    return "\n".join(verdict(found))


def test_the_fastest_of_those_that_fit_comes_first_then_others_then_what_does_not(graph: Graph) -> None:
    needed = sorted(peak(graph, plan, 4) for plan in PLANS)
    costs = {plan: jscaler.cost(graph, plan, devices(4, 0)) for plan in PLANS}
    for number, memory in enumerate(needed):
        found = jscaler.fit(graph, devices(4, memory), PLANS)
        able = [plan for plan in PLANS if costs[plan].memory.peak <= memory]
        assert len(able) == number + 1
        order = [*sorted(able, key=lambda plan: costs[plan].seconds.total or 0.0)]
        assert [one.text for one in found.candidates][: number + 1] == order
        assert [found.fits(one) for one in found.candidates] == [True] * len(able) + [False] * (len(PLANS) - len(able))
        assert found.chosen is found.candidates[0]
        assert all(one.cost is not None and one.peak == costs[one.text].memory.peak for one in found.candidates)
        assert max(map(found.headroom, found.candidates)) == memory - needed[0]


@pytest.mark.parametrize("share", [1, 3, 200])
def test_what_cannot_be_the_fastest_is_not_worked_out_and_the_answer_is_that_of_all(graph: Graph, share: int) -> None:
    on = devices(4, peak(graph, "data_parallel", 4) // share)
    at = s.Setting(4, 4, 8)  # of the points those of few micro-batches
    few = [point.text for space in s.memory() for point in space.points(at) if not point.text.startswith("pipeline")]
    found, every = jscaler.fit(graph, on), jscaler.fit(graph, on, [one for one in few if "accumulate" not in one])
    assert [one for one in found.candidates if one.cost is None]
    assert all(one.cost is not None for one in every.candidates)
    if every.chosen is not None:
        assert found.chosen is not None
        assert found.chosen.seconds <= 1.002 * every.chosen.seconds
    elif found.chosen is None:
        assert found.smallest is not None
        assert every.smallest is not None
        assert found.smallest.peak <= 1.2 * every.smallest.peak
        assert found.smallest.cost is not None  # it is worked out, so that what is missing is told


def test_flops_are_those_of_all_devices_against_one(graph: Graph) -> None:
    found = jscaler.fit(graph, devices(4, 1 << 30), ["data_parallel", "single"])
    assert {one.text: one.flops_ratio for one in found.candidates} == pytest.approx({"data_parallel": 1.0, "single": 4.0})


def test_the_record_and_the_table_have_what_each_needs(graph: Graph) -> None:
    found = jscaler.fit(graph, devices(4, peak(graph, "zero1", 4)), PLANS)
    first, *_, last = found.as_json()["candidates"]
    cost = jscaler.cost(graph, first["plan"], devices(4, 0))
    assert (first["fits"], last["fits"], last["headroom"] < 0) == (True, False, True)
    assert sum(first["parts"].values()) == first["peak"] == first["predicted_peak"] == cost.memory.peak
    assert (first["flops"], first["launches"], first["sent"]) == (cost.flops, cost.launches, cost.sent.total)
    lines = printed([found_table(found)], 240)
    assert next(line.split()[1] for line in lines.splitlines() if "chosen" in line) == first["plan"]
    assert all(name in lines for name in ("memory over the step", "FLOPs", "1.00×", "▲"))


def test_what_is_not_legal_says_why(graph: Graph) -> None:
    found = jscaler.fit(graph, devices(3, 1 << 40), ["data_parallel", "megatron(dp=2, tp=2)", "single"])
    assert [one.text for one in found.candidates] == ["single"]
    assert "into 3 parts" in found.illegal["data_parallel"]
    assert "PlanError" in found.illegal["megatron(dp=2, tp=2)"]
    assert "not legal: data_parallel: SplitError" in str(found)
    with pytest.raises(UnknownNameError, match="no plan named 'zero9'"):
        jscaler.fit(graph, devices(3, 1 << 40), ["single", "zero9"])
    none = jscaler.fit(graph, devices(3, 1 << 40), ["data_parallel"])
    assert "none of the plans is legal" in str(none)


def test_what_is_missing_and_what_would_help(graph: Graph) -> None:
    found = jscaler.fit(graph, devices(4, 30_000), PLANS)
    assert found.chosen is None
    assert found.smallest is min(found.candidates, key=lambda one: one.peak)
    assert text(found).startswith(f"nothing fits: the least is {found.smallest.text} with ")
    assert "a smaller --batch" in text(found)
    assert "spread them over more devices" not in text(found)
    state = jscaler.fit(graph, devices(1, 20_000), ["single"])
    assert "spread them over more devices, --target 2xH100-80GB" in text(state)
    near = jscaler.fit(graph, devices(1, int(peak(graph, "single", 1) / 1.1)), ["single"])
    assert "this may fit" in text(near)


def test_one_that_nearly_fits_is_an_estimate(graph: Graph) -> None:
    found = jscaler.fit(graph, devices(1, peak(graph, "single", 1)), ["single"])
    assert "it may not fit" in text(found)
    assert found.chosen is not None
    sure = dataclasses.replace(found, chosen=dataclasses.replace(found.chosen, compiled_peak=5000))
    assert "the peak is XLA's own" in text(sure)


def test_a_warning_of_a_plan_stands_with_it(graph: Graph) -> None:
    state, batch = {"w": jax.ShapeDtypeStruct((5, 7), "float32")}, {"x": jax.ShapeDtypeStruct((8, 5), "float32")}
    odd = jscaler.parallelize("single")(odd_step).graph(state, batch)
    found = jscaler.fit(odd, devices(4, 1 << 30), ["zero1"])
    assert found.chosen is not None
    assert "nothing is sharded" in found.chosen.why
    assert "nothing is sharded" in str(found)


def odd_step(state: Any, batch: Any) -> Any:
    loss, gradients = jscaler.value_and_grad(lambda p: ((batch["x"] @ p["w"]) ** 2).mean())(state)
    return {"w": state["w"] - gradients["w"]}, loss


def test_the_space_of_memory_has_plans_of_one_device_or_of_several() -> None:
    one, four = ([p.text for space in s.memory() for p in space.points(s.Setting(n, n, 8))] for n in (1, 4))
    assert one[:3] == ["single()", "selective_recompute(plan=single())", "recompute_layers(plan=single())"]
    assert next(text for text in one if text.startswith("accumulate")) == "accumulate(2, plan=single())"
    assert not any("zero" in text or "pipeline" in text for text in one)
    assert not any("single" in text for text in four)
    assert "accumulate(2, plan=recompute_layers(plan=zero1()))" in four
    assert "co_shard(8, plan=megatron(dp=2, tp=2, sequence=True, zero=3))" in four
    assert "pipeline(2, 8, plan=recompute_layers(plan=megatron(dp=1, tp=2, zero=1)))" in four
    assert all(by_name(text) for text in (*one, *four))


def test_every_plan_of_the_space(graph: Graph) -> None:
    found = jscaler.fit(graph, devices(1, 1), every=True)
    at = s.Setting(1, 1, ROWS, layers=3)
    points = {point.text.removesuffix("()") for space in s.memory() for point in space.points(at)}
    assert {one.text for one in found.candidates} | {*found.illegal} == points
    assert all(one.cost is not None for one in found.candidates)


def test_clusters(graph: Graph) -> None:
    alone = jscaler.fit(graph, "V100-32GB", ["single"]).cluster
    assert (alone.num_devices, alone.memory) == (1, find_cluster("8xV100-32GB").memory)
    with pytest.raises(DeviceError, match="does not say what its devices are"):
        jscaler.fit(graph, "cpu")
    with pytest.raises(UnknownNameError, match="no cluster named 'V100-33GB'"):
        jscaler.fit(graph, "V100-33GB")
