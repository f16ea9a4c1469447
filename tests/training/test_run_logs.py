"""Runs compared by their logs; what of a device's peak a step takes; steps that a profiler sees."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import jscaler
from jscaler.cli import app
from jscaler.clusters import find_cluster
from jscaler.clusters.device import DEVICE_KINDS
from jscaler.estimate.works import model_flops
from jscaler.training.records import seconds_at_peak
from jscaler.training.run_logs import run_logs


def write_log(path: Path, losses: list[float], **more: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        jscaler.StepRecord(step, loss, 0.5, jscaler.Speed("tokens", 64.0 * step), waited=0.5, **more)
        for step, loss in enumerate(losses)
    ]
    path.write_text("".join(json.dumps(row.as_json()) + "\n" for row in rows))


def test_logs_of_a_folder_are_compared(tmp_path: Path) -> None:
    write_log(tmp_path / "b" / "log.jsonl", [3.0, 1.0, 2.0], evaluation={"loss": 2.5}, peak_bytes=1 << 30, utilisation=0.4)
    (tmp_path / "b" / "log.jsonl.run").write_text('{"plan": "zero3", "devices": 4}')
    write_log(tmp_path / "a.log", [3.0, float("nan")])
    with (tmp_path / "a.log").open("a") as log:  # a step that was taken again, and a line that was cut short
        log.write('{"step": 0, "loss": 4.0, "seconds": 0.5}\n{"step": 2, "lo')
    (tmp_path / "notes.txt").write_text("not a log\n")
    (tmp_path / "foreign.json").write_text('{"step": 1, "loss": "x"}')
    (tmp_path / "b" / "picture.png").write_bytes(b"\x89PNG\r\n")
    first, second = (one.as_json() for one in run_logs(tmp_path))
    assert (first["run"], first["steps"], first["loss"], first["waited"]) == (
        "a.log",
        2,
        "not finite",
        pytest.approx(1 / 3),
    )
    assert "plan" not in first
    assert {
        "plan": "zero3",
        "devices": 4,
        "loss": 2.0,
        "lowest_loss": 1.0,
        "evaluation/loss": 2.5,
    }.items() <= second.items()
    assert (second["tokens_per_second"], second["waited"], second["peak_bytes"]) == (64.0, 0.5, 1 << 30)

    shown = CliRunner().invoke(app, ["runs", str(tmp_path), "--draw", str(tmp_path / "losses.svg")])
    assert shown.exit_code == 0, shown.output
    assert all(word in shown.output for word in ("a.log", "zero3", "64 tokens/s", "40%", "50%", "1.0 GiB"))
    assert "<svg" in (tmp_path / "losses.svg").read_text()
    told = CliRunner().invoke(app, ["runs", str(tmp_path / "a.log"), "--json"])
    assert [one["run"] for one in json.loads(told.output)["runs"]] == ["a.log"]


def test_a_log_is_told_of_whatever_is_in_it(tmp_path: Path) -> None:
    """A run that never had a loss, and numbers that are none."""
    row = {"step": 0, "loss": None, "seconds": "0.5", "waited": 0.5, "evaluation/loss": "low", "peak_bytes": True}
    (tmp_path / "a.log").write_text(json.dumps(row))
    (tmp_path / "a.log.run").write_text('{"plan": "zero3", "tokens_per_second": "many", "steps": 7}')
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "true").write_text('{"step": true, "loss": 1.0}')
    (one,) = run_logs(tmp_path)
    assert one.as_json() == {"run": "a.log", "plan": "zero3", "steps": 1, "loss": "not finite"}
    shown = CliRunner().invoke(app, ["runs", str(tmp_path), "--draw", str(tmp_path / "losses.svg")])
    assert (shown.exit_code, "not finite" in shown.output) == (0, True), shown.output


def test_where_there_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"step": "one"}')
    with pytest.raises(jscaler.DataError, match=r"no log of a run is in .*--log FILE"):
        run_logs(tmp_path)
    with pytest.raises(jscaler.DataError, match="no folder of logs"):
        run_logs(tmp_path / "away")


def test_products_count_once_though_they_are_computed_again() -> None:
    """As the model of cost has them, but for those."""

    def loss_of(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x), None

        hidden, _ = jax.lax.scan(layer, jnp.tanh(x @ params["first"]).astype("bfloat16"), params["layers"])
        return (hidden.astype("float32") ** 2).mean()

    def step(params: Any, x: Any) -> Any:
        loss, gradients = jscaler.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, gradients), loss

    params = {"first": jnp.ones((8, 16)), "layers": jnp.ones((3, 16, 16), "bfloat16")}
    graph = jscaler.parallelize("single", devices=1)(step).graph(params, jnp.ones((4, 8)))
    found = model_flops(graph)
    assert found == {"float32": 2 * 2 * 4 * 8 * 16, "bfloat16": 3 * 3 * 2 * 4 * 16 * 16}  # no gradient of the data
    h100 = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    peak = DEVICE_KINDS["H100-80GB"].peak
    at_peak = found["float32"] / peak.tensorfloat32 + found["bfloat16"] / peak.bfloat16
    assert seconds_at_peak(graph, [h100, h100]) == pytest.approx(at_peak / 2)  # type: ignore[list-item]
    assert seconds_at_peak(graph, jax.devices()[:1]) is None
    again = jscaler.cost(graph, "single", find_cluster("1xH100-80GB")).flops - sum(found.values())
    assert again == 3 * 2 * 4 * 16 * 16  # what jax.checkpoint asks for


@pytest.mark.one_day_in(3)
def test_a_profile_is_of_the_steps_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[tuple[str, int]]()
    now = [0]
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(("on", now[0])))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(("off", now[0])))
    for first, behind, start, expected in [
        (2, 4, 0, [("on", 2), ("off", 4)]), (0, 2, 0, [("on", 0), ("off", 2)]), (2, 4, 3, [("on", 3), ("off", 4)]),
        (5, 99, 0, [("on", 5), ("off", 6)]), (2, 4, 5, []),
    ]:  # fmt: skip
        calls.clear()
        seen = jscaler.Profile((first, behind), tmp_path)
        now[0] = start
        seen.begin(None, start, 6)  # type: ignore[arg-type]
        for step in range(start, 6):
            now[0] = step + 1
            seen.step(jscaler.StepRecord(step, 1.0, 0.1, jscaler.Speed("rows", 1.0)))
        seen.end(None)
        assert calls == expected
    with pytest.raises(jscaler.JscalerError, match="nothing to profile: the run has steps 0 to 5, and none of 6 to 8"):
        jscaler.Profile((6, 9), tmp_path).begin(None, 0, 6)  # type: ignore[arg-type]
    with pytest.raises(jscaler.JscalerError, match="FROM below TO"):
        jscaler.Profile((4, 4), tmp_path)
    for words in (["--profile", "5"], ["--profile-to", "x"], ["--profile", "50:60", "--steps", "50"]):
        assert CliRunner().invoke(app, ["train", *words]).exit_code == 2


def test_what_is_written_beside_a_log_is_data(tmp_path: Path) -> None:
    with pytest.raises(jscaler.JscalerError, match="about is written as JSON"):
        jscaler.JsonLines(tmp_path / "log", {"rate": jnp.ones(())})
    record = jscaler.StepRecord(3, 1.0, 0.1, jscaler.Speed("rows", 1.0), metrics={"step": 7.0, "norm": 2.0})
    assert (record.as_json()["step"], record.as_json()["norm"]) == (3, 2.0)
