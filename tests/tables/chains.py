"""Tables of chains of stages, as tests look at them: by themselves, without a step that runs them."""

from collections.abc import Sequence, Set

from jscaler.tables import Table, TableCell
from jscaler.tables.legal import chain_waits, check_cells, in_order


def check_chain(table: Table, rows: Sequence[Set[TableCell]]) -> None:
    """Raise PlanError or OrderError unless ``table`` is legal: `check_cells`, and none waits for itself."""
    check_cells(table, rows, [f"group {number}" for number in range(len(rows))])
    in_order(table.rows, chain_waits(table))
