"""The core of attention computed again around other plans, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
from of_the_day import of_the_day
from plan_steps import assert_same_numbers, gpt_nnx, mlp, planned
from test_recompute_layers import more, stacked, unrolled

from jscaler import PlanError, UnknownNameError
from jscaler.plans import by_name, selective_recompute


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(
    ("inner", "make", "devices"),
    of_the_day(
        [
            ("single()", gpt_nnx, 1),
            ("megatron(dp=2, tp=2, sequence=True)", stacked, 4),
        ],
        2,
    ),
)
def test_numbers_are_those_of_one_device(inner: str, make: Callable[..., Any], devices: int) -> None:
    assert_same_numbers(by_name(f"selective_recompute({inner})"), make, devices)


@pytest.mark.parametrize("make", [unrolled, stacked])
@pytest.mark.parametrize("inner", of_the_day(["single()", "tensor_parallel()", "megatron(dp=2, tp=2, sequence=True)"]))
def test_one_dot_and_the_softmax_run_once_more_and_nothing_is_sent(inner: str, make: Callable[..., Any]) -> None:
    devices = 1 if inner == "single()" else 4
    assert more(f"selective_recompute({inner})", inner, make, devices) == {"dot_general": 2}


def test_a_core_lies_between_two_products_of_activations() -> None:
    for make in (unrolled, gpt_nnx):
        graph = planned(selective_recompute(), make(), 1).source
        cores: dict[str, list[str]] = {}
        for op in graph.forward():
            if op.remat:
                cores.setdefault(op.remat[0].name, []).append(op.path.rpartition("/")[2])
        assert set(map(tuple, cores.values())) == {("dot", "exp", "random_bits", "dot.1")}


def test_without_a_softmax_it_says_so() -> None:
    with pytest.raises(PlanError, match="no softmax between two products of activations"):
        planned(selective_recompute(), mlp(), 1)
    with pytest.raises(UnknownNameError):
        planned(selective_recompute(on="*/core/*"), unrolled(), 1)


def test_ops_that_a_pattern_names_are_the_core_of_their_module() -> None:
    graph = planned(selective_recompute(on="*/mlp/tanh"), unrolled(), 1).source
    assert [op.path for op in graph.forward() if op.remat] == ["block_0/mlp/tanh", "block_1/mlp/tanh"]
