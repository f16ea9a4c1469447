"""A chain of stages in a published order: whether there is a table for it, and what its groups wait for at least."""

import functools
from dataclasses import dataclass

from jscaler.tables.catalogue import schedule_named
from jscaler.tables.least_waits import LeastWaits
from jscaler.tables.published import Published


@dataclass(frozen=True)
class StageChain:
    """Stages that follow each other, of so many groups with so many chunks each.

    Attributes:
        schedule: the name of a published one.

    Example:
        >>> StageChain("interleaved", 4, 2, 2).has_table, StageChain("1f1b", 4, 2, 1).least_waits.under_way
        (False, 0.25)
    """

    schedule: str
    groups: int
    microbatches: int
    chunks: int

    @property
    def _published(self) -> Published:
        found = schedule_named(self.schedule)
        assert found is not None
        return found

    @property
    def has_table(self) -> bool:
        """Whether the schedule has a table for these numbers."""
        return self._published.why_not(self.groups, self.microbatches, self.chunks) is None

    @property
    def least_waits(self) -> LeastWaits:
        """What its groups wait for at least."""
        return _least_waits(self)


@functools.lru_cache(maxsize=4096)
def _least_waits(chain: StageChain) -> LeastWaits:
    return LeastWaits.of(chain._published.table(chain.groups, chain.microbatches, chain.chunks))
