"""Text in lines of a screen's width: nothing is lost, words stay whole, columns stay columns."""

import io
import re

import pytest
from rich.console import Console
from screens import faults

from jscaler.text.narrowing import narrowed
from jscaler.text.tables import FittingTable, aligned, table
from jscaler.text.wrapping import column_widths, wrapped

ROWS = [
    ["op", "split", "sent", "devices"],
    ["blocks/attn/query/dot", "heads in 4 parts", "1.5 MiB", "[0 1 2 3]"],
    ["blocks/mlp/up/dot", "columns of the kernel in 4 parts, and rows of the batch in 2", "12.0 MiB", "[0 1 2 3]"],
]
TEXT = "\n".join(aligned(ROWS))


def printed(made: FittingTable, columns: int) -> list[str]:
    console = Console(width=columns, file=io.StringIO(), record=True)
    console.print(made)
    return console.export_text().splitlines()


def words(text: str) -> list[str]:
    return sorted(re.findall(r"[\w.,\[\]]+", text))


@pytest.mark.parametrize("width", [30, 48, 60, 80, 100])
def test_a_table_keeps_every_word_in_any_width(width: int) -> None:
    found = narrowed(TEXT, width)
    assert max(map(len, found.split("\n"))) <= width
    assert words(found) == words(TEXT)


def test_what_fits_stays_as_it_is() -> None:
    assert narrowed(TEXT, max(map(len, TEXT.split("\n")))) == TEXT


def test_cells_are_broken_between_words_and_columns_stay_below_their_headers() -> None:
    lines = narrowed(TEXT, 80).split("\n")
    start = lines[0].index("split")
    assert lines[2][start:].startswith("columns of")
    assert all(line[start - 2 : start].strip() == "" for line in lines)
    assert any("12.0 MiB" in line for line in lines), "a number keeps its unit"


def test_sentences_hang_below_what_follows_a_gap() -> None:
    assert narrowed("  1.00×  all_reduce over 4 devices; all_gather", 32).split("\n") == [
        "  1.00×  all_reduce over 4",
        "         devices; all_gather",
    ]


def test_pictures_over_time_are_cut_at_one_place_in_all_rows() -> None:
    picture = "devices  over time\nd0       0F0  0F1  0F2  0B0\nd1       .    1F0  1F1  1B0"
    found = narrowed(picture, 20).split("\n")
    assert max(map(len, found)) <= 20
    assert sum(line.startswith("d0") for line in found) == sum(line.startswith("d1") for line in found) > 1
    assert sorted(re.findall(r"\d[FB]\d", "\n".join(found))) == sorted(re.findall(r"\d[FB]\d", picture))


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("", 5, [""]),
        ("one two", 5, ["one", "two"]),
        ("a/long/path/name", 8, ["a/long/", "path/", "name"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("sends 1.5 MiB", 10, ["sends", "1.5 MiB"]),
    ],
)
def test_wrapped(text: str, width: int, lines: list[str]) -> None:
    assert wrapped(text, width) == lines


def test_the_widest_column_gives_first_and_none_below_its_words() -> None:
    columns = [["short", "a b"], ["many words in one cell of it", "x"]]
    assert column_widths(columns, 40, 24) == [5, 28]
    assert column_widths(columns, 20, 24) == [5, 15]
    assert column_widths(columns, 10, 24) == [5, 5]
    assert column_widths(columns, 9, 24) is None


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_tables_fit_and_use_the_room(columns: int) -> None:
    lines = printed(table("ops", ROWS[0], ROWS[1:]), columns)
    assert not faults(lines, columns)
    assert (max(map(len, lines)) > 80) == (columns == 200)


def test_columns_without_room_are_named_expendable_ones_first() -> None:
    made = table("numbers", ["name", "first number", "second number", "third number"], [["x", 1, 2, 3]], ["second number"])
    lines = printed(made, 26)
    assert lines[-1].strip() == "no room for: second number"
    assert not faults(lines, 26)
    assert any("third" in line for line in lines)
    assert printed(made, 18)[-1].strip().endswith("third number")


def test_columns_in_which_nothing_stands_are_left_out() -> None:
    lines = printed(table("numbers", ["name", "nothing", "size"], [["a", "", 1], ["b", "", 2]]), 80)
    assert not faults(lines, 80)
    assert not any("nothing" in line for line in lines)
    assert aligned([["name", "nothing", "size"], ["a", "", "1"]]) == ["name  size", "a     1"]
