"""Schedules with what is computed again in blocks of their own (R): the published order, and what is gained by it."""

import itertools
from collections.abc import Sequence

import pytest
from tables.chains import check_chain

from jscaler.errors import UnknownNameError
from jscaler.tables import SCHEDULES, Entry, Overlap, Published, Table, TableCell, find_schedule, schedule_named
from jscaler.tables.simulator import most_activations, simulate_table
from jscaler.tables.table import most_live

SMALL = list(itertools.product(range(1, 6), range(1, 9), range(1, 4)))  # groups, micro-batches, chunks


def with_r(name: str) -> Published:
    found = schedule_named(f"{name}+R")
    assert found is not None
    assert found.name == f"{name}+R"
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_backward_of_a_stage_has_its_r_in_front_of_it(name: str) -> None:
    """All of a stage's, or none: where each backward is run at once behind its forward. All else is as published."""
    plain, schedule = SCHEDULES[name], with_r(name)
    for numbers in (numbers for numbers in SMALL if plain.why_not(*numbers) is None):
        table, without = schedule.table(*numbers), plain.table(*numbers)
        cells = set(table.cells())
        stages = {cell.stage for cell in cells if cell.kind == "R"}
        own = {again(cell) for cell in cells if cell.kind in "BI" and cell.stage in stages}
        assert {cell for cell in cells if cell.kind == "R"} == own
        check_chain(table, [set(own) for own in (map_cells(row) for row in table.rows)])
        if name == "interlaced":
            assert stages == set(range(1, numbers[0]))
            continue
        assert strip(table) == without
        for row in table.rows:
            for before, entry in itertools.pairwise(row):
                assert all(again(c) in before_of(row, entry) for c in entry.cells if c.kind in "BI" and c.stage in stages)
                for cell in (c for c in entry.cells if c.kind in "BI" and c.stage not in stages):
                    assert TableCell(cell.stage, "F", cell.microbatch) in before.cells


def backwards(entry: Entry) -> list[TableCell]:
    return [cell for cell in entry.cells if cell.kind in "BI"]


def again(cell: TableCell) -> TableCell:
    return TableCell(cell.stage, "R", cell.microbatch)


def map_cells(row: tuple[Entry, ...]) -> set[TableCell]:
    """The blocks of a row, a B for its halves."""
    halves = {"I": "B", "W": "B"}
    return {TableCell(c.stage, halves.get(c.kind, c.kind), c.microbatch) for e in row for c in e.cells}  # type: ignore[arg-type]


def strip(table: Table) -> Table:
    return Table(tuple(tuple(e for e in row if any(c.kind != "R" for c in e.cells)) for row in table.rows))


def before_of(row: tuple[Entry, ...], entry: Entry) -> set[TableCell]:
    """The cells of the R that stand right in front of an entry."""
    before = itertools.takewhile(lambda e: all(c.kind == "R" for c in e.cells), reversed(row[: row.index(entry)]))
    return {cell for own in before for cell in own.cells}


def test_other_names_are_none() -> None:
    with pytest.raises(UnknownNameError, match="1f2b"):
        find_schedule("1f2b+R")


# -- what is gained


def coupled(table: Table) -> Table:
    """All stages but those of all devices compute again as a part of their backward."""
    ends, *rows = table.rows
    again = [
        tuple(
            Overlap((TableCell(e.stage, "R", e.microbatch), e)) if isinstance(e, TableCell) and e.kind == "B" else e
            for e in row
        )
        for row in rows
    ]
    return Table((ends, *again))


@pytest.mark.parametrize(("groups", "fewer"), [(2, 1), (4, 2), (6, 6), (8, 10)])
def test_interlaced_with_r_drains_faster_than_interlaced_blocks(groups: int, fewer: int) -> None:
    """Units of time that are fewer, of a step with as many for each micro-batch: all that devices have to do for one."""
    devices = [[*range(groups)], *([group] for group in range(groups))]
    for microbatches in (2 * groups, 4 * groups):
        blocks = simulate_table(coupled(SCHEDULES["interlaced"].table(groups, microbatches)), devices=devices).makespan
        apart = simulate_table(with_r("interlaced").table(groups, microbatches), devices=devices).makespan
        assert blocks - apart == fewer
        more = simulate_table(with_r("interlaced").table(groups, microbatches + 1), devices=devices).makespan
        assert more - apart == (1 + 2) * 2 + (1 + 1 + 2), "F and B of both ends; F, R and B of a stage"


@pytest.mark.parametrize("groups", [2, 3, 4, 5, 8])
def test_interlaced_with_r_holds_activations_of_one_micro_batch(groups: int) -> None:
    rows = with_r("interlaced").table(groups, 4 * groups).rows[1:]
    assert {most_activations(row) for row in rows} == {1}
    assert most_live(rows[0]) == 2 * ((groups - 1) // 2) + 2
    assert most_live(SCHEDULES["interlaced"].table(groups, 4 * groups).rows[1]) == (3 * groups + 1) // 2


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1"])
@pytest.mark.parametrize("groups", [2, 4, 8])
def test_r_runs_while_a_gradient_is_on_its_way(name: str, groups: int) -> None:
    """A step is shorter than where it is a part of backwards, by an R of each stage but the last."""
    table = with_r(name).table(groups, 2 * groups)
    merged = Table(tuple(merged_row(row) for row in table.rows))
    apart, part = simulate_table(table).makespan, simulate_table(merged).makespan
    assert part - apart == groups - 1


def merged_row(row: Sequence[Entry]) -> tuple[Entry, ...]:
    found: list[Entry] = []
    for entry in row:
        if found and isinstance(found[-1], TableCell) and found[-1].kind == "R":
            found[-1] = Overlap((*found[-1].cells, *entry.cells))
        else:
            found.append(entry)
    return tuple(found)


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_early_r_runs_one_block_earlier(name: str) -> None:
    """All else keeps its order; where the block before it is its F, the R stays."""
    early, late = schedule_named(f"{name}+R early"), with_r(name)
    assert early is not None
    assert early.name == f"{name}+R early"
    for numbers in (numbers for numbers in SMALL if early.why_not(*numbers) is None):
        table, other = early.table(*numbers), late.table(*numbers)
        assert strip(table) == strip(other)
        check_chain(table, [set(map_cells(row)) for row in table.rows])
        for row, before in zip(table.rows, other.rows, strict=True):
            for entry in (entry for entry in before if any(cell.kind == "R" for cell in entry.cells)):
                moved, place = row.index(entry), before.index(entry)
                passed = [one for one in row[moved + 1 :] if one in before[:place]]
                own = {TableCell(cell.stage, "F", cell.microbatch) for cell in entry.cells}
                in_front = [one for one in before[:place] if not any(cell.kind == "R" for cell in one.cells)]
                assert passed == ([] if not own.isdisjoint(in_front[-1].cells) else in_front[-1:])
