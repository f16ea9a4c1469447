"""``jscaler plan``: a plan and its cost for more devices than there are, as text, as data and as a file."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jscaler import Plan
from jscaler.cli import app
from jscaler.errors import DeviceError, UnknownNameError

SMALL = ["plan", "--model", "gpt-nano", "--seq", "16", "--dtype", "f32", "--plan", "megatron(dp=8, tp=4)"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*SMALL, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_text_data_and_file_for_32_devices(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    record = json.loads(run("--target", "4x8xV100-32GB", "--json", "--save", str(saved)).splitlines()[-1])
    assert record["plan"] == "megatron(dp=8, tp=4)"
    assert record["report"]["num_devices"] == record["cost"]["devices"] == 32
    assert record["cost"]["cluster"] == "4x8xV100-32GB"
    assert record["cost"]["seconds"]["total"] > 0
    assert record["cost"]["fits"]
    loaded = Plan.load(saved)
    assert (loaded.num_devices, loaded.digest) == (32, record["report"]["digest"])


def test_tables_with_and_without_a_target() -> None:
    text = run("--devices", "32")
    assert "gpt-nano, float32, stacked, 0.1 M parameters, batch 32 × 16, plan megatron(dp=8, tp=4)" in text
    assert re.search(r"all_reduce \d", text)
    assert "give --target for seconds" in text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ([], DeviceError, "say for how many devices to plan: --devices 32, or --target 4x8xV100-32GB"),
        (
            ["--devices", "64", "--target", "4x8xV100-32GB"],
            DeviceError,
            "64 devices are asked for and .* has 32",
        ),
        (["--target", "h10"], UnknownNameError, "no cluster named 'h10' .* did you mean 'h100'"),
        (["--devices", "8", "--plan", "megatorn"], UnknownNameError, "did you mean 'megatron'"),
    ],
)
def test_mistakes_are_named(arguments: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CliRunner().invoke(app, [*SMALL, *arguments], catch_exceptions=False)
