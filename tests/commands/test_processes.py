"""Jobs of several processes on one machine: the numbers of one, one end for all, and another start."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from commands.test_checkpoints import MODEL, state_of
from jax.experimental import multihost_utils
from of_the_day import of_the_day
from typer.testing import CliRunner

from bench.faults import child_pids
from jscaler.cli import app
from jscaler.commands.processes import devices_of_one, join, without
from jscaler.errors import DeviceError, ProcessError
from jscaler.runtime.agreement import agree, any_process, digest
from jscaler.runtime.checkpoint import latest_step, steps_in
from jscaler.runtime.watch import HUNG
from jscaler.training.signals import SIGNALLED

LIMIT = 120.0  # seconds that any of these jobs has


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "my_model.py"
    path.write_text(MODEL)
    return path


def started(model: Path, folder: Path, *more: str, job: str = "job", **variables: str) -> "subprocess.Popen[str]":
    words = ["train", "--job", f"{model}:{job}", *(() if "--plan" in more else ("--plan", "zero3")), "--devices", "4"]
    words += ["--platform", "cpu", "--checkpoint", str(folder), "--save-every", "2", *more]
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")} | variables
    return subprocess.Popen(
        [sys.executable, "-m", "jscaler", *words], env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def ended(process: "subprocess.Popen[str]") -> str:
    try:
        return " ".join(process.communicate(timeout=LIMIT)[0].split())
    finally:
        process.kill()


def wait_for(true: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    until = time.monotonic() + LIMIT
    while not true():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Nobody may fetch the exit code of one whose parent is gone: then it stays, without a command."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.one_day_in(5)
def test_a_killed_process_ends_all_which_start_again_and_come_to_the_same(model: Path, tmp_path: Path) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    output = ended(started(model, alone, "--steps", "12", "--local-processes", "1"))
    assert steps_in(alone) == [2, 4, 6, 8, 10, 12], output
    process = started(model, killed, "--steps", "80", "--local-processes", "2", "--restarts", "1")
    wait_for(lambda: (killed / "4").is_dir(), process)
    os.kill(child_pids(process.pid)[1], signal.SIGKILL)
    output = ended(process)
    assert process.returncode == 0, output
    assert "ProcessError: process 1 has gone (" in output  # says the other, as it would without this command
    assert "process 1 of 2 was killed by SIGKILL; the others were ended; restart 1 of 1" in output
    assert latest_step(killed) == 80
    for ours, theirs in zip(state_of(killed, 12), state_of(alone, 12), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.one_day_in(5)
@pytest.mark.parametrize("number", of_the_day([0, 1], 2))
def test_a_stopped_process_is_named_and_all_start_again(model: Path, tmp_path: Path, number: int) -> None:
    words = ["--steps", "60", "--hang-after", "4", "--local-processes", "2", "--restarts", "1"]
    process = started(model, tmp_path, "--plan", "pipeline(2, 4)", *words)
    wait_for(lambda: (tmp_path / "4").is_dir(), process)
    stopped = child_pids(process.pid)[number]
    os.kill(stopped, signal.SIGSTOP)
    output = ended(process)
    assert process.returncode == 0, output
    assert f"process {number} is silent for" in output
    assert "restart 1 of 1" in output
    assert latest_step(tmp_path) == 60
    assert not Path(f"/proc/{stopped}").exists()


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize("number", of_the_day([0, 1], 2))
def test_where_a_step_hangs_all_give_one_reason_and_the_command_ends_as_they_do(tmp_path: Path, number: int) -> None:
    """Whoever ends first is not the reason that the others, or the command, give."""
    (tmp_path / "hangs.py").write_text(MODEL + HANGS)
    words = ["--steps", "60", "--hang-after", "2", "--local-processes", "2", "--devices", "2"]
    process = started(tmp_path / "hangs.py", tmp_path / "run", *words, job=f"hangs({number})")
    output = ended(process)
    assert process.returncode == HUNG, output
    told = f"no process goes on: process 0 reads a batch for step 3 for {AGE}, process 1 reads a batch for step 3 for {AGE}"
    assert re.search(f"error: ProcessError: {told}; .*; process 0 ends", output), output
    last = f"process [01] of 2 ended with exit code 75; the others were ended: {told}; where steps take as long, give"
    assert re.search(f"error: ProcessError: {last}", output), output
    assert "Traceback" not in output


AGE = "[0-9]+ s"
HANGS = """

