"""Mistakes on the command line: one sentence that says what, where, the numbers and the remedy; before anything runs."""

import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from typer.testing import CliRunner

from jscaler.cli import app
from jscaler.errors import (
    DataError,
    DeviceError,
    JobError,
    JscalerError,
    OutputError,
    PlanError,
    PlanFileError,
    UnknownNameError,
)

USAGE = 2  # typer's exit code
FILES = {
    "text.txt": "to be or not to be, that is the question. " * 20,
    "short.txt": "to",
    "empty.json": "",
    "deep.json": "[" * 100_000,
    "half.json": '{"format": "jscaler plan", "version": 1, "na',
    "later.json": '{"format": "jscaler plan", "version": 2}',
    "none.py": "x = 1\n",
    "raises.py": "def job():\n    raise ValueError('no')\n",
    "exits.py": "import sys\nsys.exit(3)\n",
    "exits_later.py": "import sys\n\n\ndef job():\n    sys.exit(3)\n",
    "wrong.py": "def job(:\n",
    "table.csv": "nonsense",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (made / name).write_text(text)
    return made


# A command in words, where @ is the folder, then the error's class, or the exit code of a mistake of usage, and a fragment.
TRAIN = "train --devices 2 --data @/text.txt"
MISTAKES: list[tuple[str, type[JscalerError] | int, str]] = [
    # where results go
    (f"{TRAIN} --log @/text.txt/log", OutputError, "cannot write the log '…text.txt/log': …; choose another path"),
    (f"{TRAIN} --log @", OutputError, "cannot write the log '…': Is a directory; choose another path"),
    (f"{TRAIN} --log /proc/nowhere/log", OutputError, "cannot write the log '/proc/nowhere/log': No such file"),
    (f"{TRAIN} --checkpoint @/text.txt", OutputError, "cannot write the checkpoint '…text.txt': "),
    (f"{TRAIN} --checkpoint @/text.txt/x", OutputError, "cannot write the checkpoint '…text.txt/x': Not a directory"),
    (f"{TRAIN} --checkpoint /proc/nowhere", OutputError, "cannot write the checkpoint '/proc/nowhere': "),
    (f"{TRAIN} --trace @/text.txt", OutputError, "cannot write the traces '…text.txt': "),
    (f"{TRAIN} --draw @/text.txt/x.png", OutputError, "cannot write the picture '…x.png': "),
    (f"{TRAIN} --draw @/x.bmp", UnknownNameError, "no picture format named '.bmp' …; did you mean '.png'?"),
    ("plan --devices 2 --save @/text.txt/x.json", OutputError, "cannot write the plan '…x.json': "),
    ("plan --devices 2 --save @", OutputError, "cannot write the plan '…': Is a directory"),
    ("plan --devices 2 --save @/x.txt", PlanFileError, "a plan file is named *.json, not '…x.txt'"),
    ("plan --target 2xH100-80GB --trace @", OutputError, "cannot write the trace '…': Is a directory"),
    ("plan --target 2xH100-80GB --draw @/text.txt/x.png", OutputError, "cannot write the picture"),
    ("fit --target H100-80GB --draw @/text.txt/x.png", OutputError, "cannot write the picture"),
    ("compile --target 2xH100-80GB --draw @/text.txt/x.png", OutputError, "cannot write the picture"),
    ("bench-comm --out @/text.txt/x.toml", OutputError, "cannot write the cluster file '…x.toml': "),
    ("bench-comm --out @/x.txt", DeviceError, "a cluster file is named *.toml, not '…x.txt'; give --out "),
    # numbers
    ("train --steps -5", USAGE, "'--steps'"),
    ("train --steps 0", USAGE, "'--steps'"),
    ("train --steps x", USAGE, "'--steps'"),
    ("train --batch 0", USAGE, "'--batch'"),
    ("train --batch -3", USAGE, "'--batch'"),
    ("train --seq 0", USAGE, "'--seq'"),
    ("train --seq -1", USAGE, "'--seq'"),
    ("train --seed -1", USAGE, "'--seed'"),
    ("train --seed 99999999999999999999", USAGE, "'--seed'"),
    ("train --devices 2.5", USAGE, "'--devices'"),
    ("train --resume", USAGE, "--checkpoint"),
    ("plan --devices 0", USAGE, "'--devices'"),
    ("plan --batch 0 --devices 2", USAGE, "'--batch'"),
    ("fit --target H100-80GB --batch 0", USAGE, "'--batch'"),
    ("compile --target 2xH100-80GB --rows -1", USAGE, "'--rows'"),
    ("compile", USAGE, "'--target'"),
    ("compare --rounds 0", USAGE, "'--rounds'"),
    ("bench-comm --rounds 0", USAGE, "'--rounds'"),
    ("bench-comm --largest 1", USAGE, "'--largest'"),
    ("nonsense", USAGE, "'nonsense'"),
    (f"{TRAIN} --devices 0", DeviceError, "0 devices are asked for; ask for 1 to 8"),
    (f"{TRAIN} --devices -1", DeviceError, "-1 devices are asked for; ask for 1 to 8"),
    (f"{TRAIN} --devices 9", DeviceError, "9 devices are asked for and 8 are at hand (cpu); ask for 1 to 8"),
    (f"{TRAIN} --learning-rate nan", JscalerError, "--learning-rate is a positive number, not nan"),
    (f"{TRAIN} --learning-rate -1", JscalerError, "--learning-rate is a positive number, not -1.0"),
    (f"{TRAIN} --learning-rate inf", JscalerError, "--learning-rate is a positive number, not inf"),
    (f"{TRAIN} --platform nonsense", DeviceError, "no platform 'nonsense'; known: cpu, cuda"),
    (f"{TRAIN} --platform gpu", DeviceError, "no platform 'gpu'; known: cpu, cuda"),
    ("bench-comm --devices 0", DeviceError, "0 devices are asked for; ask for 1 to 8"),
    ("bench-comm --platform nonsense", DeviceError, "no platform 'nonsense'; known: cpu, cuda"),
    ("plan --devices 1000000000", DeviceError, "1000000000 devices are asked for; ask for at most 1048576"),
    # models and data
    ("train --model gtp", UnknownNameError, "no model named 'gtp'; did you mean 'gpt'?"),
    ("train --model gpt-zillion", UnknownNameError, "no size named 'zillion' of model gpt; known: nano, mini"),
    ("train --size nanoo", UnknownNameError, "no size named 'nanoo' of model gpt; did you mean 'nano'?"),
    ("train --model gpt-mini --size nano", JscalerError, "two sizes are given: --model gpt-mini and --size nano; leave"),
    ("train --model moe --stacked", JscalerError, "model moe has no --stacked and no --remat; leave them out"),
    ("train --dtype f8", UnknownNameError, "no dtype named 'f8'; known: bf16"),
    ("train --data @/nowhere", DataError, "no training data at '…nowhere': give a text file or a folder"),
    ("train --data /dev/null", DataError, "'/dev/null' holds no text (1 files, 0 bytes)"),
    ("train --data /proc/self/mem", DataError, "the data at '/proc/self/mem' cannot be read: "),
    ("train --devices 2 --data @/short.txt", DataError, "the data has 2 bytes; one sequence needs 65"),
    # jobs
    ("train --job @/nowhere.py:job", JobError, "no job file at '…nowhere.py' (asked for its function 'job')"),
    ("train --job nowhere", JobError, "a job is a function in a Python file, path.py:function, and 'nowhere' is not"),
    ("train --job @/none.py:job", UnknownNameError, "no function named 'job' in '…none.py'"),
    ("train --job @/none.py:x", JobError, "'x' in '…none.py' is a int: a job is given as a function"),
    ("train --job @/none.py", JobError, "a job is a function in a Python file"),
    ("train --job @/raises.py:job", JobError, "has raised ValueError: no (line 2 of …raises.py)"),
    ("train --job @/exits.py:job", JobError, "the job file '…exits.py' cannot be run: SystemExit: 3 (line 2 of "),
    ("train --job @/exits_later.py:job", JobError, "has raised SystemExit: 3 (line 5 of "),
    ("train --job @/wrong.py:job", JobError, "cannot be run: SyntaxError: invalid syntax (line 1 of "),
    ("train --job @/raises.py:job(", JobError, "write its arguments as literals"),
    ("train --job @/none.py:job --size nano", JobError, "--size: options of built-in models, and --job brings a model"),
    # plans
    (f"{TRAIN} --plan data_paralel", UnknownNameError, "no plan named 'data_paralel'…did you mean 'data_parallel'?"),
    (f"{TRAIN} --plan megatron(dp=1", PlanError, "cannot read the plan 'megatron(dp=1': write its arguments as literals"),
    (f"{TRAIN} --plan {'data_parallel(' * 500}", PlanError, "cannot read the plan 'data_parallel("),
    (f"{TRAIN} --plan {'(' * 500}", PlanError, "cannot read the plan '(((("),
    (f"{TRAIN} --plan @/nowhere.json", PlanFileError, "'…nowhere.json' cannot be read: No such file"),
    (f"{TRAIN} --plan @/empty.json", PlanFileError, "'…empty.json': it is no JSON"),
    (f"{TRAIN} --plan @/deep.json", PlanFileError, "'…deep.json': it is no JSON"),
    (f"{TRAIN} --plan @/half.json", PlanFileError, "'…half.json': it is no JSON"),
    (f"{TRAIN} --plan @/later.json", PlanFileError, "it is of version 2, and this jscaler reads up to version 1; load it"),
    (f"{TRAIN} --schedule 1f1b", UnknownNameError, "no argument named 'schedule' of plan 'data_parallel'"),
    (f"{TRAIN} --plan pipeline(2,2) --schedule @/nowhere.csv", PlanError, "the schedule '…nowhere.csv' cannot be read"),
    (f"{TRAIN} --plan pipeline(2,2) --schedule @/table.csv", PlanError, "table.csv"),
    # clusters
    ("plan", DeviceError, "say for how many devices to plan: --devices 32, or --target 4x8xV100-32GB"),
    ("plan --target 4x8xNOSUCH", UnknownNameError, "no device kind named 'NOSUCH' in '4x8xNOSUCH'; known: V100-16GB"),
    ("plan --target 0x8xH100-80GB", UnknownNameError, "no cluster named '0x8xH100-80GB' (or describe one: 8xH100-80GB"),
    ("plan --target=-1xH100-80GB", UnknownNameError, "no cluster named '-1xH100-80GB' (or describe one"),
    ("plan --target 99999999999999999999xH100-80GB", DeviceError, "99999999999999999999 devices; give at most 1048576"),
    ("plan --devices 2 --profile @/x.json", DeviceError, "--profile has seconds of a kind of device: say of which with"),
    ("profile --plan single --out @/x.json --devices 0", USAGE, "'--devices'"),
    ("calibrate --out @/x.txt", DeviceError, "a cluster file is named *.toml, not '…x.txt'; give --out "),
    ("plan --target @/nowhere.toml", DeviceError, "cannot read the cluster file …nowhere.toml: …bench-comm --out"),
    ("plan --target @/text.toml", DeviceError, "cannot read the cluster file"),
    ("fit --target 2xNOSUCH", UnknownNameError, "no device kind named 'NOSUCH'"),
    ("compile --target v101", UnknownNameError, "no cluster named 'v101'"),
    ("schedules --plan pipeline(2,2) --target h10", UnknownNameError, "no cluster named 'h10'…did you mean 'h100'?"),
    # layouts
    ("redistribute", USAGE, "'--shape'"),
    ("redistribute --shape 8 --from x --to y", PlanError, "layout 'x' does not parse; write R<replicas> V<value shares>"),
    ("redistribute --shape -8 --from x --to y", PlanError, "shape '-8' does not parse; write the sizes of the dims"),
    ("redistribute --shape 8 --from x --to y --dtype f8", PlanError, "layout 'x' does not parse"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "kind", "sentence"), MISTAKES, ids=[one[0][:60] for one in MISTAKES])
def test_mistakes(command: str, kind: type[JscalerError] | int, sentence: str, folder: Path) -> None:
    words = [word.replace("@", str(folder)) for word in command.split(" ")]
    result = CliRunner().invoke(app, words)
    if isinstance(kind, int):
        assert result.exit_code == kind
        assert sentence in result.output
        return
    assert isinstance(result.exception, kind), (result.exception, result.output)
    message = str(result.exception)
    assert re.search(re.escape(sentence).replace("…", ".*"), message), message
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.one_day_in(3)
def test_a_full_disk_is_told(folder: Path) -> None:
    command = ["train", "--size", "nano", "--seq", "8", "--batch", "8", "--devices", "1", "--plan", "single"]
    result = CliRunner().invoke(app, [*command, "--data", str(folder / "text.txt"), "--log", "/dev/full", "--steps", "1"])
    assert isinstance(result.exception, OutputError)
    assert str(result.exception) == "cannot write the log '/dev/full': No space left on device; choose another path"


# -- checkpoints


def state(size: int, **more: int) -> Any:
    return {
        "params": {"kernel": jnp.ones((size, size)), **{name: jnp.ones(n) for name, n in more.items()}},
        "step": jnp.int32(3),
    }


def target(of: Any) -> Any:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), of)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from jscaler.runtime.checkpoint import save

    made = tmp_path_factory.mktemp("checkpoint") / "run"
    save(made, 3, state(4))
    return made


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (state(8), "1 of 2 leaves differ, the first is 'params/kernel', [4, 4] there and [8, 8] here; give the --model"),
        (state(4, bias=4), "only the model has 'params/bias' and 1 such in all; give the --model, --size and options"),
        ({"step": jnp.int32(0)}, "only the checkpoint has 'params/kernel' and 1 such in all"),
    ],
)
def test_a_checkpoint_of_another_model(wanted: Any, sentence: str, checkpoint: Path) -> None:
    from jscaler.runtime.checkpoint import restore

    with pytest.raises(DataError, match=re.escape(sentence)):
        restore(checkpoint, 3, target(wanted))


