"""Megatron-LM: data, tensor and pipeline parallelism, with the sequence split where tensors are not, and ZeRO.

| argument | domain |
| --- | --- |
| tensor parallel | divisors of the devices, within a host |
| data parallel | what that leaves |
| sequence parallel | no; yes, where there is tensor parallelism |
| ZeRO | 1, 2, 3 where there is data parallelism |
| memory | as it is; attention computed again; a quarter, half, three quarters or all of the layers computed again |
| stages | divisors of the devices |
| schedule | published ones of one chunk or two |
| micro-batches | divisors of the batch |
"""

from collections.abc import Mapping
from typing import Any

from jscaler.spaces.numbers import divisors_of_devices, in_order, parts_of_batch, rest_of_devices, within_host
from jscaler.spaces.saving import in_microbatches, saving_memory
from jscaler.spaces.space import Space, in_each_stage

SCHEDULES = ("1f1b", "interleaved", "zb_h1", "zb_v")  # none of which has less to compute than the first


def in_a_group(least: int = 1) -> Space:
    """What the devices of one group do; ``least`` of them share a layer."""

    def together(numbers: Mapping[str, Any]) -> bool:
        goes = (numbers["tp"] > 1 or not numbers["sequence"]) and (numbers["dp"] > 1 or numbers["zero"] == 1)
        return goes and numbers["rows"] % numbers["dp"] == 0

    return Space(
        "megatron", where=together,
        tp=within_host(least), dp=rest_of_devices("tp"), sequence=[True, False], zero=in_order(1, 2, 3),
    )  # fmt: skip


def megatron() -> list[Space]:
    """All devices as one group, of which several share a layer; and in stages."""
    return [
        in_microbatches(*saving_memory(in_a_group(least=2))),
        Space(
            "pipeline",
            stages=divisors_of_devices(least=2), microbatches=parts_of_batch(least=2),
            schedule=in_order(*SCHEDULES, saves=False),
            plan=in_each_stage(*saving_memory(in_a_group())),
        ),
    ]  # fmt: skip