def hangs(number):
    import time

    def batches():
        for i, batch in enumerate(job().batches()):
            if i == 3 and jax.process_index() == number:
                time.sleep(999)
            yield batch

    return job()._replace(batches=batches)
"""


@pytest.mark.one_day_in(5)
def test_a_signal_ends_all_behind_the_same_step(model: Path, tmp_path: Path) -> None:
    process = started(model, tmp_path, "--steps", "99999", "--local-processes", "2")
    wait_for(lambda: (tmp_path / "2").is_dir(), process)
    process.send_signal(signal.SIGTERM)
    output = ended(process)
    assert process.returncode == SIGNALLED + signal.SIGTERM, output
    assert f"its state is saved in {tmp_path}" in output
    assert f"interrupted after step {latest_step(tmp_path)} of 99999" in output
    assert output.count("interrupted") == 1  # one speaks for all


@pytest.mark.one_day_in(5)
def test_where_the_command_is_killed_its_processes_end_with_their_state_saved(model: Path, tmp_path: Path) -> None:
    process = started(model, tmp_path, "--steps", "99999", "--local-processes", "2")
    wait_for(lambda: (tmp_path / "2").is_dir(), process)
    left = child_pids(process.pid)
    process.kill()
    until = time.monotonic() + LIMIT
    while any(runs(pid) for pid in left.values()):
        assert time.monotonic() < until
        time.sleep(0.02)
    output = " ".join(process.communicate()[0].split())
    assert f"has started this process ({process.pid}) is gone" in output
    assert f"interrupted after step {latest_step(tmp_path)} of 99999; its state is saved in {tmp_path}" in output


@pytest.mark.one_day_in(5)
@pytest.mark.parametrize(
    ("own", "folders", "told"),
    [
        ((["--seed", "0"], ["--seed", "1"]), "ss", "process 1 has another seed than process 0: '1' and '0'"),
        ((["--keep", "2"], ["--keep", "3"]), "ss", "process 1 has another keep than process 0: '3' and '2'"),
        (([], []), "st", "process 1 does not see the folder"),
    ],
)
def test_processes_of_different_commands_say_so(
    model: Path, tmp_path: Path, own: tuple[list[str], list[str]], folders: str, told: str
) -> None:
    """Under a launcher: these are the variables from which JAX knows Slurm."""
    launched = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    every = [
        started(
            model, tmp_path / folders[i], "--steps", "3", "--distributed", "--processes", "2", *own[i],
            **launched, SLURM_PROCID=str(i), SLURM_LOCALID=str(i),
        )
        for i in (0, 1)
    ]  # fmt: skip
    for output in map(ended, every):
        assert f"ProcessError: {told}" in output


@pytest.mark.one_day_in(5)
@pytest.mark.parametrize(
    ("job", "first", "second"),
    [
        ("job", "pipeline(2, 4)", "pipeline(2, 2)"),
        ("stack", "pipeline(2, 4, 'interleaved', chunks=2)", "pipeline(2, 2, layers=(3, 1))"),  # leaves in chunks
    ],
)
def test_a_pipeline_over_two_processes_is_that_of_one_and_goes_on_as_another_plan(
    model: Path, tmp_path: Path, job: str, first: str, second: str
) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    words = ["--plan", first, "--steps", "4"]
    for folder, count in ((alone, "1"), (shared, "2")):
        process = started(model, folder, *words, "--local-processes", count, job=job)
        output = ended(process)
        assert process.returncode == 0, output
    maker = "make_stack" if job == "stack" else "make_state"
    for ours, theirs in zip(state_of(shared, 4, maker), state_of(alone, 4, maker), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    for plan, steps, count in ((second, 6, "2"), ("zero3", 8, "1")):
        more = "--plan", plan, "--steps", str(steps), "--local-processes", count, "--resume"
        process = started(model, shared, *more, job=job)
        output = ended(process)
        assert process.returncode == 0, output
    assert steps_in(shared) == [2, 4, 6, 8]


@pytest.mark.one_day_in(3)
def test_two_processes_of_auto_get_one_plan(model: Path, tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for folder, plan, count in ((alone, "zero3", "1"), (shared, "auto", "2")):
        process = started(model, folder, "--plan", plan, "--steps", "2", "--local-processes", count)
        output = ended(process)  # plans that differ end in an error
        assert process.returncode == 0, output
    assert "plans are priced as if on H100-80GB" in output
    for ours, theirs in zip(state_of(shared, 2), state_of(alone, 2), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_words_and_shares() -> None:
    words = ["train", "--restarts", "3", "--steps=4", "--local-processes=2", "--seed", "1"]
    assert without(words, "--local-processes", "--restarts") == ["train", "--steps=4", "--seed", "1"]
    assert (devices_of_one(8, 4), devices_of_one(None, 4), devices_of_one(8, None)) == (2, None, 8)
    with pytest.raises(DeviceError, match="6 devices are not shared by 4 processes: give a multiple of 4"):
        devices_of_one(6, 4)
    result = CliRunner().invoke(app, ["train", "--local-processes", "2"])
    assert isinstance(result.exception, DeviceError)
    result = CliRunner().invoke(app, ["train", "--restarts", "2", "--checkpoint", "runs"])
    assert (result.exit_code, "it is for --local-processes" in result.output) == (2, True)


def test_what_differs_is_named_also_behind_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, of which the other one's facts are put beside our own."""
    facts = {"plan": "zero3", "XLA_FLAGS": "--xla_a=1 " * 40}

    def written(given: dict[str, str]) -> list[np.ndarray]:
        """What a process hands in."""
        handed: list[np.ndarray] = []

        def gather(own: np.ndarray) -> np.ndarray:
            handed.append(own)
            return np.stack([own, own])

        monkeypatch.setattr(multihost_utils, "process_allgather", gather)
        agree(given)
        return handed

    def agree_with(other: dict[str, str]) -> None:
        theirs = iter(written(other))
        monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: np.stack([own, next(theirs)]))
        agree(facts)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    agree_with(dict(facts))
    with pytest.raises(ProcessError, match="process 1 has another plan than process 0: 'zero1' and 'zero3'; start all"):
        agree_with(facts | {"plan": "zero1"})
    with pytest.raises(ProcessError, match="process 1 has another XLA_FLAGS than process 0"):
        agree_with(facts | {"XLA_FLAGS": facts["XLA_FLAGS"] + "--xla_b=2"})
    with pytest.raises(ProcessError, match=r"compare \[2, 3\] facts: they run different versions"):
        agree_with(facts | {"more": ""})


