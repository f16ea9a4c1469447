"""A run from Python: what it tells, evaluates, saves and goes on from."""

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from typer.testing import CliRunner

import jscaler
from jscaler import DataError, JobError, JscalerError, PlanError
from jscaler.cli import app
from jscaler.runtime.checkpoint import Checkpoints, steps_in
from jscaler.training.signals import Stopped, noted

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def make_state(key: jax.Array) -> Any:
    a, b = jax.random.split(key)
    return {"a": jax.random.normal(a, (4, 4)), "b": jax.random.normal(b, (4, 4))}


def loss_of(params: Any, batch: Any) -> Any:
    return ((jnp.tanh(batch @ params["a"]) @ params["b"] - batch) ** 2).mean()


def step(state: Any, batch: Any) -> Any:
    loss, gradients = jscaler.value_and_grad(loss_of)(state, batch)
    return jax.tree.map(lambda x, g: x - 0.1 * g, state, gradients), {"loss": loss, "twice": 2 * loss}


def batches() -> Iterator[Any]:
    for number in itertools.count():
        yield X + np.float32(number % 3)


JOB = jscaler.Job(make_state, step, batches)


class Told:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.found: list[jscaler.StepRecord] = []
        self.ended: list[Any] = []

    def begin(self, compiled: Any, start: int, steps: int) -> None:
        self.begun.append((start, steps))

    def step(self, record: jscaler.StepRecord) -> None:
        self.found.append(record)

    def end(self, error: BaseException | None) -> None:
        self.ended.append(error)


def quiet(_: str) -> None:
    """Says nothing."""


def reference(steps: int) -> tuple[Any, list[float]]:
    state, losses = make_state(jax.random.key(0)), []
    for _, batch in zip(range(steps), batches(), strict=False):
        state, metrics = jax.jit(step)(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize("plan", ["zero3", "pipeline(2, 4)"])
def test_what_it_tells_and_evaluates(plan: str) -> None:
    told = Told()
    held_out = [X, -X]
    evaluation = jscaler.Evaluation(lambda state, batch: {"error": loss_of(state, batch)}, held_out, every=2)
    state = jscaler.train(JOB, plan, 5, devices=2, evaluation=evaluation, trackers=[told], say=quiet)
    want, losses = reference(5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), jscaler.fetch(state), want)
    assert (told.begun, told.ended) == ([(0, 5)], [None])
    np.testing.assert_allclose([one.loss for one in told.found], losses, rtol=1e-5)
    np.testing.assert_allclose([one.metrics["twice"] for one in told.found], np.multiply(losses, 2), rtol=1e-5)
    assert [one.step for one in told.found if one.evaluation] == [1, 3, 4]
    error = np.mean([loss_of(want, batch) for batch in held_out])
    np.testing.assert_allclose(told.found[-1].evaluation["error"], error, rtol=1e-5)
    assert all(one.seconds > 0 and one.waited >= 0 and one.speed.what == "rows" for one in told.found)


def test_a_log_goes_on_behind_the_steps_of_the_checkpoint(tmp_path: Path) -> None:
    """Also where the run before was killed behind steps that no checkpoint has, in the middle of a line."""
    log, folder = tmp_path / "log.jsonl", tmp_path / "run"
    more = {"devices": 2, "checkpoint": folder, "save_every": 2, "say": quiet}
    jscaler.train(JOB, "zero3", 4, trackers=[jscaler.JsonLines(log)], **more)
    with log.open("a") as file:
        file.write('{"step": 4, "loss": 1.0}\n{"step": 5, "lo')
    jscaler.train(JOB, "data_parallel", 6, trackers=[jscaler.JsonLines(log)], resume=True, **more)
    lines = list(map(json.loads, log.read_text().splitlines()))
    assert [line["step"] for line in lines] == list(range(6))
    np.testing.assert_allclose([line["loss"] for line in lines], reference(6)[1], rtol=1e-5)
    assert {"twice", "waited", "saving", "rows_per_second"} <= lines[0].keys()
    with pytest.raises(DataError, match="there is a checkpoint after 6 steps"):
        jscaler.train(JOB, "zero3", 8, **more)
    assert jscaler.train(JOB, "zero3", 6, resume=True, **more) is not None  # nothing is left


def test_a_signal_ends_it_and_says_so_to_trackers(tmp_path: Path) -> None:
    told = Told()

    def stopping() -> Iterator[Any]:
        for number, batch in enumerate(batches()):
            if number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    with pytest.raises(KeyboardInterrupt, match="after step 3 of 9; its state is saved in"):
        jscaler.train((make_state, step, stopping), "zero3", 9, devices=2, checkpoint=tmp_path, trackers=[told], say=quiet)
    assert isinstance(told.ended[0], KeyboardInterrupt)
    assert len(told.found) == 3


