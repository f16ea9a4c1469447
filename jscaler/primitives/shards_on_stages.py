"""Where parameters lie that a policy for one stage's devices shards: on their own stage, and on others that read them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jscaler.ir import Graph
from jscaler.primitives.plan import Decision, Shard
from jscaler.rules.made_of import made_of


def shards_on_stages(
    graph: Graph, decisions: Iterable[Decision], stage_of: Mapping[str, int], rows: Sequence[Sequence[Sequence[int]]]
) -> list[Decision]:
    """``decisions``, with shards on the devices of the stages whose ops read their parameters, or what is cast of these.

    Args:
        stage_of: path of an op, or of an input -> its stage.
        rows: of each stage the devices that it runs on, one list after another where it takes turns on several.
    """
    given = list(decisions)
    leaves = {graph.input(d.leaf): d.dim for d in given if isinstance(d, Shard)}
    reading: dict[str, set[int]] = {leaf.name: set() for leaf in leaves}
    for tensor, (leaf, _) in made_of(graph, leaves).dims.items() if leaves else ():
        reading[leaf.name].update(stage_of[op.path] for op in graph.consumers.get(tensor, ()) if op.path in stage_of)

    def moved(shard: Shard) -> Shard:
        own = stage_of[shard.leaf]
        every = [[row[d] for d in shard.devices] for stage in (own, *sorted(reading[shard.leaf])) for row in rows[stage]]
        first, *others = dict.fromkeys(map(tuple, every))
        return dataclasses.replace(shard, devices=first, elsewhere=tuple(others))

    return [moved(d) if isinstance(d, Shard) else d for d in given]
