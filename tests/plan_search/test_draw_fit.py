"""The picture of what was tried: a panel each, bars by kind that add up, the device's line, what is cut off."""

import dataclasses
from pathlib import Path

import pytest
from report.stand_in import arguments, step

import jscaler
from jscaler import Found
from jscaler.clusters import find_cluster
from jscaler.errors import JscalerError, UnknownNameError
from jscaler.plan_search.draw_fit import MOST_PANELS, fit_figure, phases
from jscaler.report.draw_layout import refuse_picture, save_picture
from jscaler.report.draw_memory import GIB
from jscaler.xla_model.lifetimes import Moment

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def found() -> Found:
    graph = jscaler.parallelize("single")(step).graph(*arguments())
    cluster = dataclasses.replace(find_cluster("4xH100-80GB"), memory=300_000)
    return jscaler.fit(graph, cluster, ["data_parallel", "zero1", "zero3", "megatron(dp=2, tp=2)"])


def test_a_panel_for_each_legal_plan_with_the_bars_of_its_memory(found: Found) -> None:
    figure = fit_figure(found, "three layers")
    legal = [one for one in found.candidates if one.cost is not None]
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert len(panels) == len(legal) == 3
    for axes, one in zip(panels, legal, strict=True):
        assert axes.get_title("left").startswith(f"{one.text}\n")
        tops = [bar.get_y() + bar.get_height() for bar in axes.patches if hasattr(bar, "get_height")]
        size = 1 << 20 if max(tops) > 1e-2 else GIB
        assert max(tops) * size == pytest.approx(one.peak)
    assert {text.get_text() for text in figure.legends[0].get_texts()} >= {"parameters", "optimizer", "temporaries"}


def test_what_is_higher_than_the_panel_is_marked(found: Found) -> None:
    figure = fit_figure(dataclasses.replace(found, memory=30_000.0), "three layers")
    for axes in figure.axes:
        assert [line.get_marker() for line in axes.lines if line.get_marker() != "None"] == ["^"]
        assert axes.get_ylim()[1] * (1 << 20) < min(one.peak for one in found.candidates)


def test_many_plans_leave_those_that_need_least(found: Found) -> None:
    smallest, *_, largest = sorted(found.candidates, key=lambda one: one.peak)
    tried = [dataclasses.replace(one) for one in (largest, *[smallest] * MOST_PANELS)]
    figure = fit_figure(dataclasses.replace(found, chosen=None, candidates=tuple(tried)), "")
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title("left").partition("\n")[0] for axes in panels] == [smallest.text] * MOST_PANELS
    assert fit_figure(dataclasses.replace(found, chosen=None, candidates=()), "nothing").axes


def test_what_runs_when() -> None:
    kinds = {"a": "forward", "b": "backward"}
    moments = [Moment("", op, 1) for op in ("", "a", "", "b", "a")]
    assert phases(moments, kinds) == [("forward", 0, 2), ("backward", 3, 3), ("forward", 4, 4)]


def test_pictures_are_files(found: Found, tmp_path: Path) -> None:
    figure = fit_figure(found, "three layers")
    save_picture(tmp_path / "new" / "fit.png", figure, dpi=110)
    assert (tmp_path / "new" / "fit.png").stat().st_size > 1000
    with pytest.raises(UnknownNameError, match=r"'\.gif'"):
        refuse_picture(tmp_path / "fit.gif")
    (tmp_path / "file").touch()
    with pytest.raises(JscalerError, match="cannot write the picture"):
        save_picture(tmp_path / "file" / "fit.png", figure)
