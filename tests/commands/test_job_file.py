"""``--job path.py:function``: every command takes a model of the user's own, and says what is wrong with one."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from losing import losing
from report.stand_in import on_cpu
from typer.testing import CliRunner

import jscaler
from jscaler.cli import app
from jscaler.commands.job_file import checked_job, job_from_file
from jscaler.errors import DataError, JobError, PlanError, UnknownNameError

MODEL = """
from __future__ import annotations  # dataclasses look up what they mean

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jscaler
from sizes import HIDDEN  # a file beside this one


class Net(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = x + nn.Dense(8, name=f"down_{i}")(nn.relu(nn.Dense(self.hidden, name=f"up_{i}")(x)))
        return x


def step(training, data):
    def loss_fn(params):
        return ((training.apply_fn({"params": params}, data["x"]) - data["y"]) ** 2).mean()

    loss, grads = jscaler.value_and_grad(loss_fn)(training.params)
    return training.apply_gradients(grads=grads), loss


def batches():
    for i in range(3):
        x = np.random.default_rng(i).normal(size=(8, 8)).astype(np.float32)
        yield {"x": x, "y": np.sin(x)}


def job(hidden=HIDDEN):
    model = Net(hidden)

    def make_state(key):
        params = model.init(key, jnp.zeros((1, 8)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))

    return jscaler.Job(make_state, step, batches)


def columns(graph, devices):
    graph.op_assign(graph.op_trans(graph["up_0/dot"], jscaler.Split(("kernel", 1), devices.size)), devices)


RUNS = []
RUNS.append("once more")
number = 3


def one_by_one():
    made = job()
    return made.make_state, made.train_step, batches()


def needs(hidden):
    return job(hidden)


def fails():
    return job(None + 1)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of one's own, and a file that it imports."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "sizes.py").write_text("HIDDEN = 16\n")
    yield str(tmp_path / "my_model.py")
    for name in ("my_model", "sizes"):
        sys.modules.pop(name, None)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def last(*arguments: str) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json").splitlines()[-1])


def losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


@pytest.mark.one_day_in(2)
def test_it_trains_as_on_one_device_and_another_plan_goes_on_from_its_checkpoint(file: str, tmp_path: Path) -> None:
    log, folder = tmp_path / "log.jsonl", tmp_path / "checkpoint"
    common = ["train", "--job", f"{file}:job(hidden=32)", "--log", str(log), "--checkpoint", str(folder), "--seed", "7"]
    output = run(*common, "--plan", "zero3", "--devices", "4", "--steps", "3")
    assert "plan zero3" in output
    run(*common, "--plan", "pipeline(2, 2)", "--devices", "2", "--steps", "5", "--resume")

    job = job_from_file(f"{file}:job(hidden=32)")
    state, step, expected = job.make_state(jax.random.key(7)), jax.jit(job.train_step), []
    for batch in [*job.batches()] * 2:
        state, loss = step(state, batch)
        expected.append(loss)
    np.testing.assert_allclose(losses(log), expected[:5], rtol=1e-4)
    assert json.loads(log.read_text().splitlines()[0]).keys() == {
        "step", "loss", "seconds", "rows_per_second", "waited", "saving"
    }  # fmt: skip


@pytest.mark.one_day_in(3)
@losing
def test_every_command_takes_one(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ["--job", f"{file}:job"]
    described = f"{file}:job, 560 parameters, batch 8 × 8"
    assert last("plan", *job, "--plan", "zero1", "--devices", "4")["model"] == described
    assert last("plan", *job, "--plan", f"{file}:columns", "--devices", "4")["report"]["num_devices"] == 4
    assert last("fit", *job, "--target", "2xH100-80GB", "--no-confirm")["fits"]
    stages = ["--plan", "pipeline(2, 2)", "--target", "2xH100-80GB"]
    assert {one["schedule"] for one in last("schedules", *job, *stages)["schedules"]} >= {"gpipe", "1f1b"}
    shown = " ".join(run("schedules", *job, *stages).split())  # a long path is wrapped
    assert "560 parameters, batch 8 × 8, plan pipeline(2, 2), on 2xH100-80GB" in shown
    found = last("compare", *job, "--plan", "data_parallel", "--devices", "2", "--rounds", "1")
    assert max(found["loss_difference"], found["parameter_difference"]) < 1e-6
    on_cpu(monkeypatch)
    report = last("compile", *job, "--plan", "zero1", "--target", "2xH100-80GB")
    assert report["memory"]["optimizer"] > 0
    assert report["model"] == described


def test_a_file_is_run_once_until_it_changes(file: str) -> None:
    first, again = job_from_file(f"{file}:job"), job_from_file(f"{file}:needs(16)")
    assert first.train_step is again.train_step
    Path(file).write_text(MODEL + "\n\nprint('changed')\n")
    assert job_from_file(f"{file}:job").train_step is not first.train_step


def test_batches_that_end_begin_again_or_say_that_they_cannot(file: str) -> None:
    train = ["train", "--plan", "single", "--devices", "1", "--steps", "5"]
    assert "5/5" in run(*train, "--job", f"{file}:job")
    with pytest.raises(
        DataError, match=r"the batches of .*one_by_one have ended after 3, and do not begin again: give a list"
    ):
        run(*train, "--job", f"{file}:one_by_one")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["my_model.py"], JobError, r"a job is a function in a Python file, path.py:function, and 'my_model.py' is not"),
        (["nowhere.py:job"], JobError, "no job file at 'nowhere.py'"),
        (["{}:jop"], UnknownNameError, "no function named 'jop' in .*did you mean 'job'"),
        (["{}:number"], JobError, "'number' in .* is a int: a job is given as a function, path.py:function"),
        (["{}:job(hiden=3)"], UnknownNameError, "no argument named 'hiden' of job .*did you mean 'hidden'"),
        (["{}:needs"], JobError, r"missing a required argument: 'hidden'.* as in --job \".*:needs\(hidden=64\)\""),
        (["{}:job(zero3())"], JobError, "cannot read the job .*literals, such as .*hidden=64"),
        (["{}:job(a b)"], JobError, "cannot read the job"),
        (["{}:fails"], JobError, r"has raised TypeError: unsupported operand .*\(line \d+ of .*my_model.py\)"),
        (["{}:Net(3)"], JobError, r"has returned a Net: return \(make_state, train_step, batches\), or a jscaler.Job"),
        (
            ["{}:job", "--size", "nano", "--batch", "8"],
            JobError,
            r'--size and --batch: options of built-in models.*--job "path.py:function\(hidden=64\)"',
        ),
    ],
)
def test_mistakes_are_named(file: str, arguments: list[str], error: type[Exception], message: str) -> None:
    words = [word.format(file) for word in arguments]
    with pytest.raises(error, match=message) as found:
        CliRunner().invoke(app, ["plan", "--devices", "2", "--job", *words], catch_exceptions=False)
    if "fails" in words[0]:
        assert isinstance(found.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def job(:\n", r"cannot be run: SyntaxError: .*\(line 1 of .*broken.py\)"),
        ("import no_such_module_anywhere\n", r"ModuleNotFoundError: No module named .*\(line 1 of .*broken.py\)"),
    ],
)
def test_a_file_that_cannot_be_run(file: str, text: str, message: str) -> None:
    broken = Path(file).parent / "broken.py"
    broken.write_text(text)
    with pytest.raises(JobError, match=message) as found:
        job_from_file(f"{broken}:job")
    assert found.value.__cause__ is not None
    assert "broken" not in sys.modules
    with pytest.raises(PlanError, match=f"the plan file .*{message}"):
        jscaler.plans.by_name(f"{broken}:policy")


