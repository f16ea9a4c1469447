"""Which indices of a fragment can be cut into equal parts only, and why."""

from collections.abc import Collection

from jax.extend import core

from jscaler.rules.analysis import Analysis
from jscaler.rules.registry import TABLE
from jscaler.rules.wants import slid_along

INNER = frozenset({"scan", "while", "cond"})  # they run programs of their own over the padding too


def even_only(analysis: Analysis, leaves: Collection[int]) -> str:
    """Why ``leaves`` cannot be cut into parts of different sizes; empty where they can."""
    if not slid_along(analysis).isdisjoint(leaves):
        return "windows slide along it"
    for eqn in analysis.jaxpr.eqns:
        if eqn.primitive.name in INNER or eqn.primitive.name not in TABLE:
            carried = {
                leaf
                for v in (*eqn.invars, *eqn.outvars)
                if isinstance(v, core.Var)
                for dim in analysis.leaves(v)
                for leaf in dim
            }
            if not carried.isdisjoint(leaves):
                return f"'{eqn.primitive.name}' does not say what it makes of padding"
    return ""
