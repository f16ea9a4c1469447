"""Benchmarks end in one JSON object, and fail where a row misses its bound."""

import json
import sys
from typing import Any

import pytest

from bench import harness


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]], *options: str
) -> str:
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    harness.main("demo", "a benchmark", ("case", "value"), lambda quick: [{**r, "quick": quick} for r in rows])
    return capsys.readouterr().out


def test_the_last_line_is_one_json_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = run(monkeypatch, capsys, [{"case": "a", "value": 1.0, "bound": 1.0}], "--json", "--quick")
    result = json.loads(output.splitlines()[-1])
    assert result["bench"] == "demo"
    assert result["rows"] == [{"case": "a", "value": 1.0, "bound": 1.0, "quick": True}]


def test_the_table_shows_the_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = run(monkeypatch, capsys, [{"case": "first case", "value": 0.25}])
    assert "first case" in output
    assert "0.25" in output


@pytest.mark.parametrize("value", [1.1, float("nan")])
def test_a_missed_bound_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: float) -> None:
    with pytest.raises(SystemExit, match="1"):
        run(monkeypatch, capsys, [{"case": "a", "value": value, "bound": 1.0}])
    assert "1 rows miss their bound" in capsys.readouterr().err
