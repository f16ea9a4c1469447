"""A report in words and as a picture."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from report.stand_in import arguments, on_cpu, step

import jscaler
from jscaler.errors import JscalerError, UnknownNameError
from jscaler.estimate.memory import MEMORY_KINDS, Memory
from jscaler.report.draw_layout import refuse_picture, save_picture
from jscaler.report.draw_memory import memory_figure
from jscaler.report.target_report import CollectiveRow, TargetReport, groups_text, verdict


@pytest.fixture(scope="module")
def report() -> Iterator[TargetReport]:
    with pytest.MonkeyPatch.context() as patch:
        on_cpu(patch)
        yield jscaler.parallelize("data_parallel", devices=4)(step).lower(*arguments()).compile(target="2x2xV100-32GB")


def test_the_text_says_what_the_record_says(report: TargetReport) -> None:
    text, record = str(report), json.loads(json.dumps(report.as_json()))
    assert "plan data_parallel on 2x2xV100-32GB: 2 hosts of 2 Tesla V100-SXM3-32GB, compiled without them" in text
    assert record["memory"] == report.memory.as_json()
    for kind in MEMORY_KINDS:
        assert kind in text
    (reduced,) = [c for c in record["collectives"] if c["kind"] == "all-reduce"]
    assert reduced["groups"] == [[0, 1, 2, 3]]
    assert reduced["crosses"]
    assert "all 4, across hosts: [0 1 2 3]" in text
    assert "state/params/layers" in text
    assert "stand_in.py:" in text
    assert record["xla"]["argument"] == report.memory_analysis().argument_size_in_bytes


def memory(peak: int, capacity: int) -> Memory:
    return Memory(peak, 0, 0, 0, 0, 0, 0, capacity)


@pytest.mark.parametrize(
    ("peak", "expected"),
    [
        (1 << 30, "fits: 1.0 GiB (1.07 GB) of 32.0 GiB (34.36 GB) per device at the peak, 31.0 GiB to spare"),
        (
            33 << 30,
            "does not fit: the peak of 33.0 GiB (35.43 GB) is 1.0 GiB more than the 32.0 GiB (34.36 GB)",
        ),
        (28 << 30, "JAX takes 75% of a device by default: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.9"),
    ],
)
def test_the_verdict(peak: int, expected: str) -> None:
    assert expected in verdict(memory(peak, 32 << 30))


@pytest.mark.parametrize(
    ("groups", "crosses", "expected"),
    [
        (((0, 1), (2, 3), (4, 5)), False, "3 groups of 2, inside hosts: [0 1] [2 3] …"),
        (((0, 8),), True, "all 2, across hosts: [0 8]"),
        ((), True, "neighbours, across hosts"),
    ],
)
def test_groups_in_words(groups: tuple[tuple[int, ...], ...], crosses: bool, expected: str) -> None:
    assert groups_text(CollectiveRow("all-reduce", ("f32",), 1, 8, 8.0, 2, groups, crosses)) == expected


def test_the_picture_holds_every_kind_and_the_capacity(report: TargetReport, tmp_path: Path) -> None:
    figure = memory_figure(report)
    bars = figure.axes[0].patches
    kinds = [kind for kind in MEMORY_KINDS if getattr(report.memory, kind)]
    assert [bar.get_width() for bar in bars] == [getattr(report.memory, kind) / (1 << 30) for kind in kinds]
    assert max(bar.get_x() + bar.get_width() for bar in bars) == pytest.approx(report.memory.peak / (1 << 30))
    (line,) = figure.axes[0].lines
    assert line.get_xdata()[0] == report.memory.capacity / (1 << 30)
    for suffix in ("png", "svg"):
        save_picture(tmp_path / "deep" / f"memory.{suffix}", figure)
        assert (tmp_path / "deep" / f"memory.{suffix}").stat().st_size > 1000


def test_a_picture_that_cannot_be_written(report: TargetReport, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"no picture format named '\.gif'"):
        refuse_picture(tmp_path / "memory.gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(JscalerError, match=r"cannot write the picture .*; choose another path"):
        save_picture(tmp_path / "file" / "memory.png", memory_figure(report))
