"""States that ``jscaler train`` writes while it goes on: none is lost to a signal, a kill or a damaged file."""

import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from jscaler import CheckpointWarning, DataError, OutputError
from jscaler.cli import app
from jscaler.runtime.checkpoint import (
    FORMAT,
    Checkpoints,
    latest_step,
    read,
    restore,
    restore_latest,
    save,
    steps_in,
    written_beside,
)
from jscaler.training.signals import SIGNALLED

MODEL = """
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jscaler

ADAM = optax.adam(1e-2)


def make_state(key):
    params = {"w": jax.random.normal(key, (8, 8)), "v": jnp.zeros((8, 8))}
    gain = jnp.linspace(0.5, 1.5, 8)  # no step changes it, and both stages of a pipeline read it
    return {"params": params, "moments": ADAM.init(params), "key": jax.random.key(5), "gain": gain}


def step(state, batch):
    key, mask = jax.random.split(state["key"])

    def loss_fn(params):
        kept = jax.random.bernoulli(mask, 0.8, batch.shape)
        hidden = jnp.tanh(batch * kept * state["gain"] @ params["w"])
        return ((hidden @ params["v"] * state["gain"] - batch) ** 2).mean()

    loss, grads = jscaler.value_and_grad(loss_fn)(state["params"])
    updates, moments = ADAM.update(grads, state["moments"], state["params"])
    return {**state, "params": optax.apply_updates(state["params"], updates), "moments": moments, "key": key}, loss


def job(stop=0, by=0):
    def batches():
        for i in range(10**6):
            if by and i == stop:
                signal.raise_signal(by)
            yield np.random.default_rng(i).normal(size=(8, 8)).astype(np.float32)

    return jscaler.Job(make_state, step, batches)


def make_stack(key):
    params = {"w": 0.3 * jax.random.normal(key, (4, 8, 8))}
    return {"params": params, "moments": ADAM.init(params)}


def stack_step(state, batch):
    def loss_fn(params):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch, params["w"])
        return (x ** 2).mean()

    loss, grads = jscaler.value_and_grad(loss_fn)(state["params"])
    updates, moments = ADAM.update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


def stack():
    return jscaler.Job(make_stack, stack_step, job().batches)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "my_model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run of eight steps that nothing disturbs, every two of them."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(model, folder, "--steps", "8", "--save-every", "2")
    return folder


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Also where the tests run in the background, and so ignore interrupts."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def words(model: Path, folder: Path, job: str = "job") -> list[str]:
    return [
        "train", "--job", f"{model}:{job}", "--plan", "data_parallel", "--devices", "2", "--checkpoint", str(folder)
    ]  # fmt: skip


def train(model: Path, folder: Path, *more: str, job: str = "job", code: int = 0) -> str:
    result = CliRunner().invoke(app, [*words(model, folder, job), *more])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def state_of(folder: Path, step: int, maker: str = "make_state") -> list[np.ndarray]:
    """The leaves of a state as they were written, from whatever devices."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    made: dict[str, Any] = {}
    exec(MODEL, made)
    structs = jax.eval_shape(made[maker], jax.random.key(0))
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), structs)
    found = jax.tree.leaves(restore(folder, step, target))
    return [np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in found]


def assert_same_bits(ours: Path, theirs: Path, step: int) -> None:
    pairs = list(zip(state_of(ours, step), state_of(theirs, step), strict=True))
    assert len(pairs) == 9
    assert all(a.tobytes() == b.tobytes() for a, b in pairs)


def test_states_are_written_on_the_way_and_are_those_of_their_steps(whole: Path, model: Path, tmp_path: Path) -> None:
    """Although the steps behind take their buffers."""
    assert steps_in(whole) == [2, 4, 6, 8]
    for steps in (2, 6):
        folder = tmp_path / str(steps)
        train(model, folder, "--steps", str(steps))
        assert_same_bits(whole, folder, steps)
    about = written_beside(whole, 4)["run"]
    assert (about["plan"], about["seed"], about["jax"]) == ("data_parallel", 0, jax.__version__)


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_a_resumed_run_is_the_same_to_the_bit(
    number: signal.Signals, whole: Path, model: Path, tmp_path: Path
) -> None:
    output = train(model, tmp_path, "--steps", "8", job=f"job(stop=3, by={int(number)})", code=SIGNALLED + number)
    assert f"interrupted after step 4 of 8; its state is saved in {tmp_path}: go on with --resume" in output
    assert steps_in(tmp_path) == [4]
    train(model, tmp_path, "--steps", "8", "--resume")
    assert_same_bits(tmp_path, whole, 8)


def test_a_state_waits_for_the_one_before_to_be_written(tmp_path: Path) -> None:
    """Megabytes, as fast as they come."""
    state = {"w": jax.random.normal(jax.random.key(0), (1024, 2048))}
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_the_latest_are_kept(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path, "--steps", "7", "--save-every", "2", "--keep", "2")
    assert steps_in(tmp_path) == [6, 7]


