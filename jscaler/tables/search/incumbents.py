"""Published schedules as first solutions: their tables, in the kinds of blocks that a problem has."""

from collections.abc import Iterator
from dataclasses import dataclass

from jscaler.errors import PlanError
from jscaler.tables.catalogue import SCHEDULES
from jscaler.tables.search.problem import Problem
from jscaler.tables.search.replay import Replay, check_table, fits, replay
from jscaler.tables.table import BlockKind, Table, TableCell


@dataclass(frozen=True)
class Incumbent:
    """A table that keeps within the limits of memory, how it runs, and who found it."""

    source: str
    table: Table
    found: Replay


def from_catalogue(problem: Problem) -> Iterator[Incumbent]:
    """The published schedules that fit a problem and its limits of memory.

    Example:
        >>> from jscaler.tables.search.chain_problem import chain_problem, unit_costs
        >>> problem = chain_problem([unit_costs()] * 4, lies=range(4), microbatches=8, memory=4)
        >>> [(one.source, one.found.seconds) for one in from_catalogue(problem)]
        [('1f1b', 30.0), ('zb_h1', 27.0)]
    """
    stages = len({block.stage for block in problem.lanes[0]})
    for published in SCHEDULES.values():
        groups = len(problem.rows) - (1 if published.everywhere else 0)
        chunks = (stages - (2 if published.everywhere else 0)) // max(groups, 1)
        if groups < 1 or chunks < 1 or published.why_not(groups, problem.microbatches, chunks) is not None:
            continue
        table = in_kinds_of(problem, published.table(groups, problem.microbatches, chunks))
        one = incumbent(problem, table, published.name)
        if one is not None:
            yield one


def incumbent(problem: Problem, table: Table, source: str) -> Incumbent | None:
    """``table`` as a first solution; None where it does not fit the problem, or its limits of memory."""
    try:
        check_table(problem, table)
        found = replay(problem, table)
    except PlanError:
        return None
    return Incumbent(source, table, found) if fits(problem, found) else None


def in_kinds_of(problem: Problem, table: Table) -> Table:
    """``table`` with the kinds of blocks that each stage has: B is I and W, or I and W are B at the place of I; R stands in
    front of the backward. Overlapped blocks follow each other.

    Example:
        >>> from jscaler.tables.search.chain_problem import chain_problem, unit_costs
        >>> print(in_kinds_of(chain_problem([unit_costs()], [0], 2), Table.parse("0F0 (0F1;0B0) 0B1")))
        0F0 0F1 0I0 0W0 0I1 0W1
    """
    kinds: dict[int, set[BlockKind]] = {}
    for block in problem.lanes[0]:
        kinds.setdefault(block.stage, set()).add(block.kind)
    rows = [
        [c for entry in row for cell in entry.cells for c in _cells(cell, kinds.get(cell.stage, set()))]
        for row in table.rows
    ]
    return Table(tuple(tuple(dict.fromkeys(row)) for row in rows))


def _cells(cell: TableCell, kinds: set[BlockKind]) -> list[TableCell]:
    def of(kind: BlockKind) -> TableCell:
        return TableCell(cell.stage, kind, cell.microbatch)

    if cell.kind == "F":
        return [cell]
    if cell.kind == "R":
        return [cell] if "R" in kinds else []
    if cell.kind == "W":
        return [cell] if "W" in kinds else []
    again = [of("R")] if "R" in kinds else []
    if "B" in kinds:
        return [*again, of("B")]
    return [*again, of("I"), *([of("W")] if cell.kind == "B" and "W" in kinds else [])]
