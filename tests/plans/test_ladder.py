"""The ladder: every rung is a plan that there is, and the tables are in the order of what they cost."""

import re

import pytest

from jscaler import plans
from jscaler.plans.ladder import Rung, ladder


@pytest.mark.parametrize("devices", [1, 2, 8, 12])
@pytest.mark.parametrize("batch", [1, 8])
def test_every_rung_is_a_plan_that_there_is(devices: int, batch: int) -> None:
    for rung in ladder(devices, batch):
        assert callable(plans.by_name(rung.plan)), rung
        assert "{" not in rung.plan


def test_one_device_and_several() -> None:
    assert ladder(1)[0] == Rung("single")
    assert ladder(8)[:2] == (Rung("data_parallel"), Rung("zero1"))
    assert not {rung.plan for rung in ladder(1)} & {rung.plan for rung in ladder(8)}


def test_grids_use_all_devices_and_no_column_is_split_that_there_is_not() -> None:
    found = {tuple(map(int, grid)) for rung in ladder(12) for grid in re.findall(r"dp=(\d+), tp=(\d+)", rung.plan)}
    assert found == {(6, 2), (4, 3), (3, 4), (2, 6), (1, 12)}
    assert not any("dp=1," in rung.plan and "zero" in rung.plan for rung in ladder(12))


def test_a_rung_stands_once() -> None:
    rungs = ladder(8, 8)
    assert len(set(rungs)) == len(rungs)
