"""The ZeRO family: data parallelism whose optimizer state, gradients and parameters lie in parts.

| argument | domain |
| --- | --- |
| stage | none, 1, 2, 3 |
| memory | as it is; attention computed again; a quarter, half, three quarters or all of the layers computed again |
| micro-batches | divisors of the batch |
"""

from jscaler.spaces.numbers import whole_rows
from jscaler.spaces.saving import in_microbatches, saving_memory
from jscaler.spaces.space import Space


def zero() -> list[Space]:
    """Data parallelism and ZeRO 1 to 3, in micro-batches."""
    names = "data_parallel", "zero1", "zero2", "zero3"
    return [in_microbatches(*saving_memory(Space(name, where=whole_rows("devices")))) for name in names]
