"""Values that lie anywhere in a job of many processes, on the host of each."""

from typing import Any

import jax

from jscaler.runtime.chunked_array import ChunkedArray, arrays_of, joined
from jscaler.runtime.gathered import gathered


def fetch(tree: Any) -> Any:
    """``tree`` with numpy arrays in place of its arrays, on every process, wherever these lie.

    A pipeline's loss lies on its last stage, of which other processes have nothing. All processes call it, with trees of
    the same form; alone, it is ``jax.device_get``. It waits for the values.

    Args:
        tree: of arrays, of any layout.

    Raises:
        RuntimeError: what JAX raises where the values cannot be computed, or a process has gone.

    Example:
        >>> new, loss = compiled(state, batch)
        >>> jscaler.fetch({"loss": loss})["loss"].shape
        ()
    """
    if jax.process_count() == 1:
        return jax.device_get(tree)
    leaves, form = jax.tree.flatten(tree)
    parts = [arrays_of(leaf) for leaf in leaves]
    found = iter(gathered([part for own in parts for part in own]))
    values = [[next(found) for _ in own] for own in parts]
    return form.unflatten([own[0] if len(own) == 1 else joined(own) for own in values])


def fetched_chunks(tree: Any) -> Any:
    """``tree`` with an ordinary array in the place of each that lies in chunks: what a library for checkpoints takes.

    All processes of a job call it.
    """
    return jax.tree.map(lambda leaf: leaf.on_host() if isinstance(leaf, ChunkedArray) else leaf, tree)
