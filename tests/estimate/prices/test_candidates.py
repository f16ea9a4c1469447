"""A plan taken apart: what it says of space is one, whatever it says of time and of stages."""

import functools
from typing import Any

import pytest

import jscaler
from bench.predicted import gpt
from jscaler.estimate.prices.candidate import Candidate, LayersDifferError
from jscaler.estimate.prices.folded import Folded, folded
from jscaler.plans import by_name
from jscaler.stages import Captured, transform

SIZES = {"batch": 16, "hidden": 64, "heads": 4, "sequence": 16, "vocabulary": 64, "layers": 8}


@functools.cache
def captured(stacked: bool) -> Captured:
    step, args = gpt(**SIZES, stacked=stacked)
    return Captured.of(jscaler.parallelize("single")(step).graph(*args))


@functools.cache
def short(stacked: bool) -> Folded:
    return folded(captured(stacked))


def candidate(plan: str, stacked: bool, devices: int = 4) -> Candidate:
    return Candidate.of(transform(captured(stacked), by_name(plan), devices), short(stacked))


@pytest.mark.parametrize("stacked", [True, False])
def test_time_and_stages_are_no_part_of_space(stacked: bool) -> None:
    inner = candidate("megatron(dp=1, tp=2)", stacked, 2)
    parts = candidate("accumulate(4, megatron(dp=1, tp=2))", stacked, 2)
    staged = candidate("megatron(dp=1, tp=2, pp=2, microbatches=4)", stacked)
    assert inner.space == parts.space
    assert inner.microbatches == 1
    assert parts.microbatches == staged.microbatches == 4
    assert not inner.cuts
    assert {cut.parts for cuts in parts.cuts.values() for cut in cuts} == {4}
    assert (staged.num_devices, staged.groups, staged.stages) == (2, ((0, 1), (2, 3)), (0, 1))
    assert {*map(str, inner.space)} >= {*map(str, staged.space)}


@pytest.mark.parametrize("stacked", [True, False])
def test_stages_have_parts_of_what_stands_for_their_layers(stacked: bool) -> None:
    found = candidate("pipeline(4, 8)", stacked)
    of_layers = [own for own in found.shares.values() if len(own) > 1]
    assert of_layers
    assert all(sum(own.values()) == pytest.approx(1) for own in found.shares.values())
    layers = {stage: own.get(stage, 0.0) for own in of_layers for stage in range(4)}
    assert list(layers.values()) == ([0.25] * 4 if stacked else [0.2, 0.4, 0.4, 0.0])  # the first and the last stay


def test_layers_that_differ_are_told_apart() -> None:
    def policy(planner: Any, devices: Any) -> None:
        for op in planner.select("block_3/mlp/up/dot", kind="forward"):
            planner.op_assign(planner.op_trans(op, jscaler.Split("a", 4)), devices)

    plan = transform(captured(False), policy, 4)
    with pytest.raises(LayersDifferError, match="in several ways"):
        Candidate.of(transform(captured(False), lambda g, d: (policy(g, d), _other(g, d))[0], 4), short(False))
    assert Candidate.of(plan, Folded(captured(False).graph)).space


def _other(planner: Any, devices: Any) -> None:
    for op in planner.select("block_4/mlp/up/dot", kind="forward"):
        planner.op_assign(planner.op_trans(op, jscaler.Split("b", 4)), devices)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("recompute_layers(data_parallel())", "other parts of equal layers again"), ("zero1()", "in some of them"),
        ("single()", "in some of them"),
    ],
)  # fmt: skip
def test_stages_with_other_plans_are_not_taken_for_all(other: str, why: str) -> None:
    """A decision on some ranges of a stack is none on all of them."""
    with pytest.raises(LayersDifferError, match=why):
        candidate(f"pipeline(2, 4, plan=[data_parallel(), {other}])", stacked=True)


def test_some_layers_of_each_stage_are_a_part_of_all() -> None:
    found = candidate("pipeline(2, 4, 'interleaved', plan=recompute_layers(layers=1))", stacked=True)
    assert found.again == pytest.approx(0.5)
    assert found.without is not None
    assert not Candidate.of(found.without, short(True)).structure
    with pytest.raises(LayersDifferError, match="other parts of equal layers"):
        candidate("pipeline(2, 4, plan=recompute_layers(layers=1), layers=[2, 6])", stacked=True)
