"""What follows itself: a sequence as single items and runs of equal rows, in the fewest words.

::

    e A F A F A F n      ──►   e (A F)³ n
    A F A C F A C F      ──►   A F (A C F)²
    A F A F M A F A F M  ──►   ((A F)² M)²

A single item costs one word, a run what its row costs and one for the count. Rows are short, so that the work is that of
their length and of their number, not of the square of what is read.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

LONGEST = 48  # items of a row


@dataclass(frozen=True)
class EqualRows:
    """Equal rows in a row.

    Attributes:
        start: the first item's place.
        length: items of a row.
        count: how many rows; a single item is a row of one.
    """

    start: int
    length: int = 1
    count: int = 1

    @property
    def rows(self) -> tuple[range, ...]:
        """The places of each row."""
        return tuple(range(i, i + self.length) for i in range(self.start, self.start + self.size, self.length))

    @property
    def size(self) -> int:
        return self.length * self.count


def innermost(items: Sequence[Hashable]) -> tuple[EqualRows, ...]:
    """Single items, and runs whose rows hold no further runs, in order.

    Example:
        >>> [(rows.start, rows.length, rows.count) for rows in innermost("eAFAFn")]
        [(0, 1, 1), (1, 2, 2), (5, 1, 1)]
    """
    return tuple(Parser().leaves(tuple(items), 0, top=True))


@dataclass
class Parser:
    """Texts of sequences; what stands in one several times is looked at once."""

    known: dict[tuple[Hashable, ...], tuple[int, tuple[EqualRows, ...]]] = field(default_factory=dict)

    def leaves(self, items: tuple[Hashable, ...], at: int, top: bool = False) -> Iterator[EqualRows]:
        """The runs of the shortest text, from place ``at`` on; of a run of rows with runs in them, these."""
        for run in self.shortest(items, top)[1]:
            row = items[run.start : run.start + run.length]
            if run.count == 1 or len(self.shortest(row)[1]) == run.length:
                yield EqualRows(at + run.start, run.length, run.count)
                continue
            for start in range(run.start, run.start + run.size, run.length):
                yield from self.leaves(row, at + start)

    def shortest(self, items: tuple[Hashable, ...], top: bool = False) -> tuple[int, tuple[EqualRows, ...]]:
        """The words of the shortest text of ``items``, and its runs.

        Of equally short ones that with the most rows. Within a row two equal items are no run yet: it is to say less.
        """
        if items in self.known:
            return self.known[items]
        best: list[tuple[tuple[int, int], EqualRows | None]] = [((0, 0), None)]  # of what follows each place, from behind
        for start in range(len(items) - 1, -1, -1):
            choices = []
            for run in (EqualRows(start), *self._runs(items, start)):
                words = 1 if run.count == 1 else 1 + self.shortest(items[start : start + run.length])[0]
                after = best[len(items) - start - run.size][0]
                rows = run.count if run.count > 1 else 0
                if top or rows == 0 or words < run.size:
                    choices.append(((words + after[0], after[1] - rows), run))
            best.append(min(choices, key=lambda c: (c[0], c[1].length)))
        runs, at = [], 0
        while at < len(items):
            run = best[len(items) - at][1]
            assert run is not None
            runs.append(run)
            at += run.size
        self.known[items] = best[-1][0][0], tuple(runs)
        return self.known[items]

    def _runs(self, items: tuple[Hashable, ...], start: int) -> Iterator[EqualRows]:
        for length in range(1, min(LONGEST, (len(items) - start) // 2) + 1):
            row, end, count = items[start : start + length], start + length, 1
            while items[end : end + length] == row:
                end, count = end + length, count + 1
                yield EqualRows(start, length, count)
