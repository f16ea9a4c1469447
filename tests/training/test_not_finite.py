"""Steps that are not finite: the run stops in front of a state that is lost, leaves them out, or goes back."""

import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jscaler
from jscaler import JobError, NotFiniteError
from jscaler.cli import app
from jscaler.runtime.checkpoint import steps_in
from jscaler.training.not_finite import NotFinite, OnNan, not_finite, skipping

MODEL = """
import jax
import jax.numpy as jnp
import numpy as np

import jscaler


def make_state(key):
    return {"w": jax.random.normal(key, (4, 4)), "n": 0}


def step(state, batch):
    def loss_fn(w):
        value = ((jnp.tanh(batch["x"] @ w) - 1) ** 2).mean()
        nothing = jnp.where(batch["sharp"] > 0, (0 * w).sum(), 1.0)
        return value + jnp.sqrt(nothing)  # which has no derivative at 0

    loss, gradient = jscaler.value_and_grad(loss_fn)(state["w"])
    return {"w": state["w"] - 0.1 * gradient, "n": state["n"] + 1}, loss


def job(bad=-1, sharp=-1, every=0):
    def batches():
        for i in range(10**6):
            x = np.random.default_rng(i).normal(size=(8, 4)).astype(np.float32)
            ends = i == bad or (every and i % every == every - 1)
            yield {"x": x * np.float32(np.nan if ends else 1), "sharp": np.float32(i == sharp)}

    return jscaler.Job(make_state, step, batches)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "my_model.py"
    path.write_text(MODEL)
    return path


def train(model: Path, job: str, *more: str, plan: str = "data_parallel") -> tuple[str, Any]:
    words = ["train", "--job", f"{model}:{job}", "--plan", plan, "--devices", "2", "--steps", "8", *more]
    result = CliRunner().invoke(app, words)
    return " ".join(result.output.split()), result.exception


def losses(log: Path) -> list[tuple[int, float | None]]:
    return [(line["step"], line["loss"]) for line in map(json.loads, log.read_text().splitlines())]


def test_it_stops_in_front_of_a_state_that_is_lost(model: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    told = train(model, "job(bad=5)", "--checkpoint", folder, "--save-every", "2")[1]
    assert isinstance(told, NotFiniteError)
    assert "the loss of step 5 is nan; this run's last state is that after 4 steps; JAX_DEBUG_NANS=1" in str(told)
    assert steps_in(tmp_path / "run") == [2, 4]


def test_a_gradient_that_is_not_finite_is_seen_before_its_state_is_saved(model: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    told = train(model, "job(sharp=3)", "--checkpoint", folder, "--save-every", "2")[1]
    assert isinstance(told, NotFiniteError)
    assert "the state behind step 3 is not finite" in str(told)
    assert steps_in(tmp_path / "run") == [2]


@pytest.mark.parametrize("plan", ["data_parallel", "pipeline(2, 2)"])
@pytest.mark.parametrize("job", ["job(bad=5)", "job(sharp=5)"])
def test_skip_leaves_the_state_as_it_was(model: Path, tmp_path: Path, plan: str, job: str) -> None:
    log = tmp_path / "log.jsonl"
    output, error = train(model, job, "--on-nan", "skip", "--log", str(log), plan=plan)
    assert error is None, output
    made: dict[str, Any] = {}
    exec(MODEL, made)
    state, want = made["make_state"](jax.random.key(0)), []
    for number, batch in zip(range(8), made["job"]().batches(), strict=False):
        after, loss = jax.jit(made["step"])(state, batch)
        want.append(loss)
        state = after if number != 5 else state
    found = [loss for number, loss in losses(log) if number != 5]
    np.testing.assert_allclose(found, [loss for number, loss in enumerate(want) if number != 5], rtol=1e-6)
    assert "1 step skipped" in output


@pytest.mark.one_day_in(2)
def test_restore_goes_back_and_on_behind_the_batch(model: Path, tmp_path: Path) -> None:
    log, folder = tmp_path / "log.jsonl", tmp_path / "run"
    words = ["--on-nan", "restore", "--checkpoint", str(folder), "--save-every", "2", "--log", str(log)]
    output, error = train(model, "job(bad=5)", *words)
    assert error is None, output
    assert "step 5 is not finite: back to the state after 4 steps" in output
    assert [number for number, _ in losses(log)] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]
    # the batches that a resumed run reads are those behind: ten have been read for eight steps
    output, error = train(model, "job(bad=5)", *words, "--steps", "10", "--resume")
    assert error is None, output
    whole = tmp_path / "whole.jsonl"
    other = ["--checkpoint", str(tmp_path / "other"), "--save-every", "2", "--log", str(whole)]
    train(model, "job(bad=5)", *words[:2], *other, "--steps", "10")
    assert losses(log)[-2:] == losses(whole)[-2:]


def test_a_run_that_comes_to_nothing_else_ends(model: Path, tmp_path: Path) -> None:
    words = ["--on-nan", "restore", "--checkpoint", str(tmp_path / "run"), "--save-every", "2"]
    told = train(model, "job(every=3)", *words, "--save-every", "3")[1]
    assert isinstance(told, NotFiniteError)  # there is no state yet
    assert "the loss of step 2 is nan; JAX_DEBUG_NANS=1" in str(told)
    guard = NotFinite(OnNan.RESTORE, _Fake())  # type: ignore[arg-type]
    told = guard.after(7, math.nan, {}, saved=False)
    for _ in range(3):
        assert guard.back(told) == (4, "state")
    with pytest.raises(
        NotFiniteError, match="the loss of step 7 is nan, as something was 3 times behind the state after 4"
    ):
        guard.back(told)


def test_steps_are_not_skipped_for_ever(model: Path, tmp_path: Path) -> None:
    guard = NotFinite(OnNan.SKIP)
    for skipped in [*[True] * 99, False, *[True] * 99]:
        assert not guard.gives_up(skipped)
    assert guard.gives_up(True)
    words = ("--steps", "150", "--checkpoint", str(tmp_path), "--on-nan", "skip")
    told = train(model, "job(every=1)", *words)[1]
    assert isinstance(told, NotFiniteError)
    assert re.search("100 steps in a row were skipped, up to step 99: .* last state is that after 100 steps", str(told))


def test_a_number_that_is_infinite_from_the_first_stops_nothing(tmp_path: Path) -> None:
    def make_state(key: Any) -> Any:
        return {"w": jnp.zeros(4), "best": jnp.inf, "n": 0}  # as that of a plateau that has seen no loss yet

    def step(state: Any, batch: Any) -> Any:
        loss, gradient = jscaler.value_and_grad(lambda w: ((batch @ w - 1) ** 2).mean())(state["w"])
        return {"w": state["w"] - 0.1 * gradient, "best": state["best"], "n": state["n"] + 1}, {
            "loss": loss,
            "ratio": loss / (state["n"] * 0.0),  # no reason to skip, either
        }

    job = jscaler.Job(make_state, step, [np.ones((4, 4), np.float32)])
    for choice, folder in (("skip", None), ("stop", tmp_path / "run")):
        told: list[str] = []
        state = jscaler.train(
            job, "data_parallel", 3, devices=2, on_nan=choice, checkpoint=folder, save_every=1, say=told.append
        )
        assert (int(state["n"]), np.isinf(state["best"]), "skipped" in told[-1]) == (3, True, False)


class _Fake:
    latest = 4

    def back(self, target: Any) -> tuple[int, str]:
        return 4, "state"


def test_what_cannot_be_is_said(model: Path) -> None:
    result = CliRunner().invoke(app, ["train", "--job", f"{model}:job", "--devices", "2", "--on-nan", "restore"])
    assert result.exit_code == 2
    assert "restore goes back to a state of --checkpoint" in " ".join(result.output.replace("│", " ").split())
    from flax import nnx

    with pytest.raises(JobError, match="this one is changed in place"):
        skipping(lambda state, batch: 0.0)(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 0)


def test_states_on_several_groups_are_looked_at_whole() -> None:
    devices = jax.devices()
    state = {"a": jax.device_put(jnp.ones(3), devices[0]), "b": jax.device_put(jnp.ones(3), devices[1]), "n": 3}
    assert not_finite(state) == {}
    state |= {"b": jax.device_put(jnp.array([1.0, jnp.inf]), devices[1])}
    assert not_finite(state) == {"state/b": 1}
    worse = state | {"b": jnp.array([jnp.nan, jnp.inf])}  # not the number that was infinite from the first
    guard = NotFinite(OnNan.STOP, _Fake(), state=state)  # type: ignore[arg-type]
    assert guard.after(3, 1.0, state, saved=True) == ""
    with pytest.raises(NotFiniteError, match="the state behind step 3 is not finite, in 'state/b'; this run's last"):
        guard.after(3, 1.0, worse, saved=True)


def test_the_op_is_named_on_request() -> None:
    step = jscaler.parallelize("data_parallel", devices=2)(lambda x: jnp.log(x).sum())
    with jax.debug_nans(True), pytest.raises(NotFiniteError, match="log"):
        step(-jnp.ones((4, 4)))
