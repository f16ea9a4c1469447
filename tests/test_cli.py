"""The command line, as a stranger uses it."""

import json
import re
import warnings
from pathlib import Path

import jax
import pytest
import typer
from typer.testing import CliRunner

import jscaler
from jscaler import Plan, cli
from jscaler.cli import app
from jscaler.errors import DataError, DeviceError, PlanError, PlanFitError, PlanWarning, SplitError, UnknownNameError, warn
from jscaler.tables import SCHEDULES, write_table
from jscaler.training.planned_job import devices_for

SMALL = ["--size", "nano", "--seq", "8", "--batch", "8"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.one_day_in(3)
def test_train_logs_every_step_and_another_plan_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    log, folder, text = tmp_path / "runs" / "log.jsonl", tmp_path / "checkpoint", tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 20)
    common = ["train", *SMALL, "--data", str(text), "--log", str(log), "--checkpoint", str(folder)]
    output = run(*common, "--plan", "data_parallel", "--devices", "8", "--steps", "12")
    assert "plan data_parallel" in output
    assert "all_reduce" in output
    policy = "docs/split_one_mlp.py:split_one_mlp"
    output = run(*common, "--plan", policy, "--devices", "4", "--steps", "14", "--resume")
    assert "plan split_one_mlp" in output
    assert "collectives in front" not in output, "that is for --explain"
    output = run(*common, "--plan", "single", "--devices", "1", "--steps", "14", "--resume")
    assert "the checkpoint is of 14 steps, and --steps is 14: nothing is left" in output
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(14))
    assert {"seconds", "tokens_per_second"} <= records[0].keys()
    assert max(r["loss"] for r in records[12:]) < records[0]["loss"] - 0.5


def test_version() -> None:
    assert run("--version").startswith(f"jscaler {jscaler.__version__}, jax {jax.__version__}, Python 3.")


@pytest.mark.parametrize("command", [None, *typer.main.get_command(app).commands])
def test_every_command_has_an_example(command: str | None) -> None:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", run(*([command] if command else []), "--help"))  # whoever loaded typer first
    assert re.search(rf"Example: jscaler {command or 'train'} -", " ".join(plain.split()))


def test_a_warning_of_a_command_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And not of a line of a library that calls commands; another's is as ever."""

    def command() -> None:
        warn("a table stays whole", PlanWarning)
        warnings.warn("old", UserWarning, stacklevel=1)

    monkeypatch.setattr(cli, "app", command)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, category, *where: print(category.__name__, *where[:1]))
        cli.main()
    told = capsys.readouterr()
    assert told.err == "warning: PlanWarning: a table stays whole\n"
    assert told.out == f"UserWarning {__file__}\n"


@pytest.mark.one_day_in(2)
def test_resume_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no checkpoint in .*without --resume"):
        run("train", *SMALL, "--plan", "single", "--devices", "1", "--checkpoint", str(tmp_path / "none"), "--resume")
    assert CliRunner().invoke(app, ["train", "--resume"]).exit_code == 2
    assert CliRunner().invoke(app, ["train", "--resume-if-any"]).exit_code == 2
    words = (*SMALL, "--plan", "single", "--devices", "1", "--checkpoint", str(tmp_path / "run"), "--resume-if-any")
    assert "in 1 step;" in run("train", *words, "--steps", "1")  # and of a state that is there: --restarts in commands/


def test_a_folder_with_the_state_of_another_run_is_not_trained_into(tmp_path: Path) -> None:
    from jscaler.runtime.checkpoint import save

    save(tmp_path, 3, {"w": 1.0})
    with pytest.raises(DataError, match="there is a checkpoint after 3 steps"):
        run("train", *SMALL, "--plan", "single", "--devices", "1", "--checkpoint", str(tmp_path))


@pytest.mark.one_day_in(2)
def test_a_saved_plan_brings_its_number_of_devices(tmp_path: Path) -> None:
    Plan("mine", 3).save(tmp_path / "plan.json")
    path = str(tmp_path / "plan.json")
    assert [devices_for(path, None), devices_for(path, 8), devices_for("single", None)] == [3, 8, None]
    with pytest.raises(DeviceError, match="is for 3 devices, and 2 are given"):
        run("plan", "--model", "gpt-nano", "--seq", "8", "--batch", "6", "--plan", path, "--devices", "2")
    assert "on 3 devices" in run("plan", "--model", "gpt-nano", "--seq", "8", "--batch", "6", "--plan", path)


