"""Algorithms in plan files: ours by name, users' by import path, others refused."""

from dataclasses import dataclass

import pytest

from jscaler import Plan, PlanFileError, Prefix
from jscaler.primitives import GridAxis, Trans
from tests.primitives.algorithms_of_users import Forgetful, Own, Plain, Unsavable


def plan_with(algorithm: object) -> Plan:
    return Plan("mine", 2, (Trans("sum", (GridAxis("a", 2, algorithm=algorithm),)),))  # type: ignore[arg-type]


def test_ours_go_by_name_and_users_by_import_path() -> None:
    own = Own("a", 2, (("x", 0.5), ("y", 2.0)))
    for algorithm, name in ((Prefix("a", 2), "Prefix"), (own, "tests.primitives.algorithms_of_users:Own")):
        plan = plan_with(algorithm)
        assert f'"algorithm": {{"name": "{name}"' in plan.to_json()
        assert Plan.from_json(plan.to_json()) == plan


def test_fields_of_algorithms_are_part_of_the_digest() -> None:
    assert plan_with(Own("a", 2)).digest != plan_with(Own("a", 2, (("x", 0.5),))).digest


@dataclass(frozen=True)
class InScript(Own):
    pass


def test_what_another_process_could_not_make_is_not_saved() -> None:
    @dataclass(frozen=True)
    class Local(Own):
        pass

    InScript.__module__ = "__main__"
    cases = (
        (Local("a", 2), "Local cannot be saved: it is defined inside a function"),
        (InScript("a", 2), "InScript cannot be saved: it is defined in the script that runs"),
        (Unsavable("a", 2), "Unsavable.what is a builtin_function_or_method: a plan file holds numbers"),
        (Forgetful("a", 2), "Forgetful cannot be saved: made again from its fields"),
        (Plain(), "Plain cannot be saved: it is no dataclass"),
    )
    for algorithm, message in cases:
        with pytest.raises(PlanFileError, match=message):
            plan_with(algorithm).to_json()
        assert len(plan_with(algorithm).digest) == 12  # it can still be run, and compared within a run


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Prefixx", "no algorithm named 'Prefixx'; did you mean 'Prefix'"),
        ("no.such:Thing", r"'no.such:Thing' cannot be imported \(No module named 'no'\)"),
        ("os:nothing", "'os:nothing' cannot be imported"),
        ("os:getcwd", "'os:getcwd' is no algorithm"),
        ("tests.primitives.algorithms_of_users:Plain", "is no algorithm: not a dataclass with an expand method"),
    ],
)
def test_what_cannot_be_imported_is_refused(name: str, message: str) -> None:
    text = plan_with(Prefix("a", 2)).to_json().replace('"Prefix"', f'"{name}"')
    with pytest.raises(PlanFileError, match=message):
        Plan.from_json(text)


def test_other_fields_than_an_algorithm_s_are_refused() -> None:
    text = plan_with(Prefix("a", 2)).to_json().replace('"parts": 2}}', '"cuts": 2}}')
    with pytest.raises(PlanFileError, match="Prefix cannot be made of"):
        Plan.from_json(text)
