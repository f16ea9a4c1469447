"""Layouts as pictures in text, held against the devices' masks."""

import re
from typing import Any

import pytest

from jscaler.ir.mask import Mask
from jscaler.materialize import parse_layout
from jscaler.report.layout_text import layout_picture, side_by_side

SHARES = """\
               0:1024
         ┌───────────────┐
   0:512 │ 0 + 2 + 4 + 6 │
512:1024 │ 1 + 3 + 5 + 7 │
         └───────────────┘"""
REPLICAS = """\
       0:3    3:6    6:9
     ┌──────┬──────┬─────┐
 0:5 │ 5 11 │ 4 10 │ 3 9 │
5:10 │ 2 8  │ 1 7  │ 0 6 │
     └──────┴──────┴─────┘"""
NESTED = """\
           0:4                     4:8
┌───────────────────────┬───────────────────────┐
│ max(0, 2) + max(4, 6) │ max(1, 3) + max(5, 7) │
└───────────────────────┴───────────────────────┘"""
UNEVEN = """\
 0:1 1:2 2:3
┌───┬───┬───┐
│ 0 │ 1 │ 2 │
└───┴───┴───┘
nothing: 3"""
GOLDEN = [
    ((1024, 1024), "R1 V4 D(2,1)", SHARES),
    ((10, 9), "R2 V1 D(2,3) on [5 4 3 2 1 0 11 10 9 8 7 6]", REPLICAS),
    ((8,), "R1 V2·2max D(2)", NESTED),
    ((3,), "R1 V1 D(4)", UNEVEN),
]


@pytest.mark.parametrize(("shape", "text", "picture"), GOLDEN, ids=["shares", "replicas", "nested", "uneven"])
def test_pictures(shape: tuple[int, ...], text: str, picture: str) -> None:
    assert "\n".join(layout_picture(laid(text, shape))) == picture


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((1024, 1024), "R1 V4 D(2,1)"),
        ((10, 9), "R2 V1 D(2,3) on [5 4 3 2 1 0 11 10 9 8 7 6]"),
        ((16, 12), "R2 V2max D(2,2) on [15 1 2 3 4 5 6 7 8 9 10 11 12 13 14 0]"),
        ((8,), "R2 V2·2max D(2)"),
        ((3, 5), "R1 V1 D(4,2)"),
        ((4, (3, 4)), "R1 V1 D(2,1·4)"),
        ((), "R2 V2 D()"),
    ],
)
def test_every_device_stands_in_its_block_and_in_no_other(shape: tuple[Any, ...], text: str) -> None:
    layout = laid(text, shape)
    found = read(layout_picture(layout))
    for position, device in enumerate(layout.mesh.devices):
        mask = layout.mask(position)
        assert [place for place, devices in found.items() if device in devices] == [place_of(mask)]


def test_a_wide_picture_heads_its_columns_with_their_starts() -> None:
    layout = laid("R1 V1 D(1,16)", (8, 1600))
    assert layout_picture(layout, 200)[0].split()[:2] == ["0:100", "100:200"]
    assert layout_picture(layout, 120)[0].split()[:2] == ["0:", "100:"]
    assert layout_picture(layout, 80) == []
    assert layout_picture(laid("R1 V1 D(1,2,1)", (2, 2, 2))) == []  # three dims


def test_pictures_stand_side_by_side_where_there_is_room() -> None:
    assert side_by_side(["aa", "a"], ["b"], 12) == ["aa   ─►  b", "a"]
    assert side_by_side(["aa", "a"], ["b"], 9) == ["aa", "a", "", "b"]


def laid(text: str, shape: tuple[Any, ...]) -> Any:
    return parse_layout(text, shape)


def read(lines: list[str]) -> dict[tuple[str, ...], set[int]]:
    """(row, column) labels -> devices, as a person reads a picture; ("nothing",) -> devices below it."""
    body = [line for line in lines if "│" in line]
    heads = lines[0].split() if "┌" not in lines[0] else [""]
    found: dict[tuple[str, ...], set[int]] = {}
    if lines[-1].startswith("nothing"):
        found["nothing",] = numbers(lines[-1])
    for line in body:
        label, *cells = [part.strip() for part in line.rstrip("│").split("│")]
        found |= {(label, head): numbers(cell) for head, cell in zip(heads, cells, strict=True)}
    return found


def numbers(text: str) -> set[int]:
    return {int(word) for word in re.findall(r"\d+", text)}


def place_of(mask: Mask) -> tuple[str, ...]:
    if mask.size == 0:
        return ("nothing",)
    labels = ["·".join(f"{a}:{b}" for a, b in dim) for dim in mask.box]
    return ("",) * (2 - len(labels)) + tuple(labels)
