"""The backward of a user's op, as calls of their own: what they compute at any part shapes, and by which rule.

With the forward ``y = f(x, w)``, words of x, w, y as its rule gives them:

    inputs   dx, dw = vjp(f)(x, w, dy)          dims of dy by y's words, of dx by x's
    saved    y, r = f*(x, w);  dx, dw = f'(r, dy)    dims of the residuals r found by tracing f* at part shapes

A factor that x has and w lacks gives a summand of dw in each part. A factor joined by max or min is blocked: which part
holds the maximum decides where the gradient goes, and no part knows that.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from jscaler.capture.jaxprs import evaluate, make_jaxpr, trace_flat
from jscaler.capture.op_rule import Matched, Words
from jscaler.capture.saving import Leaf, Saving, trace_saving, vjp_of
from jscaler.capture.user_op import OpCall

Struct = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Derived:
    """A call made from a user's: the forward, at which shapes, differentiated by and at what."""

    forward: OpCall
    operands: tuple[Struct, ...]
    words: tuple[Words, ...]
    wrt: tuple[int, ...]
    outputs: tuple[int, ...]
    rule: Matched

    @property
    def name(self) -> str:
        return getattr(self.forward, "name", "op")

    def at(self, parts: Mapping[str, int]) -> Any:
        operands = tuple(part_struct(s, w, parts) for s, w in zip(self.operands, self.words, strict=True))
        return dataclasses.replace(
            self, forward=self.forward.at(parts), operands=operands, rule=part_rule(self.rule, parts)
        )

    def matched(self, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> Matched:
        return self.rule

    def saving(self) -> Saving:
        return trace_saving(self.forward, self.operands, self.wrt, self.outputs)


@dataclass(frozen=True)
class VjpCall(Derived):
    """``jax.vjp`` of the forward: reads its operands and the cotangents, as far as ``reads`` says."""

    reads: tuple[int, ...] = ()

    def __call__(self, *arrays: Any) -> list[Any]:
        jaxpr = self._jaxpr()
        full: dict[core.Var, Any] = dict(zip([jaxpr.invars[i] for i in self.reads], arrays, strict=True))
        assert reads_of(jaxpr) <= set(self.reads), f"a part of '{self.name}' reads what its whole does not"
        kept = make_jaxpr(jaxpr.eqns, list(full), jaxpr.outvars, jaxpr)
        return evaluate(kept, list(full.values()))

    def _jaxpr(self) -> core.Jaxpr:
        """The gradients as a program of all operands, then all cotangents."""
        outs = jax.eval_shape(self.forward, *self.operands)
        fun = vjp_of(self.forward, len(self.operands), self.wrt, self.outputs)
        flat = trace_flat(fun, [*self.operands, *(outs[i] for i in self.outputs)])
        eqns = [e for e in flat.eqns if e.outvars]  # a debug print is the forward's alone
        return make_jaxpr(eqns, flat.invars, flat.outvars, flat)


@dataclass(frozen=True)
class SavingCall(Derived):
    """The forward that hands out the residuals of its vjp, behind its results."""

    def __call__(self, *arrays: Any) -> list[Any]:
        return evaluate(self.saving().jaxpr, arrays)


@dataclass(frozen=True)
class AppliedCall(Derived):
    """The vjp of a `SavingCall` applied: reads leaves (its operands, results or residuals), then the cotangents."""

    reads: tuple[Leaf, ...] = ()

    def __call__(self, *arrays: Any) -> list[Any]:
        values = dict(zip(self.reads, arrays, strict=False))
        return self.saving().apply(values, arrays[len(self.reads) :])


def reads_of(jaxpr: core.Jaxpr) -> set[int]:
    """Which inputs of a jaxpr it reads."""
    read = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, core.Var)}
    read |= {v for v in jaxpr.outvars if isinstance(v, core.Var)}
    return {i for i, v in enumerate(jaxpr.invars) if v in read}


