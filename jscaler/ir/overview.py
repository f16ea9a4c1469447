"""``Overview``: an object in at most twenty lines, and in a notebook as tables that fold by module.

::

    Graph of 3198 ops: 627 forward, 621 backward, 1950 update        what it is, and the numbers that matter
    print(graph) has a line for every op                             the call that shows more
    ▸ ops: 3198                                                      plain HTML, without a script: each module is a
      ▾ block_0: 26                                                  <details>, opened level by level as far as the
        ▸ attn: 13                                                   bytes allow; what lies deeper is a count
"""

import functools
import html
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_LINES, MOST_BYTES = 20, 100_000
LONGEST = 200  # characters of a line, or of a cell
NOTE_BYTES, FOLD_BYTES, ROW_BYTES = 400, 70, 10  # of a table's title and notes; of the tags around a module, and a row


@dataclass(frozen=True)
class FoldingTable:
    """A table of things that have paths.

    Attributes:
        title: what they are: ``ops``.
        header: of the cells behind a thing's name.
        path: of an item.
        cells: of an item; asked only for those that are shown.
        more: the call that shows all.
    """

    title: str
    header: tuple[str, ...]
    items: Sequence[Any]
    path: Callable[[Any], str]
    cells: Callable[[Any], Sequence[str]]
    more: str


@dataclass(frozen=True)
class Overview:
    """What an object says of itself.

    Attributes:
        lines: what it is, the numbers that matter, and last the call that shows more.
        tables: made only where HTML is asked for.
    """

    lines: Sequence[str]
    tables: Callable[[], Sequence[FoldingTable]] = tuple

    @property
    def text(self) -> str:
        """At most ``MOST_LINES`` lines."""
        lines = [*self.lines[: MOST_LINES - 1], self.lines[-1]] if len(self.lines) > MOST_LINES else self.lines
        return "\n".join(map(clipped, lines))

    @property
    def html(self) -> str:
        """At most ``MOST_BYTES`` bytes."""
        head = f"<pre>{html.escape(self.text)}</pre>\n"
        tables = self.tables()
        room = (MOST_BYTES - len(head.encode())) // max(len(tables), 1)
        return head + "".join(_folded(table, room) for table in tables)


class Shown(ABC):
    """Whose ``repr``, and whose cell in a notebook, is its overview. Dataclasses of this kind have ``repr=False``."""

    @abstractmethod
    def overview(self) -> Overview:
        """What it says of itself."""

    def __repr__(self) -> str:
        return self.overview().text

    def _repr_html_(self) -> str:
        return self.overview().html


def clipped(text: str) -> str:
    """``text`` as one line of at most ``LONGEST`` characters."""
    line = " ".join(text.split("\n"))
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def count_text(counts: dict[str, int]) -> str:
    """``3 forward, 1 update``; of what there is none of nothing."""
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


@dataclass(eq=False)
class _Module:
    """The things whose paths begin alike: those right here, and modules below.

    Attributes:
        rows: once it is opened.
    """

    items: list[Any] = field(default_factory=list)
    below: "dict[str, _Module]" = field(default_factory=dict)
    is_listed: bool = False
    rows: list[str] | None = None

    @functools.cached_property
    def count(self) -> int:
        return len(self.items) + sum(inner.count for inner in self.below.values())


def _tree(table: FoldingTable) -> _Module:
    made = {"": _Module()}

    def at(path: str) -> _Module:
        if path not in made:
            above, _, name = path.rpartition("/")
            made[path] = at(above).below[name] = _Module()
        return made[path]

    for item in table.items:
        at(table.path(item).rpartition("/")[0]).items.append(item)
    return made[""]


def _folded(table: FoldingTable, room: int) -> str:
    """The table, opened level by level as far as ``room`` bytes allow."""
    root = _tree(table)
    page = _Page(table, room - NOTE_BYTES, [root])
    whole = all(page.opens(module) for module in page.listed)  # which grows meanwhile
    note = "" if whole else f"<p>Not all is listed here; {html.escape(table.more)} shows all.</p>\n"
    opened = f"<details open><summary>{html.escape(table.title)}: {root.count}</summary>\n"
    return "".join([opened, note, *page.written(root), "</details>\n"])


@dataclass
class _Page:
    """What is written of a table.

    Attributes:
        room: bytes that are left.
        listed: the modules that are named, the outer ones first.
    """

    table: FoldingTable
    room: int
    listed: list[_Module]

    def opens(self, module: _Module) -> bool:
        """Write the rows of a module, and name those below it; whether there was room for all of them."""
        module.rows = []
        if not self._takes(len(self._header) + FOLD_BYTES):
            return False
        for item in module.items:
            name = self.table.path(item).rpartition("/")[2]
            row = "".join(f"<td>{html.escape(clipped(cell))}</td>" for cell in (name, *self.table.cells(item)))
            if not self._takes(len(row.encode()) + ROW_BYTES):
                return False
            module.rows.append(f"<tr>{row}</tr>\n")
        for name, inner in module.below.items():
            if not self._takes(len(_summary(name, inner).encode()) + FOLD_BYTES):
                return False
            inner.is_listed = True
            self.listed.append(inner)
        return True

    def written(self, module: _Module) -> Iterator[str]:
        """A module that is opened; what lies in those that are not is a count."""
        rows = module.rows or ()
        if rows:
            yield from ("<table>", self._header, *rows, "</table>\n")
        below = [(name, inner) for name, inner in module.below.items() if inner.is_listed]
        for name, inner in below:
            if inner.rows is not None:
                yield f'<details style="margin-left:1em"><summary>{_summary(name, inner)}</summary>\n'
                yield from self.written(inner)
                yield "</details>\n"
            else:
                yield f'<div style="margin-left:1em">{_summary(name, inner)}</div>\n'
        if rest := module.count - len(rows) - sum(inner.count for _, inner in below):
            yield f"<p>and {rest} more</p>\n"

    @property
    def _header(self) -> str:
        return f"<tr>{''.join(f'<th>{html.escape(name)}</th>' for name in ('', *self.table.header))}</tr>\n"

    def _takes(self, nbytes: int) -> bool:
        self.room -= nbytes
        return self.room >= 0


def _summary(name: str, module: _Module) -> str:
    return f"{html.escape(clipped(name))}: {module.count}"