def test_a_signal_while_the_last_state_is_written_comes_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Checkpoints.__exit__

    def stopped(self: Checkpoints, *raised: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        leave(self, *raised)

    monkeypatch.setattr(Checkpoints, "__exit__", stopped)
    with pytest.raises(KeyboardInterrupt, match="after step 2 of 2; its state is saved in"):
        jscaler.train(JOB, "single", 2, devices=1, checkpoint=tmp_path, say=quiet)
    assert steps_in(tmp_path) == [2]


def test_a_state_that_does_not_fit_is_told_where_it_is_saved_and_where_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")

    more: dict[str, Any] = {"devices": 1, "checkpoint": tmp_path, "say": quiet}
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        with pytest.raises(jscaler.OutOfMemoryError, match=r"saving the state is out of memory: .*9 bytes"):
            jscaler.train(JOB, "single", 1, **more)
    jscaler.train(JOB, "single", 1, **more)
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "restore", full)
        with pytest.raises(jscaler.OutOfMemoryError, match=r"restoring the state is out of memory: .*jscaler.fit tries"):
            jscaler.train(JOB, "single", 2, resume=True, **more)


def test_what_a_tracker_returns_hides_no_error() -> None:
    class Loud(Told):
        def step(self, record: Any) -> None:
            raise DataError("it is full")

        def end(self, error: BaseException | None) -> Any:
            return "done"

    with pytest.raises(DataError, match="it is full"):
        jscaler.train(JOB, "single", 2, devices=1, trackers=[Loud()], say=quiet)


def test_events_for_tensorboard(tmp_path: Path) -> None:
    jscaler.train(JOB, "single", 2, devices=1, trackers=[jscaler.TensorBoard(tmp_path)], say=quiet)
    (events,) = tmp_path.iterdir()
    assert all(name in events.read_bytes() for name in (b"loss", b"twice", b"rows_per_second"))


def test_a_plan_of_ones_own() -> None:
    def mine(graph: Any, devices: Any) -> None:
        jscaler.plans.data_parallel()(graph, devices)

    state = jscaler.train(JOB, mine, 2, devices=2, say=quiet)
    want = jscaler.train(JOB, "single", 2, devices=1, say=quiet)
    np.testing.assert_allclose(*map(np.asarray, (jax.tree.leaves(state)[0], jax.tree.leaves(want)[0])), rtol=1e-5)


def test_mistakes() -> None:
    once = jscaler.Evaluation(loss_of, iter([X]), 1)
    with pytest.raises(JobError, match="a list_iterator can be read once: give a list, or a function"):
        jscaler.train(JOB, "single", 2, devices=1, evaluation=once, say=quiet)
    with pytest.raises(JscalerError, match="on_nan is 'stop', 'skip', 'restore', and not 'no'"):
        jscaler.train(JOB, "zero3", 2, devices=2, on_nan="no", say=quiet)
    with pytest.raises(JobError, match="train takes a job, and was given a tuple of 2"):
        jscaler.train((make_state, step), "zero3", 2)
    with pytest.raises(PlanError, match="train: save_every is a positive whole number, not 0"):
        jscaler.train(JOB, "zero3", 2, save_every=0)
    with pytest.raises(PlanError, match="train: evaluation: every is a positive whole number, not 0"):
        jscaler.train(JOB, "zero3", 2, evaluation=jscaler.Evaluation(loss_of, [X], 0))
    with pytest.raises(JscalerError, match="goes back to a state of checkpoint=…, which is not given"):
        jscaler.train(JOB, "zero3", 2, devices=2, on_nan="restore", say=quiet)
    for evaluation, message in (
        (jscaler.Evaluation(lambda state, batch: batch, [X], 1), r"'loss' is an array of shape \(8, 4\): return numbers"),
        (jscaler.Evaluation(loss_of, [], 1), "the batches of the evaluation are none: give a list"),
    ):
        with pytest.raises((JobError, DataError), match=message):
            jscaler.train(JOB, "zero3", 2, devices=2, evaluation=evaluation, say=quiet)


def test_a_signal_that_comes_a_moment_after_the_end_that_another_process_was_asked_for_does_not_kill() -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(Stopped), noted(signal.SIGTERM) as signals:
            raise Stopped("", signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert signals == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_command_line_takes_the_evaluation_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import sys\nimport jscaler\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import {Path(__file__).stem} as t\n\n\n"
        "def job():\n"
        "    return jscaler.Job(t.make_state, t.step, t.batches, evaluation=jscaler.Evaluation(t.named, [t.X], every=2))\n"
    )
    words = ["train", "--job", f"{tmp_path / 'own.py'}:job", "--devices", "2", "--steps", "2", "--plan", "zero3"]
    result = CliRunner().invoke(app, [*words, "--eval-every", "1"])
    assert result.exit_code == 0, result.output
    assert "after 1 steps: error " in result.output, result.output
    (tmp_path / "none.py").write_text((tmp_path / "own.py").read_text().partition(", evaluation")[0] + ")\n")
    result = CliRunner().invoke(app, [*(word.replace("own.py", "none.py") for word in words), "--eval-every", "1"])
    assert "none.py:job' has no evaluation; return jscaler.Job" in str(result.exception)


def named(state: Any, batch: Any) -> Any:
    return {"error": loss_of(state, batch)}
