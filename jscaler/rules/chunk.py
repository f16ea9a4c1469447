"""Run an op in chunks: its parts along one factor, one after another on one device, in a ``lax.scan``.

    for each chunk:  cut the operands ──► the op at the chunk's shapes ──► write the rows of the results that carry the
                                                                           factor, add up those that are reduced over it

What an op makes inside (the logits of a fused cross entropy) is then held for one chunk at a time.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jscaler.capture.jaxprs import dtype, evaluate, shape, trace_flat
from jscaler.ir.mask import Combiner
from jscaler.rules.analysed import Analysis
from jscaler.rules.factor_states import INDEPENDENT, SPLIT, State, interpret
from jscaler.rules.localize import Localizer, Parts, Sizes
from jscaler.rules.neutral import neutral

JOIN = {"add": jnp.add, "max": jnp.maximum, "min": jnp.minimum}


class Chunks:
    """One part's program as a loop over chunks of ``leaves``, which are one factor.

    Args:
        parts, sizes: how the op is split between devices, as for a `Localizer`.
        leaves: the atoms of the factor that is walked.
        count: the number of chunks in every part.
    """

    def __init__(self, analysis: Analysis, parts: Parts, sizes: Sizes, leaves: Sequence[int], count: int):
        self.analysis = analysis
        self.count = count
        self.walked = frozenset(leaves)
        self.whole = Localizer(analysis, parts, sizes)
        finer = {leaf: parts.get(leaf, 1) * (count if leaf in self.walked else 1) for leaf in (*parts, *leaves)}
        assert all(analysis.atoms.size[leaf] % finer[leaf] == 0 for leaf in leaves), "chunks that do not divide their part"
        self.chunk = Localizer(analysis, finer, sizes)
        self.leaves = self.whole.leaves

    def run(self) -> core.Jaxpr:
        """The local jaxpr, with the operands, results and part indices of the part that is not chunked."""
        jaxpr = self.analysis.jaxpr
        body = self.chunk.run()
        after = interpret(self.analysis, tuple(self.walked), {})
        states = [after[v] if isinstance(v, core.Var) else INDEPENDENT for v in jaxpr.outvars]

        def local(*args: Any) -> list[Any]:
            operands = args[: len(jaxpr.invars)]
            index = dict(zip(self.leaves, args[len(jaxpr.invars) :], strict=True))
            start = [self._empty(v, state) for v, state in zip(jaxpr.outvars, states, strict=True)]

            def step(held: list[Any], i: Any) -> tuple[list[Any], None]:
                own = [self._cut(v, x, i) for v, x in zip(jaxpr.invars, operands, strict=True)]
                made = evaluate(body, [*own, *self._indices(index, i)])
                zipped = zip(jaxpr.outvars, states, held, made, strict=True)
                return [self._joined(v, state, before, x, i) for v, state, before, x in zipped], None

            held, _ = lax.scan(step, start, jnp.arange(self.count, dtype=jnp.int32))
            return [x.astype(dtype(v)) for v, x in zip(jaxpr.outvars, held, strict=True)]

        avals = [v.aval.update(shape=self.whole.extended(v)) for v in jaxpr.invars]
        return trace_flat(local, [*avals, *[jax.ShapeDtypeStruct((), jnp.int32)] * len(self.leaves)])

    def _indices(self, index: Mapping[int, Any], i: Any) -> list[Any]:
        """The part index of each leaf of the chunk: a part's chunks lie one behind another."""
        found = []
        for leaf in self.chunk.leaves:
            if leaf not in self.walked:
                found.append(index[leaf])
            else:
                found.append(index[leaf] * jnp.int32(self.count) + i if leaf in index else i)
        return found

    def _place(self, var: core.Var, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int] | None:
        """Where ``var`` carries what is walked: its shape with that dim refined, which dim then, and a chunk's rows.

        ``shape`` is that of its part, which may have rows around it along other dims, for windows.
        """
        for dim, leaves in enumerate(self.analysis.leaves(var)):
            for place, leaf in enumerate(leaves):
                if leaf in self.walked:
                    sizes = [self.whole.local_size(x) for x in leaves]
                    view = (
                        *shape[:dim],
                        math.prod(sizes[:place]),
                        sizes[place],
                        math.prod(sizes[place + 1 :]),
                        *shape[dim + 1 :],
                    )
                    return view, dim + 1, self.chunk.local_size(leaf)
        return None

    def _cut(self, var: core.Var, value: Any, i: Any) -> Any:
        found = self._place(var, self.whole.extended(var))
        if found is None:
            return value
        view, dim, rows = found
        piece = lax.dynamic_slice_in_dim(value.reshape(view), i * rows, rows, dim, allow_negative_indices=False)
        return piece.reshape(self.chunk.extended(var))

    def _empty(self, atom: core.Var | core.Literal, state: State) -> Any:
        """What a result starts as. Sums of short floats are added up in float32, as one dot would."""
        sizes = self.whole.shape(atom) if isinstance(atom, core.Var) else shape(atom)
        own = dtype(atom)
        if state in (SPLIT, INDEPENDENT):
            return jnp.zeros(sizes, own)
        wide = jnp.float32 if state == "add" and jnp.issubdtype(own, jnp.floating) and own.itemsize < 4 else own
        combiner: Combiner = state  # type: ignore[assignment]
        return jnp.broadcast_to(neutral(combiner, wide), sizes)

    def _joined(self, atom: Any, state: State, before: Any, made: Any, i: Any) -> Any:
        if state == INDEPENDENT:
            return jnp.asarray(made, before.dtype)
        if state != SPLIT:
            return JOIN[state](before, made.astype(before.dtype))
        found = self._place(atom, self.whole.shape(atom))
        assert found is not None
        view, dim, rows = found
        piece = made.reshape((*view[:dim], rows, *view[dim + 1 :]))
        seen, start = before.reshape(view), i * rows
        return lax.dynamic_update_slice_in_dim(seen, piece, start, dim, allow_negative_indices=False).reshape(before.shape)
