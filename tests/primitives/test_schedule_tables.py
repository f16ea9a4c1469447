"""Tables of published schedules, and their text."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from of_the_day import drawn

from jscaler import PlanError
from jscaler.primitives import Table, TableCell, gpipe, one_f_one_b
from jscaler.primitives.table import SCHEDULES

sizes = st.integers(1, 6), st.integers(1, 12)


def makespan(table: Table) -> int:
    """With F, I and W of one unit each, so B of two, and no communication."""
    stages = len(table.rows)
    done: dict[tuple[int, str, int], int] = {}
    at, clock = [0] * stages, [0] * stages
    while any(i < len(row) for i, row in zip(at, table.rows, strict=True)):
        moved = False
        for stage, row in enumerate(table.rows):
            while at[stage] < len(row):
                cell = row[at[stage]]
                before = [(stage - 1, "F", cell.microbatch)] if cell.kind == "F" else [(stage + 1, "B", cell.microbatch)]
                before = [b for b in before if 0 <= b[0] < stages]
                before += [(stage, "F", cell.microbatch)] if cell.kind == "B" else []
                if any(b not in done for b in before):
                    break
                start = max([clock[stage], *(done[b] for b in before)])
                clock[stage] = done[stage, cell.kind, cell.microbatch] = start + (1 if cell.kind == "F" else 2)
                at[stage] += 1
                moved = True
        assert moved, "circular wait"
    return max(clock)


def most_live(table: Table, stage: int) -> int:
    """The most micro-batches whose forward has run, and whose backward has not."""
    live = most = 0
    for cell in table.rows[stage]:
        live += 1 if cell.kind == "F" else -1
        most = max(most, live)
    return most


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches", "wanted"), [(4, 4, 21), (4, 8, 33), (8, 32, 117)])
def test_makespans_are_the_published_ones(name: str, stages: int, microbatches: int, wanted: int) -> None:
    """(p - 1)(F + B) on top of m (F + B), for GPipe and 1F1B alike."""
    assert makespan(SCHEDULES[name](stages, microbatches)) == wanted == 3 * (microbatches + stages - 1)


@given(*sizes)
@drawn(60)
def test_every_block_stands_once_and_few_micro_batches_are_live(stages: int, microbatches: int) -> None:
    for make, most in ((gpipe, lambda _: microbatches), (one_f_one_b, lambda s: min(stages - s, microbatches))):
        table = make(stages, microbatches)
        assert [sorted(row) for row in table.rows] == [
            sorted(TableCell(s, k, i) for k in ("F", "B") for i in range(microbatches)) for s in range(stages)
        ]
        assert [most_live(table, s) for s in range(stages)] == [most(s) for s in range(stages)]
        assert makespan(table) == 3 * (microbatches + stages - 1)
        assert Table.parse(str(table)) == table


def test_a_cell_that_cannot_be_read() -> None:
    with pytest.raises(PlanError, match="'0X1' is no cell of a table: a cell is stage, kind"):
        Table.parse("0F0 0X1")