KERNEL, COUNT = jnp.ones((4, 4)), jnp.int32(3)
FOREIGN: dict[str, tuple[Any, str]] = {
    "another dtype": (
        {"params": {"kernel": KERNEL.astype(jnp.bfloat16)}, "step": COUNT},
        "1 of 2 leaves differ, the first is 'params/kernel', float32 there and bfloat16 here; give the --model",
    ),
    "a count of another dtype": (
        {"params": {"kernel": KERNEL}, "step": jnp.float32(3)},
        "'step', int32 there and float32 here",
    ),
    "a count in a list": ({"params": {"kernel": KERNEL}, "step": jnp.ones(3, int)}, "'step', [] there and [3] here"),
    "no count": ({"params": {"kernel": KERNEL}}, "only the checkpoint has 'step' and 1 such in all"),
    "a leaf renamed": (
        {"params": {"weight": KERNEL}, "step": COUNT},
        "only the checkpoint has 'params/kernel' and 1 such in all and only the model has 'params/weight' and 1 such in",
    ),
    "another optimizer": (
        {**state(4), "opt": optax.adam(1e-3).init(state(4)["params"])},
        "only the model has 'opt/0/count', 'opt/0/mu/kernel' and 3 such in all",
    ),
    "a list": (
        [KERNEL, COUNT],
        "only the checkpoint has 'params/kernel', 'step' and 2 such in all and only the model has '0'",
    ),
    "nothing": ({}, "only the checkpoint has 'params/kernel', 'step' and 2 such in all"),
}


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("name", FOREIGN)
def test_a_checkpoint_of_another_state(name: str, checkpoint: Path) -> None:
    from jscaler.runtime.checkpoint import restore

    wanted, sentence = FOREIGN[name]
    with pytest.raises(DataError, match=re.escape(sentence)):
        restore(checkpoint, 3, target(wanted))


