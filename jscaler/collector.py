"""Python's collector of cyclic garbage, whose full collections planning puts off.

A plan is some hundred thousand objects that live on. While they are made, each full collection looks at all of them, and at
all that the process has beside them, and finds next to nothing (docs/benchmarks/README.md has the figures). Young garbage
in circles is collected as ever; the old waits for the first full collection behind. PyTorch does so while it compiles
(pytorch/pytorch#193289).
"""

import contextlib
import gc
from collections.abc import Iterator

NEVER = 2**31 - 1  # younger collections between two full ones


@contextlib.contextmanager
def no_full_collections() -> Iterator[None]:
    """A context in which no full collection starts by itself; decorates functions, too.

    Within another such context, of this thread or of another, it does nothing, so that none restores what the other set.
    """
    young, middle, full = gc.get_threshold()
    if full == NEVER:
        yield
        return
    try:
        gc.set_threshold(young, middle, NEVER)
        yield
    finally:
        gc.set_threshold(young, middle, full)
