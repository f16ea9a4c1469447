"""A model as a row of segments, between the places where it may be cut into stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jscaler.clusters import Cluster
from jscaler.estimate.prices.folded import Folded
from jscaler.estimate.prices.segments import Shares, shares_of_segments
from jscaler.plans.balance import Unit, places_and_bytes
from jscaler.plans.find_stages import name_of, row_of
from jscaler.primitives import Planner
from jscaler.stages import Captured


@dataclass(frozen=True)
class SegmentRow:
    """Segments in order.

    Attributes:
        kinds: of each segment its kind; equal ones have the same.
        nbytes: what comes into each from the one before, of the whole batch.
        shares: of ops of the folded graph the part that each kind has.
        begins: of each segment the unit that it begins with.
        loops: how many loops there are whose layers may lie apart.
    """

    kinds: np.ndarray
    nbytes: np.ndarray
    shares: Shares
    begins: Sequence[Unit]
    loops: int

    @staticmethod
    def of(captured: Captured, folded: Folded, cluster: Cluster, batch: str) -> "SegmentRow":
        """Of a step; equal layers of its loops, and those that are folded, are one kind.

        Raises:
            PlanError: it is no row.
        """
        graph = Planner(captured.graph, cluster.num_devices, captured.bodies, cluster=cluster)
        units, known = row_of(graph, batch)
        places = places_and_bytes(graph, units, known, cluster.num_devices - 1)
        starts = [0, *(place for place, _ in places)]
        numbers: dict[frozenset[tuple[str, float]], int] = {}
        shares: dict[str, dict[int, float]] = {}
        kinds: list[int] = []
        for start, stop in zip(starts, [*starts[1:], len(units)], strict=True):
            own: dict[str, float] = {}
            for unit in units[start:stop]:
                for op in unit.ops:
                    path = folded.of(op.path)
                    own[path] = own.get(path, 0.0) + 1 / unit.of / folded.counts.get(path, 1)
            kinds.append(numbers.setdefault(frozenset(own.items()), len(numbers)))
            for path, part in own.items():
                shares.setdefault(path, {})[kinds[-1]] = part
        loops = len({id(unit.item) for unit in units if unit.of > 1})
        nbytes = [0, *(own for _, own in places)]
        whole = shares_of_segments(folded.graph, shares)
        return SegmentRow(np.array(kinds), np.array(nbytes, float), whole, [units[start] for start in starts], loops)

    @property
    def count(self) -> int:
        """How many kinds there are."""
        return int(self.kinds.max()) + 1

    def cuts(self, starts: Sequence[int]) -> dict[str, Any]:
        """How `pipeline` is told in front of which segments stages begin: between layers of the one loop, or by name."""
        units = [self.begins[start] for start in starts]
        if self.loops == 1 and all(unit.of > 1 and unit.iteration for unit in units):
            bounds = [0, *(unit.iteration for unit in units), units[0].of] if units else []
            return {"layers": [int(n) for n in np.diff(bounds)]}
        return {"at": [name_of(unit) for unit in units]}