@pytest.mark.one_day_in(2)
def test_checkpoints_that_are_not_there(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    from jscaler.runtime.checkpoint import latest_step, restore

    (tmp_path / "half" / "3.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / "empty" / "3").mkdir(parents=True)
    for where, step, told in (
        (checkpoint, 4, "there is no state after 4 steps in …; it has those after 3"),
        (tmp_path / "nowhere", 3, "there is no state after 3 steps in …nowhere; it has none"),
        (tmp_path / "half", 3, "there is no state after 3 steps in …half; it has none"),
        (tmp_path / "empty", 3, "the checkpoint after 3 steps in …empty is damaged: "),
        (folder / "text.txt", 3, "'…text.txt' is a file, and a checkpoint is a folder; give --checkpoint"),
    ):
        with pytest.raises(DataError, match=re.escape(told).replace("…", ".*")):
            restore(where, step, target(state(4)))
    with pytest.raises(DataError, match=r"there is no checkpoint in .*half: train with --checkpoint .*half first"):
        latest_step(tmp_path / "half")
    with pytest.raises(DataError, match=r"text.txt' is a file, and a checkpoint is a folder"):
        latest_step(folder / "text.txt")


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("part", ["default/_METADATA"])
def test_a_damaged_checkpoint(part: str, checkpoint: Path, tmp_path: Path) -> None:
    from jscaler.runtime.checkpoint import restore

    shutil.copytree(checkpoint, tmp_path / "run")
    damaged = tmp_path / "run" / "3" / part
    damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(DataError, match=r"the checkpoint after 3 steps in .* is damaged: .*; remove .*/3 to go on from"):
        restore(tmp_path / "run", 3, target(state(4)))


def test_a_checkpoint_of_a_newer_jscaler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its state looks like, it is not called damaged."""
    from jscaler.runtime import checkpoint as module

    monkeypatch.setattr(module, "WRITTEN", {"jscaler": {"format": 2, "orbax": "99.1"}})
    module.save(tmp_path / "run", 3, {"leaves": [KERNEL]})
    sentence = r"after 3 steps in .* is of format 2, and this jscaler reads format 1: a newer jscaler has written it; go on"
    with pytest.raises(DataError, match=sentence):
        module.restore(tmp_path / "run", 3, target(state(4)))


@pytest.mark.one_day_in(2)
def test_a_checkpoint_of_a_newer_orbax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is damaged here, as one is of which this Orbax does not know how it lies."""
    from jscaler.runtime import checkpoint as module

    monkeypatch.setattr(module, "WRITTEN", {"jscaler": {"format": 1, "orbax": "99.1"}})
    module.save(tmp_path / "run", 3, state(4))
    assert jnp.array_equal(module.restore(tmp_path / "run", 3, target(state(4)))["params"]["kernel"], KERNEL)
    (tmp_path / "run" / "3" / "default" / "_METADATA").write_text("{}")
    with pytest.raises(DataError, match=r"cannot be read: Orbax 99\.1 has written it, and this one is .*--upgrade orbax"):
        module.restore(tmp_path / "run", 3, target(state(4)))


@pytest.mark.one_day_in(2)
def test_a_checkpoint_that_cannot_be_written(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import errno

    from jscaler.runtime import checkpoint as module

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.ocp.CheckpointManager, "save", full)
    with pytest.raises(OutputError, match=r"cannot write the checkpoint .*: No space left on device;"):
        module.save(tmp_path / "full", 1, state(2))
