"""An object in a few lines, and as tables that fold by module and end where their bytes do."""

from collections.abc import Sequence
from html.parser import HTMLParser

from jscaler.ir.overview import LONGEST, MOST_BYTES, MOST_LINES, FoldingTable, Overview, Shown

ALLOWED = {"pre", "details", "summary", "table", "tr", "th", "td", "p", "div"}


class Page(HTMLParser):
    """The rows, modules and sentences of a page whose tags are all closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.stack: list[str] = []
        self.found: dict[str, list[str]] = {tag: [] for tag in ALLOWED}
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag in ALLOWED
        self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and data.strip():
            self.found[self.stack[-1]].append(data)


class Thing(Shown):
    """Things that have paths; counts how often it is asked for cells."""

    def __init__(self, paths: Sequence[str], lines: Sequence[str] = ("a thing", "call() shows more")):
        self.paths, self.lines, self.asked = paths, lines, 0

    def overview(self) -> Overview:
        def cells(item: int) -> list[str]:
            self.asked += 1
            return [f"cell {item}"]

        numbers = range(len(self.paths))
        return Overview(
            self.lines, lambda: [FoldingTable("things", ("what",), numbers, self.paths.__getitem__, cells, "call()")]
        )


def test_a_few_things_are_all_listed_module_by_module() -> None:
    page = Page(Thing(["a/up/dot", "a/down/dot", "add"])._repr_html_())
    assert page.found["summary"] == ["things: 3", "a: 2", "up: 1", "down: 1"]
    assert page.found["td"] == ["add", "cell 2", "dot", "cell 0", "dot", "cell 1"]
    assert page.found["p"] == page.found["div"] == []


def test_many_things_end_where_the_bytes_do_and_the_rest_is_counted() -> None:
    thing = Thing([f"layer_{i}/mlp_{j}/op_{k}" for i in range(30) for j in range(30) for k in range(30)])
    text = thing._repr_html_()
    page = Page(text)
    assert MOST_BYTES // 2 < len(text.encode()) <= MOST_BYTES
    note, *counted = page.found["p"]
    assert note == "Not all is listed here; call() shows all."
    listed = len(page.found["td"]) // 2
    folded = sum(int(line.rsplit(": ", 1)[1]) for line in page.found["div"])
    counts = [int(line.split()[1]) for line in counted]
    assert listed + folded + sum(counts) == 30**3
    assert thing.asked <= listed + 1, "cells are made only of what is listed"


def test_a_level_that_is_too_long_and_names_that_are_too_long_are_cut() -> None:
    for paths in (
        ["x" * 10_000] * 5_000,
        ["<&'" * 200 + f"/{i}" for i in range(5_000)],
        [f"{i}/op" for i in range(50_000)],
    ):
        text = Thing(paths)._repr_html_()
        assert len(text.encode()) <= MOST_BYTES
        assert any("more" in sentence for sentence in Page(text).found["p"])
        assert "call() shows all" in text


def test_names_are_text_and_no_tags() -> None:
    text = Thing(["<script>alert(1)</script>/<b>x</b>"], ["<i>", "&"])._repr_html_()
    page = Page(text)
    assert page.found["pre"] == ["<i>\n&"]
    assert page.found["summary"][1] == "<script>alert(1)<: 1"


def test_text_keeps_the_last_line_and_no_line_is_long() -> None:
    lines = repr(Thing([], [*(f"line {i}\nand {'x' * 500}" for i in range(40)), "call() shows more"])).splitlines()
    assert len(lines) == MOST_LINES
    assert lines[-1] == "call() shows more"
    assert max(map(len, lines)) == LONGEST
