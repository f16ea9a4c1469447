"""Megatron's split: two all-reduces of activations per layer in the forward pass, two in the backward pass."""

import optax
import pytest
from plan_steps import COLUMNS, activations, assert_same_numbers, collectives, gpt, gpt_nnx, mlp, planned

from jscaler.errors import PlanError, SplitError, UnknownNameError
from jscaler.plans import tensor_parallel


@pytest.mark.smoke
def test_two_all_reduces_each_way_per_layer() -> None:
    plan = planned(tensor_parallel(), gpt(), 4)
    assert activations(plan) == {"all_reduce": 4}
    assert [k for k, t in collectives(plan) if t.shape] == ["all_reduce"] * 4  # and no gradient is sent at all


def test_the_same_in_nnx() -> None:
    assert activations(planned(tensor_parallel(), gpt_nnx(), 4)) == {"all_reduce": 4}


def test_a_stack_of_layers_is_split_inside_its_loop() -> None:
    plan = planned(tensor_parallel(), gpt(stacked=True, layers=3), 4)
    assert activations(plan) == {"all_reduce": 4}  # in the loop's body, which runs three times
    kernels = [layout for t, layout in plan.completed.inputs.items() if t.name.endswith("/query/kernel")]
    assert [layout.local_shape for layout in kernels] == [(3, 16, 1, 4)] * 2


def test_of_an_mlp_one_per_pair_and_none_into_the_first() -> None:
    plan = planned(tensor_parallel(COLUMNS), mlp(), 8)
    assert activations(plan) == {"all_reduce": 3}


def test_optimizer_state_lies_with_its_parameter() -> None:
    plan = planned(tensor_parallel(), gpt(optax.adamw(0.1)), 4)
    inputs = {t.name: layout for t, layout in plan.completed.inputs.items()}
    for kernel in ("attn/query/kernel", "attn/query/bias", "attn/out/kernel", "mlp/up/kernel", "mlp/down/kernel"):
        layouts = [layout for name, layout in inputs.items() if name.endswith(f"block_0/{kernel}")]
        assert len(layouts) == 3  # the parameter and Adam's two moments
        assert {str(layout) for layout in layouts} == {str(layouts[0])}
        assert any(layouts[0].cuts), kernel


@pytest.mark.parametrize(("make", "columns"), [(gpt, None), (gpt_nnx, None), (mlp, COLUMNS)])
def test_the_numbers_are_those_of_one_device(make: object, columns: object) -> None:
    assert_same_numbers(tensor_parallel(columns) if columns else tensor_parallel(), make, 4)  # type: ignore[arg-type]


def test_columns_are_found_whatever_the_rank() -> None:
    by_dim = planned(tensor_parallel({"*/query/kernel": -2, "*/up/kernel": -1}), gpt(), 4)
    found = planned(tensor_parallel(["*/query/kernel", "*/up/kernel"]), gpt(), 4)
    assert by_dim.digest == found.digest


def test_mistakes() -> None:
    with pytest.raises(SplitError, match=r"attn/key/kernel' cannot .* 'dim 1' of size 4 into 8 parts; legal: 1, 2, 4"):
        planned(tensor_parallel(), gpt(), 8)
    with pytest.raises(UnknownNameError, match=r"pass tensor_parallel\(columns=\.\.\.\)"):
        planned(tensor_parallel(), mlp(), 4)
    with pytest.raises(PlanError, match=r"has no dim 2; give one from -2 to 1"):
        planned(tensor_parallel({"*/layer_0/kernel": 2}), mlp(), 4)
