"""``jscaler diff``: table and record, plans in files with the model they were made for, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jscaler import Plan
from jscaler.cli import app
from jscaler.errors import DeviceError, PlanFitError, UnknownNameError

MODEL = ["--model", "gpt-nano", "--seq", "16", "--dtype", "f32", "--batch", "16"]
TARGET = ["--target", "4xH100-80GB"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.one_day_in(2)
def test_a_table_and_a_record() -> None:
    text = run("diff", "zero1", "megatron(dp=2, tp=2)", *MODEL, *TARGET, "--most", "3")
    assert "gpt-nano, float32, stacked" in text
    for said in ("a: zero1, ", "b: megatron(dp=2, tp=2), ", "b less a: ", " more ", "activations"):
        assert said in text
    record = json.loads(run("diff", "zero1", "megatron(dp=2, tp=2)", *MODEL, *TARGET, "--json").splitlines()[-1])
    assert (record["target"], record["a"]["devices"], record["b"]["plan"]) == ("4xH100-80GB", 4, "megatron(dp=2, tp=2)")
    seconds = record["b"]["seconds"] - record["a"]["seconds"]
    assert sum(line["seconds"] for line in record["lines"]) == pytest.approx(seconds, abs=1e-9 * record["a"]["seconds"])


@pytest.mark.one_day_in(3)
def test_saved_plans_bring_their_model_and_their_devices(tmp_path: Path) -> None:
    found, other = (str(tmp_path / f"{name}.json") for name in ("found", "other"))
    run("search", "--space", "zero", "--no-confirm", "--seconds", "100", *MODEL, "--target", "2xH100-80GB", "--save", found)
    record = json.loads(run("diff", found, "zero3", *TARGET, "--json").splitlines()[-1])
    assert "float32, stacked" in record["model"]
    assert record["a"]["devices"] == record["b"]["devices"] == 2
    plan = Plan.load(found)
    replace(plan, told={**plan.told, "batch": 8}).save(other)
    message = "was made with --batch 8, and '.*found.json' with --batch 16: plans are compared for one step"
    with pytest.raises(PlanFitError, match=message):
        run("diff", found, other, *TARGET)
    with pytest.raises(DeviceError, match="is for 2 devices, and 4 are given"):
        run("diff", found, "zero3", *TARGET, "--devices", "4")


def test_a_job_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import jax, jax.numpy as jnp, jscaler\n\n\n"
        "def job():\n"
        "    def step(state, batch):\n"
        "        loss = lambda w: jnp.mean((batch['x'] @ w) ** 2)\n"
        "        value, grad = jscaler.value_and_grad(loss)(state['w'])\n"
        "        return {'w': state['w'] - 0.1 * grad}, value\n\n"
        "    return jscaler.Job(lambda key: {'w': jax.random.normal(key, (8, 8))}, step, [{'x': jnp.ones((8, 8))}])\n"
    )
    text = run("diff", "single", "data_parallel", "--job", f"{tmp_path / 'mine.py'}:job", "--target", "2xH100-80GB")
    assert "state/w" in text


def test_mistakes_are_named() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'zero1'"):
        run("diff", "zer1", "zero3", *MODEL, *TARGET)
    with pytest.raises(UnknownNameError, match=r"no cluster named 'h10' .* did you mean 'h100'"):
        run("diff", "zero1", "zero3", *MODEL, "--target", "h10")
    assert CliRunner().invoke(app, ["diff", "zero1", *TARGET]).exit_code == 2
