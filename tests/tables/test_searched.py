"""The table that a searched schedule sets out from: legal, and of all kinds of blocks."""

import itertools

import pytest
from tables.chains import check_chain

from jscaler.tables import TableCell, schedule_named
from jscaler.tables.searched import in_two, one_after_another


@pytest.mark.parametrize("kinds", ["FB", "FRB", "FIW"])
def test_micro_batches_follow_one_another(kinds: str) -> None:
    for groups, microbatches, chunks in itertools.product((1, 2, 3), (1, 2), (1, 2, 3)):
        search = schedule_named("search")
        assert search is not None
        lies = list(search.lies(groups, chunks))
        table = one_after_another(lies, microbatches, tuple(kinds))  # type: ignore[arg-type]
        wanted = {
            TableCell(stage, kind, number)
            for stage, number, kind in itertools.product(range(len(lies)), range(microbatches), kinds)
            if kind != "R" or stage + 1 < len(lies)
        }
        assert set(table.cells()) == wanted
        assert [next(iter(row)).stage for row in table.rows] == sorted(next(iter(row)).stage for row in table.rows)
        check_chain(table, [{cell for cell in wanted if lies[cell.stage] == row} for row in range(groups)])


def test_backwards_in_two() -> None:
    assert in_two(one_after_another([0, 1, 1, 0], 3, ("F", "B"))) == one_after_another([0, 1, 1, 0], 3, ("F", "I", "W"))
