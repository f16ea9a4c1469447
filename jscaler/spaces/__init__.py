"""Search spaces: policies with holes, which `jscaler.search` fills. Built-in ones are functions that make a `Space`."""

from jscaler.spaces.built_in import SPACES, as_spaces
from jscaler.spaces.co_shard import co_shard
from jscaler.spaces.dap import dap
from jscaler.spaces.expert_parallel import expert_parallel
from jscaler.spaces.interlaced import interlaced
from jscaler.spaces.megatron import megatron
from jscaler.spaces.numbers import (
    Domain,
    Setting,
    divisors_of_devices,
    in_order,
    one_of,
    parts_of_batch,
    rest_of_devices,
    within_host,
)
from jscaler.spaces.saving import in_microbatches, saving_memory
from jscaler.spaces.space import Point, Space, in_each_stage
from jscaler.spaces.three_f_one_b import three_f_one_b
from jscaler.spaces.zero import zero

__all__ = [
    "SPACES",
    "Domain",
    "Point",
    "Setting",
    "Space",
    "as_spaces",
    "co_shard",
    "dap",
    "divisors_of_devices",
    "expert_parallel",
    "in_each_stage",
    "in_microbatches",
    "in_order",
    "interlaced",
    "megatron",
    "one_of",
    "parts_of_batch",
    "rest_of_devices",
    "saving_memory",
    "three_f_one_b",
    "within_host",
    "zero",
]
