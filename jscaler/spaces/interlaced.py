"""Interlaced pipelines (nnScaler): large tables of words on all devices, the layers between them in stages.

| argument | domain |
| --- | --- |
| stages | divisors of the devices |
| recompute | in blocks of their own; layer by layer; none |
| in a stage | tensor parallel with its sequence, data parallel with ZeRO 1 |
| micro-batches | divisors of the batch |
"""

from jscaler.spaces.numbers import divisors_of_devices, one_of, parts_of_batch, rest_of_devices, whole_rows, within_host
from jscaler.spaces.space import Space, in_each_stage


def interlaced() -> list[Space]:
    """The vocabulary on all devices; stages between."""
    rows = whole_rows("dp")
    inside = [
        Space("megatron", tp=within_host(least), dp=rest_of_devices("tp"), sequence=least > 1, zero=1, where=where)
        for least, where in ((1, lambda numbers: numbers["tp"] == 1 and rows(numbers)), (2, rows))
    ]
    return [
        Space(
            "interlaced", where=lambda numbers: not (numbers["recompute"] and numbers["plan"] == "recompute_layers"),
            stages=divisors_of_devices(least=2), microbatches=parts_of_batch(least=2), recompute=one_of(False, True),
            plan=in_each_stage(*inside, Space("recompute_layers", plan=inside)),
        )
    ]  # fmt: skip
