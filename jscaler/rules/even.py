"""Which indices of a fragment can be cut into equal parts only, and why."""

from collections.abc import Collection

from jax.extend import core

from jscaler.lax_primitives import known
from jscaler.rules.analysed import Analysis
from jscaler.rules.halo_reach import slid_along
from jscaler.rules.nested import stops_by_row


def even_only(analysis: Analysis, leaves: Collection[int]) -> str:
    """Why ``leaves`` cannot be cut into parts of different sizes; empty where they can."""
    if not slid_along(analysis).isdisjoint(leaves):
        return "windows slide along it"
    for eqn in analysis.jaxpr.eqns:
        stops = eqn.primitive.name == "while" and stops_by_row(analysis.inner[id(eqn)][0])  # rows of padding might not
        if known(eqn.primitive).spec is None or known(eqn.primitive).even_only or stops:
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