def make_state(key: Any) -> Any:
    return {"w": jax.random.normal(key, (4, 2))}


def train_step(state: Any, batch: Any) -> Any:
    loss, grads = jscaler.value_and_grad(lambda s: ((batch @ s["w"]) ** 2).mean())(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ((make_state, train_step), "has returned a tuple of 2: return"),
        ([make_state, train_step, []], "has returned a list of 3: return"),
        (({"w": 1}, train_step, []), "make_state of job 'mine' is a dict, and no function; return"),
        ((lambda: 0, train_step, []), r"make_state of job 'mine' is called as make_state\(key\), and takes \(\): too many"),
        ((make_state, lambda state: 0, []), r"called as train_step\(state, batch\), and takes \(state\): too many"),
        ((make_state, lambda *args: 0, []), r"takes \(\*args\): give each argument a name"),
        ((make_state, train_step, 3), "batches of job 'mine' is a int, and no iterable of batches .*nor a function"),
        ((make_state, train_step, lambda start: []), r"batches of job 'mine' is called as batches\(\)"),
    ],
)
def test_what_is_no_job(made: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        checked_job(made, "mine")


def test_a_step_that_has_a_plan_gets_that_of_the_command_line() -> None:
    job = checked_job((make_state, jscaler.parallelize("single", devices=1)(train_step), [1]), "mine")
    assert job == jscaler.Job(make_state, train_step, [1], "mine")
