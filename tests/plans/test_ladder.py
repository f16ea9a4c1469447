"""The ladder: every rung is a plan that there is, and the tables are in the order of what they cost."""

import re

import pytest

import jscaler
from jscaler import plans
from jscaler.commands.built_in_job import built_in_job
from jscaler.plans.ladder import ONE_DEVICE, SAVED, ladder
from jscaler.training.planned_job import PlannedJob


@pytest.mark.parametrize("devices", [1, 2, 8, 12])
@pytest.mark.parametrize("batch", [1, 8])
def test_every_rung_is_a_plan_that_there_is(devices: int, batch: int) -> None:
    rungs = ladder(devices, batch)
    assert len(set(rungs)) == len(rungs) >= len(SAVED) - 4  # fewer, where there is one sequence
    for rung in rungs:
        assert callable(plans.by_name(rung)), rung
        assert "{" not in rung


def test_one_device_and_several() -> None:
    assert ladder(1)[: len(ONE_DEVICE)] == ONE_DEVICE
    assert ladder(8)[:3] == ("data_parallel", "zero1", "zero3")
    assert not set(ladder(1)) & set(ladder(8))
    assert "recompute_layers(zero1())" in ladder(8)
    assert not any("single()" in rung for rung in ladder(1, 4))


def test_micro_batches_are_of_what_a_row_of_devices_has() -> None:
    assert [rung for rung in ladder(1, 4) if rung.startswith("accumulate")][:3] == [
        "accumulate(2)", "accumulate(4)", "accumulate(4, recompute_layers())",
    ]  # fmt: skip
    several = [rung for rung in ladder(4, 16) if rung.startswith("accumulate(")]
    assert "accumulate(4, zero2())" in several
    assert "accumulate(8, zero2())" not in several
    assert "accumulate(8, megatron(dp=2, tp=2))" in several
    assert not any("zero2" in rung for rung in ladder(4, 16) if rung not in several)
    assert not any("accumulate" in rung for rung in ladder(8, 8) if "megatron" not in rung)


def test_grids_use_all_devices_and_none_is_split_that_there_is_not() -> None:
    found = {tuple(map(int, grid)) for rung in ladder(12) for grid in re.findall(r"dp=(\d+), tp=(\d+)", rung)}
    assert found == {(6, 2), (4, 3), (3, 4), (2, 6), (1, 12)}
    assert not any("dp=1," in rung and "zero" in rung for rung in ladder(12))


def test_stages_have_micro_batches_of_what_their_rows_have() -> None:
    staged = [rung for rung in ladder(8, 16) if "pipeline" in rung or "pp=" in rung]
    assert staged[:3] == [f"pipeline({p}, {m}, plan=data_parallel())" for p, m in ((2, 4), (4, 8), (8, 16))]
    assert "megatron(dp=2, tp=2, pp=2, microbatches=8)" in staged
    assert "pipeline(2, 8, plan=recompute_layers(megatron(dp=2, tp=2)))" in staged
    assert not [rung for rung in ladder(8, 1) if "pipeline" in rung or "pp=" in rung]
    assert not [rung for rung in ladder(1, 16) if "pipeline" in rung]


@pytest.mark.one_day_in(2)
def test_the_order_is_that_of_flops() -> None:
    job = PlannedJob(built_in_job("gpt", "nano", 2, dtype="f32", stacked=True), "single", 1)
    found = jscaler.fit(job.step.graph(*job.arguments()), "H100-80GB", every=True)
    assert [one.plan for one in found.tried if one.cost is None] == [p for p in ladder(1, 2) if re.search("(8|16|32)", p)]
    ratios = {one.plan: one.flops_ratio for one in found.tried}
    assert ratios.pop("single") == 1.0
    assert ratios["accumulate(2)"] == 1.0 < ratios["selective_recompute"] < ratios["recompute_layers"] < 1.4
    assert found.chosen is found.tried[0]
