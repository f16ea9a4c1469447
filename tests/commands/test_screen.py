"""Every command of the README on terminals of 80 and of 200 columns, into a pipe, and stopped by Ctrl-C."""

import io
import json
import re
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import typer
import typer.rich_utils  # asks for FORCE_COLOR once, when it is imported: not in a test that sets it, for all that follow
from of_the_day import of_the_day
from report.stand_in import on_cpu
from rich.console import Console
from screens import faults, shown
from terminal import in_terminal
from typer.testing import CliRunner

import jscaler
from jscaler import Speed, StepRecord
from jscaler.cli import app
from jscaler.commands.interrupts import INTERRUPTED, finished_before_interrupts, on_screen
from jscaler.commands.training import OnScreen
from jscaler.runtime.checkpoint import save

ROOT = Path(__file__).parents[2]
NARROW, WIDE = 80, 200
ROWS = {NARROW: "24", WIDE: "50"}
NANO = "--model gpt --size nano --seq 8 --batch 8"
OWN = "--job {folder}/my_model.py:job"

# Each command of the README as one that takes a second or two, and how wide it is seen: both where that is cheap.
SMALLER = {
    "jscaler train --model gpt --size nano --plan data_parallel --devices 8 --platform cpu --log runs/nano.jsonl": (
        f"train {OWN} --plan data_parallel --devices 4 --steps 2 --log {{folder}}/nano.jsonl",
        (NARROW, WIDE),
    ),
    'jscaler train --size nano --plan "megatron(dp=2, tp=4, sequence=True)" --devices 8 --platform cpu': (
        f'train {NANO} --plan "megatron(dp=1, tp=2, sequence=True)" --devices 2 --steps 2 --explain --stacked',
        (NARROW,),
    ),
    "jscaler train --size mini --plan docs/split_one_mlp.py:split_one_mlp --devices 4 --platform cpu --data my_texts/": (
        f"train {NANO} --plan {ROOT}/docs/split_one_mlp.py:split_one_mlp --devices 2 --steps 2 --data {{folder}}/my_texts",
        (WIDE,),
    ),
    "jscaler compare --size nano --plan data_parallel --devices 8 --platform cpu": (
        f"compare {OWN} --plan data_parallel --devices 4 --rounds 1",
        (NARROW, WIDE),
    ),
    "jscaler train --job my_model.py:job --plan zero3 --devices 8 --platform cpu": (
        f"train {OWN} --plan zero3 --devices 4 --steps 2 --explain",
        (NARROW, WIDE),
    ),
    'jscaler compile --model gpt-1.3b --plan "megatron(dp=4, tp=8)" --target 4x8xV100-32GB --dtype fp16 --remat '
    "--draw memory.png": (
        f"compile {OWN} --plan data_parallel --target 2xH100-80GB --draw {{folder}}/memory.svg",
        (NARROW, WIDE),
    ),
    'jscaler plan --model gpt-1.3b --plan "megatron(dp=4, tp=8, zero=1)" --target 4x8xV100-32GB --save plan.json': (
        f'plan {NANO} --plan "megatron(dp=2, tp=4, zero=1)" --target 8xH100-80GB --save {{folder}}/plan.json',
        (NARROW, WIDE),
    ),
    "jscaler search --model gpt-1.3b --target 16xA100-80GB --batch 256 --save plan.json": (
        f"search {OWN} --target 2xA100-80GB --space zero --no-confirm --save {{folder}}/found.json",
        (NARROW, WIDE),
    ),
    "jscaler fit --model gpt-1.3b --target V100-32GB --seq 16384": (
        "fit --model gpt-nano --target V100-32GB --seq 16 --no-confirm --all",
        (NARROW, WIDE),
    ),
    'jscaler redistribute --shape 1024,1024 --from "R1 V4 D(2,1)" --to "R8 V1 D(1,1)" --devices 8 '
    "--cluster v100-nvlink-ib100": (
        'redistribute --shape 1024,1024 --from "R1 V4 D(2,1)" --to "R8 V1 D(1,1)" --devices 8 --cluster v100-nvlink-ib100',
        (NARROW, WIDE),
    ),
    "jscaler bench-comm --platform cpu --devices 4 --quick": (
        "bench-comm --devices 2 --quick",
        (NARROW, WIDE),
    ),
    "jscaler calibrate --out lab.toml": ("calibrate --devices 1 --like H200 --quick --out {folder}/lab.toml", (NARROW,)),
}
BESIDE = [  # which the README does not show
    f'schedules {OWN} --plan "pipeline(2, 2)" --target 2xH100-80GB',
    "export --part params {folder}/run {folder}/net.safetensors",
    f"profile {NANO} --batch 2 --seq 8 --plan data_parallel --devices 2 --whole --platform cpu --out {{folder}}/seen.json",
    "runs {folder}/logs --draw {folder}/losses.png",
    f"diff zero1 zero3 {OWN} --target 2xA100-80GB",
]
USES_ROOM = ("compile", "plan", "fit", "redistribute")  # have more to show than 80 columns
SEEN = [
    pytest.param(smaller, columns, id=f"{smaller.split()[0]}-{number}-{columns}")
    for number, (smaller, widths) in enumerate([*SMALLER.values(), *((one, (NARROW, WIDE)) for one in BESIDE)])
    for columns in widths
]
SLOW = ("megatron(dp=1", "split_one_mlp")  # to compile, and what they show others show
PIPED = [smaller for smaller, _ in SMALLER.values() if not any(one in smaller for one in SLOW)] + BESIDE

