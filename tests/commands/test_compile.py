"""``jscaler compile``: tables, record and picture; a plain shell with no settings (marked ``aot``)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from report.stand_in import on_cpu
from typer.testing import CliRunner

from jscaler.cli import app
from jscaler.errors import DeviceError, JscalerError, UnknownNameError

ROOT = Path(__file__).parents[2]
SMALL = ["--model", "gpt-nano", "--seq", "16", "--batch", "8", "--dtype", "f32", "--plan", "data_parallel"]


@pytest.mark.one_day_in(2)
def test_tables_record_and_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_cpu(monkeypatch)
    drawn = tmp_path / "memory.png"
    arguments = ["compile", *SMALL, "--target", "2xH100-80GB", "--draw", str(drawn)]
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout.splitlines()[-1])
    assert record["model"].startswith("gpt-nano, float32, stacked, 0.1 M parameters, batch 8 × 16")
    assert (record["plan"], record["devices"], record["device"]) == ("data_parallel", 2, "H100-80GB")
    assert record["memory"]["fits"]
    assert record["memory"]["optimizer"] > 2 * record["memory"]["parameters"] > 0
    assert drawn.stat().st_size > 1000
    assert record["picture"] == str(drawn)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--target", "8xH10"], UnknownNameError, "no device kind named 'H10'"),
        (["--target", "cpu"], DeviceError, "does not say what its devices are"),
        (["--model", "gtp-nano"], UnknownNameError, "no model named 'gtp'; did you mean 'gpt'"),
        (["--model", "gpt-1.4b"], UnknownNameError, "no size named '1.4b' of model gpt; did you mean '1.3b'"),
        (["--model", "gpt-nano", "--size", "mini"], JscalerError, "two sizes are given"),
        (["--model", "moe-nano", "--remat"], JscalerError, "model moe has no --stacked and no --remat"),
        (["--dtype", "bf17"], UnknownNameError, "no dtype named 'bf17'; did you mean 'bf16'"),
        (["--draw", "memory.gif"], UnknownNameError, "no picture format named '.gif'"),
    ],
)
def test_mistakes_are_named(arguments: list[str], error: type[Exception], message: str) -> None:
    target = [] if "--target" in arguments else ["--target", "8xH100-80GB"]
    with pytest.raises(error, match=message):
        CliRunner().invoke(app, ["compile", *target, *arguments], catch_exceptions=False)


@pytest.mark.aot
def test_a_plain_shell() -> None:
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "TF_"))}
    command = [sys.executable, "-m", "jscaler", "compile", *SMALL, "--target", "2x2xV100-32GB"]
    run = subprocess.run(command, env=settings, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert "plan data_parallel on 2x2xV100-32GB: 2 hosts of 2 Tesla V100-SXM3-32GB" in run.stdout
    assert "fits: " in run.stdout
    assert "models/gpt.py:" in run.stdout
