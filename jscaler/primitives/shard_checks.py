"""Whether a parameter can be sharded as a decision says."""

from collections.abc import Collection, Mapping

from jscaler.errors import PlanError, SplitError, check_dim
from jscaler.ir import Graph, PTensor
from jscaler.ir.kinds import TensorKind
from jscaler.primitives.plan import Plan, Shard


def check_shard(
    graph: Graph, shard: Shard, groups: Collection[frozenset[int]], kinds: Mapping[PTensor, TensorKind]
) -> None:
    """Compare a decision with the parameter that it names.

    Args:
        groups: the sets of devices that it may be sharded over; the largest is all devices.
        kinds: of the graph's tensors.

    Raises:
        UnknownNameError: there is no such input.
        PlanError: it is no parameter, has no such dim, or the devices are none of ``groups``, as many for each part.
        SplitError: the dim does not divide.
    """
    tensor = graph.input(shard.leaf)
    if kinds.get(tensor) != "parameter":
        raise PlanError(f"'{tensor.name}' is no parameter: no gradient is taken with respect to it")
    check_dim(tensor.name, tensor.shape, shard.dim)
    every = (shard.devices, *shard.elsewhere)
    known = all(frozenset(own) in groups and len(frozenset(own)) == len(own) for own in every)
    if not known or shard.parts < 1 or any(len(own) % shard.parts for own in every):
        of_stage = ", or of all that a stage has" if len(groups) > 1 else ""
        raise PlanError(
            f"'{tensor.name}' is sharded over devices {' and '.join(str([*own]) for own in every)}: give an array "
            f"of all {max(map(len, groups))}{of_stage}, each once, whose first axis counts the parts"
        )
    if tensor.shape[shard.dim] % shard.parts:
        raise SplitError(tensor.name, f"dim {shard.dim}", tensor.shape[shard.dim], shard.parts)


def stored_leaves(graph: Graph, plan: Plan) -> dict[PTensor, int]:
    """The parameters that ``plan`` stores in parts, and their copies on other groups, with the dim that is cut."""
    found = {graph.input(leaf): shard.dim for leaf, shard in plan.shards.items() if shard.stored}
    return found | {copy: found[tensor] for copy, tensor in graph.copy_of.items() if tensor in found}
