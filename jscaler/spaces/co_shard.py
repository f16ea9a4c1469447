"""Co-shard (nnScaler): heads, hidden units and the tokens of the loss in parts that run one after another on one device.

| argument | domain |
| --- | --- |
| parts | 2, 4, 8, 16, 32 |
| loss in parts | yes; no |
| between devices | data parallel, ZeRO 1 to 3; Megatron's tensor parallelism |
| stages, micro-batches | divisors of the devices and of the batch |
"""

from jscaler.spaces.megatron import in_a_group
from jscaler.spaces.numbers import divisors_of_devices, in_order, one_of, parts_of_batch
from jscaler.spaces.saving import in_microbatches
from jscaler.spaces.space import Space, in_each_stage


def co_shard() -> list[Space]:
    """Co-shard around data and tensor parallelism, on all devices and in stages."""
    inside = Space("co_shard", parts=in_order(2, 4, 8, 16, 32), loss=one_of(True, False), plan=in_a_group())
    return [
        in_microbatches(inside),
        Space(
            "pipeline",
            stages=divisors_of_devices(least=2), microbatches=parts_of_batch(least=2), plan=in_each_stage(inside),
        ),
    ]  # fmt: skip
