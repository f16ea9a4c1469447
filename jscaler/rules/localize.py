"""Localize: re-bind an op's body at the shapes of one part.

Most primitives take their shapes from their operands; about ten carry shapes among their parameters and get them
shrunk here. Two depend on *where* the part lies: ``iota`` adds the part's offset, and random bits are drawn by the
element's global index, so that a part draws exactly the bits of the whole. Literals (a mean's N) stay global.

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
from jax.extend.random import threefry2x32_p

from jscaler.capture.jaxprs import evaluate, make_jaxpr, shape, trace_flat
from jscaler.ir import Halo
from jscaler.rules import lookups, nested_parts, pieces
from jscaler.rules.analysis import Analysis
from jscaler.rules.counters import global_index
from jscaler.rules.neutral import neutral
from jscaler.rules.table import Spec
from jscaler.rules.user_rules import bind_part
from jscaler.rules.wants import NONE, Wants, slid_along, wants, window_of
from jscaler.rules.window_parts import crop, run_windowed
from jscaler.rules.windows import local_groups

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
        self.wants = {leaf: found for leaf in self.leaves if (found := self._wants(leaf))}
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
            return [crop(self, v, x, {}) for v, x in zip(jaxpr.outvars, results, strict=True)]

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
        return jnp.asarray(self.index[leaf], dtype) * jnp.asarray(self.local_size(leaf), dtype)

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
        if eqn.primitive.name == "conv_general_dilated":
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
        params = dict(eqn.params)
        if eqn.primitive.name in SHAPED:
            params.update(SHAPED[eqn.primitive.name](self, eqn))
        return [run_windowed(self, eqn, values, params, slid)]

    def subdims(self, var: core.Var) -> list[list[tuple[int, int]]]:
        """Per dim of ``var`` its sub-dims, major first: size and parts."""
        sizes = self.analysis.atoms.size
        return [[(sizes[leaf], self.parts.get(leaf, 1)) for leaf in dim] for dim in self.analysis.leaves(var)]

    def _bind(self, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        if (results := bind_part(eqn, values, self.subdims, self.keeps_ops)) is not None:
            return results
        name = eqn.primitive.name
        if name in SPECIAL and self.touches(eqn):
            return SPECIAL[name](self, eqn, values)
        params = dict(eqn.params)
        if name in SHAPED:
            params.update(SHAPED[name](self, eqn))
        if any(core.jaxprs_in_params(eqn.params)):
            one = make_jaxpr([eqn], [v for v in eqn.invars if isinstance(v, core.Var)], eqn.outvars, self.analysis.jaxpr)
            return evaluate(one, [x for x, v in zip(values, eqn.invars, strict=True) if isinstance(v, core.Var)])
        results = eqn.primitive.bind(*values, **params)
        return results if eqn.primitive.multiple_results else [results]

    def touches(self, eqn: core.JaxprEqn) -> bool:
        """Whether an operand or result of ``eqn`` is split."""
        return any(self.shape(v) != shape(v) for v in (*eqn.invars, *eqn.outvars) if isinstance(v, core.Var))

    def positions(self, var: core.Var, dim: int, dtype: Any) -> Any:
        """The global positions of a part's rows along ``dim``, as a vector of the local size."""
        total = jnp.zeros((1,), dtype)
        for leaf in self.analysis.leaves(var)[dim]:
            own = self.start(leaf, dtype) + lax.iota(dtype, self.local_size(leaf))
            total = (total[:, None] * jnp.asarray(self.analysis.atoms.size[leaf], dtype) + own[None, :]).reshape(-1)
        return total

    def locate(self, var: core.Var, dim: int, positions: Any) -> tuple[Any, Any]:
        """Where global ``positions`` along ``dim`` (inside the whole) lie in this part, and whether they do."""
        dtype = positions.dtype
        local, mine, rest, stride = jnp.zeros_like(positions), jnp.ones(positions.shape, bool), positions, 1
        for leaf in reversed(self.analysis.leaves(var)[dim]):
            whole = jnp.asarray(self.analysis.atoms.size[leaf], dtype)
            digit = lax.rem(rest, whole) - self.start(leaf, dtype)
            rest = lax.div(rest, whole)
            mine = mine & (digit >= 0) & (digit < self.extent(leaf, dtype))
            local = local + digit * jnp.asarray(stride, dtype)
            stride *= self.local_size(leaf)
        return jnp.where(mine, local, jnp.zeros_like(local)), mine


def _iota(part: Localizer, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    dim = eqn.params["dimension"]
    dtype = eqn.params["dtype"]
    out = eqn.outvars[0]
    positions, sizes = part.positions(out, dim, jnp.int32), part.extended(out)
    if sizes[dim] != positions.size:  # the rows around a part, which then lies in a row
        positions = positions[0] - part.around(out, dim).before + lax.iota(jnp.int32, sizes[dim])
    return [lax.broadcast_in_dim(positions.astype(dtype), sizes, (dim,))]


def _random_bits(part: Localizer, eqn: core.JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """Threefry in its partitionable form is a function of the key and the 64-bit global index of the element."""
    (key,), out = values, eqn.outvars[0]
    width, keys = eqn.params["bit_width"], len(shape(eqn.invars[0]))
    by_index = jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and "fry" in str(key.dtype)
    if not by_index or not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        return [_draw_whole(part, eqn, key)]
    local = part.shape(out)
    dims = range(keys, len(local))
    high, low = global_index(lambda d: part.positions(out, d, jnp.uint32), dims, eqn.params["shape"], local)
    # one key stays a scalar: broadcast, it would go through every round of XLA:CPU's loop as an array
    words = jax.random.key_data(key)
    rank = (*words.shape[:-1], *(1 for _ in local[keys:])) if keys else ()
    first, second = (words[..., i].reshape(rank) for i in (0, 1))
    high, low = threefry2x32_p.bind(first, second, high, low)
    if width == 64:
        return [(high.astype(jnp.uint64) << jnp.uint64(32)) | low.astype(jnp.uint64)]
    return [(high ^ low).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[width])]


def _draw_whole(part: Localizer, eqn: core.JaxprEqn, key: Any) -> Any:
    """Other generators have no form by index: draw the whole's bits, then take the part's."""
    out = eqn.outvars[0]
    keys = len(shape(eqn.invars[0]))
    bits = eqn.primitive.bind(key, **eqn.params)
    for dim in range(keys, len(shape(out))):
        bits = jnp.take(bits, part.positions(out, dim, jnp.int32), axis=dim)
    return bits


def _sized(parameter: str) -> Callable[[Localizer, core.JaxprEqn], dict[str, Any]]:
    return lambda part, eqn: {parameter: part.shape(eqn.outvars[0])}


# What is bound in another way where it is split, and what carries shapes among its parameters.
SPECIAL: dict[str, Callable[[Localizer, core.JaxprEqn, Sequence[Any]], Sequence[Any]]] = {
    "iota": _iota,
    "random_bits": _random_bits,
    **lookups.SPECIAL,
    **nested_parts.SPECIAL,
}
SHAPED: dict[str, Callable[[Localizer, core.JaxprEqn], dict[str, Any]]] = {
    "broadcast_in_dim": lambda part, eqn: {"shape": part.extended(eqn.outvars[0])},
    "reshape": _sized("new_sizes"),
    "empty": _sized("shape"),
    **pieces.SHAPED,
    "conv_general_dilated": local_groups,
}
