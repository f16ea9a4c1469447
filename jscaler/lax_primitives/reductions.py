"""Reductions, and what walks a dim or needs all of it: running sums, sorts."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jscaler.ir.equations import dtype, shape
from jscaler.ir.mask import Combiner
from jscaler.lax_primitives.primitive import Primitive
from jscaler.lax_primitives.spec import Spec, SpecFunction, dims


def reduce(combiner: Combiner | None, linear: str = "") -> SpecFunction:
    """Reduce over ``axes``; ``combiner=None`` where parts cannot be joined (argmax)."""

    def spec(eqn: core.JaxprEqn) -> Spec:
        axes = eqn.params["axes"]
        source = dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0]))))
        result = tuple(d for i, d in enumerate(source) if i not in axes)
        blocked = {} if combiner else {label: "its reduction cannot be joined" for a in axes for label in source[a]}
        results = (result,) * len(eqn.outvars)
        return Spec((source,) * len(eqn.invars), results, combiner or "add", blocked, linear)

    return spec


def reduce_logical(combiner: Combiner) -> SpecFunction:
    """And is min and or is max for booleans only; on integers they work bit by bit."""
    return lambda eqn: reduce(combiner if dtype(eqn.invars[0]) == np.dtype(bool) else None)(eqn)


def along(parameter: str, linear: str, why: str) -> SpecFunction:
    """All dims pass but those that ``parameter`` names, which are blocked (cumsum, sort, reverse)."""

    def spec(eqn: core.JaxprEqn) -> Spec:
        value = eqn.params[parameter]
        axes = value if isinstance(value, tuple) else (value,)
        all_dims = dims(shape(eqn.invars[0]), range(len(shape(eqn.invars[0]))))
        blocked = {label: why for a in axes for label in all_dims[a]}
        made = [("made", i) for i in range(len(all_dims))]
        sizes = shape(eqn.invars[0])
        results = tuple(
            tuple(
                d if n == m else cut for d, n, m, cut in zip(all_dims, shape(v), sizes, dims(shape(v), made), strict=True)
            )
            for v in eqn.outvars
        )
        blocked |= {label: why for result in results for a in axes for label in result[a]}
        operands = (all_dims, *(((),) * len(shape(v)) for v in eqn.invars[1:]))
        same = all(shape(v) == shape(eqn.invars[0]) for v in eqn.invars)
        return Spec((all_dims,) * len(eqn.invars) if same else operands, results, blocked=blocked, linear=linear)

    return spec


def _reduction(name: str, spec: SpecFunction, combiner: Combiner | None = None, **facts: Any) -> Primitive:
    given = {"by_row": True, "role": "reduces", "cost": "reduced", "seen": "sums" if combiner else ""}
    return Primitive(name, spec, combiner=combiner, **given | facts)


def _running(name: str, join: Any, start: Combiner | float, linear: str, why: str, weight: int = 0) -> Primitive:
    return Primitive(name, along("axis", linear, why), running=(join, start), role="mixes", cost="reduced", weight=weight)


RECORDS = (
    _reduction("reduce_sum", reduce("add", "add"), "add", zero="any", counts=True, weight=29),
    _reduction("reduce_max", reduce("max"), "max", weight=30),
    _reduction("reduce_min", reduce("min"), "min"),
    _reduction("reduce_prod", reduce(None)),
    _reduction("reduce_or", reduce_logical("max"), "max"),
    _reduction("reduce_and", reduce_logical("min"), "min"),
    _reduction("reduce_xor", reduce(None), by_row=False),
    Primitive("argmax", reduce(None), by_row=True, role="mixes", cost="reduced", weight=28),
    Primitive("argmin", reduce(None), by_row=True, role="mixes", cost="reduced"),
    Primitive("reduce", why="its combiner is a program", cost="reduced"),
    # one dim is walked in order
    _running("cumsum", jnp.add, "add", "first", "it is summed along", weight=50),
    _running("cumlogsumexp", jnp.logaddexp, "max", "", "it is summed along"),
    _running("cumprod", jnp.multiply, 1.0, "", "it is multiplied along"),
    _running("cummax", jnp.maximum, "max", "", "its running maximum is taken"),
    _running("cummin", jnp.minimum, "min", "", "its running minimum is taken"),
    Primitive("sort", along("dimension", "", "it is sorted"), role="mixes", weight=55),
    Primitive("top_k", along("axis", "", "its largest are taken"), role="mixes", weight=54),
)
