"""Which constructs are opened into ops of the graph, and what their bodies look like.

A ``scan`` whose body holds a contraction, or an op with a user's rule, is a stack of layers: its body's ops stand in the
graph once. A checkpointed region (``nn.remat``) that holds one is opened too; its ops remember it. What holds none (a scan
that sums a vector) stays one op.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jscaler.capture.inner_jaxprs import inner_jaxpr
from jscaler.capture.jaxprs import Atom, all_equations
from jscaler.capture.user_op import op_p
from jscaler.lax_primitives import known

# A layer's number is a literal of these; as operands, equal layers are equal programs.
NUMBERED = frozenset({"random_fold_in"})


def opens(eqn: core.JaxprEqn) -> bool:
    """Whether the equation becomes ops of its own."""
    if known(eqn.primitive).opened != "remat" and eqn.primitive.name != "scan":
        return False
    if eqn.params.get("differentiated"):  # a recomputation that the user's own jax.grad has written out
        return False
    inside = {e.primitive for e in all_equations(inner_jaxpr(eqn)[0])}
    return op_p in inside or any(known(p).role == "contracts" for p in inside)


def hoist_numbers(eqns: Sequence[core.JaxprEqn], constants: list[tuple[core.Var, Any]]) -> list[core.JaxprEqn]:
    """``eqns`` with the numbers of layers as constants (appended to ``constants``) instead of literals."""
    known: dict[tuple[Any, ...], core.Var] = {
        _number_key(value): var for var, value in constants if isinstance(value, np.ndarray) and not value.ndim
    }
    found = []
    for eqn in eqns:
        if eqn.primitive.name in NUMBERED and isinstance(eqn.invars[0], core.Var):
            invars: list[Atom] = list(eqn.invars)
            for i, atom in enumerate(invars):
                if isinstance(atom, core.Literal):
                    value = np.asarray(atom.val, getattr(atom.aval, "dtype"))  # noqa: B009
                    key = _number_key(value)
                    if key not in known:
                        known[key] = core.Var(atom.aval)
                        constants.append((known[key], value))
                    invars[i] = known[key]
            eqn = eqn.replace(invars=invars)
        found.append(eqn)
    return found


def _number_key(value: np.ndarray) -> tuple[Any, ...]:
    return value.item(), value.dtype.str
