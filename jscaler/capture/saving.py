"""A function traced together with its vjp: the residuals that go from forward to backward become values with names.

A leaf of the vjp may be an input or a result of the function, which are at hand anyway, or a constant; the others are
residuals.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.extend import core

from jscaler.capture.jaxprs import make_jaxpr, shape_struct, trace_flat


@dataclass(frozen=True)
class Leaf:
    """Where a leaf of the vjp comes from: the how-manieth input, result, residual or constant."""

    kind: Literal["input", "output", "residual", "literal"]
    index: int


@dataclass(frozen=True)
class Saving:
    """A function that hands out the residuals of its vjp.

    Attributes:
        jaxpr: from its inputs to its results, then its residuals.
        leaves: what the vjp is made of.
        residuals: shapes and dtypes.
        literals: the constants among the leaves.
        tree: of the vjp.
    """

    jaxpr: core.Jaxpr
    leaves: tuple[Leaf, ...]
    residuals: tuple[jax.ShapeDtypeStruct, ...]
    literals: tuple[Any, ...]
    tree: Any

    def apply(self, values: Mapping[Leaf, Any], cotangents: Sequence[Any]) -> list[Any]:
        """The gradients, from the leaves that are no constants and the cotangents."""
        leaves = [self.literals[leaf.index] if leaf.kind == "literal" else values[leaf] for leaf in self.leaves]
        return list(jax.tree.unflatten(self.tree, leaves)(list(cotangents)))


def vjp_of(
    fun: Callable[..., Sequence[Any]], num_inputs: int, wrt: Sequence[int], outputs: Sequence[int]
) -> Callable[..., list[Any]]:
    """The gradients of ``fun`` by the inputs ``wrt``, as a function of its inputs and the cotangents of ``outputs``."""

    def backward(*args: Any) -> list[Any]:
        inputs, cotangents = args[:num_inputs], args[num_inputs:]
        _, vjp, _ = _vjp(fun, inputs, wrt, outputs)
        return list(vjp(list(cotangents)))

    return backward


def trace_saving(
    fun: Callable[..., Sequence[Any]], structs: Sequence[Any], wrt: Sequence[int], outputs: Sequence[int]
) -> Saving:
    """Trace ``fun`` and its vjp by the inputs ``wrt`` at ``structs``."""
    num_results, tree = 0, None

    def run(*inputs: Any) -> list[Any]:
        nonlocal num_results, tree
        _, vjp, results = _vjp(fun, inputs, wrt, outputs)
        leaves, tree = jax.tree.flatten(vjp)
        num_results = len(results)
        return [*results, *leaves]

    jaxpr = trace_flat(run, structs)
    results, atoms = jaxpr.outvars[:num_results], jaxpr.outvars[num_results:]
    residuals: list[core.Var] = []
    literals: list[Any] = []
    leaves = []
    for atom in atoms:
        if isinstance(atom, core.Literal):
            leaves.append(Leaf("literal", len(literals)))
            literals.append(atom.val)
        elif atom in jaxpr.invars:
            leaves.append(Leaf("input", jaxpr.invars.index(atom)))
        elif any(atom is r for r in results):
            leaves.append(Leaf("output", next(i for i, r in enumerate(results) if r is atom)))
        else:
            if atom not in residuals:
                residuals.append(atom)
            leaves.append(Leaf("residual", residuals.index(atom)))
    kept = make_jaxpr(jaxpr.eqns, jaxpr.invars, [*results, *residuals], jaxpr)
    return Saving(kept, tuple(leaves), tuple(shape_struct(v.aval) for v in residuals), tuple(literals), tree)


def _vjp(fun: Callable[..., Sequence[Any]], inputs: Sequence[Any], wrt: Sequence[int], outputs: Sequence[int]) -> Any:
    def selected(*diff: Any) -> tuple[list[Any], list[Any]]:
        full = list(inputs)
        for i, value in zip(wrt, diff, strict=True):
            full[i] = value
        results = list(fun(*full))
        return [results[i] for i in outputs], results

    return jax.vjp(selected, *(inputs[i] for i in wrt), has_aux=True)
