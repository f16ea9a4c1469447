"""The passes over the flat program, in order: what XLA gets is what the last one leaves."""

from collections.abc import Sequence, Set

from jscaler.errors import PlanError
from jscaler.flat_passes.added_by_slices import added_by_slices
from jscaler.flat_passes.before_loops import products_before_loops
from jscaler.flat_passes.cast_at_use import casts_at_use
from jscaler.flat_passes.casts import adapters_across_casts
from jscaler.flat_passes.conditions import merged_conditions
from jscaler.flat_passes.pairs import pairs_together
from jscaler.flat_passes.read_by_nobody import live
from jscaler.flat_passes.stacks_with_carries import stacks_with_carries
from jscaler.flat_passes.swaps import swapped_dots
from jscaler.ir.passes import Pass, name_of
from jscaler.lower.flat_program import FlatProgram

FLAT_PASSES: tuple[Pass[FlatProgram], ...] = (
    swapped_dots,
    adapters_across_casts,
    added_by_slices,
    pairs_together,
    products_before_loops,
    stacks_with_carries,
    merged_conditions,
    casts_at_use,
    live,
)
# What is done before a program of one of several device groups is cut into blocks, too: it says what blocks keep.
BEFORE_CUT: tuple[Pass[FlatProgram], ...] = (adapters_across_casts, casts_at_use, live)
# What only saves memory or time: the numbers are the same without.
FOR_XLA: tuple[Pass[FlatProgram], ...] = (
    added_by_slices, swapped_dots, pairs_together, products_before_loops, stacks_with_carries,
)  # fmt: skip


def flat_passes(without: Set[str] | Sequence[str] = ()) -> tuple[Pass[FlatProgram], ...]:
    """The passes but those that are called as ``without`` says.

    Raises:
        PlanError: there is no such pass that may be left out.
    """
    free = [name_of(one) for one in FOR_XLA]
    for name in without:
        if name not in free:
            raise PlanError(
                f"no pass '{name}' can be left out; those that can, since they save memory or time alone: {', '.join(free)}"
            )
    return tuple(one for one in FLAT_PASSES if name_of(one) not in without)
