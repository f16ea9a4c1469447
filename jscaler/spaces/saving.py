"""Ways to save memory on a device, around the spaces of other plans."""

from jscaler.spaces.numbers import parts_of_batch, some_layers
from jscaler.spaces.space import Space


def saving_memory(*spaces: Space, some: bool = True) -> list[Space]:
    """These spaces as they are; with attention's cores computed again; with ``some`` layers, or all, computed again."""
    again = Space("recompute_layers", plan=[*spaces], layers=some_layers() if some else None)
    return [*spaces, Space("selective_recompute", plan=[*spaces]), again]


def in_microbatches(*spaces: Space) -> Space:
    """These spaces as they are, and in micro-batches."""
    return Space("accumulate", alone={"microbatches": 1}, microbatches=parts_of_batch(), plan=[*spaces])
