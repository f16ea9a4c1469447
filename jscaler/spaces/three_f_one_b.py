"""3F1B (nnScaler): models that go over their own output several times, in stages.

| argument | domain |
| --- | --- |
| stages | divisors of the devices |
| in a stage | data parallel; DAP; attention, some layers or all computed again |
| micro-batches | divisors of the batch |
"""

from jscaler.spaces.dap import in_a_group
from jscaler.spaces.numbers import divisors_of_devices, parts_of_batch, whole_rows
from jscaler.spaces.saving import saving_memory
from jscaler.spaces.space import Space, in_each_stage


def three_f_one_b() -> list[Space]:
    """Passes of micro-batches that follow each other through the stages."""
    inside = saving_memory(Space("data_parallel", where=whole_rows("devices")), in_a_group())
    return [
        Space(
            "three_f_one_b",
            stages=divisors_of_devices(least=2), microbatches=parts_of_batch(least=2), plan=in_each_stage(*inside),
        )
    ]  # fmt: skip
