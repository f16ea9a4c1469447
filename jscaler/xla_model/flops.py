"""Floating-point operations of one equation, from its shapes."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from jax.extend import core

from jscaler.capture.jaxprs import dtype, open_jaxpr, shape
from jscaler.lax_primitives import known

# Integer instructions of one call of threefry, by the HLO that XLA makes of it: 20 rounds of 3 (an add, a turn of bits, an
# xor), and 26 for keys and counters. It gives two words, of which JAX makes one.
PER_DRAWN_WORD = 86.0
NO_PRODUCTS = frozenset({"vector", "integer"})


class Flops(NamedTuple):
    """Operations of one equation.

    Attributes:
        unit: what does them: the dtype of a product's operands; ``vector`` for other arithmetic, ``integer`` for what makes
            random bits.
        sizes: of a matrix product its batch, rows, columns, and what is contracted; else nothing.
    """

    count: float = 0.0
    unit: str = "vector"
    sizes: tuple[int, ...] = ()


NONE = Flops()


def flops_of(eqn: core.JaxprEqn) -> Flops:
    """What an equation computes: 2·b·m·n·k of a dot, 2 per tap and output of a convolution, 1 per element of arithmetic.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> a, b = jnp.ones((8, 16)), jnp.ones((16, 4))
        >>> flops_of(jax.make_jaxpr(jnp.dot)(a, b).eqns[0])
        Flops(count=1024.0, unit='float32', sizes=(1, 8, 4, 16))
    """
    one = known(eqn.primitive)
    if one.flops is not None:
        return Flops(one.flops(eqn), str(dtype(eqn.invars[0])), _sizes(eqn) if one.name == "dot_general" else ())
    if one.cost == "drawn":
        return Flops(PER_DRAWN_WORD * math.prod(shape(eqn.outvars[0])), "integer")
    if not eqn.outvars:
        return NONE
    if one.name == "pallas_call":
        return _kernel(eqn)
    sizes = [math.prod(shape(v)) for v in (*eqn.invars, *eqn.outvars)]
    return Flops(float(max(sizes, default=0)))


def _sizes(eqn: core.JaxprEqn) -> tuple[int, ...]:
    (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
    left, right = (math.prod(shape(v)) for v in eqn.invars)
    batch, depth = (math.prod(shape(eqn.invars[0])[d] for d in dims) for dims in (batched, contracted))
    each = max(1, batch * depth)
    return batch, left // each, right // each, depth


def _kernel(eqn: core.JaxprEqn) -> Flops:
    """A kernel's own program, once for each cell of its grid, or what its author says; as products where it has any."""
    cells = math.prod(int(n) for n in eqn.params["grid_mapping"].grid)
    units: dict[str, float] = {}
    for found, times in _inside(eqn):
        units[found.unit] = units.get(found.unit, 0.0) + times * found.count
    products = [(count, unit) for unit, count in units.items() if unit not in NO_PRODUCTS]
    count, unit = max(products, default=(units.get("vector", 0.0), "vector"))
    said = eqn.params.get("cost_estimate")  # of loops whose length depends on the cell, say
    return Flops(cells * count if said is None else float(said.flops), unit)


def _inside(eqn: core.JaxprEqn) -> Iterator[tuple[Flops, int]]:
    """What the programs in an equation compute, loops in them too, and how often; a loop of unknown length runs once."""
    for inner in core.jaxprs_in_params(eqn.params):
        for one in open_jaxpr(inner)[0].eqns:
            times = one.params.get("length", 1)
            found = [*_inside(one)] or [(flops_of(one), 1)]
            yield from ((flops, times * n) for flops, n in found)
