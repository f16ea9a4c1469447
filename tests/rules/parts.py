"""Whole against parts: run a fragment's local program on every part, and put the results together again.

This is what a rule promises. ``check`` takes it at its word, for every factor that is not blocked and every number of
parts; ``check_both`` does so for the function and for its ``jax.vjp``.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jscaler.capture.jaxprs import evaluate, inline, trace_flat
from jscaler.errors import divisors
from jscaler.ir import Halo, Rule
from jscaler.ir.rule import TensorFactors
from jscaler.rules.analysis import Analysis, analyse
from jscaler.rules.derive import derive_rule
from jscaler.rules.localize import Localizer

COMBINE = {"add": np.add, "max": np.maximum, "min": np.minimum}
# Compiling is all that these tests spend: the least of it will do.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Fragment:
    """A traced function with its rule."""

    analysis: Analysis
    rule: Rule

    @property
    def primitives(self) -> set[str]:
        return {e.primitive.name for e in self.analysis.jaxpr.eqns}

    @property
    def leaves(self) -> dict[str, int]:
        """Factor name -> leaf atom."""
        jaxpr = self.analysis.jaxpr
        found: dict[str, int] = {}
        for var, dims in zip((*jaxpr.invars, *jaxpr.outvars), (*self.rule.operands, *self.rule.results), strict=True):
            if isinstance(var, core.Var):
                for names, leaves in zip(dims, self.analysis.leaves(var), strict=True):
                    found.update(zip(names, leaves, strict=True))
        return found

    @property
    def open(self) -> dict[str, int]:
        """The factors that may be split, with their sizes."""
        return {f.name: f.size for f in self.rule.factors.values() if f.kind != "blocked"}

    def blocked(self, operand: int, dim: int) -> str:
        """Why the one factor of an operand's dim is blocked; empty if it is not."""
        (name,) = self.rule.operands[operand][dim]
        return self.rule.factors[name].reason


def fragment(fun: Callable[..., Any], *args: Any) -> Fragment:
    jaxpr = inline(trace_flat(lambda *xs: jax.tree.leaves(fun(*xs)), [jax.typeof(x) for x in args]))
    analysis = analyse(jaxpr)
    return Fragment(analysis, derive_rule(analysis)[0])


