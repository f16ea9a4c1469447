"""A case is what its seed says, and what is no error of ours is a failure."""

import random
import time
from pathlib import Path

import pytest

from bench import fuzz
from jscaler.errors import PlanError


def test_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise PlanError("no")

    assert fuzz.failure(lambda: None) == ("worked", "")
    assert fuzz.failure(refused) == ("refused", "")
    assert fuzz.failure(lambda: 1 / 0) == ("failed", "ZeroDivisionError: division by zero")
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    assert fuzz.failure(lambda: time.sleep(5)) == ("failed", "Hang: more than 1 s")


@pytest.mark.parametrize("seed", range(12))
def test_some_cases(seed: int, tmp_path: Path) -> None:
    made = fuzz.texts()
    for case in (fuzz.plan_case, fuzz.cluster_case, fuzz.call_case, fuzz.policy_case, fuzz.option_case):
        assert fuzz.failure(case(made, random.Random(seed), tmp_path))[0] != "failed"


def test_a_seed_says_what_is_mutated() -> None:
    data = {"a": [1, 2], "b": {"c": "x"}}
    texts = [str([fuzz.mutated(data, random.Random(seed)) for seed in range(20)]) for _ in range(2)]
    assert texts[0] == texts[1]
    assert data == {"a": [1, 2], "b": {"c": "x"}}
