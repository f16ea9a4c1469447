"""Stages of a pipeline with devices and plans of their own: unequal meshes, and recompute where memory asks for it.

| argument | domain |
| --- | --- |
| cuts | all, between places that few tensors cross |
| devices of a stage | divisors of the devices, on one host or on whole hosts |
| in a stage | data and tensor parallel, sequence parallel, ZeRO 1 to 3; attention or layers computed again |
| micro-batches | divisors of the batch |
| schedule | 1F1B |
"""

from jscaler.spaces.megatron import in_a_group
from jscaler.spaces.saving import saving_memory
from jscaler.spaces.stage_space import StageSpace


def stages() -> list[StageSpace]:
    """Each stage with its own devices and its own plan."""
    return [StageSpace(saving_memory(in_a_group(), some=False))]