def backward(fun: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """``jax.vjp`` of ``fun`` as a function of its arguments and cotangents, and those; None where nothing is real."""
    wrt = [i for i, x in enumerate(args) if _is_real(x)]
    outs = jax.tree.leaves(jax.eval_shape(fun, *args))
    real = [i for i, y in enumerate(outs) if _is_real(y)]
    if not wrt or not real:
        return None
    rng = np.random.default_rng(7)
    cotangents = [np.asarray(rng.normal(size=outs[i].shape), outs[i].dtype) for i in real]

    def vjp(*both: Any) -> list[Any]:
        given, seeds = list(both[: len(args)]), list(both[len(args) :])

        def chosen(*diff: Any) -> list[Any]:
            full = dict(enumerate(given)) | dict(zip(wrt, diff, strict=True))
            results = jax.tree.leaves(fun(*(full[i] for i in range(len(args)))))
            return [results[i] for i in real]

        return list(jax.vjp(chosen, *(given[i] for i in wrt))[1](seeds))

    return vjp, (*args, *cotangents)


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def check(fun: Callable[..., Any], *args: Any, exact: bool = False, most: int = 9) -> Fragment:
    """Assert that whole and parts agree for every open factor and every number of parts (the ``most`` smallest)."""
    made = fragment(fun, *args)
    check_splits(made, args, [{name: n} for name, size in made.open.items() for n in divisors(size)[1 : most + 1]], exact)
    return made


def check_splits(made: Fragment, args: Any, splits: Sequence[Mapping[str, int]], exact: bool = False) -> None:
    """Assert that whole and parts agree for each of ``splits``: factor -> number of parts."""
    locals_ = [Localizer(made.analysis, {made.leaves[f]: n for f, n in split.items()}).run() for split in splits]
    args = [x if _is_key(x) else np.asarray(x) for x in args]  # cut by numpy: it compiles nothing
    stacks = [_stacked(made.rule, args, split) for split in splits]

    # One program for all: what takes time here is compiling.
    def run(args: Any, operands: Any) -> Any:
        each = [_every_part(local, own, axes) for local, own, (_, axes) in zip(locals_, operands, stacks, strict=True)]
        return evaluate(made.analysis.jaxpr, args), each

    whole, each = jax.jit(run, compiler_options=QUICK)(args, [own for own, _ in stacks])
    for split, results in zip(splits, each, strict=True):
        shown = f"{made.rule} with {dict(split)}"
        for i, (expected, parts) in enumerate(zip(map(_plain, whole), map(_plain, results), strict=True)):
            compare(expected, _join(i, parts, made.rule, split, expected.shape, shown), f"{shown}: result {i}", exact)


def check_both(fun: Callable[..., Any], *args: Any) -> Fragment:
    """`check` the function, and its backward if it has one (in the fewest parts)."""
    made = check(fun, *args)
    if pair := backward(fun, *args):
        check(pair[0], *pair[1], most=1)
    return made


def _every_part(local: core.Jaxpr, operands: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """The results of all parts, stacked: one ``vmap``; bits one part after another, since ``vmap`` may change them."""

    def one(stacked: Sequence[Any]) -> list[Any]:
        rest = iter(stacked)
        return evaluate(local, [x if axis is None else next(rest) for x, axis in zip(operands, axes, strict=True)])

    stacked = [x for x, axis in zip(operands, axes, strict=True) if axis is not None]
    draws = any("random" in e.primitive.name or "threefry" in e.primitive.name for e in local.eqns)
    return lax.map(one, stacked) if draws else jax.vmap(one)(stacked)


def _stacked(rule: Rule, args: Any, parts: Mapping[str, int]) -> tuple[list[Any], tuple[int | None, ...]]:
    """The operands of all parts, stacked where they differ, then the parts' indices; and what is stacked."""
    places = list(itertools.product(*map(range, parts.values())))
    operands, axes = [], []
    for index, (x, dims) in enumerate(zip(args, rule.operands, strict=True)):
        if parts.keys() & {name for names in dims for name in names}:
            halos = {d: (f, halo) for (f, i, d), halo in rule.halos.items() if i == index and f in parts}
            own = [_cut(x, dims, rule, parts, dict(zip(parts, place, strict=True)), halos) for place in places]
            operands.append(jnp.stack(own) if _is_key(x) else np.stack(own))
            axes.append(0)
        else:
            operands.append(x)
            axes.append(None)
    index = [np.array(column, np.int32) for column in zip(*places, strict=True)]
    return [*operands, *index], (*axes, *(0 for _ in index))


def _cut(
    x: Any,
    dims: TensorFactors,
    rule: Rule,
    parts: Mapping[str, int],
    place: Mapping[str, int],
    halos: Mapping[int, tuple[str, Halo]],
) -> Any:
    """One part of an operand: its dims refined, cut at its factors, flattened again; and the rows of its halos."""
    if halos:
        (dim, (name, halo)), *rest = halos.items()
        assert dims[dim][0] == name, f"{name} is not the major factor of {dims[dim]}, so its parts have no neighbours"
        width, own = [(0, 0)] * x.ndim, x.shape[dim] // parts[name]
        width[dim] = (halo.before, halo.after)
        start = place[name] * own
        rows = np.take(np.pad(x, width), range(start, start + own + halo.before + halo.after), dim)
        less = tuple(() if d == dim else names for d, names in enumerate(dims))
        return _cut(rows, less, rule, parts, place, dict(rest))
    refined, where, local = [], [], []
    for names, size in zip(dims, x.shape, strict=True):
        sizes = [rule.factors[n].size for n in names] or [size]
        names = names or ("",)
        assert math.prod(sizes) == size, f"{names} do not make a dim of {size}"
        refined += sizes
        own = [s // parts.get(n, 1) for n, s in zip(names, sizes, strict=True)]
        where += [slice(o * place.get(n, 0), o * (place.get(n, 0) + 1)) for n, o in zip(names, own, strict=True)]
        local.append(math.prod(own))
    return x.reshape(refined)[tuple(where)].reshape(local)


def _join(result: int, values: Any, rule: Rule, parts: Mapping[str, int], shape: tuple[int, ...], shown: str) -> Any:
    """The whole result from those of all parts."""
    names = [n for dim in rule.results[result] for n in dim]
    local = [rule.factors[n].size // parts.get(n, 1) for n in names]
    assert values[0].size == math.prod(local), f"{shown}: result {result} of a part has shape {values[0].shape}"
    found = [x.reshape(local) for x in values]
    for name, n in reversed(parts.items()):
        found = [_join_one(result, name, found[i : i + n], rule, names, shown) for i in range(0, len(found), n)]
    return found[0].reshape(shape)


def _join_one(result: int, name: str, values: list[Any], rule: Rule, names: list[str], shown: str) -> Any:
    if combiner := rule.shares.get((name, result)):
        assert name not in names, f"{shown}: result {result} is both split along {name} and in shares of it"
        return functools.reduce(COMBINE[combiner], values)
    if name in names:
        return np.concatenate(values, names.index(name))
    for other in values[1:]:
        compare(values[0], other, f"{shown}: result {result} does not carry {name}, so all its parts are equal")
    return values[0]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _plain(x: Any) -> Any:
    """A numpy array; a random key as the bytes of its words."""
    if not _is_key(x):
        return np.asarray(x)
    words = np.ascontiguousarray(jax.random.key_data(x))
    return words.view(np.dtype((np.void, words.shape[-1] * words.itemsize)))[..., 0]


TOLERANCE = {"float64": 1e-11, "complex128": 1e-11, "float32": 2e-5, "complex64": 2e-5, "bfloat16": 4e-2, "float16": 1e-2}


def compare(whole: Any, joined: Any, what: str, exact: bool = False) -> None:
    assert (whole.shape, whole.dtype) == (joined.shape, joined.dtype), what
    if exact or whole.dtype.name not in TOLERANCE:
        equal = np.array_equal(whole, joined, equal_nan=whole.dtype.name in TOLERANCE)
        assert equal, f"{what}\n{whole}\n{joined}"
        return
    wide = complex if whole.dtype.kind == "c" else float
    whole, joined, tolerance = whole.astype(wide), joined.astype(wide), TOLERANCE[whole.dtype.name]
    scale = max(1.0, np.abs(whole[np.isfinite(whole)]).max(initial=0.0))
    np.testing.assert_allclose(joined, whole, rtol=tolerance, atol=tolerance * scale, err_msg=what)
