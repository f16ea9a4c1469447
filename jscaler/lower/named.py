"""What the HLO of a lowered adapter must hold: the collectives that its path names.

Compiled with ``report.hlo.AS_WRITTEN``, XLA launches exactly these on CPU and on GPUs (``tests/lower/test_named.py``).
Some travel wider than the path counts: XLA:CPU sends bfloat16 and 8-bit floats as wider floats in every collective, and
XLA:GPU reduces 16-bit integers as 32-bit ones.
"""

from collections import Counter

from jscaler.materialize import Adapter
from jscaler.materialize.transitions import rounds_of


def named_collectives(adapter: Adapter) -> Counter[str]:
    """How many collectives of each HLO kind the path of ``adapter`` names; ``report.hlo.collectives`` counts the text's.

    A point-to-point exchange is one permute per round. Maxima and minima are scattered as an all-to-all. A permute under
    which every device keeps its block only renames axes.
    """
    kinds: Counter[str] = Counter()
    for before, step in adapter.walk:
        if step.to is not None:
            kinds[step.line.hlo] += sum(len(r.pairs) > 0 for r in rounds_of(before, step))
        elif step.kind == "reduce_scatter" and step.combiner != "add":
            kinds["all-to-all"] += 1
        elif step.line.hlo:
            kinds[step.line.hlo] += 1
    return +kinds