MODEL = """
import jax, jax.numpy as jnp
import jscaler


def make_state(key):
    return {"up": jax.random.normal(key, (8, 16)), "down": jax.random.normal(key, (16, 8))}


def step(state, batch):
    loss = lambda s: ((jnp.tanh(batch @ s["up"]) @ s["down"] - batch) ** 2).mean()
    value, grads = jscaler.value_and_grad(loss)(state)
    return jax.tree.map(lambda x, g: x - 0.1 * g, state, grads), value


def job():
    return jscaler.Job(make_state, step, [jnp.ones((8, 8))])


def stopped():
    raise KeyboardInterrupt


def stopped_in_step():
    def train_step(state, batch):
        raise KeyboardInterrupt

    return jscaler.Job(make_state, train_step, [jnp.ones((8, 8))])


def stopped_behind_two_steps():
    def batches():
        yield jnp.ones((8, 8))
        yield jnp.ones((8, 8))
        raise KeyboardInterrupt

    return jscaler.Job(make_state, step, batches)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the README's commands name: a model and texts; and a checkpoint."""
    made = tmp_path_factory.mktemp("screen")
    (made / "my_model.py").write_text(MODEL)
    (made / "my_texts").mkdir()
    (made / "my_texts" / "one.txt").write_text("to be or not to be, that is the question. " * 20)
    save(made / "run", 2, {"params": {"up": np.ones((8, 16), np.float32)}})
    record = {"step": 0, "loss": 2.5, "seconds": 0.5, "tokens_per_second": 1e4, "waited": 0.1, "saving": 0.0}
    (made / "logs").mkdir()
    (made / "logs" / "zero3.jsonl").write_text(
        json.dumps(record) + "\n" + json.dumps(record | {"step": 1, "loss": 2.25}) + "\n"
    )
    (made / "logs" / "zero3.jsonl.run").write_text(json.dumps({"plan": "zero3", "devices": 8}))
    return made


