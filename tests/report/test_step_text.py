"""The steps of adapters in words."""

from typing import Any

import pytest

from jscaler.materialize import find_adapter, parse_layout
from jscaler.report.step_text import describe, groups_of, groups_text, layout_legend, layout_text
from jscaler.text.device_list import devices_text
from jscaler.text.units import readable_seconds


def steps(source: str, target: str, shape: tuple[Any, ...] = (16, 16)) -> list[Any]:
    return list(find_adapter(parse_layout(source, shape), parse_layout(target, shape), 4).walk)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "target", "words", "groups"),
    [
        ("R1 V1 D(4,2)", "R4 V1 D(1,2)", "all_gather over 4 devices, dim 0", "[0 2 4 6] [1 3 5 7]"),
        ("R1 V2max D(4,1)", "R2 V1 D(4,1)", "all_reduce over 2 devices, max", "[0 4] [1 5] [2 6] [3 7]"),
        ("R1 V8 D(1,1)", "R1 V1 D(1,8)", "reduce_scatter over 8 devices, to dim 1", "[0 1 2 3 4 5 6 7]"),
        ("R1 V1 D(8,1)", "R1 V1 D(1,8)", "all_to_all over 8 devices, dim 0 to dim 1", "[0 1 2 3 4 5 6 7]"),
        ("R8 V1 D(1,1)", "R1 V1 D(8,1)", "slice over 8 devices, dim 0", "no communication"),
        ("R8 V1 D(1,1)", "R1 V8 D(1,1)", "value_mask over 8 devices", "no communication"),
        ("R1 V1 D(2,1)", "R1 V1 D(2,1) on [1 0]", "permute", "2 messages"),
        ("R1 V1 D(4,2)", "R1 V1 D(2,4)", "point_to_point", "12 messages in 2 rounds"),
    ],
)
def test_a_step_in_words(source: str, target: str, words: str, groups: str) -> None:
    ((layout, step),) = steps(source, target)
    assert describe(layout, step) == words
    assert groups_text(layout, step) == groups


def test_a_part_of_a_refined_dim_is_named() -> None:
    ((layout, step),) = steps("R1 V1 D(1,1·4)", "R1 V1 D(4,1·1)", (8, (3, 4)))
    assert describe(layout, step) == "all_to_all over 4 devices, dim 1 part 1 to dim 0"


def test_messages_name_devices_and_not_positions() -> None:
    ((layout, step),) = steps("R1 V1 D(2,1) on [7 4]", "R1 V1 D(2,1) on [4 7]")
    assert sorted(groups_of(layout, step)) == [[4, 7], [7, 4]]
    ((layout, step),) = steps("R1 V1 D(4,2) on [8-15]", "R1 V1 D(2,4) on [8-15]")
    assert {device for pairs in groups_of(layout, step) for pair in pairs for device in pair} <= set(range(8, 16))


def test_many_devices_are_shortened() -> None:
    assert devices_text(range(16)) == "[0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]"
    assert devices_text(range(0, 1024, 32)) == "[0 32 64 96 … 992]"
    ((layout, step),) = steps("R1 V1 D(4,8)", "R4 V1 D(1,8)")
    assert groups_text(layout, step) == "[0 8 16 24] [1 9 17 25] [2 10 18 26] [3 11 19 27] …"


def test_layouts_in_their_own_order_need_no_device_list() -> None:
    shape = (64, 64)
    texts = ["R2 V1 D(2,1)", "R1 V1 D(2,1) on [1 0]", "R1 V1 D(32,1) on [31 0-30]"]
    shown = ["R2 V1 D(2,1)", "R1 V1 D(2,1) on [1 0]", "R1 V1 D(32,1) on [31 0-30]"]
    assert [layout_text(parse_layout(text, shape)) for text in texts] == shown  # type: ignore[arg-type]


def test_readable_seconds() -> None:
    assert [readable_seconds(s) for s in (3.89e-5, 0.0021, 1.5)] == ["38.9 µs", "2.1 ms", "1.5 s"]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("R8 V1 D(1,1)", "8 replicas of each part, no value shares, dim 0 whole, dim 1 whole"),
        ("R1 V4 D(2)", "no replicas, 4 value shares (add), dim 0 in 2 parts"),
        (
            "R2 V2·3max D()",
            "2 replicas of each part, 2 value shares (add), each of 3 value shares (max), no dims",
        ),
        ("R1 V1 D(1·8·1,5+3)", "no replicas, no value shares, dim 0 in 8 parts, sub-dim by sub-dim, dim 1 in parts of 5+3"),
    ],
)
def test_a_legend_puts_the_first_layout_of_a_table_into_words(layout: str, words: str) -> None:
    assert layout_legend(["op  n", f"up  1  {layout}  {layout}", "down  R9 V9 D(9)"]) == [f"{layout}: {words}"]
    assert layout_legend(["op  n"]) == []
