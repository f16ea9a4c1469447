"""``bench.gpu``: predictions beside what one H200 took, and a step that is really measured."""

import dataclasses

import numpy as np
import pytest

from bench import gpu
from jscaler.clusters import find_cluster
from jscaler.xla_model.work import KernelWork, Work

H200 = find_cluster("1xH200")


@pytest.mark.one_day_in(4)
def test_what_was_measured_is_predicted_and_in_order() -> None:
    *rows, pairs = gpu.stored(quick=True)
    assert len(rows) == 5
    assert all(row["value"] <= row["bounds"]["value"] == 0.15 for row in rows)
    assert (pairs["value"], pairs["bounds"]) == (0, {"value": 0})
    assert all(row["at peaks"] < row["predicted"] for row in rows)


def test_a_pair_out_of_order_is_named() -> None:
    case = next(c for c in gpu.cases() if c.quick)
    one = gpu.estimated(case, H200)
    assert H200.device is not None
    slow = dataclasses.replace(one, case=dataclasses.replace(case, plan="slow"), work=Work(one.work.kernels * 2))
    *_, pairs = gpu.compared([(one, 2.0, {}), (slow, 1.0, {})], H200.device)
    assert (pairs["value"], pairs["plan"]) == (1, f"{case.plan} and slow of {case.shown}")
    *_, pairs = gpu.compared([(one, 1.0, {}), (slow, 1.02, {})], H200.device)
    assert pairs["value"] == 0


def test_a_fit_finds_the_device_that_made_the_seconds() -> None:
    assert H200.device is not None
    assert H200.device.reached is not None
    other = dataclasses.replace(H200.device.reached, bandwidth=3.1e12, launch=4e-6, half_row=7000.0)
    device = dataclasses.replace(H200.device, reached=other)
    draws = np.random.default_rng(0)
    works = [
        Work(tuple(KernelWork("", (), int(n), int(n), 10, row) for n in draws.integers(1e4, 1e9, 5)))
        for row in (0, 0, 0, 1024, 4096, 16384)
    ]
    found = gpu.fitted({work: work.seconds(device) for work in works}, H200.device).reached
    assert found is not None
    assert found.bandwidth == pytest.approx(3.1e12, rel=1e-3)
    assert found.launch == pytest.approx(4e-6, rel=1e-2)
    assert found.half_row == pytest.approx(7000, rel=1e-2)


@pytest.mark.one_day_in(8)
def test_a_step_is_measured_beside_jit_and_its_numbers_are_those_of_one_device() -> None:
    seconds, row = gpu.measured(gpu.estimated(next(c for c in gpu.cases() if c.quick), H200))
    assert 0 < seconds < 60
    assert row["memory"] > 0
    assert 0 < row["jit"] < 60
    assert gpu.numbers("accumulate(2)") <= gpu.NUMBERS
