"""``FoundSchedule``: what a schedule search returns, with its certificate."""

from dataclasses import dataclass

from jscaler.tables.search.ticks import RESOLUTION
from jscaler.tables.table import Table
from jscaler.text.units import readable_seconds


@dataclass(frozen=True)
class FoundSchedule:
    """The best table that a search found, and how far it may be from the least step time.

    Attributes:
        table: legal for the problem, and within its limits of memory.
        seconds: of a step, as `jscaler.tables.tasks.times_of` has it.
        bound: seconds that every schedule takes at least.
        exact: whether all seconds of the problem are multiples of one tick, so that nothing was rounded.
        period: seconds from a round of micro-batches to the next in the periodic schedule found; None where none was.
        peaks: the most bytes that each device holds under the table.
        source: who found the table: a published schedule, a given incumbent, or a step of the search.

    Example:
        >>> found = FoundSchedule(Table.parse("0F0 0B0"), 3.0, 3.0, True, 3.0, (1.0,), "1f1b")
        >>> found.gap, found.proved, str(found)
        (0.0, True, '1f1b: 3 s, proved least')
    """

    table: Table
    seconds: float
    bound: float
    exact: bool
    period: float | None
    peaks: tuple[float, ...]
    source: str

    @property
    def gap(self) -> float:
        """How much longer the step is than the bound, as a share of the bound."""
        return self.seconds / self.bound - 1 if self.bound else 0.0

    @property
    def proved(self) -> bool:
        """Whether the gap is none; where seconds were rounded to ticks, whether it is at most that rounding, 0.1 %."""
        return self.gap <= (1e-9 if self.exact else RESOLUTION)

    def __str__(self) -> str:
        proof = "proved least" if self.proved else f"at most {self.gap:.2%} above the least"
        return f"{self.source}: {readable_seconds(self.seconds)}, {proof}"
