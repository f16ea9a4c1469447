"""``Published``: a schedule of the literature, and for which numbers it exists."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jscaler.errors import PlanError
from jscaler.tables.table import Table

Numbers = tuple[int, int, int]  # device groups, micro-batches, chunks


def one_each(groups: int, chunks: int) -> list[int]:
    """A stage on each group; of several chunks, one after another: group 0 has the stages 0, p, 2p, …"""
    return [stage % groups for stage in range(groups * chunks)]


def in_a_v(groups: int, chunks: int) -> list[int]:
    """To the last group and back: group 0 has the first stage and the last."""
    there = list(range(groups))
    return [group for chunk in range(chunks) for group in (there if chunk % 2 == 0 else there[::-1])]


@dataclass(frozen=True)
class Published:
    """A schedule of the literature.

    Attributes:
        source: where it was published.
        make: the table for so many device groups, micro-batches and chunks (stages on each group).
        chunks: how many a group has; None for ``fewest`` or more.
        lies: the group of each stage, for so many groups and chunks.
        lies_turned: the same for every second micro-batch, if these lie elsewhere.
        problem: why it does not exist for so many groups, micro-batches and chunks; None where it does.
        everywhere: the first and the last stage lie on all devices, and are the table's first row.
        passes: chunks are passes of one model over its own output; the last alone has a backward.
        searched: the table only says which blocks there are: their order is searched when a step's are known.
        make_again: the table where stages compute their forward again; by default R stands right in front of each backward.
    """

    name: str
    source: str
    make: Callable[[int, int, int], Table]
    chunks: int | None = 1
    lies: Callable[[int, int], Sequence[int]] = one_each
    lies_turned: Callable[[int, int], Sequence[int]] | None = None
    problem: Callable[[int, int, int], str | None] = lambda groups, microbatches, chunks: None
    everywhere: bool = False
    passes: bool = False
    searched: bool = False
    make_again: Callable[[int, int, int], Table] | None = None
    fewest: int = 2

    def table(self, groups: int, microbatches: int, chunks: int | None = None) -> Table:
        """The table for ``groups`` device groups with ``chunks`` stages each.

        Raises:
            PlanError: there is none for these numbers; the nearest for which there is one are named.

        Example:
            >>> from jscaler.tables import SCHEDULES
            >>> print(SCHEDULES["1f1b"].table(2, 3))
            0F0 0F1 0B0 0F2 0B1 0B2
            1F0 1B0 1F1 1B1 1F2 1B2
        """
        chunks = self.chunks_of(chunks)
        why = self.why_not(groups, microbatches, chunks)
        if why is not None:
            near = "; ".join(_text(*numbers) for numbers in self._nearest(groups, microbatches, chunks))
            raise PlanError(
                f"there is no schedule '{self.name}' for {_text(groups, microbatches, chunks)}: {why}; the nearest: {near}"
            )
        return self.make(groups, microbatches, chunks)

    @property
    def example(self) -> Table:
        """A small table, which has the kinds of blocks that all have."""
        return self.make(2, 4, self.chunks_of(None))

    def chunks_of(self, chunks: int | None) -> int:
        """How many a group has, where nobody says."""
        least = 3 if self.passes else self.fewest
        return chunks if chunks is not None else least if self.chunks is None else self.chunks

    def why_not(self, groups: int, microbatches: int, chunks: int) -> str | None:
        """Why there is none for these numbers; None where there is."""
        if groups < 1 or microbatches < 1:
            return "groups and micro-batches are positive"
        if chunks < 1 or (self.chunks or chunks) != chunks or (self.chunks is None and chunks < self.fewest):
            return "a group has " + (
                "two chunks or more" if self.chunks is None else f"{self.chunks} of the model's chunks"
            )
        return self.problem(groups, microbatches, chunks)

    def _nearest(self, groups: int, microbatches: int, chunks: int) -> list[Numbers]:
        """Numbers for which it exists: of micro-batches the next ones below and above, else of groups too."""
        chunks = self.chunks if self.chunks is not None else max(self.fewest, chunks)
        found: list[Numbers] = []
        for near in (groups, groups - 1, groups + 1):
            legal = [(near, m, chunks) for m in _around(microbatches) if self.why_not(near, m, chunks) is None]
            found += legal[: 1 if (near, microbatches, chunks) in legal else 2]
            if found:
                break
        return found


def _around(number: int) -> Iterator[int]:
    """The numbers near ``number``, the nearest first."""
    yield number
    for distance in range(1, 4 * number + 16):
        yield from (n for n in (number - distance, number + distance) if n > 0)


def _text(groups: int, microbatches: int, chunks: int) -> str:
    text = f"{groups} groups and {microbatches} micro-batches"
    return text if chunks == 1 else f"{text}, {chunks} chunks on each group"
