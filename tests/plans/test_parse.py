"""Plans by name, with arguments, as on the command line."""

from pathlib import Path

import pytest

from jscaler import plans
from jscaler.errors import PlanError, UnknownNameError
from jscaler.plans import by_name
from jscaler.plans.parse import PlanCall, parse_call
from jscaler.primitives import Plan


def test_arguments_are_literals() -> None:
    name, call = parse_call('sequence_parallel(["*/up/kernel"], sequence={"batch/x": 0})')
    assert name == "sequence_parallel"
    assert call == PlanCall(name, (["*/up/kernel"],), {"sequence": {"batch/x": 0}})
    assert parse_call("single") == ("single", None)
    assert by_name("megatron(dp=2, tp=4)").__name__ == "megatron"
    assert by_name("megatron").__name__ == "megatron"


@pytest.mark.parametrize(
    "text",
    [
        "megatron(dp=two)",
        "megatron(dp=2",
        "megatron(**{})",
        "megatron(1)(2)",
        "single(os.getcwd())",
        "single({'a': single()})",
    ],
)
def test_nothing_is_evaluated(text: str) -> None:
    with pytest.raises(PlanError, match="write its arguments as literals"):
        by_name(text)


def test_names_that_nothing_carries() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'megatron'"):
        by_name("megatrn(dp=2)")
    with pytest.raises(UnknownNameError, match=r"no argument named 'dpx' of plan 'megatron'; did you mean 'dp'\?"):
        by_name("megatron(dpx=2)")
    with pytest.raises(PlanError, match="too many positional arguments; its arguments are none"):
        by_name("single(1)")


def test_a_plan_is_an_argument_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own.py"
    file.write_text("def around(plan, times=1):\n    return plan, times\ndef policy(graph, devices): ...\n")
    policy, times = by_name(f"{file}:around(megatron(dp=2, tp=4), times=3)")
    assert (policy.__name__, times) == ("megatron", 3)
    assert by_name(f"{file}:around(plan='{file}:policy')")[0].__name__ == "policy"
    with pytest.raises(UnknownNameError, match="plan named 'print'"):
        by_name(f"{file}:around(print())")
    with pytest.raises(PlanError, match="its argument 'times' takes no plan, such as 'single'"):
        by_name(f"{file}:around(single(), times=single())")
    with pytest.raises(PlanError, match="too many positional arguments"):
        by_name(f"{file}:around(single(1))")
    monkeypatch.setattr("jscaler.plans.Plan.load", lambda name: Plan(name, 1))
    with pytest.raises(PlanError, match=r"the saved plan 'a\.json' is finished"):
        by_name(f"{file}:around('a.json')")


def test_a_file_may_hold_a_policy_or_what_makes_one(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def policy(graph, devices): ...\ndef made(parts):\n    return lambda graph, devices: parts\n")
    assert by_name(f"{file}:policy").__name__ == "policy"
    assert by_name(f"{file}:made(parts=3)")(None, None) == 3


def test_fsdp_is_zero3() -> None:
    assert plans.fsdp is plans.zero3
    assert plans.by_name("accumulate(2, fsdp())") is not None
    assert plans.by_name("fsdp").__name__ == "zero3"
    with pytest.raises(UnknownNameError, match="no argument named 'bacth' of plan 'fsdp'; did you mean 'batch'"):
        plans.by_name("fsdp(bacth='x')")
    with pytest.raises(UnknownNameError, match="did you mean 'fsdp'"):
        plans.by_name("fsdpp")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("co_shard(2, plan=3)", "plan 'co_shard': its argument 'plan' is a plan or None, not 3"),
        ("expert_parallel(experts=3)", "its argument 'experts' is str or Sequence[str] or None, not 3"),
        (
            "tensor_parallel(['a', 3])",
            "'columns' is Mapping[str, int | None] or Sequence[str] or None, not ['a', 3]",
        ),
        ("zero3(gather_once=2)", "its argument 'gather_once' is bool, not 2"),
        ("recompute_layers(every='x')", "its argument 'every' is int, not 'x'"),
    ],
)
def test_arguments_of_another_type(text: str, sentence: str) -> None:
    with pytest.raises(PlanError) as error:
        plans.by_name(text)
    assert sentence in str(error.value)
