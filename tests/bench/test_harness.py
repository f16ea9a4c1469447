"""Benchmarks end in one JSON object, and fail where a row misses its bound."""

import json

import pytest

from bench.harness import run


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", ("case", "value"), [{"case": "a", "value": 1.0, "bound": 1.0}], as_json=True)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["bench"] == "demo"
    assert result["rows"] == [{"case": "a", "value": 1.0, "bound": 1.0}]


def test_the_table_shows_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", ("case", "value"), [{"case": "first case", "value": 0.25}], as_json=False)
    shown = capsys.readouterr().out
    assert "first case" in shown
    assert "0.25" in shown


@pytest.mark.parametrize("value", [1.1, float("nan")])
def test_a_missed_bound_fails(capsys: pytest.CaptureFixture[str], value: float) -> None:
    assert not run("demo", ("case",), [{"case": "a", "value": value, "bound": 1.0}], as_json=False)
    assert not run("demo", ("case",), [{"case": "a", "ratio": value, "bounds": {"ratio": 1.0}}], as_json=False)
    assert "1 rows miss their bound" in capsys.readouterr().err
