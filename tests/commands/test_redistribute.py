"""``jscaler redistribute``: the cheapest way between two layouts, as a stranger asks for it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jscaler.cli import app
from jscaler.clusters import BYTES, find_cluster
from jscaler.errors import DeviceError, JscalerError, PlanError, UnknownNameError
from jscaler.materialize import parse_layout
from jscaler.materialize.adapter import alternatives
from jscaler.materialize.bounds import bytes_at_least

ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20
ISSUE = (
    'jscaler redistribute --shape 1024,1024 --from "R1 V4 D(2,1)" --to "R8 V1 D(1,1)" --devices 8 '
    "--cluster v100-nvlink-ib100"
)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["redistribute", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def answer(shape: str, source: str, target: str, *arguments: str) -> dict[str, Any]:
    return json.loads(run("--shape", shape, "--from", source, "--to", target, "--json", *arguments))


def test_the_issue_s_example_as_json() -> None:
    found = json.loads(run(*shlex.split(ISSUE)[2:], "--json"))
    first, second = found["path"]
    # the four shares of each half are summed to quarters of it, which go to everybody: 3/4 of a half, 7 eighths
    assert (first["kind"], first["axes"], first["groups"]) == ("reduce_scatter", [4], [[0, 2, 4, 6], [1, 3, 5, 7]])
    assert (first["bytes"], first["layout"]) == (1.5 * MIB, "R1 V1 D(8,1) on [0 2 4 6 1 3 5 7]")
    assert (second["kind"], second["groups"], second["bytes"]) == ("all_gather", [[0, 2, 4, 6, 1, 3, 5, 7]], 3.5 * MIB)
    assert second["layout"] == found["target"] == "R8 V1 D(1,1) on [0 1 2 3 4 5 6 7]"
    assert found["bound"]["bytes"] == found["totals"]["bytes"] == 5 * MIB
    other = found["runners_up"][0]
    assert [step["kind"] for step in other["path"]] == ["all_reduce", "all_gather"]
    assert other["path"][0]["bytes"] == 2 * 3 / 4 * 2 * MIB  # of a half of the tensor
    assert other["ratio"] == pytest.approx(1)


def test_the_issue_s_example_in_words() -> None:
    output = run(*shlex.split(ISSUE)[2:])
    assert output.startswith("float32[1024,1024], 4.0 MiB, 8 devices, cluster v100-nvlink-ib100\n")
    assert "   0:512 │ 0 + 2 + 4 + 6 │       0:1024 │ 0 1 2 3 4 5 6 7 │\n" in output
    assert re.search(
        r"1 +│ reduce_scatter over 4 devices, to dim 0 +│ \[0 2 4 6\] \[1 3 5 7\] +│.*│ 1.5 MiB │ 32.1 µs", output
    )
    assert re.search(r"2 +│ all_gather over 8 devices, dim 0 +│ \[0 2 4 6 1 3 5 7\] +│ R8 V1 D\(1,1\) +│ 3.5 MiB", output)
    assert re.search(r"total +│.*│ 5.0 MiB │ 90.2 µs", output)
    assert re.search(r"lower bound +│.*│ 5.0 MiB", output)
    assert "  1.00×    5.0 MiB   90.2 µs  all_reduce over 4 devices; all_gather over 2 devices, dim 0\n" in output


CASES = [
    ("1024,1024", "R1 V4 D(2,1)", "R8 V1 D(1,1)"),
    ("1024,1024", "R1 V1 D(4,2)", "R1 V1 D(2,4)"),  # a point-to-point exchange
    ("16,16", "R1 V1 D(2,4) on [7 1 2 3 4 5 6 0]", "R2 V1 D(2,2)"),
    ("16,16", "R2 V2 D(1,2)", "R1 V1 D(8,1) on any"),
    ("64,3·8·64", "R1 V1 D(1,1·8·1)", "R1 V1 D(8,1)"),
    ("16", "R2 V2max D(2)", "R4 V1 D(2)"),
    ("16", "R1 V1 D(8)", "R1 V4 D(2)"),
    ("16", "R2 V4 D(1)", "R4 V2 D(1)"),  # the other share may be zeros
    ("", "R1 V8 D()", "R8 V1 D()"),
    ("8,8", "R1 V1 D(2,4)", "R1 V1 D(2,4)"),
]


@pytest.mark.parametrize("cluster", [(), ("--cluster", "v100-nvlink-ib100")], ids=["bytes", "seconds"])
@pytest.mark.parametrize("case", CASES, ids=" -> ".join)
def test_totals_are_the_steps_sums_and_no_less_than_the_bound(case: tuple[str, str, str], cluster: tuple[str, ...]) -> None:
    found = answer(*case, *cluster)
    for way in (found, *found["runners_up"]):
        totals = way if "path" in way and "steps" in way else way["totals"]
        assert totals["steps"] == len(way["path"])
        assert totals["bytes"] == sum(step["bytes"] for step in way["path"]) >= found["bound"]["bytes"] * (1 - 1e-12)
        if cluster:
            assert totals["seconds"] == sum(step["seconds"] for step in way["path"]) >= found["bound"]["seconds"]
        else:
            assert totals["seconds"] is None
        assert (way["path"][-1]["layout"] if way["path"] else found["source"]) == way["target"]
    ratios = [other["ratio"] for other in found["runners_up"]]
    assert all(ratio is None or ratio >= 1 - 1e-12 for ratio in ratios)
    assert ratios == sorted(ratios)
    assert len(ratios) <= 3


def test_an_exchange_stands_beside_the_best_collectives_and_the_other_way_round() -> None:
    exchange = answer("1024,1024", "R1 V1 D(4,2)", "R1 V1 D(2,4)")
    assert [step["kind"] for step in exchange["path"]] == ["point_to_point"]
    assert sum(map(len, exchange["path"][0]["groups"])) == 12  # rounds of messages
    assert {step["kind"] for step in exchange["runners_up"][0]["path"]} == {"all_to_all", "permute"}
    gather = answer("1024,1024", "R1 V1 D(4,2)", "R4 V1 D(1,2)", "--runners-up", "9")
    assert [step["kind"] for step in gather["path"]] == ["all_gather"]
    assert ["point_to_point"] in [[step["kind"] for step in other["path"]] for other in gather["runners_up"]]


@pytest.mark.parametrize("cost", [BYTES, find_cluster("v100-nvlink-ib100")], ids=str)
def test_runners_up_are_other_ways_in_the_order_of_their_cost(cost: Any) -> None:
    source, target = (parse_layout(text, (16, 16)) for text in ("R2 V2 D(2,1)", "R1 V1 D(2,4)"))
    found = alternatives(source, target, 4, cost, 5)  # type: ignore[arg-type]
    assert 1 < len({str(adapter) for adapter in found}) <= 5
    assert [a.cost for a in found] == sorted(a.cost for a in found)


def test_a_crossing_to_another_group_as_json() -> None:
    found = answer("8,8", "R1 V4 D(1,1) on 0-3", "R1 V1 D(4,1) on 8-11", "--cluster", "v100-nvlink-ib100")
    assert [(step["group"], step["bytes"]) for step in found["steps"]] == [("producers", 768), ("hop", 256)]
    assert all(step["seconds"] > 0 for step in found["steps"])
    assert found["target"] == "R1 V1 D(4,1) on [8 9 10 11]"
    assert found["totals"]["bytes"] == 1024
    assert [other["totals"]["seconds"] for other in found["runners_up"]] >= [found["totals"]["seconds"]] * 3


def test_a_crossing_in_words_and_drawn(tmp_path: Path) -> None:
    ends = "--from", "R4 V1 D(1,1) on 0-3", "--to", "R6 V1 D(1,1) on 4-9"
    shown = run("--shape", "1024,1024", *ends, "--draw", str(tmp_path / "a.svg"))
    drawn = (tmp_path / "a.svg").read_text()
    assert all(f'id="stage0-device{n}"' in drawn for n in range(4))
    assert 'id="stage0-device4"' not in drawn
    assert re.findall(r'id="stage\d+-device9"', drawn)
    assert "runners-up, beside the best" in shown
    assert "from 4 devices to 6 devices" in shown
    assert "send pieces" in shown
    assert re.search(r"consumers │ (all_gather|point_to_point)", shown)


def test_no_runners_up_when_none_are_asked_for() -> None:
    assert answer("8,8", "R1 V2 D(2,1)", "R4 V1 D(1,1)", "--runners-up", "0")["runners_up"] == []


def test_an_open_order_takes_the_cheapest() -> None:
    named = answer("1024,1024", "R1 V1 D(4,2)", "R1 V1 D(2,4)")
    free = answer("1024,1024", "R1 V1 D(4,2)", "R1 V1 D(2,4) on any")
    assert free["totals"]["bytes"] == free["bound"]["bytes"] == MIB // 4  # an all-to-all over two devices
    assert named["totals"]["bytes"] == MIB * 3 // 8
    assert free["target"] == "R1 V1 D(2,4) on [0 2 1 3 4 6 5 7]"


def test_a_cluster_file_of_one_s_own(tmp_path: Path) -> None:
    lab = tmp_path / "lab.toml"
    lab.write_text(
        "hosts = 1\ndevices_per_host = 8\n[inside]\nlatency = 1.0\nbandwidth = 1024000000\n"
        "[between]\nlatency = 1.0\nbandwidth = 1024000000\n"
    )
    found = answer("1024000000", "R1 V1 D(2)", "R2 V1 D(1)", "--cluster", str(lab), "--dtype", "bfloat16")
    assert found["cluster"] == "lab"
    assert found["totals"]["bytes"] == 1024000000  # half of the elements, two bytes each
    assert found["totals"]["seconds"] == pytest.approx(2)  # one step, and 1.024 GB at 1.024 GB per second


@pytest.mark.one_day_in(2)
def test_a_thousand_devices_and_none_at_hand() -> None:
    """No backend is started: there is no platform of that name."""
    command = 'redistribute --shape 4096,4096 --from "R1 V32 D(32,1)" --to "R32 V1 D(1,32)" --devices 1024 --cluster a100'
    result = subprocess.run(
        [sys.executable, "-m", "jscaler", *shlex.split(command)],
        env={**os.environ, "JAX_PLATFORMS": "nowhere", "PYTHONIOENCODING": "utf-8"},
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "1024 devices, cluster a100, 128 such hosts (it has 4)" in result.stdout
    assert "[0 32 64 96 … 992] …" in result.stdout


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [("10,9", "R2 V1 D(3,1)", "R1 V1 D(1,6)"), ("3", "R1 V1 D(8)", "R8 V1 D(1)"), ("7,10", "R1 V2 D(2,1)", "R1 V1 D(2,2)")],
)
def test_uneven_sizes_are_padded(shape: str, source: str, target: str) -> None:
    found = answer(shape, source, target)
    assert found["totals"]["bytes"] >= found["bound"]["bytes"] > 0
    assert found["path"][-1]["layout"] == found["target"]
    run("--shape", shape, "--from", source, "--to", target)


def test_equal_layouts_need_nothing() -> None:
    assert "nothing to do" in run("--shape", "8", "--from", "R1 V1 D(2)", "--to", "R1 V1 D(2) on [0 1]")


@pytest.mark.parametrize("name", ["new/picture.png", "picture.svg", "picture.pdf"])
def test_the_picture_is_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    output = run("--shape", "16,16", "--from", "R1 V2 D(2,1)", "--to", "R4 V1 D(1,1)", "--draw", str(path))
    assert f"written: {path}" in output.replace("\n", "")
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"--devices": "16"}, PlanError, "is for 8 devices, R · V · D; there are 16"),
        ({"--to": "R4 V1 D(1,1)"}, PlanError, "is for 4 devices, R · V · D; there are 8"),
        ({"--to": "R8 V1 D(1,1) on [8-14]"}, PlanError, "needs 8 different devices; it lists 7"),
        ({"--dtype": "float3"}, UnknownNameError, "no dtype named 'float3'; did you mean 'float32'"),
        ({"--cluster": "v100-nvlink"}, UnknownNameError, "did you mean 'v100-nvlink-ib100'"),
        ({"--cluster": "nowhere.toml"}, DeviceError, "cannot read the cluster file"),
        ({"--shape": "1024x1024"}, PlanError, "shape '1024x1024' does not parse"),
        ({"--shape": "0,4"}, PlanError, "from 1 on"),
        ({"--shape": "1024"}, PlanError, "cuts 2 dims; the tensor has 1"),
        ({"--from": "R1 V4 E(2,1)"}, PlanError, "does not parse; write R<replicas>"),
        ({"--from": "R1 V4 D(2,1) on any"}, PlanError, "must say which device holds what"),
        ({"--from": "R1 V4 D(2,1) @host"}, PlanError, "leave '@host' out"),
        ({"--draw": "picture.gif"}, UnknownNameError, "no picture format named '.gif'"),
        ({"--draw": "/dev/null/picture.png"}, JscalerError, "cannot write the picture"),
    ],
)
def test_mistakes_in_redistribute_are_named(changed: dict[str, str], error: type[Exception], message: str) -> None:
    options = {"--shape": "1024,1024", "--from": "R1 V4 D(2,1)", "--to": "R8 V1 D(1,1)", "--devices": "8", **changed}
    with pytest.raises(error, match=message):
        run(*(word for option in options.items() for word in option))


def test_a_missing_matplotlib_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(JscalerError, match=r'pip install "jscaler\[plot\]"'):
        run("--shape", "8", "--from", "R1 V1 D(2)", "--to", "R2 V1 D(1)", "--draw", "picture.png")


def test_shares_wanted_may_be_zeros_so_less_than_their_blocks_can_do() -> None:
    eighths, shares = (parse_layout(text, (8,)) for text in ("R1 V1 D(8)", "R1 V8 D(1)"))
    assert bytes_at_least(eighths, shares, 4) == 0  # type: ignore[arg-type]
    summands, fewer = (parse_layout(text, (8,)) for text in ("R2 V4 D(1)", "R4 V2 D(1)"))
    assert bytes_at_least(summands, fewer, 4) == 32 * 6 / 8  # type: ignore[arg-type]


DOCUMENT = (ROOT / "docs" / "redistribution.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [line for line in DOCUMENT.splitlines() if line.startswith("jscaler redistribute ")])
def test_the_document_s_commands_run_and_make_its_picture(command: str, tmp_path: Path) -> None:
    words = [str(tmp_path / word) if word.endswith(".svg") else word for word in shlex.split(command, comments=True)]
    run(*words[2:])
    for made in tmp_path.glob("*.svg"):
        assert texts(made) == texts(ROOT / "docs" / "images" / made.name)


def texts(svg: Path) -> list[str]:
    """The words in a picture: matplotlib writes them as comments beside their shapes."""
    return re.findall(r"<!-- (.*?) -->", svg.read_text(encoding="utf-8"))


@pytest.mark.one_day_in(2)
def test_the_document_s_programs_run() -> None:
    program = "\n".join(re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL))
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert "R1 V8 D(1,1) on [0 1 2 3 4 5 6 7] -> R8 V1 D(1,1)" in result.stdout, result.stderr
    assert "verified on 8 devices" in result.stdout
    assert "(1,) of held: 0 -> 1, 1 -> 2\n(1,) of held: 1 -> 0, 2 -> 1" in result.stdout
