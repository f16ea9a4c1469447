"""``jscaler search``: table, record, picture, plan file and exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import jscaler
from jscaler.cli import app
from jscaler.commands.fit_command import NOTHING
from jscaler.commands.search_command import STOPPED

SMALL = ["--model", "gpt-nano", "--batch", "4", "--dtype", "f32", "--stacked"]
MODEL = ["search", *SMALL, "--target", "4xH100-80GB", "--no-confirm"]


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*MODEL, *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def record(*arguments: str, code: int = 0) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json", code=code).splitlines()[-1])


def test_a_plan_is_found_saved_drawn_and_runs(tmp_path: Path) -> None:
    files = tmp_path / "plan.json", tmp_path / "found.png"
    found = record("--space", "zero", "--save", str(files[0]), "--draw", str(files[1]))
    assert found["written"] == [str(files[1]), str(files[0])]
    assert files[1].stat().st_size > 10_000
    assert (found["complete"], found["devices"]) == (True, 4)
    assert found["plan"] == jscaler.Plan.load(files[0]).name
    assert found["candidates"][0]["plan"] == found["plan"]
    assert found["candidates"][0]["seconds"] >= found["bound"]
    shown = CliRunner().invoke(app, ["plan", *SMALL, "--plan", str(files[0])])
    assert shown.exit_code == 0, shown.output


@pytest.mark.one_day_in(2)
def test_exit_codes_say_how_a_search_ended() -> None:
    assert record("--space", "megatron", "--seconds", "1", code=STOPPED)["complete"] is False
    nothing = run("--space", "zero", "--memory", "1e-6", code=NOTHING)
    assert "nothing fits: the least is" in nothing


def test_what_is_wrong_is_said() -> None:
    for wrong, said in ((["--space", "alpaca"], "no space named 'alpaca'"), (["--save", "plan.txt"], "a .json file")):
        result = CliRunner().invoke(app, [*MODEL, *wrong])
        assert result.exit_code != 0
        assert said in str(result.exception)
