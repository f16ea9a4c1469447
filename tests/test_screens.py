"""The checker of screens finds what is wrong with bad ones."""

import re

import pytest
from screens import faults, shown

GOOD = ["┏━━━━━━┳━━━━━━┓", "┃ name ┃ size ┃", "┡━━━━━━╇━━━━━━┩", "│ a    │ 1    │", "│ b    │      │", "└──────┴──────┘"]


def test_a_good_screen_has_no_faults() -> None:
    assert faults(GOOD, 15) == []


@pytest.mark.parametrize(
    ("lines", "columns", "fault"),
    [
        (GOOD, 14, "15 columns"),
        ([line.replace("1", " ") for line in GOOD], 15, "column 1, 'size', is empty"),
        ([line.replace("name", "    ") for line in GOOD], 15, "column 0 .* has no header"),
        (["┏━━━━━━┳┓", "┃ name ┃┃", "┡━━━━━━╇┩", "│ a    ││", "└──────┴┘"], 15, "column 1 .* has no header"),
        (["┏━━━━━━┓", "┃ name ┃", "┡━━━━━━┩", "│ long…│", "└──────┘"], 15, "cut: │ long"),
        (["┏━━━━━━┓", "┃ name ┃", "┡━━━━━━┩", "│ …    │", "└──────┘"], 15, "cut: │ …"),
        (["│ long… │"], 15, "cut: │ long"),
    ],
)  # fmt: skip
def test_bad_screens(lines: list[str], columns: int, fault: str) -> None:
    found = faults(lines, columns)
    assert found
    assert any(re.search(fault, one) for one in found), found


def test_what_is_cut_in_a_cell_may_stand_whole_elsewhere() -> None:
    assert faults(["│ long… │", "long names: longest"], 20) == []


def test_lines_are_read_as_a_terminal_shows_them() -> None:
    assert shown(b"bar 1\rbar 2\n\x1b[1Agone?\x1b[2K\rdone\n" + b"x" * 30, 10) == ["done", "x" * 30]
