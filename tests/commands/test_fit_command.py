"""``jscaler fit``: table, record, picture and exit code; what XLA is asked and refuses; (marked ``aot``) a plain shell."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report.stand_in import on_cpu
from typer.testing import CliRunner

from jscaler.cli import app
from jscaler.errors import DeviceError, JscalerError, UnknownNameError
from jscaler.plan_search import compiled

ROOT = Path(__file__).parents[2]
MODEL = ["fit", "--model", "gpt-nano", "--batch", "16", "--dtype", "f32"]
ROWS = ["--plan", "single", "--plan", "data_parallel"]  # of which the second copies nothing on one device
RUNGS = ["--plan", "single", "--plan", "recompute_layers"]
Asked = Callable[[Any, Any], int]


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*MODEL, *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def record(*arguments: str, code: int = 0) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json", code=code).splitlines()[-1])


@pytest.fixture(scope="module")
def peaks() -> dict[str, int]:
    """The peaks on one large device."""
    every = record("--target", "H100-80GB", *RUNGS, "--no-confirm")
    assert (every["chosen"], every["fits"], every["devices"]) == (0, True, 1)
    return {row["plan"]: row["peak"] for row in every["tried"]}


def small(folder: Path, memory: int) -> list[str]:
    """A described device with so many bytes."""
    path = folder / "small.toml"
    path.write_text(f'hosts = 1\ndevices_per_host = 1\nmemory = {memory}\ndevice = "H100-80GB"\n')
    return ["--target", str(path)]


def test_it_finds_what_fits(peaks: dict[str, int], tmp_path: Path) -> None:
    assert peaks["recompute_layers"] < peaks["single"]
    drawn = tmp_path / "fit.svg"
    found = record(*small(tmp_path, peaks["recompute_layers"]), *RUNGS, "--no-confirm", "--draw", str(drawn))
    first, last = found["tried"]
    assert [(row["plan"], row["fits"]) for row in found["tried"]] == [("recompute_layers", True), ("single", False)]
    assert (found["chosen"], found["fits"], found["capacity"]) == (0, True, peaks["recompute_layers"])
    assert last["headroom"] == peaks["recompute_layers"] - peaks["single"]
    assert first["flops_ratio"] > 1
    assert sum(first["parts"].values()) == first["peak"] == first["predicted_peak"]
    assert first["compiled_peak"] is None
    assert "gpt-nano" in drawn.read_text()


def test_nothing_fits(tmp_path: Path) -> None:
    text = run(*small(tmp_path, 1_000_000), *RUNGS, code=3)
    assert "gpt-nano, float32, stacked, 0.1 M parameters, batch 16 × 64" in text
    assert "nothing fits: the least is " in text
    assert "parameters and optimizer take" in text


def test_plans_of_ones_own_and_what_is_not_legal() -> None:
    text = run("--target", "3xH100-80GB", "--plan", "data_parallel", "--plan", "single", "--no-confirm")
    assert "not legal: data_parallel: SplitError" in text
    assert "found: single, " in text


@pytest.mark.one_day_in(2)
def test_xla_is_asked_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch)
    found = record("--target", "H100-80GB", "--confirm", "--seq", "8")
    assert found["tried"][0]["peak"] == found["tried"][0]["compiled_peak"] > 0
    assert found["tried"][0]["compiled_peak"] != found["tried"][0]["predicted_peak"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Asked], list[str]]:
    """Puts a function in XLA's place, and notes the plans that it was asked for."""

    def put(answer: Asked) -> list[str]:
        plans: list[str] = []

        def compile_for(step: Any, cluster: Any, donated: Any, progress: Any) -> Any:
            assert len(donated) > 10
            plans.append(step.name)
            return SimpleNamespace(memory=SimpleNamespace(peak=answer(step, cluster)))

        monkeypatch.setattr(compiled, "compile_for", compile_for)
        return plans

    return put


@pytest.mark.parametrize("every", [[], ["--all"]])
def test_what_xla_refuses_does_not_fit(asked: Callable[[Asked], list[str]], every: list[str]) -> None:
    plans = asked(lambda step, cluster: cluster.memory + (1 if step.name == "single" else -1))
    found = record("--target", "H100-80GB", *ROWS, "--confirm", *every)
    assert plans == ["single", "data_parallel"]
    assert [(row["plan"], row["fits"]) for row in found["tried"]] == [("data_parallel", True), ("single", False)]


@pytest.mark.one_day_in(2)
def test_it_is_not_compiled_where_it_cannot_be(
    asked: Callable[[Asked], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(step: Any, cluster: Any) -> int:
        raise DeviceError("no code for it")

    plans = asked(refused)
    monkeypatch.setattr(compiled, "plugin_installed", lambda: True)
    for asked_for in ([], ["--confirm"]):
        assert "not compiled: no code for it" in run("--target", "H100-80GB", *ROWS, *asked_for)
    monkeypatch.setattr(compiled, "plugin_installed", lambda: False)
    assert "the peak is an estimate" in run("--target", "H100-80GB", *ROWS)
    assert plans == ["single"] * 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--target", "V100"], UnknownNameError, "no cluster named 'V100'.*; did you mean"),
        (["--target", "cpu"], DeviceError, "does not say what its devices are"),
        (["--plan", "singel"], UnknownNameError, "did you mean 'single'"),
        (["--model", "gpt-1.4b"], UnknownNameError, "no size named '1.4b'"),
        (["--draw", "memory.gif"], UnknownNameError, "no picture format named '.gif'"),
        (["--model", "moe-nano", "--remat"], JscalerError, "model moe has no --stacked and no --remat"),
    ],
)
def test_mistakes_are_named(arguments: list[str], error: type[Exception], message: str) -> None:
    target = [] if "--target" in arguments else ["--target", "H100-80GB"]
    with pytest.raises(error, match=message):
        CliRunner().invoke(app, ["fit", *target, *arguments], catch_exceptions=False)


@pytest.mark.aot
def test_a_plain_shell() -> None:
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "TF_"))}
    command = [sys.executable, "-m", "jscaler", *MODEL, "--target", "V100-32GB"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "found: " in done.stdout
    assert "the peak is XLA's own" in done.stdout
