"""Spatial parallelism: an image's rows (and columns) over the devices; convolutions and pooling swap their edges. (Dryden
et al., Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism, IPDPS 2019.)

::

    rows 0-7    d0 │ d1        spatial(grid=(2, 2)): a window at the edge of a part reads rows (and columns) of the
    rows 8-15   d2 │ d3        neighbours, which they send before the op: a halo exchange

Parameters are copied, and each device's gradients are shares of the whole's, summed before the update as in data
parallelism. Statistics over space (batch normalisation) are summed between the devices, so that they are one device's.
"""

from collections.abc import Callable, Sequence

import numpy as np

from jscaler.errors import PlanError
from jscaler.ir import PTensor
from jscaler.plans.argument_types import checked
from jscaler.plans.batch import batch_leaves
from jscaler.plans.data_parallel import batch_factors
from jscaler.plans.factors import device_grid, reached, required, split
from jscaler.primitives import Planner

IMAGES = "batch/image*"


@checked
def spatial(
    image: str = IMAGES, dim: int = 1, grid: Sequence[int] | None = None, dp: int = 1, batch: str = "batch"
) -> Callable[..., None]:
    """Split dim ``dim`` of the images over all devices, or that dim and the next over a grid of them.

    What the rows do not reach, or do not divide any more (the last, small feature maps), is left to be filled in.

    Args:
        image: path or shell pattern of the images among the step's inputs; by default ``"batch/image*"``, or where no input
            is called so, what has 4 dims and more of the batch.
        dim: their first spatial dim.
        grid: parts of that dim, and of those that follow it; all devices along the first by default.
        dp: parts of the batch: the outer axis of the devices. Neighbours in space are neighbours in number.
        batch: as for `data_parallel`, if ``dp`` is more than 1.

    Raises (when the plan is made):
        UnknownNameError: no input is called so.
        PlanError: the grid is not that of the devices, or the images have no such dims.
        SplitError: the image does not divide.

    Example:
        >>> def blurred(kernel, images):  # (rows, channels, height, width)
        ...     return (jax.lax.conv(images, kernel, (1, 1), "SAME") ** 2).mean()
        >>> plan = plans.spatial("images", dim=2, grid=(2, 2))
        >>> train = jscaler.parallelize(plan, devices=4)(jscaler.value_and_grad(blurred))
        >>> "halo" in train.lower(jnp.ones((2, 1, 3, 3)), jnp.ones((4, 1, 16, 16))).plan.report.total
        True
    """

    def policy(graph: Planner, devices: np.ndarray) -> None:
        parts = tuple(grid) if grid is not None else (None,)
        names = [f"grid[{i}]" for i in range(len(parts))]
        cells = device_grid(devices, "spatial", dp=dp, **dict(zip(names, parts, strict=True)))
        tables = [batch_factors(graph, batch, dp) if dp > 1 else {}]
        for i, count in enumerate(cells.shape[1:]):
            leaves = _images(graph, image, batch, dim + i)
            tables.append(reached(graph, leaves, count))
        if not any(size > 1 for size in cells.shape):
            return
        split(graph, cells, *tables)

    if grid is not None and not (len(grid) and all(isinstance(n, int) for n in grid)):
        raise PlanError(f"spatial: grid is the numbers of parts of each spatial dim, e.g. (2, 2), not {grid!r}")
    return policy


def _images(graph: Planner, image: str, batch: str, dim: int) -> list[tuple[PTensor, int]]:
    """The images and the dim of theirs that is split."""
    if image == IMAGES and not graph.select_inputs(image):
        found = [t for t in batch_leaves(graph.graph, batch) if len(t.shape) >= 4]
        if found:
            return [(t, dim) for t in found]
    return required(graph, {image: dim}, "pass spatial(image=...)")