@pytest.mark.one_day_in(3)
def test_a_plan_that_was_saved_trains_the_model_that_it_was_made_for(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    run("plan", *SMALL, "--devices", "2", "--plan", "data_parallel", "--save", path)
    assert "on 2 devices" in run("train", "--plan", path, "--steps", "1")
    for flags, sentence in (
        (["--no-stacked"], "was made with --stacked, and --no-stacked is given; leave --stacked out"),
        (["--dtype", "f32"], "was made with --dtype bf16, and --dtype f32 is given; leave --dtype out"),
        (["--remat"], "was made with --no-remat, and --remat is given"),
        (["--batch", "7"], r"--batch 7 is given, and '.*plan.json' was made with --batch 8: leave it out"),
    ):
        with pytest.raises(PlanFitError, match=sentence):
            run("train", *flags, "--plan", path, "--steps", "1")


@pytest.mark.one_day_in(3)
def test_train_a_mixture_of_experts() -> None:
    model = ["--model", "moe", *SMALL, "--plan", "expert_parallel", "--devices", "4"]
    output = run("train", "--explain", *model, "--steps", "2")
    assert "plan expert_parallel" in output
    assert "collectives in front" in output
    assert "all_to_all" in output


@pytest.mark.one_day_in(5)
def test_compare_as_json() -> None:
    output = run("compare", *SMALL, "--plan", "data_parallel", "--devices", "4", "--rounds", "1", "--json")
    result = json.loads(output.splitlines()[-1])
    assert result["loss_difference"] < 1e-5
    assert result["parameter_difference"] < 1e-3
    assert result["gradient_difference"] < 1e-4
    ours, gspmd = result["ours"], result["gspmd"]
    assert 0 < ours["collectives"]["all-reduce"]["nbytes"] <= gspmd["collectives"]["all-reduce"]["nbytes"]
    assert ours["memory"]["argument"] == gspmd["memory"]["argument"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--plan", "data_paralel"], UnknownNameError, "did you mean 'data_parallel'"),
        (["--plan", "nowhere.py:policy"], PlanError, "no plan file at 'nowhere.py'"),
        (["--plan", "docs/split_one_mlp.py:split_one_mpl"], UnknownNameError, "did you mean 'split_one_mlp'"),
        (["--size", "nanoo"], UnknownNameError, "did you mean 'nano'"),
        (["--model", "gtp"], UnknownNameError, "did you mean 'gpt'"),
        (
            ["--model", "resnet"],
            UnknownNameError,
            "no model named 'resnet'; known: gpt, llama, moe, mbart, convnet, ",
        ),
        (["--devices", "9"], DeviceError, "9 devices are asked for and 8 are at hand"),
        (["--platform", "tpu"], DeviceError, "no platform 'tpu'"),
        (["--data", "nowhere.txt"], DataError, "no training data at 'nowhere.txt'"),
        (["--devices", "8", "--batch", "12"], SplitError, "of size 12 into 8 parts"),
    ],
)
def test_mistakes_are_named(arguments: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CliRunner().invoke(app, ["train", "--steps", "1", *arguments], catch_exceptions=False)


@pytest.mark.one_day_in(3)
def test_plans_with_stages_are_simulated_and_drawn(tmp_path: Path) -> None:
    plan, target = "megatron(dp=2, tp=2, pp=2, microbatches=4)", "8xH100-80GB"
    table = tmp_path / "mine.csv"
    write_table(SCHEDULES["zb_h1"].table(2, 4), table)
    picture, trace = tmp_path / "step.png", tmp_path / "step.json"
    output = run(
        "plan", *SMALL, "--plan", plan, "--target", target, "--schedule", str(table), "--simulate", "--draw", str(picture),
        "--trace", str(trace),
    )  # fmt: skip
    assert "of which devices wait" in output
    assert "0I0" not in output, "the first stage has all of its backward in W"
    assert "1I0" in output
    assert picture.stat().st_size > 10_000
    assert any("1I0" in event["name"] for event in json.loads(trace.read_text())["traceEvents"])


@pytest.mark.one_day_in(3)
def test_all_schedules_of_a_plan(tmp_path: Path) -> None:
    command = ["schedules", *SMALL, "--plan", "megatron(dp=2, tp=1, pp=2, microbatches=4)", "--target", "4xH100-80GB"]
    found = json.loads(run(*command, "--json"))["schedules"]
    named = {one["schedule"]: one for one in found}
    assert {"gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v", "chimera", "interleaved"} <= named.keys()
    searched = min(one["makespan"] for one in found if one["schedule"] == "search")
    assert searched <= min(named[name]["makespan"] for name in ("1f1b", "zb_h1", "zb_v")) * 1.001
    assert named["gpipe"]["devices"][0]["peak"] > named["1f1b"]["devices"][0]["peak"]
    assert "there is no schedule" not in named["zb_h2"]["why"]
    assert named["interlaced"]["why"] == ""
    assert "go over their own output, pass after pass, and this one does not" in named["3f1b"]["why"]
    with pytest.raises(UnknownNameError, match="no argument named 'schedule'"):
        run("schedules", *SMALL, "--plan", "data_parallel", "--target", "4xH100-80GB")


def test_a_plan_for_which_no_schedule_is_possible(tmp_path: Path) -> None:
    picture = tmp_path / "none.png"
    command = ["schedules", *SMALL, "--plan", "pipeline(2, 3)", "--target", "4xH100-80GB", "--draw", str(picture)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 3
    assert "gpipe, 1f1b, eager_1f1b" in result.output
    assert "of size 8 into 3 parts; legal: 1, 2, 4, 8" in result.output
    assert "none of these schedules is possible" in result.output
    assert "the fastest first" not in result.output, "no table without rows"
    assert not picture.exists()


@pytest.mark.one_day_in(3)
def test_a_step_is_traced_while_it_trains(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 20)
    plan = "pipeline(2, 2, plan=data_parallel())"
    run(
        "train", *SMALL, "--data", str(text), "--plan", plan, "--devices", "2", "--steps", "3", "--schedule", "gpipe",
        "--trace", str(tmp_path / "traces"), "--draw", str(tmp_path / "step.png"),
    )  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "traces").iterdir()) == ["step_00001.json", "step_00002.json"]
    assert (tmp_path / "step.png").exists()
