"""Dynamic axial parallelism: each op is split along the axis that it does not mix, over the same devices, and what two ops
hand each other changes sides. (Cheng et al., FastFold, 2022; SuperScaler and nnScaler run AlphaFold2 so.)

::

    m [b, s, i, c]   rows: s split ──► all-to-all ──► columns, outer product: i split ──► all-to-all ──► …
    z [b, i, j, c]   one side split: triangle products in shares, reduce-scatter ──► all-to-all ──► the other side ──► …
                     what all rows share (a bias from pairs, one operand of an outer product): all-gather

Attention runs whole in rows that are split. For all else the sides are chosen together, such that the least is sent (see
`jscaler.plans.fewest_switches`). Parameters are copied; gradients are summed as in data parallelism, which ``dp`` adds.
Recompute is around it, of layers (`recompute_layers`) or the model's own (``nn.remat``): what is gathered, is so again.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jscaler.plans.argument_types import checked
from jscaler.plans.data_parallel import batch_factors
from jscaler.plans.factors import device_grid, split
from jscaler.plans.fewest_switches import fewest_switches
from jscaler.plans.find_sequence import axes_of
from jscaler.primitives import Planner


@checked
def dap(
    dap: int | None = None,
    dp: int | None = None,
    axes: Mapping[str, int | Sequence[int]] | None = None,
    batch: str = "batch",
) -> Callable[..., None]:
    """The batch over ``dp`` rows of the devices; the axes of tables (alignments, pairs, images) over their ``dap`` columns.

    Args:
        dap, dp: how many parts; one that is not given is what the other leaves; with neither, ``dap`` is all. No batch has
            to be divided by ``dap``, which is for fewer tables than devices.
        axes: ``{input: dims}``, the axes of the batch: ``{"batch/msa": (1, 2)}``; by default the dims that attention mixes
            and all else carries along. What is made of them (pairs of residues) is found.
        batch: as for `data_parallel`, if ``dp`` is more than 1.

    Raises (when the plan is made):
        PlanError: dap × dp is not the number of devices, or no axes are found.
        UnknownNameError: no input matches.
        SplitError: the batch does not divide by ``dp``.

    Warns:
        PlanWarning: no axis divides by ``dap``, so that nothing is split.

    Example:
        >>> policy = plans.dap(dap=4, dp=2)
        >>> policy.__name__
        'dap'
    """

    def policy(graph: Planner, devices: np.ndarray) -> None:
        grid = device_grid(devices, "dap", dp=dp, dap=dap)
        rows, parts = grid.shape
        of_batch = batch_factors(graph, batch, rows) if rows > 1 else {}
        split(graph, grid, of_batch, fewest_switches(graph, axes_of(graph, axes, "pass dap(axes=...)"), parts))

    return policy
