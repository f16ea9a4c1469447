"""What stages wait for at least is never more than they do, and just that for equal blocks in the order of 1F1B."""

import random

import pytest

from jscaler.tables import SCHEDULES
from jscaler.tables.least_waits import LeastWaits
from jscaler.tables.simulator import most_activations, simulate_table

CHAINS = [name for name, one in SCHEDULES.items() if not one.everywhere and not one.passes]


@pytest.mark.parametrize("name", CHAINS)
def test_no_order_takes_less_than_what_its_table_waits_for(name: str) -> None:
    rng, checked = random.Random(name), 0
    for groups, microbatches in ((2, 4), (2, 8), (4, 8), (4, 16)):
        if SCHEDULES[name].why_not(groups, microbatches, SCHEDULES[name].chunks_of(None)) is not None:
            continue
        table = SCHEDULES[name].table(groups, microbatches)
        waits, cells = LeastWaits.of(table), [*table.cells()]
        count = {kind: sum(cell.kind == kind for cell in cells) for kind in "FBIWR"}
        seconds = {"F": rng.uniform(1, 2), "I": rng.uniform(1, 2), "W": rng.uniform(1, 2), "R": rng.uniform(0, 1)}
        seconds["B"] = seconds["I"] + seconds["W"]
        busy = min(sum(seconds[cell.kind] for entry in row for cell in entry.cells) for row in table.rows)
        end = max(run.end for run in simulate_table(table, seconds).runs)
        least = busy + waits.seconds({kind: count["F"] * seconds[kind] for kind in "FBI"})
        assert least <= end * (1 + 1e-9)
        if name in ("1f1b", "gpipe"):
            assert least == pytest.approx(end)
        checked += 1
        assert waits.under_way == max(map(most_activations, table.rows)) / count["F"]
    assert checked
