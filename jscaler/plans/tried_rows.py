"""Where rows are cut into stages, tried by what a whole step takes: on unlike devices, whose balance is only a guess."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jscaler.plans.balance import Unit, balanced, cuts_and_places

Price = tuple[float, float]  # bytes beyond the memory of devices, and seconds: what fits comes first
Row = tuple[str, int, int]  # the first op, how many units, into how many stages
Cuts = dict[Row, list[int]]
MOST = 64  # cuts that are tried: each is planned and priced


@dataclass
class TriedRows:
    """Cuts of each row, filled in as balanced where they are not known yet.

    Attributes:
        alike: as they would be balanced if all devices were alike.
        places: where they may lie.
    """

    cuts: Cuts = field(default_factory=dict)
    alike: Cuts = field(default_factory=dict)
    places: Cuts = field(default_factory=dict)

    def __call__(self, graph: Any, units: Sequence[Unit], stages: int, known: Any, *unlike: Any) -> list[int]:
        row = next(units[0].ops).path, len(units), stages
        if row not in self.cuts:
            self.cuts[row], self.places[row] = cuts_and_places(graph, units, stages, known, *unlike)
            self.alike[row] = balanced(graph, units, stages, known)
        return self.cuts[row]

    def moved(self) -> Iterator[Cuts]:
        """One cut moved to the place before, or to the next."""
        for row, cuts in self.cuts.items():
            for number, cut in enumerate(cuts):
                before, behind = [0, *cuts][number], [*cuts, row[1]][number + 1]
                near = [place for place in self.places[row] if before < place < cut][-1:]
                far = [place for place in self.places[row] if cut < place < behind][:1]
                for place in (*near, *far):
                    yield {**self.cuts, row: [*cuts[:number], place, *cuts[number + 1 :]]}


def fastest_rows(price: Callable[[Any], Price], policy: Callable[[TriedRows], Any]) -> TriedRows:
    """The better of the balanced cuts and those for like devices; from there on, one cut is moved at a time while that is
    better.

    Args:
        price: of a policy.
        policy: with rows that are cut so.
    """
    best = TriedRows()
    least, known = price(policy(best)), [dict(best.cuts)]

    def better(cuts: Cuts) -> bool:
        nonlocal best, least
        if cuts in known or len(known) == MOST:
            return False
        known.append(cuts)
        rows = TriedRows(cuts, best.alike, best.places)
        found = price(policy(rows))
        if found < least:
            best, least = rows, found
            return True
        return False

    better(best.alike)
    while any(map(better, best.moved())):
        pass
    return best
