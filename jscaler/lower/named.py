"""What the HLO of a lowered adapter must hold: the collectives that its path names.

Compiled with ``report.hlo.AS_WRITTEN``, XLA launches exactly these on CPU and on GPUs (``tests/lower/test_named.py``).
Some travel wider than the path counts: XLA:CPU sends bfloat16 and 8-bit floats as wider floats in every collective, and
XLA:GPU reduces 16-bit integers as 32-bit ones.
"""

from collections import Counter

from jscaler.materialize import Adapter
from jscaler.materialize.transitions import moves, regions_between

HLO_KIND = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "permute": "collective-permute",
}


def named_collectives(adapter: Adapter) -> Counter[str]:
    """How many collectives of each HLO kind the path of ``adapter`` names; ``report.hlo.collectives`` counts the text's.

    A point-to-point exchange is one permute per round. Maxima and minima are scattered as an all-to-all. A permute under
    which every device keeps its block only renames axes.
    """
    kinds: Counter[str] = Counter()
    for before, step in adapter.walk:
        if step.kind == "point_to_point":
            assert step.to is not None
            kinds["collective-permute"] += regions_between(before, step.to).num_rounds
        elif step.kind == "reduce_scatter" and step.combiner != "add":
            kinds["all-to-all"] += 1
        elif step.kind == "permute":
            assert step.to is not None
            kinds["collective-permute"] += len(moves(before, step.to)) > 0
        elif step.kind in HLO_KIND:
            kinds[HLO_KIND[step.kind]] += 1
    return +kinds
