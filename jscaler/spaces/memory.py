"""Ways to make a step fit: how it is spread over devices, and what saves memory on each. `jscaler.fit` searches it.

| argument | domain |
| --- | --- |
| between devices | data parallel, ZeRO 1 to 3; Megatron's tensor parallelism |
| on each device | as it is; attention, some layers or all computed again; co-shard in 4, 8, 16, 32 parts |
| stages | none; divisors of the devices up to 8, tensor and data parallel inside, with layers computed again or not |
| micro-batches | divisors of the batch |
"""

from jscaler.spaces.megatron import in_a_group
from jscaler.spaces.numbers import divisors_of_devices, in_order, parts_of_batch, rest_of_devices, whole_rows, within_host
from jscaler.spaces.saving import in_microbatches, saving_memory
from jscaler.spaces.space import Space, in_each_stage

COPIED = ("data_parallel", "zero1", "zero2", "zero3")


def memory() -> list[Space]:
    """Plans of one device, of all as one group, and of stages."""
    alone = Space("single", where=lambda numbers: numbers["devices"] == 1)
    rows = whole_rows("devices")
    copied = [Space(name, where=lambda numbers: numbers["devices"] > 1 and rows(numbers)) for name in COPIED]
    spread = [alone, *copied, in_a_group(least=2)]
    stage = Space("megatron", where=whole_rows("dp"), tp=within_host(), dp=rest_of_devices("tp"), zero=1)
    return [
        in_microbatches(*saving_memory(*spread), Space("co_shard", parts=in_order(4, 8, 16, 32), plan=spread)),
        Space(
            "pipeline",
            stages=divisors_of_devices(least=2, most=8), microbatches=parts_of_batch(least=2),
            plan=in_each_stage(stage, Space("recompute_layers", plan=stage)),
        ),
    ]  # fmt: skip
