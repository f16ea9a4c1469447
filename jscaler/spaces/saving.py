"""Ways to save memory on a device, around the spaces of other plans."""

from jscaler.spaces.numbers import parts_of_batch
from jscaler.spaces.space import Space


def saving_memory(*spaces: Space) -> list[Space]:
    """These spaces as they are; with attention's cores computed again; with layers computed again."""
    again = [Space(name, plan=[*spaces]) for name in ("selective_recompute", "recompute_layers")]
    return [*spaces, *again]


def in_microbatches(*spaces: Space) -> Space:
    """These spaces as they are, and in micro-batches."""
    return Space("accumulate", alone={"microbatches": 1}, microbatches=parts_of_batch(), plan=[*spaces])
