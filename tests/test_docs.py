"""README's code blocks, the notebook and the tutorial run as they stand."""

import functools
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from quick import FLAGS
from typer.testing import CliRunner

import jscaler
from jscaler.cli import app

ROOT = Path(__file__).parent.parent


def blocks(language: str, document: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def run(*arguments: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error::UserWarning:jscaler"}
    environment["XLA_FLAGS"] = " ".join(FLAGS)
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_readme_s_python_blocks_run_one_after_another() -> None:
    output = run("-c", "\n".join(blocks("python")))
    assert "plan data_parallel" in output
    assert "plan hidden_units" in output
    assert "1× all_reduce" in output


@pytest.mark.one_day_in(5)
def test_the_first_hour_runs() -> None:
    output = run("-c", "\n".join(blocks("python", "docs/first_hour.md")))
    printed = [line.split() for line in output.splitlines()]
    for line in "".join(blocks("text", "docs/first_hour.md")).splitlines():
        assert line.split() in printed, line
    for step, count in ((4, 5), (5, 2)):  # the same numbers under every plan
        losses = [float(loss) for loss in re.findall(rf"loss ([\d.]+) after step {step}", output)]
        assert len(losses) == count
        assert max(losses) - min(losses) < 2e-3
    assert "53× all_gather" in output
    assert "37× all_reduce" in output


@pytest.mark.one_day_in(2)
def test_the_notebook_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "tour"}
    cells = json.loads((ROOT / "docs/tour.ipynb").read_text())["cells"]
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        exec("".join(cell["source"]).replace('jax.config.update("jax_num_cpu_devices", 4)', ""), names)
        assert capsys.readouterr().out == "".join(line for output in cell["outputs"] for line in output["text"])


@pytest.mark.one_day_in(3)
def test_the_blocks_on_splitting_run_one_after_another() -> None:
    output = run("-c", "\n".join(blocks("python", "docs/splitting.md")))
    assert "norm/rsqrt/reduce_sum.1" in output
    assert output.endswith("['b', 'h', 'o', 's']\n")


@pytest.mark.one_day_in(2)
def test_the_blocks_on_training_state_run_one_after_another() -> None:
    lines = run("-c", "\n".join(blocks("python", "docs/state.md"))).splitlines()
    assert lines[0] == "(64, 64)"
    assert float(lines[1]) > 0
    assert lines[2:] == ["True", "4"]


@pytest.mark.one_day_in(3)
def test_the_blocks_on_plans_run_one_after_another() -> None:
    output = run("-c", "\n".join(blocks("python", "docs/plans.md")))
    quoted = blocks("text", "docs/plans.md")
    for line in quoted[0].replace("…\n", "").splitlines():
        words = line.split()
        assert any(words == found.split() for found in output.splitlines()), line
    differences = [line for line in output.splitlines() if "the first difference: " in line]
    assert len(differences) == 3
    assert " ".join(quoted[2].split())[:-1] in differences[0]
    assert "op 'layer_2/dot' is not in the graph" in differences[1]
    assert "of size 66 into 4 parts" in differences[2]


@pytest.mark.one_day_in(2)
def test_the_blocks_for_people_from_elsewhere_run_one_after_another() -> None:
    output = run("-c", "\n".join(blocks("python", "docs/coming_from.md")))
    assert "plan hidden_units" in output


def test_the_reference_names_all_that_is_public() -> None:
    text = (ROOT / "docs/api.md").read_text()
    named = set(re.findall(r"jscaler\.(\w+)$", text, re.MULTILINE))
    rest = set(jscaler.__all__) - named - {"plans", "spaces"}
    assert all(issubclass(getattr(jscaler, name), (Exception, Warning)) for name in rest), rest
    assert "automodule:: jscaler.errors" in text
    assert all(inspect.getdoc(getattr(jscaler, name)) for name in jscaler.__all__)


@pytest.mark.one_day_in(3)
def test_the_blocks_on_pipelines_run() -> None:
    output = run("-c", "\n".join(blocks("python", "docs/pipelines.md")))
    quoted = blocks("text", "docs/pipelines.md")
    assert len(quoted) == 6
    assert all(one in output for one in quoted)
    assert "verified on 6 devices" in output
    assert "[[0, 1], [2, 3, 4, 5]]\n" in output


@pytest.mark.one_day_in(3)
def test_the_blocks_on_schedules_run() -> None:
    output = run("-c", "\n".join(blocks("python", "docs/schedules.md")))
    assert blocks("text", "docs/schedules.md")[0] in output
    assert "0F0 0F1 0F2 3F0 3I0 3W0" in output


def test_the_gallery_of_schedules_is_what_its_command_draws() -> None:
    run("docs/gallery.py", "--check")


@pytest.mark.one_day_in(3)
def test_the_zoo_of_plans_is_what_its_command_writes() -> None:
    run("docs/plan_zoo.py", "--check")


@pytest.mark.one_day_in(2)
def test_the_blocks_on_fitting_run() -> None:
    lines = run("-c", "\n".join(blocks("python", "docs/fit.md"))).splitlines()
    rows = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    assert any(row[1] == "data_parallel" and row[4].startswith("-") for row in rows)
    assert any(line.startswith("found: zero1, ") for line in lines)
    assert lines[-2].startswith("zero1 ")


@pytest.mark.one_day_in(2)
def test_the_blocks_on_search_run() -> None:
    lines = run("-c", "\n".join(blocks("python", "docs/search.md"))).splitlines()
    printed = [line.split() for line in lines]
    for line in blocks("text", "docs/search.md")[2].splitlines():
        assert line.split() in printed, line
    assert any(line.startswith("no plan of the space takes less than ") for line in lines)
    assert [line.partition("(")[0] for line in lines[-3:]] == ["pipeline", "rows_and_columns", "alike"]


@pytest.mark.one_day_in(3)
def test_the_commands_on_a_job_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("my_model.py").write_text(blocks("python", "docs/jobs.md")[0])
    commands = [shlex.split(line) for line in blocks("bash", "docs/jobs.md")[0].splitlines()]
    for _, verb, *options in commands:
        if verb == "compile":
            continue  # needs the extra aot; tests/commands has it compile for a stand-in
        words = [word for word in options if word not in ("--platform", "cpu")]  # there are eight already
        result = CliRunner().invoke(app, [verb, *words], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    sys.modules.pop("my_model")


@pytest.mark.one_day_in(2)
def test_the_blocks_on_jobs_run() -> None:
    output = run("-c", "\n".join(blocks("python", "docs/jobs.md")))
    assert "plan zero3 on 4 devices" in output
    assert "bytes are gathered" in output


@pytest.mark.aot
def test_the_blocks_on_targets_run() -> None:
    output = run("-c", "\n".join(blocks("python", "docs/targets.md")))
    assert "plan zero1 on 8xH100-80GB: 8 NVIDIA H100 80GB HBM3, compiled without them" in output
    assert "'all-gather'" in output


def test_readme_s_first_example_is_short() -> None:
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) < 20


COMMANDS = [
    *blocks("bash"),
    *blocks("bash", "docs/targets.md"),
    *blocks("bash", "docs/fit.md"),
    *blocks("bash", "docs/search.md"),
    *blocks("bash", "docs/jobs.md"),
]


@functools.cache
def help_of(command: str) -> str:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})  # no flag is cut, whatever the terminal
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", [line for block in COMMANDS for line in block.splitlines()])
def test_readme_s_commands_exist(command: str) -> None:
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    assert words[0] == "jscaler"
    for flag in (w for w in words if w.startswith("--")):
        assert flag in help_of(words[1])


def test_the_command_line_starts() -> None:
    assert "redistribute" in run("-m", "jscaler", "--help")


@pytest.mark.smoke
def test_the_tutorial_runs() -> None:
    assert "the same numbers" in run("docs/tutorial.py")


@pytest.mark.one_day_in(2)
@pytest.mark.smoke
def test_the_flash_attention_runs() -> None:
    output = run("docs/flash_attention.py")
    assert "the same loss and the same gradients" in output
    assert "with t in 2 parts: result 0 differs" in output


@pytest.mark.one_day_in(3)
def test_the_chunked_loss_runs() -> None:
    output = run("docs/chunked_loss.py")
    assert "the same gradients" in output
    temporaries = [float(number) for number in re.findall(r"temporaries +([\d.]+) MiB", output)]
    assert temporaries[-1] < temporaries[0] / 8  # 16 chunks


def test_links_in_the_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/*.ipynb")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document}: {target}"