def seen(arguments: list[str], columns: int, code: int = 0) -> list[str]:
    """A command's lines on a terminal, in this process."""
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": ROWS[columns]}
    result = CliRunner(env=terminal).invoke(app, arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return shown(result.output_bytes, columns)


def test_each_command_of_the_readme_is_here() -> None:
    found = re.findall(r"^(jscaler [a-z-]+ --.*?)(?: +#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert found == list(SMALLER)
    assert {param.values[0].split()[0] for param in SEEN} == {*typer.main.get_command(app).commands}


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize(("command", "columns"), of_the_day(SEEN, 3))
def test_a_command_on_a_terminal(command: str, columns: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if command.startswith("compile"):
        on_cpu(monkeypatch)
    lines = seen(shlex.split(command.format(folder=folder)), columns)
    assert not faults(lines, columns)
    assert columns == NARROW or command.split()[0] not in USES_ROOM or max(map(len, lines)) > NARROW, lines
    assert not any("capturing" in line for line in lines), "what was shown for the time being is gone"


@pytest.mark.parametrize("command", [None, *typer.main.get_command(app).commands])
@pytest.mark.parametrize("columns", [NARROW, WIDE])
def test_help_on_a_terminal(command: str | None, columns: int) -> None:
    assert not faults(seen([*([command] if command else []), "--help"], columns), columns)


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("command", of_the_day(PIPED, 3), ids=lambda command: command.split()[0])
def test_a_command_in_a_pipe(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the terminal around it: no control codes, and cells and columns as on a wide one."""
    if command.startswith("compile"):
        on_cpu(monkeypatch)
    result = CliRunner(env={"COLUMNS": "40", "LINES": "10"}).invoke(app, shlex.split(command.format(folder=folder)))
    assert result.exit_code == 0, (result.output, result.exception)
    assert "\x1b" not in result.output
    assert "\r" not in result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) > 40
    assert not faults(lines, max(map(len, lines))), lines


def test_a_pipe_has_one_width_and_no_control_codes() -> None:
    command = shlex.split(SMALLER[next(one for one in SMALLER if "redistribute" in one)][0])
    outputs = {CliRunner(env={"COLUMNS": str(columns)}).invoke(app, command).output for columns in (40, NARROW, WIDE)}
    assert len(outputs) == 1
    assert "\x1b" not in outputs.pop()


def test_no_color_is_heeded() -> None:
    command = shlex.split(SMALLER[next(one for one in SMALLER if "redistribute" in one)][0])
    result = CliRunner(env={"NO_COLOR": "1", "FORCE_COLOR": "1", "TERM": "xterm-256color"}).invoke(app, command)
    assert not re.search(r"\x1b\[[\d;]*(3|4|9)\dm", result.output)


# -- Ctrl-C


@pytest.mark.parametrize(
    "command",
    [
        "train --plan single --devices 1",
        "compare --plan single --devices 1",
        "plan --plan single --devices 1",
        "fit --target V100-32GB",
        "compile --plan single --target V100-32GB",
        'schedules --plan "pipeline(2, 2)" --target 2xH100-80GB',
    ],
)
@pytest.mark.parametrize("job", ["stopped", "stopped_in_step"])
def test_every_command_ends_in_a_sentence(command: str, job: str, folder: Path) -> None:
    lines = seen([*shlex.split(command), "--job", f"{folder}/my_model.py:{job}"], NARROW, INTERRUPTED)
    assert lines == ["interrupted before it was done"]


def test_what_was_trained_and_is_not_saved_is_told(folder: Path) -> None:
    job = f"--job {folder}/my_model.py:stopped_behind_two_steps"
    command = f"train {job} --plan single --devices 1 --steps 9 --checkpoint {folder}/stopped"
    words = " ".join(" ".join(seen(shlex.split(command), NARROW, INTERRUPTED)).split())
    assert "interrupted after step 2 of 9; 2 steps of this run are in no checkpoint: a second signal" in words
    assert not list((folder / "stopped").iterdir())


def finished(presses: int, done: list[str]) -> None:
    with finished_before_interrupts("its checkpoint is complete"):
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        done.append("written")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also where the tests run in the background, and so ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_what_is_under_way_is_finished() -> None:
    before, done = signal.getsignal(signal.SIGINT), list[str]()
    finished(0, done)
    with pytest.raises(KeyboardInterrupt, match="its checkpoint is complete"):
        finished(1, done)
    assert len(done) == 2
    with pytest.raises(KeyboardInterrupt):
        finished(2, done)  # whoever presses twice does not wait
    assert len(done) == 2
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("moment", ["begins", "is shown", "ends"])
def test_an_interrupt_takes_a_display_back_whole(moment: str) -> None:
    seen = list[str]()

    def at(now: str) -> None:
        if now == moment:
            signal.raise_signal(signal.SIGINT)
        seen.append(now)

    @contextmanager
    def display() -> Iterator[None]:
        at("begins")
        try:
            yield
        finally:
            at("ends")

    with pytest.raises(KeyboardInterrupt), on_screen(display()):
        at("is shown")
    assert (seen[0], seen[-1]) == ("begins", "ends")


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize(
    ("arguments", "columns", "rows", "stop_at"),
    [
        ("train --plan single --steps 1000000", 80, 24, b"loss 0."),
        ("train --plan single --steps 1000000", 200, 50, b"capturing, planning and compiling"),
    ],
)
def test_a_terminal_after_ctrl_c(arguments: str, columns: int, rows: int, stop_at: bytes, folder: Path) -> None:
    job = ["--job", f"{folder}/my_model.py:job", "--devices", "1", "--platform", "cpu"]
    ended = in_terminal([*arguments.split(), *job], columns, rows, stop_at)
    assert ended.code == INTERRUPTED, ended.lines
    assert not ended.cursor_hidden
    assert not faults(ended.lines, columns)
    assert any(line.startswith("interrupted ") for line in ended.lines[-3:]), ended.lines
    assert not any("Traceback" in line or "capturing" in line for line in ended.lines)


def test_the_bar_of_a_run_that_goes_on_counts_from_its_step_and_shows_no_loss_before_it_has_one() -> None:
    compiled = jscaler.parallelize("single", devices=1)(jnp.sum).lower(jnp.ones(3)).compile()
    out = io.StringIO()
    with OnScreen(Console(file=out, force_terminal=True, width=160), explain=False) as shown:
        shown.begin(compiled, 4, 8)
        before = out.getvalue()
        shown.step(StepRecord(4, 0.5, 0.1, Speed("rows", 80.0)))
        shown.end(None)
    assert "4/8" in before
    assert "nan" not in before
    assert "loss" not in before.partition("training")[2]
    assert all(part in out.getvalue() for part in ("5/8", "loss 0.500", "80 rows/s", "0.100 s/step"))
