"""A batch with as many rows as the devices divide: the last of an epoch, filled up, and a mask of the rows that count."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jscaler.errors import DataError, DeletedArgumentError, check_count

MOST_ADDED = 1 << 24  # rows; the mask alone has 4 bytes for each


def pad_batch(batch: Any, multiple: int) -> tuple[Any, np.ndarray]:
    """``batch`` with rows up to the next multiple of ``multiple``, and which of them are its own.

    The numbers are those of the batch as it was, forward and backward, where the loss weighs each row by the mask and
    divides by the mask's sum in place of the number of rows. What makes one statistic of all rows (BatchNorm) counts the
    added ones.

    Args:
        batch: a pytree of NumPy or JAX arrays with one number of rows, which is dim 0. Numbers and other leaves stay.
        multiple: what the rows shall divide by: the devices that the batch is split over, times the micro-batches.

    Returns:
        The batch, in which copies of the last row follow (zeros may have no logarithm, and 0 · NaN is NaN), or as it is if
        it divides; and float32 (rows,), 1 for its own rows and 0 for the copies.

    Raises:
        DataError: no leaf has rows, there are none, or leaves have several numbers of them.
        PlanError: ``multiple`` is no positive whole number.

    Example:
        >>> batch, mask = jscaler.pad_batch({"x": np.ones((6, 3))}, 4)
        >>> batch["x"].shape, mask
        ((8, 3), array([1., 1., 1., 1., 1., 1., 0., 0.], dtype=float32))
    """
    check_count("pad_batch: multiple", multiple)
    rows = _rows(batch)
    added = -rows % multiple
    if added > MOST_ADDED:
        raise DataError(f"pad_batch: {rows} rows and a multiple of {multiple} make {added} more; give a smaller one")
    mask = np.repeat(np.array([1, 0], np.float32), (rows, added))
    return (jax.tree.map(lambda leaf: _padded(leaf, added), batch) if added else batch), mask


def _rows(batch: Any) -> int:
    leaves = [pair for pair in jax.tree_util.tree_leaves_with_path(batch) if np.ndim(pair[1])]
    for path, leaf in leaves:
        name = f"batch{jax.tree_util.keystr(path)}"
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise DataError(f"pad_batch: {name} is a shape alone; give an array")
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
            raise DeletedArgumentError([name])
    found = {f"batch{jax.tree_util.keystr(path)}": np.shape(leaf)[0] for path, leaf in leaves}
    if len(set(found.values())) == 1 and (rows := next(iter(found.values()))):
        return rows
    told = ", ".join(f"{name} has {rows}" for name, rows in found.items()) or "no leaf is an array with rows"
    raise DataError(f"pad_batch: a batch has arrays with one number of rows in dim 0, and at least one row; {told}")


def _padded(leaf: Any, added: int) -> Any:
    if not np.ndim(leaf):
        return leaf
    of = jnp if isinstance(leaf, jax.Array) else np
    return of.concatenate([leaf, of.repeat(leaf[-1:], added, 0)])
