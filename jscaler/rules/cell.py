"""One part of an op whose parts are of unequal sizes, and run one after another: traced at its own size and place."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jscaler.capture.jaxprs import Atom, make_jaxpr
from jscaler.capture.user_op import op_p
from jscaler.lax_primitives import REGISTRY, Spec, known
from jscaler.rules.analysed import Analysis
from jscaler.rules.analysis import spec_of
from jscaler.rules.localize import Localizer


class Cell(Localizer):
    """The part ``number`` along ``leaves``, which are one factor. Nothing is padded: the other parts run elsewhere.

    Args:
        sizes: of all parts.

    Attributes:
        located: what has been asked for the place of its first row; where nothing has, and its index is not read, all parts
            of its size are the same.
        analysed: of a part that differs from the whole in shapes alone, the analysis, where that differs in sizes alone.
    """

    def __init__(self, analysis: Analysis, leaves: Sequence[int], sizes: tuple[int, ...], number: int):
        self.own = sizes[number]
        self.first = sum(sizes[:number])
        self.all_sizes, self.number, self.cut_leaves = sizes, number, tuple(leaves)
        self.located: list[int] = []
        self.analysed: Analysis | None = None
        super().__init__(
            analysis, dict.fromkeys(leaves, len(sizes)), dict.fromkeys(leaves, sizes), keeps_ops=True
        )  # fmt: skip

    def run(self) -> core.Jaxpr:
        """The local jaxpr; where its equations differ from the whole's in shapes alone, nothing is traced."""
        return self._of_shapes() if all(map(self._differs_in_shapes, self.analysis.jaxpr.eqns)) else super().run()

    def _differs_in_shapes(self, eqn: core.JaxprEqn) -> bool:
        one = known(eqn.primitive)
        bound = one.bound is not None and self.touches(eqn)
        special = one.nested or eqn.primitive is op_p or eqn.primitive in REGISTRY or any(core.jaxprs_in_params(eqn.params))
        return not (bound or special or self.wants or self.slid)

    def _of_shapes(self) -> core.Jaxpr:
        jaxpr = self.analysis.jaxpr
        found = (*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars))
        own = {v: core.Var(v.aval.update(shape=self.shape(v))) for v in found}

        def here(atoms: Sequence[Atom]) -> list[Any]:
            return [a if isinstance(a, core.Literal) else own[a] for a in atoms]

        eqns = [
            e.replace(invars=here(e.invars), outvars=here(e.outvars), params={**e.params, **self._own_params(e)})
            for e in jaxpr.eqns
        ]
        made = make_jaxpr(eqns, here(jaxpr.invars), here(jaxpr.outvars), jaxpr)
        atoms = self.analysis.atoms.resized(self.cut_leaves, self.own) if self.own > 1 else None
        if atoms is not None:
            specs = tuple(spec_of(eqn, set()) for eqn in eqns)
            dims, zeros = self.analysis.dims, self.analysis.zeros
            self.analysed = Analysis(
                made, specs, atoms, {own[v]: dims[v] for v in found}, frozenset(own[v] for v in zeros),
                self.analysis.reduced, {},
            )  # fmt: skip
        return made

    def local_size(self, leaf: int) -> int:
        return self.own if leaf in self.sizes else super().local_size(leaf)

    def start(self, leaf: int, dtype: Any) -> Any:
        if leaf not in self.sizes:
            return super().start(leaf, dtype)
        self.located.append(leaf)
        return jnp.asarray(self.first, dtype)

    def extent(self, leaf: int, dtype: Any) -> Any:
        return jnp.asarray(self.local_size(leaf), dtype)

    def inside(self, inner: Analysis) -> Any:
        part = Cell(inner, self.cut_leaves, self.all_sizes, self.number)
        part.index, part.located = self.index, self.located
        return part.evaluate

    def _without_rest(self, eqn: core.JaxprEqn, spec: Spec, values: Sequence[Any]) -> Sequence[Any]:
        return values
