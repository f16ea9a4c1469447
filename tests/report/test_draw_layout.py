"""The picture of a redistribution: what it draws is what the masks say."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from masks import elements

from jscaler.errors import UnknownNameError
from jscaler.materialize import Layout, find_adapter, parse_layout
from jscaler.report.draw_layout import COLORS, draw_redistribution, redistribution_figure
from jscaler.report.step_text import layout_text

CASES = {
    "2-D, value shares": ((16, 16), "R1 V4 D(2,1)", "R8 V1 D(1,1)"),
    "another order": ((16, 8), "R2 V1 D(2,2) on [3 1 0 2 7 6 5 4]", "R1 V2max D(1,4)"),
    "1-D": ((16,), "R1 V2 D(2)", "R2 V1 D(2)"),
    "3-D": ((8, 4, 16), "R1 V1 D(2,1,8)", "R2 V2 D(2,2,1)"),
    "uneven, and empty blocks": ((10, 3), "R2 V1 D(3,1)", "R1 V1 D(1,6)"),
    "refined": ((8, (3, 8, 2)), "R1 V1 D(1,1·4·1)", "R1 V1 D(2,1·1·2)"),
    "16 devices": ((16, 16), "R1 V1 D(16,1)", "R1 V1 D(4,4)"),
    "a scalar": ((), "R1 V2 D()", "R2 V1 D()"),
}


def drawn(shape: tuple[Any, ...], source: str, target: str) -> tuple[list[Layout], Any]:
    adapter = find_adapter(parse_layout(source, shape), parse_layout(target, shape), 4)  # type: ignore[arg-type]
    walk = list(adapter.walk)
    layouts = [adapter.source, *(step.apply(here) for here, step in walk[:-1]), adapter.target]
    return layouts, redistribution_figure("title", layouts, [str(step) for _, step in walk])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_boxes_are_what_the_masks_say(case: tuple[tuple[Any, ...], str, str]) -> None:
    layouts, figure = drawn(*case)
    patches = by_name(figure)
    last = max(int(re.match(r"stage(\d+)", name)[1]) for name in patches)  # type: ignore[index]
    for stage, layout in ((0, layouts[0]), (last, layouts[-1])):
        for position, device in enumerate(layout.mesh.devices):
            mask = layout.mask(position)
            wide = layout.shape[:2] if len(layout.shape) > 1 else (1, *layout.shape, 1)[:2]
            held = np.zeros(wide, bool)
            for index in elements(mask):
                held[index[:2] if len(layout.shape) > 1 else (0, *index, 0)[:2]] = True
            frame, boxes = panel(patches, f"stage{stage}-device{device}")
            assert (filled(frame, boxes, wide) == held).all(), f"stage {stage}, device {device}: {mask}"
            assert {bool(box.get_hatch()) for box in boxes} <= {bool(mask.shares)}


def test_one_share_one_hatch_and_one_device_one_colour() -> None:
    layouts, figure = drawn(*CASES["2-D, value shares"])
    patches = by_name(figure)
    boxes = {device: panel(patches, f"stage0-device{device}")[1][0] for device in range(8)}
    shares = {device: layouts[0].mask(device).shares[0].position for device in range(8)}
    assert {(shares[d], box.get_hatch()) for d, box in boxes.items()} == {
        (shares[d], boxes[d].get_hatch()) for d in (0, 2, 4, 6)
    }
    assert len({box.get_hatch() for box in boxes.values()}) == 4
    assert len({box.get_facecolor() for box in boxes.values()}) == len(COLORS) == 8
    after = {device: panel(patches, f"stage2-device{device}")[1][0] for device in range(8)}
    assert all(boxes[d].get_facecolor() == after[d].get_facecolor() for d in range(8))


def test_every_step_is_named_and_layouts_in_between_are_small() -> None:
    layouts, figure = drawn(*CASES["2-D, value shares"])
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words.count("device 3") == 3
    assert words.count("share 2 of 4") == 2
    assert [word for word in words if " over " in word] == ["1  all_reduce over x0", "2  all_gather over x1"]
    assert any(word.startswith(f"after step 1: {layout_text(layouts[1])}") for word in words)
    heights = [by_name(figure)[f"stage{i}-device0"].get_height() for i in range(3)]
    assert heights[1] < heights[0] == heights[2]


def test_what_is_left_out_is_said() -> None:
    _, figure = drawn((64, 64, 2), "R1 V1 D(64,1,1)", "R1 V1 D(1,64,1)")
    words = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert "The first 32 of 64 devices are drawn." in words
    assert "Only dims 0 and 1 of 3 are drawn" in words
    assert "stage0-device31" in by_name(figure)
    assert "stage0-device32" not in by_name(figure)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_text_overlaps_another_or_leaves_the_picture(case: tuple[tuple[Any, ...], str, str]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    _, figure = drawn(*case)
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in figure.axes[0].texts]
    for i, (words, box) in enumerate(boxes):
        assert box.x0 >= 0, words
        assert box.x1 <= figure.bbox.x1, words
        assert not [other for other, beside in boxes[:i] if box.overlaps(beside)], words


@pytest.mark.parametrize("name", ["a.png", "a.svg", "a.pdf"])
def test_equal_pictures_are_equal_files(tmp_path: Path, name: str) -> None:
    layouts, _ = drawn(*CASES["1-D"])
    files = [tmp_path / "one" / name, tmp_path / "two" / name]
    for path in files:
        draw_redistribution(path, "title", layouts, ["all_reduce"])
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size < 200_000


def test_unknown_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"no picture format named '.jpg'"):
        draw_redistribution(tmp_path / "a.jpg", "title", drawn(*CASES["1-D"])[0], [])


def by_name(figure: Any) -> dict[str, Any]:
    return {patch.get_gid(): patch for patch in figure.axes[0].patches if patch.get_gid()}


def panel(patches: dict[str, Any], name: str) -> tuple[Any, list[Any]]:
    return patches[name], [patch for gid, patch in patches.items() if gid.startswith(f"{name}-")]


def filled(frame: Any, boxes: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Which elements the boxes cover; their edges lie between elements."""
    covered = np.zeros(shape, bool)
    for box in boxes:
        top, left = (box.get_y() - frame.get_y()) / frame.get_height(), (box.get_x() - frame.get_x()) / frame.get_width()
        edges = [top, top + box.get_height() / frame.get_height(), left, left + box.get_width() / frame.get_width()]
        scaled = [edge * shape[i // 2] for i, edge in enumerate(edges)]
        y0, y1, x0, x1 = (round(edge) for edge in scaled)
        assert np.allclose(scaled, [y0, y1, x0, x1], atol=1e-6)
        covered[y0:y1, x0:x1] = True
    return covered
