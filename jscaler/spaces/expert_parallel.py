"""Expert parallelism: each device has some of the experts, and tokens travel to them.

| argument | domain |
| --- | --- |
| memory | as it is; attention computed again; a quarter, half, three quarters or all of the layers computed again |
| micro-batches | divisors of the batch |
"""

from jscaler.spaces.saving import in_microbatches, saving_memory
from jscaler.spaces.space import Space


def expert_parallel() -> list[Space]:
    """Experts on all devices, in micro-batches."""
    inside = saving_memory(Space("expert_parallel"))
    return [in_microbatches(*inside)]
