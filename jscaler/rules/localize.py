"""Localize: re-bind an op's body at the shapes of one part.

Most primitives take their shapes from their operands; of those that do not, their records say how they are bound (see
``lax_primitives``). Literals (a mean's N) stay global.

Parts of unequal sizes are all traced at the largest. Rows beyond a part's own hold anything, NaN included; before an
equation reduces them away, they are replaced by what leaves the result as it is.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jscaler.capture.jaxprs import Atom, evaluate, make_jaxpr, shape, trace_flat
from jscaler.capture.user_op import op_p
from jscaler.ir import Halo
from jscaler.lax_primitives import REGISTRY, Spec, known
from jscaler.rules.analysed import Analysis
from jscaler.rules.halo_reach import NONE, Wants, slid_along, wants, window_of
from jscaler.rules.nested_parts import bind_nested
from jscaler.rules.neutral import neutral
from jscaler.rules.user_rules import bind_call, check_shapes
from jscaler.rules.window_parts import crop, run_windowed

Parts = Mapping[int, int]  # leaf atom -> number of parts
Sizes = Mapping[int, tuple[int, ...]]  # leaf atom -> the sizes of its parts


class Localizer:
    """Traces an analysed fragment at part shapes. The result takes the part's index for each split leaf, last.

    Args:
        keeps_ops: whether the parts of user ops stay user ops, which can be split again.
    """

    def __init__(self, analysis: Analysis, parts: Parts, sizes: Sizes | None = None, keeps_ops: bool = False):
        self.analysis = analysis
        self.keeps_ops = keeps_ops
        self.parts = {leaf: n for leaf, n in parts.items() if n > 1}
        self.sizes = dict(sizes or {})
        self.leaves = tuple(self.parts)
        self.index: dict[int, Any] = {}
        self.wants: Mapping[int, Wants] = {leaf: found for leaf in self.leaves if (found := self._wants(leaf))}
        self.slid = slid_along(analysis)

    def _wants(self, leaf: int) -> Wants:
        found = wants(self.analysis, leaf)
        assert not isinstance(found, str), found
        return found

    def run(self) -> core.Jaxpr:
        """The local jaxpr: operands at part shapes, then one int32 part index per leaf of ``leaves``."""
        jaxpr = self.analysis.jaxpr

        def local(*args: Any) -> list[Any]:
            operands = args[: len(jaxpr.invars)]
            self.index = dict(zip(self.leaves, args[len(jaxpr.invars) :], strict=True))
            results = self.evaluate(operands)
            cropped = [crop(self, v, x, {}) for v, x in zip(jaxpr.outvars, results, strict=True)]
            self.index = {}  # no tracer outlives its trace
            return cropped

        avals = [v.aval.update(shape=self.extended(v)) for v in jaxpr.invars]
        index = [jax.ShapeDtypeStruct((), jnp.int32)] * len(self.leaves)
        return trace_flat(local, [*avals, *index])

    def evaluate(self, operands: Sequence[Any]) -> list[Any]:
        """Bind the equations one after another on parts of the operands."""
        jaxpr = self.analysis.jaxpr
        env: dict[core.Var, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        for eqn, spec in zip(jaxpr.eqns, self.analysis.specs, strict=True):
            values = [v.val if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
            values = self._without_rest(eqn, spec, values) if self.sizes else values
            env.update(zip(eqn.outvars, self._run(eqn, spec, values), strict=True))
        return [v.val if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]

    def inside(self, inner: Analysis) -> Callable[[Sequence[Any]], list[Any]]:
        """How the same part runs a program inside one of the equations."""
        part = Localizer(inner, self.parts, self.sizes, self.keeps_ops)
        part.index = self.index
        return part.evaluate

    def shape(self, var: Any) -> tuple[int, ...]:
        """The shape of ``var``'s part."""
        if not self.sizes:
            return tuple(
                size // math.prod(self.parts.get(leaf, 1) for leaf in dim)
                for size, dim in zip(shape(var), self.analysis.leaves(var), strict=True)
            )
        return tuple(math.prod(map(self.local_size, dim)) for dim in self.analysis.leaves(var))

    def local_size(self, leaf: int) -> int:
        """The size of a leaf in every part: its largest part's."""
        if leaf in self.sizes:
            return max(self.sizes[leaf])
        return self.analysis.atoms.size[leaf] // self.parts.get(leaf, 1)

    def start(self, leaf: int, dtype: Any) -> Any:
        """The global index of the part's first row along a leaf."""
        if leaf not in self.parts:
            return jnp.zeros((), dtype)
        if leaf in self.sizes:
            starts = [0, *itertools.accumulate(self.sizes[leaf])][:-1]
            return self._of_part(leaf, starts, dtype)
        index, size = jnp.asarray(self.index[leaf], dtype), self.local_size(leaf)
        return index * jnp.asarray(size, dtype) if size > 1 else index

    def extent(self, leaf: int, dtype: Any) -> Any:
        """The number of the part's own rows along a leaf; what it has beyond them is padding."""
        if leaf in self.sizes:
            return self._of_part(leaf, self.sizes[leaf], dtype)
        return jnp.asarray(self.local_size(leaf), dtype)

    def _of_part(self, leaf: int, table: Sequence[int], dtype: Any) -> Any:
        # One equation over scalar literals, not an array: equal look-ups are then seen to be equal.
        return lax.select_n(jnp.asarray(self.index[leaf], jnp.int32), *(jnp.asarray(x, dtype) for x in table))

    def own_rows(self, leaves: Sequence[int]) -> Any:
        """For each index of a local dim of ``leaves`` whether it is the part's own."""
        total = jnp.ones((1,), bool)
        for leaf in leaves:
            size = self.local_size(leaf)
            own = lax.iota(jnp.int32, size) < self.extent(leaf, jnp.int32)
            total = (total[:, None] & own[None, :]).reshape(-1)
        return total

    def _without_rest(self, eqn: core.JaxprEqn, spec: Spec, values: Sequence[Any]) -> Sequence[Any]:
        """``values`` with neutral elements in the padding of every dim that ``eqn`` reduces.

        All operands that carry the dim, since NaN times zero is NaN. So, too, for the groups of a convolution: where they
        are small, XLA:CPU runs one convolution over all features, with zeros in the kernel between groups.
        """
        if spec.pairwise:
            return values
        kept = [self._carried(v) for v in eqn.outvars]
        lost = [leaf for leaf in self.sizes if any(leaf not in leaves for leaves in kept)]
        windows = known(eqn.primitive).windows
        if windows is not None and windows.grouped:
            both = self._carried(eqn.invars[0]) & self._carried(eqn.invars[1])
            lost += [leaf for leaf in self.sizes if leaf in both and leaf not in lost]
        return [
            self._masked(v, x, lost, spec) if isinstance(v, core.Var) else x
            for v, x in zip(eqn.invars, values, strict=True)
        ]

    def _carried(self, var: Any) -> set[int]:
        """The leaves of all dims of ``var``."""
        return {leaf for dim in self.analysis.leaves(var) for leaf in dim}

    def _masked(self, var: core.Var, value: Any, lost: Sequence[int], spec: Spec) -> Any:
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return value
        for dim, leaves in enumerate(self.analysis.leaves(var)):
            if any(leaf in lost for leaf in leaves):
                own = lax.broadcast_in_dim(self.own_rows(leaves), value.shape, (dim,))
                value = jnp.where(own, value, neutral(spec.combiner, value.dtype))
        return value

    def extended(self, var: Any) -> tuple[int, ...]:
        """The shape of ``var``'s part with the rows around it that windows read."""
        around = [self.around(var, dim) for dim in range(len(shape(var)))]
        return tuple(size + halo.before + halo.after for size, halo in zip(self.shape(var), around, strict=True))

    def around(self, var: Any, dim: int) -> Halo:
        """The rows around ``var``'s part that windows read along ``dim``."""
        leaves = self.analysis.leaves(var)[dim]
        return next((found[var] for leaf, found in self.wants.items() if leaf in leaves and var in found), NONE)

    def _run(self, eqn: core.JaxprEqn, spec: Spec, values: Sequence[Any]) -> Sequence[Any]:
        """Give each operand the rows that the equation reads, and bind it."""
        found = {leaf: window_of(self.analysis, eqn, spec, leaf) for leaf in self.leaves if leaf in self.slid}
        # two indices of one window (side by side, it has no halo) are one to it
        slid = list({window.number: (window, leaf) for leaf, window in found.items() if window is not None}.values())
        if not slid and not self.wants:
            return self._bind(eqn, values)
        made = {leaf: known[v] for leaf, known in self.wants.items() for v in eqn.outvars if v in known}
        own = [made | {leaf: window.halos[i] for window, leaf in slid} for i in range(len(eqn.invars))]
        values = [crop(self, v, x, want) for v, x, want in zip(eqn.invars, values, own, strict=True)]
        if not slid:
            return self._bind(eqn, values)
        return [run_windowed(self, eqn, values, {**eqn.params, **self._own_params(eqn)}, slid)]

    def subdims(self, var: core.Var) -> list[list[tuple[int, int]]]:
        """Per dim of ``var`` its sub-dims, major first: size and parts."""
        sizes = self.analysis.atoms.size
        return [[(sizes[leaf], self.parts.get(leaf, 1)) for leaf in dim] for dim in self.analysis.leaves(var)]

    def _bind(self, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive is op_p:
            return bind_call(eqn, values, self.subdims, self.keeps_ops)
        one = known(eqn.primitive)
        if one.nested and self.touches(eqn):
            return bind_nested(self, eqn, values)
        if one.bound is not None and self.touches(eqn):
            return one.bound(self, eqn, values)
        results = self.bind(eqn, values, **self._own_params(eqn))
        if eqn.primitive in REGISTRY:
            check_shapes(eqn, results, [self.shape(v) for v in eqn.outvars])
        return results

    def _own_params(self, eqn: core.JaxprEqn) -> Mapping[str, Any]:
        """The parameters that carry shapes, at the part's."""
        shaped = known(eqn.primitive).shaped
        return shaped(self, eqn) if shaped is not None else {}

    def bind(self, eqn: core.JaxprEqn, values: Sequence[Any], **params: Any) -> Sequence[Any]:
        """The results of an equation on ``values``, with these parameters in place of its own; it may carry a program."""
        eqn = eqn.replace(params={**eqn.params, **params})
        if any(core.jaxprs_in_params(eqn.params)):
            operands = [core.Var(v.aval) for v in eqn.invars]
            one = make_jaxpr([eqn.replace(invars=list[Atom](operands))], operands, eqn.outvars, self.analysis.jaxpr)
            return evaluate(one, values)
        results = eqn.primitive.bind(*values, **eqn.params)
        return results if eqn.primitive.multiple_results else [results]

    def leaves_of(self, var: Any) -> Sequence[Sequence[int]]:
        """Per dim of ``var`` its leaf atoms."""
        return self.analysis.leaves(var)

    def touches(self, eqn: core.JaxprEqn) -> bool:
        """Whether an operand or result of ``eqn`` is split."""
        return any(self.shape(v) != shape(v) for v in (*eqn.invars, *eqn.outvars) if isinstance(v, core.Var))

    def positions(self, var: core.Var, dim: int, dtype: Any) -> Any:
        """The global positions of a part's rows along ``dim``, as a vector of the local size."""
        total: Any = None  # a scalar, as long as the part has one row of each leaf so far
        for leaf in self.analysis.leaves(var)[dim]:
            size, split = self.local_size(leaf), leaf in self.parts
            if size == 1 and not split:
                continue
            own: Any = lax.iota(dtype, size) if size != 1 else None
            if split:
                own = self.start(leaf, dtype) if own is None else self.start(leaf, dtype) + own
            if total is not None:
                total = total * jnp.asarray(self.analysis.atoms.size[leaf], dtype)
                own = (total[:, None] + own[None, :]).reshape(-1) if total.ndim and own.ndim else total + own
            total = own
        total = jnp.zeros((), dtype) if total is None else total
        return total if total.ndim else total[None]

    def locate(self, var: core.Var, dim: int, positions: Any) -> tuple[Any, Any]:
        """Where global ``positions`` along ``dim`` (inside the whole) lie in this part, and whether they do."""
        dtype = positions.dtype
        local, mine, rest, stride = jnp.zeros_like(positions), jnp.ones(positions.shape, bool), positions, 1
        leaves = self.analysis.leaves(var)[dim]
        for leaf in reversed(leaves):
            whole = jnp.asarray(self.analysis.atoms.size[leaf], dtype)
            digit, rest = (lax.rem(rest, whole), lax.div(rest, whole)) if leaf != leaves[0] else (rest, rest)
            if leaf in self.parts:
                digit = digit - self.start(leaf, dtype)
                mine = mine & (digit >= 0) & (digit < self.extent(leaf, dtype))
            local = local + digit * jnp.asarray(stride, dtype)
            stride *= self.local_size(leaf)
        return jnp.where(mine, local, jnp.zeros_like(local)), mine
