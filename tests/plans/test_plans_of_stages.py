"""Stages with plans of their own: the numbers of one device, and what their plans say of each."""

from typing import Any

import pytest
from of_the_day import of_the_day
from plans.test_stacked_pipeline import UP, check_plan, inputs, make_state, step

import jscaler
from jscaler import PlanError, plans
from jscaler.primitives import Plan
from jscaler.primitives.plan import Recompute, Shard

CASES = {  # plan -> devices
    f"pipeline([1, 4], 4, plan=[recompute_layers(zero1('x')), megatron(tp=2, {UP}, vocab=False, batch='x')], batch='x')": 5,
    "pipeline(2, 4, plan=[zero1('x'), recompute_layers(zero2('x'))], batch='x')": 4,
    "pipeline([2, 1], 4, plan=[recompute_layers(zero3('x')), single()], layers=[3, 1], batch='x')": 3,
    f"pipeline(2, 4, 'gpipe', plan=[data_parallel('x'), tensor_parallel({UP})], at=['0/layers[1:]'], batch='x')": 4,
    "pipeline(2, 4, plan=[recompute_layers(zero1('x'), layers=2), recompute_layers(zero2('x'), layers=1)], "
    "layers=[3, 1], batch='x')": 4,
    "pipeline(2, 4, plan=[recompute_layers(zero1('x'), layers=1), zero1('x')], batch='x')": 4,
    "pipeline([2, 1], 4, 'zb_v', plan=[zero1('x'), recompute_layers(data_parallel('x'))], batch='x')": 3,
}


@pytest.mark.parametrize("name", of_the_day(CASES, 3, always=[list(CASES)[i] for i in (0, 1, 4)]))
def test_stages_with_other_plans_have_the_numbers_of_one_device(name: str) -> None:
    check_plan(name, CASES[name])


def planned(name: str, devices: int = 4) -> Plan:
    train = jscaler.parallelize(plans.by_name(name), devices=devices)(step)
    return train.lower(make_state(4), inputs()).plan.plan


def test_each_stage_does_what_its_plan_says() -> None:
    """What is computed again, and when gradients are reduced, is a stage's own."""
    found = planned("pipeline(2, 4, plan=[zero1('x'), recompute_layers(zero2('x'))], batch='x')")
    again = [op for decision in found.decisions if isinstance(decision, Recompute) for op in decision.ops]
    assert again
    assert all("[2:4]" in op for op in again)
    shards = [(d.leaf, d.each_time) for d in found.decisions if isinstance(d, Shard) and "layers" in d.leaf]
    assert {each for leaf, each in shards if "[0:2]" in leaf} == {False}
    assert {each for leaf, each in shards if "[2:4]" in leaf} == {True}
    assert not found.accumulation.each_time
    alike = planned("pipeline(2, 4, plan=[zero2('x'), zero2('x')], batch='x')")
    assert Plan.from_json(found.to_json()) == found != alike


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([plans.single()], "plan is a plan, or a list of one for each of 2 groups"),
        ([plans.single(), "single"], "plan is a plan, or a list of one for each of 2 groups"),
        ([], "plan is a plan, or a list of one for each of 2 groups"),
    ],
)
def test_plans_that_are_not_one_for_each_stage(given: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plans.pipeline(2, 2, plan=given)


def test_a_list_of_plans_is_for_stages_alone() -> None:
    with pytest.raises(PlanError, match="its argument 'plan' is a plan or None"):
        plans.by_name("accumulate(2, plan=[zero1(), zero2()])")
    with pytest.raises(PlanError, match="its argument 'layers' takes no plan, such as 'zero1'"):
        plans.by_name("pipeline(2, 2, layers=[zero1(), 2])")