def test_processes_without_a_place_to_meet_are_refused() -> None:
    with pytest.raises(DeviceError, match="--processes 2 and --process 1 say nothing of where the others are"):
        join(None, 2, 1, distributed=False)
    join(None, None, None, distributed=False)
    with pytest.raises(DeviceError, match="--local-devices is of a process of a job"):
        join(None, None, None, distributed=False, local_devices="all")


@pytest.mark.parametrize(("words", "given"), [("all", []), ("0,2", [0, 2]), (None, None)])
def test_the_devices_of_a_host_that_a_process_takes(
    monkeypatch: pytest.MonkeyPatch, words: str | None, given: list[int] | None
) -> None:
    """Of no numbers JAX leaves none out; of none at all it does, under Slurm."""
    found: list[tuple[object, ...]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *said, **_: found.append(said))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    join("host:1", 2, 0, distributed=False, local_devices=words)
    assert found == [("host:1", 2, 0, given)]
    with pytest.raises(DeviceError, match="is all, or numbers such as 0,1, and not 'both'"):
        join("host:1", 2, 0, distributed=False, local_devices="both")


def test_alone_there_is_nothing_to_agree_on() -> None:
    agree({"plan": "zero3"})
    assert any_process(15) == 15
    assert digest("a", np.ones(2)) != digest("a", np.ones(2, np.float32)) != digest("a", np.ones((2, 1), np.float32))