def part_struct(struct: Struct, words: Words, parts: Mapping[str, int]) -> Struct:
    """One part of a tensor: each dim by the parts of the factors it carries."""
    shape = tuple(n // math.prod(parts.get(f, 1) for f in dim) for n, dim in zip(struct.shape, words, strict=True))
    return struct.update(shape=shape)


def part_rule(rule: Matched, parts: Mapping[str, int]) -> Matched:
    """``rule`` at the shapes of one part; a dim of size 1 has no factor."""
    sizes = {name: size // parts.get(name, 1) for name, size in rule.sizes}

    def left(tensors: tuple[Words, ...]) -> tuple[Words, ...]:
        return tuple(tuple(tuple(f for f in dim if sizes[f] > 1) for dim in words) for words in tensors)

    return dataclasses.replace(rule, operands=left(rule.operands), results=left(rule.results), sizes=tuple(sizes.items()))


def vjp_call(forward: OpCall, operands: Sequence[Struct], rule: Matched, wrt: Any, outputs: Any) -> VjpCall:
    """The backward of ``forward`` that reads its operands."""
    words = (*rule.operands, *(rule.results[i] for i in outputs))
    gradients = tuple(rule.operands[i] for i in wrt)
    blocked = {**_undifferentiable(rule), **dict(rule.blocked)}
    known = dataclasses.replace(rule, operands=words, results=gradients, blocked=tuple(blocked.items()), linear="")
    call = VjpCall(forward, tuple(operands), rule.operands, tuple(wrt), tuple(outputs), known)
    reads = tuple(sorted(reads_of(call._jaxpr())))
    seen = {n for i in reads for dim in words[i] for n in dim}
    for name in known.open():
        carried = [any(name in dim for dim in w) for w in gradients]
        if name not in seen and any(carried) and not all(carried):
            blocked[name] = "some gradients carry it, and nothing that they are made of does"
    known = dataclasses.replace(known, operands=tuple(words[i] for i in reads), blocked=tuple(blocked.items()))
    return dataclasses.replace(call, rule=known, reads=reads)


def saved_calls(
    forward: OpCall, operands: Sequence[Struct], rule: Matched, wrt: Any, outputs: Any
) -> tuple[SavingCall, AppliedCall]:
    """The forward of ``forward`` that hands out residuals, and the backward that reads them."""
    head = (forward, tuple(operands), rule.operands, tuple(wrt), tuple(outputs))
    saving = SavingCall(*head, rule).saving()
    words, blocked = _residual_words(SavingCall(*head, rule), saving, rule)
    for leaf in saving.leaves:
        if leaf.kind == "output":
            for name, _ in rule.reduce:
                if not any(name in dim for dim in rule.results[leaf.index]):
                    blocked[name] = "a part's share of a result is saved, and only the whole is at hand later"
    blocked |= dict(rule.blocked)
    kept = dataclasses.replace(rule, results=(*rule.results, *words), blocked=tuple(blocked.items()))
    blocked = {**_undifferentiable(rule), **blocked}
    reads = tuple(dict.fromkeys(leaf for leaf in saving.leaves if leaf.kind != "literal"))
    table = {"input": rule.operands, "output": rule.results, "residual": words}
    read_words = tuple(table[leaf.kind][leaf.index] for leaf in reads)
    after = dataclasses.replace(
        rule, operands=(*read_words, *(rule.results[i] for i in outputs)), results=tuple(rule.operands[i] for i in wrt),
        blocked=tuple(blocked.items()), linear="",
    )  # fmt: skip
    return SavingCall(*head, dataclasses.replace(kept, linear="")), AppliedCall(*head, after, reads)


def _undifferentiable(rule: Matched) -> dict[str, str]:
    return {
        name: f"its results are joined by {combiner}, which has no derivative in parts"
        for name, combiner in rule.reduce
        if combiner != "add"
    }


def _residual_words(call: SavingCall, whole: Saving, rule: Matched) -> tuple[tuple[Words, ...], dict[str, str]]:
    """The factors of each residual's dims, found by cutting one factor at a time; and the factors that resist."""
    dims: list[list[list[str]]] = [[[] for _ in s.shape] for s in whole.residuals]
    sizes, blocked = dict(rule.sizes), {}
    for name in rule.open() if whole.residuals else ():
        parts = next(n for n in range(2, sizes[name] + 1) if sizes[name] % n == 0)
        try:
            part = call.at({name: parts}).saving()
        except Exception as error:
            blocked[name] = f"the function fails in {parts} parts: {error}"
            continue
        if part.leaves != whole.leaves:
            blocked[name] = "a part saves other residuals than the whole"
            continue
        for i, (mine, other) in enumerate(zip(whole.residuals, part.residuals, strict=True)):
            cut = [d for d, (n, m) in enumerate(zip(mine.shape, other.shape, strict=True)) if n == m * parts and n != m]
            if len(cut) != 1 or sum(n != m for n, m in zip(mine.shape, other.shape, strict=True)) != 1:
                blocked[name] = f"residual {i} of shape {mine.shape} does not carry it"
            else:
                dims[i][cut[0]].append(name)
    composite = {frozenset(dim): dim for words in (*rule.operands, *rule.results) for dim in words}
    words = []
    for struct, each in zip(whole.residuals, dims, strict=True):
        found = []
        for size, names in zip(struct.shape, each, strict=True):
            dim = composite.get(frozenset(names), tuple(names) if len(names) < 2 else ())
            if math.prod(sizes[n] for n in dim) != size or set(dim) != set(names):
                blocked.update(dict.fromkeys(names, f"a residual's dim of size {size} is made of it in another way"))
                dim = ()
            found.append(dim)
        words.append(tuple(found))
    return tuple(words), blocked
