"""Megatron's sequence parallelism: reduce-scatter and all-gather where tensor parallelism has all-reduces."""

import pytest
from plan_steps import COLUMNS, activations, assert_same_numbers, collectives, gpt, gpt_nnx, mlp, planned

from jscaler.errors import SplitError, UnknownNameError
from jscaler.plans import sequence_parallel, tensor_parallel

ROWS = {"batch/x": 0}  # the rows of the MLP's batch in place of a sequence


def sent(plan: object, *kinds: str) -> float:
    moved = plan.program.adapters  # type: ignore[attr-defined]
    return sum(n for adapt in moved if adapt.tensor.shape for kind, n in adapt.sent(4) if kind in kinds)


def test_every_all_reduce_becomes_a_reduce_scatter_and_an_all_gather() -> None:
    assert activations(planned(sequence_parallel(), gpt(), 4)) == {"all_gather": 4, "reduce_scatter": 4}


def test_the_same_in_nnx() -> None:
    assert activations(planned(sequence_parallel(), gpt_nnx(), 4)) == {"all_gather": 4, "reduce_scatter": 4}


def test_of_the_same_bytes() -> None:
    tensor = planned(tensor_parallel(COLUMNS), mlp(), 4)
    sequence = planned(sequence_parallel(COLUMNS, ROWS), mlp(), 4)
    assert activations(tensor) == {"all_reduce": 3}
    assert activations(sequence) == {"all_gather": 3, "reduce_scatter": 3}
    assert sent(tensor, "all_reduce") == sent(sequence, "all_gather", "reduce_scatter")
    reduced = [t.name for kind, t in collectives(sequence) if kind == "all_reduce" and t.shape]
    assert len(reduced) == 2  # the biases of the two row kernels
    assert all("bias" in name for name in reduced)


@pytest.mark.parametrize(("make", "arguments"), [(gpt, ()), (mlp, (COLUMNS, ROWS))])
def test_the_numbers_are_those_of_one_device(make: object, arguments: tuple[object, ...]) -> None:
    assert_same_numbers(sequence_parallel(*arguments), make, 4)  # type: ignore[arg-type]


def test_mistakes() -> None:
    with pytest.raises(UnknownNameError, match=r"pass sequence_parallel\(sequence=\.\.\.\)"):
        planned(sequence_parallel(COLUMNS, {"batch/tokens": 1}), mlp(), 4)
    with pytest.raises(SplitError, match=r"batch/x' cannot split factor 'dim 0' of size 24 into 5"):
        planned(sequence_parallel({"*/layer_3/kernel": 0}, ROWS), mlp(), 5)