def test_another_seed_is_told(whole: Path, model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    assert "had --seed 0, this one has --seed 3" in train(model, folder, "--steps", "9", "--resume", "--seed", "3")


@pytest.mark.parametrize("option", ["--resume", "--save-every=2", "--keep=2"])
def test_options_of_checkpoints_need_a_folder(option: str) -> None:
    result = CliRunner().invoke(app, ["train", option])
    assert result.exit_code == 2
    assert "give the --checkpoint that it is about" in " ".join(result.output.split())


@pytest.mark.one_day_in(3)
def test_no_damage_to_a_file_of_a_state_is_a_wrong_number(tmp_path: Path) -> None:
    """Each file that holds the latest, taken away or cut short: it is read as it was, or the one before is taken."""
    state = {"w": jax.random.normal(jax.random.key(0), (99, 99)), "key": jax.random.key(1)}
    earlier = state | {"w": 2 * state["w"]}
    save(tmp_path / "sound", 1, earlier)
    save(tmp_path / "sound", 2, state)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    taken = Counter[int]()
    for file in sorted(path for path in (tmp_path / "sound" / "2").rglob("*") if path.is_file()):
        for length in (None, 0, file.stat().st_size // 2):
            folder = Path(shutil.copytree(tmp_path / "sound", tmp_path / "damaged"))
            damage(folder / file.relative_to(tmp_path / "sound"), length)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always", CheckpointWarning)
                step, found = restore_latest(folder, target)
            assert (step == 1) == any(
                "after 2 steps" in str(one.message) and "is damaged" in str(one.message) for one in told
            )
            assert (folder / "damaged-2").is_dir() == (step == 1)
            np.testing.assert_array_equal(found["w"], (earlier if step == 1 else state)["w"])
            assert found["key"] == state["key"]
            save(folder, step + 1, found)  # where the damaged one was
            taken[step] += 1
            shutil.rmtree(folder)
    assert taken[1] > 5


def damage(file: Path, length: int | None) -> None:
    if length is None:
        file.unlink()
    else:
        os.truncate(file, length)


@pytest.mark.one_day_in(2)
def test_a_run_goes_on_from_the_state_before_a_damaged_one(whole: Path, model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    damage(folder / "8" / "default" / "manifest.ocdbt", 20)
    with pytest.warns(CheckpointWarning, match=r"after 8 steps in .* is damaged: .*damaged-8, and the one after 6 steps"):
        train(model, folder, "--steps", "8", "--resume")
    assert_same_bits(folder, whole, 8)
    damage(folder / "8" / "default" / "manifest.ocdbt", 20)
    with pytest.warns(CheckpointWarning, match=r"after 8 steps in .* is damaged: .*damaged-8-2, and the one after 6 steps"):
        train(model, folder, "--steps", "7", "--resume")


@pytest.fixture
def files_of_at_most() -> Iterator[Callable[[int], None]]:
    """The operating system refuses to write more into a file, as where a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.one_day_in(2)
def test_where_nothing_can_be_written_the_last_good_state_stays(
    files_of_at_most: Callable[[int], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor do Orbax's threads say so beside the error: without one each does, in a hundred lines."""
    state = {"w": jax.random.normal(jax.random.key(0), (300, 300))}
    save(tmp_path, 1, state)
    files_of_at_most(100_000)
    told = (
        r"^cannot write the checkpoint '.*': File too large; the state after 1 steps is whole; make room, or choose anoth"
    )
    with pytest.raises(OutputError, match=told) as raised, Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(2, state)
    files_of_at_most(resource.RLIM_INFINITY)
    assert raised.value.__suppress_context__
    assert not caplog.records
    logging.getLogger("absl").error("as before")
    assert [record.getMessage() for record in caplog.records] == ["as before"]
    assert steps_in(tmp_path) == [1]
    with pytest.raises(DataError, match=r"after 1 steps is not saved: .* has one after 1"), Checkpoints(tmp_path) as again:
        again.save(1, state)
    save(tmp_path, 2, state)
    target = {"w": jax.ShapeDtypeStruct((300, 300), np.float32, sharding=state["w"].sharding)}
    np.testing.assert_array_equal(restore(tmp_path, 2, target)["w"], state["w"])
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot write the checkpoint '.*file'"), Checkpoints(tmp_path / "file"):
        pass


def test_a_folder_is_a_path_or_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    state = {"w": jax.numpy.ones(3)}
    with Checkpoints("~/run") as checkpoints:
        checkpoints.save(1, state)
    assert (tmp_path / "run" / "1").is_dir()
    assert steps_in("~/run") == [latest_step(str(tmp_path / "run"))] == [1]
    assert restore_latest("~/run", state)[0] == 1
    np.testing.assert_array_equal(read("~/run", 1)["w"], restore(f"{tmp_path}/run", 1, state)["w"])
    assert written_beside("~/run", 1)["format"] == FORMAT
    with pytest.raises(OutputError, match=r"the checkpoint is written to a path, as text or a pathlib\.Path, not to 5"):
        Checkpoints(5)  # type: ignore[arg-type]


@pytest.mark.one_day_in(2)
def test_a_kill_leaves_the_last_good_state(model: Path, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "jscaler", *words(model, folder), "--platform", "cpu", "--steps", "9999"]
    process = subprocess.Popen([*command, "--save-every", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not (folder / "4").is_dir():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(random.Random(int(until)).random() / 10)
    finally:
        process.kill()
        process.wait()
    latest = latest_step(folder)
    for step in range(4, latest):
        shutil.rmtree(folder / str(step + 1))
    assert_same_bits(folder, whole, 4)
    train(model, folder, "--steps", "8", "--resume")
    assert_same_bits(folder, whole, 8)
