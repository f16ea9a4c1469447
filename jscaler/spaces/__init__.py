"""Search spaces: policies with holes, which `jscaler.search` fills. Built-in ones are functions that make a `Space`."""

from jscaler.spaces.allowed import Allowed
from jscaler.spaces.alpa import alpa
from jscaler.spaces.built_in import SPACES, as_spaces
from jscaler.spaces.co_shard import co_shard
from jscaler.spaces.dap import dap
from jscaler.spaces.expert_parallel import expert_parallel
from jscaler.spaces.free import free
from jscaler.spaces.holes import any_split, maybe
from jscaler.spaces.interlaced import interlaced
from jscaler.spaces.megatron import megatron
from jscaler.spaces.memory import memory
from jscaler.spaces.numbers import (
    Domain,
    OneOf,
    Setting,
    divisors_of_devices,
    in_order,
    meshes,
    one_of,
    parts_of_batch,
    rest_of_devices,
    some_layers,
    whole_rows,
    within_host,
)
from jscaler.spaces.open_space import OpenSpace
from jscaler.spaces.per_op import per_op
from jscaler.spaces.saving import in_microbatches, saving_memory
from jscaler.spaces.space import Point, Space, StageOpening, in_each_stage
from jscaler.spaces.space_planner import SpacePlanner, space_of
from jscaler.spaces.stage_space import StageSpace
from jscaler.spaces.stages import stages
from jscaler.spaces.three_f_one_b import three_f_one_b
from jscaler.spaces.ties import Tie, apart, on_all, same_as, together
from jscaler.spaces.zero import zero

__all__ = [
    "SPACES", "Allowed", "Domain", "OneOf", "OpenSpace", "Point", "Setting", "Space", "SpacePlanner", "StageOpening",
    "StageSpace", "Tie", "alpa", "any_split", "apart", "as_spaces", "co_shard", "dap", "divisors_of_devices",
    "expert_parallel", "free", "in_each_stage", "in_microbatches", "in_order", "interlaced", "maybe", "megatron",
    "memory", "meshes", "on_all", "one_of", "parts_of_batch", "per_op", "rest_of_devices", "same_as", "saving_memory",
    "some_layers", "space_of", "stages", "three_f_one_b", "together", "whole_rows", "within_host", "zero",
]  # fmt: skip
