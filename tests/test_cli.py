"""The command line, as a stranger uses it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jscaler.cli import app
from jscaler.errors import DataError, DeviceError, PlanError, SplitError, UnknownNameError

SMALL = ["--size", "nano", "--seq", "8", "--batch", "8"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_train_prints_the_plan_and_logs_every_step(tmp_path: Path) -> None:
    log = tmp_path / "runs" / "log.jsonl"
    output = run("train", *SMALL, "--plan", "data_parallel", "--devices", "8", "--steps", "12", "--log", str(log))
    assert "plan data_parallel" in output
    assert "all_reduce" in output
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(12))
    assert records[-1]["loss"] < records[0]["loss"]
    assert {"seconds", "tokens_per_second"} <= records[0].keys()


def test_train_on_a_file_with_a_policy_of_ones_own(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 20)
    output = run(
        "train",
        *SMALL,
        "--plan",
        "docs/split_one_mlp.py:split_one_mlp",
        "--devices",
        "4",
        "--steps",
        "2",
        "--data",
        str(text),
    )
    assert "plan split_one_mlp" in output


def test_train_a_mixture_of_experts() -> None:
    output = run("train", "--model", "moe", *SMALL, "--plan", "expert_parallel", "--devices", "4", "--steps", "2")
    assert "plan expert_parallel" in output
    assert "all_to_all" in output


def test_compare_as_json() -> None:
    output = run("compare", *SMALL, "--plan", "data_parallel", "--devices", "4", "--rounds", "1", "--json")
    result = json.loads(output.splitlines()[-1])
    assert result["loss_difference"] < 1e-5
    assert result["parameter_difference"] < 1e-3
    assert result["gradient_difference"] < 1e-4
    ours, gspmd = result["ours"], result["gspmd"]
    assert 0 < ours["collectives"]["all-reduce"]["nbytes"] <= gspmd["collectives"]["all-reduce"]["nbytes"]
    assert ours["memory"]["argument"] == gspmd["memory"]["argument"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--plan", "data_paralel"], UnknownNameError, "did you mean 'data_parallel'"),
        (["--plan", "nowhere.py:policy"], PlanError, "no plan file at 'nowhere.py'"),
        (["--plan", "docs/split_one_mlp.py:split_one_mpl"], UnknownNameError, "did you mean 'split_one_mlp'"),
        (["--size", "nanoo"], UnknownNameError, "did you mean 'nano'"),
        (["--model", "gtp"], UnknownNameError, "did you mean 'gpt'"),
        (["--model", "convnet"], UnknownNameError, "no language model named 'convnet'; known: gpt, moe"),
        (["--devices", "9"], DeviceError, "9 devices are asked for and 8 are at hand"),
        (["--platform", "tpu"], DeviceError, "no platform 'tpu'"),
        (["--data", "nowhere.txt"], DataError, "no training data at 'nowhere.txt'"),
        (["--devices", "8", "--batch", "12"], SplitError, "of size 12 into 8 parts"),
    ],
)
def test_mistakes_are_named(arguments: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CliRunner().invoke(app, ["train", "--steps", "1", *arguments], catch_exceptions=False)
