"""DAP, dynamic axial parallelism (FastFold): the axes of a model that mixes along each of them in turn.

| argument | domain |
| --- | --- |
| parts of the axes | divisors of the devices |
| data parallel | what that leaves |
| memory | as it is; attention computed again; a quarter, half, three quarters or all of the layers computed again |
| stages, micro-batches | divisors of the devices and of the batch |
"""

from jscaler.spaces.numbers import divisors_of_devices, parts_of_batch, rest_of_devices, whole_rows
from jscaler.spaces.saving import in_microbatches, saving_memory
from jscaler.spaces.space import Space, in_each_stage


def in_a_group() -> Space:
    """What the devices of one group do."""
    return Space("dap", where=whole_rows("dp"), dap=divisors_of_devices(least=2), dp=rest_of_devices("dap"))


def dap() -> list[Space]:
    """DAP on all devices, and in stages."""
    inside = saving_memory(in_a_group())
    return [
        in_microbatches(*inside),
        Space(
            "pipeline",
            stages=divisors_of_devices(least=2), microbatches=parts_of_batch(least=2), plan=in_each_stage(*inside),
        ),
    ]  # fmt: skip
