"""Whole against parts: run a fragment's local program on every part, and put the results together again.

This is what a rule promises; `jscaler.verify_rule` takes it at its word.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jscaler.capture.jaxprs import evaluate, inline
from jscaler.errors import VerificationError
from jscaler.ir import Halo, Rule
from jscaler.ir.rule import TensorFactors
from jscaler.rules.analysed import Analysis
from jscaler.rules.analysis import analyse
from jscaler.rules.derive import derive_rule
from jscaler.rules.localize import Localizer
from jscaler.rules.user_rules import user_names

How = int | tuple[int, ...]  # a number of equal parts, or the sizes of unequal ones
Split = Mapping[str, How]

COMBINE = {"add": np.add, "max": np.maximum, "min": np.minimum}
# Compiling is all that these checks spend: the least of it will do.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
TOLERANCE = {"float64": 1e-11, "complex128": 1e-11, "float32": 2e-5, "complex64": 2e-5, "bfloat16": 4e-2, "float16": 1e-2}


@dataclass(frozen=True)
class FragmentInParts:
    """A traced function with its rule, and the leaf atoms of each factor."""

    analysis: Analysis
    rule: Rule
    leaves: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(jaxpr: core.Jaxpr) -> "FragmentInParts":
        analysis = analyse(inline(jaxpr))
        return FragmentInParts(analysis, *derive_rule(analysis, user_names(analysis.jaxpr.eqns, analysis.leaves)))

    @property
    def open(self) -> dict[str, int]:
        """The factors that may be split, with their sizes."""
        return {f.name: f.size for f in self.rule.factors.values() if f.kind != "blocked"}

    def local(self, split: Split) -> core.Jaxpr:
        """The program of one part; it takes the part's index along each factor, last."""
        return Localizer(self.analysis, *self.cuts(split)).run()

    def cuts(self, split: Split) -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
        """``split`` by leaf atoms: the numbers of parts, and the sizes of unequal ones."""
        each = [(leaf, how) for f, how in split.items() for leaf in self.leaves[f]]
        sizes = {leaf: how for leaf, how in each if isinstance(how, tuple)}
        return {leaf: len(how) if isinstance(how, tuple) else how for leaf, how in each}, sizes


def blocks(size: int, how: How) -> tuple[int, ...]:
    """The sizes of the parts of ``size``."""
    return how if isinstance(how, tuple) else (size // how,) * how


@dataclass(frozen=True)
class PartsComparison:
    """A fragment, what to run it on, and the splits to compare with the whole.

    Attributes:
        splits: each is factor -> number of parts, or their sizes, padded with NaN.
        programs: for each split the program of one part, as ``made.local`` gives it.
        what: goes before messages.
    """

    made: FragmentInParts
    args: Sequence[Any]
    splits: Sequence[Split]
    programs: Sequence[core.Jaxpr]
    what: str = ""


def compare_all(comparisons: Sequence[PartsComparison], exact: bool = False, one_by_one: bool = False) -> list[list[float]]:
    """Whole against parts, in one program for all: what takes time here is compiling.

    Args:
        exact: no rounding is allowed.
        one_by_one: run the parts one after another (``lax.map``), for what cannot be batched.

    Returns:
        For each split of each the largest difference of any result, as a fraction of the result's largest element.

    Raises:
        VerificationError: a rule lies: which result of which split, and by how much.
    """
    args = [[x if is_key(x) else np.asarray(x) for x in c.args] for c in comparisons]  # cut by numpy: it compiles nothing
    stacks = [[_stacked(c.made, own, split) for split in c.splits] for c, own in zip(comparisons, args, strict=True)]

    def run(args: Any, operands: Any) -> Any:
        found = []
        for c, own, given, stacked in zip(comparisons, args, operands, stacks, strict=True):
            pairs = zip(c.programs, given, stacked, strict=True)
            each = [_every_part(local, mine, axes, one_by_one) for local, mine, (_, axes) in pairs]
            found.append((evaluate(c.made.analysis.jaxpr, own), each))
        return found

    operands = [[own for own, _ in stacked] for stacked in stacks]
    results = jax.jit(run, compiler_options=QUICK)(args, operands)
    return [_differences(c, whole, each, exact) for c, (whole, each) in zip(comparisons, results, strict=True)]


def _differences(one: PartsComparison, whole: Sequence[Any], each: Sequence[Any], exact: bool) -> list[float]:
    found = []
    for split, results in zip(one.splits, each, strict=True):
        parts_of = ", ".join(f"{f} in {how} parts" for f, how in split.items())
        shown = f"{f'{one.what}: ' if one.what else ''}{one.made.rule} with {parts_of}"
        largest = [0.0]
        for i, (expected, parts) in enumerate(zip(map(_plain, whole), map(_plain, results), strict=True)):
            joined = _join(i, parts, one.made.rule, split, expected.shape, shown)
            largest.append(compare(expected, joined, f"{shown}: result {i}", exact))
        found.append(max(largest))
    return found


def _every_part(local: core.Jaxpr, operands: Sequence[Any], axes: Sequence[int | None], one_by_one: bool) -> list[Any]:
    """The results of all parts, stacked: one ``vmap``; bits one part after another, since ``vmap`` may change them."""

    def one(stacked: Sequence[Any]) -> list[Any]:
        rest = iter(stacked)
        return evaluate(local, [x if axis is None else next(rest) for x, axis in zip(operands, axes, strict=True)])

    stacked = [x for x, axis in zip(operands, axes, strict=True) if axis is not None]
    if not stacked:  # nothing is split
        return [jnp.stack([x]) for x in one([])]
    draws = "random" in (text := str(local)) or "threefry" in text
    return lax.map(one, stacked) if draws or one_by_one else jax.vmap(one)(stacked)


def _stacked(made: FragmentInParts, args: Any, parts: Split) -> tuple[list[Any], tuple[int | None, ...]]:
    """The operands of all parts, stacked where they differ, then the parts' indices; and what is stacked."""
    rule = made.rule
    places = list(itertools.product(*(range(len(blocks(rule.factors[f].size, how))) for f, how in parts.items())))
    operands, axes = [], []
    for number, (x, dims) in enumerate(zip(args, rule.operands, strict=True)):
        if parts.keys() & {name for names in dims for name in names}:
            halos = {d: (f, halo) for (f, i, d), halo in rule.halos.items() if i == number and f in parts}
            own = [_cut(x, dims, rule, parts, dict(zip(parts, place, strict=True)), halos) for place in places]
            operands.append(jnp.stack(own) if is_key(x) else np.stack(own))
            axes.append(0)
        else:
            operands.append(x)
            axes.append(None)
    columns = zip(parts, zip(*places, strict=True), strict=True)
    index = [np.array(column, np.int32) for f, column in columns for _ in made.leaves[f]]
    return [*operands, *index], (*axes, *(0 for _ in index))


def _cut(
    x: Any,
    dims: TensorFactors,
    rule: Rule,
    parts: Split,
    place: Mapping[str, int],
    halos: Mapping[int, tuple[str, Halo]],
) -> Any:
    """One part of an operand: its dims refined, cut, padded with rubbish, flattened again; and the rows of its halos."""
    if halos:
        (dim, (name, halo)), *others = halos.items()
        assert dims[dim][0] == name, f"{name} is not the major factor of {dims[dim]}, so its parts have no neighbours"
        width, own = [(0, 0)] * x.ndim, x.shape[dim] // len(blocks(rule.factors[name].size, parts[name]))
        width[dim] = (halo.before, halo.after)
        start = place[name] * own
        rows = np.take(np.pad(x, width), range(start, start + own + halo.before + halo.after), dim)
        less = tuple(() if d == dim else names for d, names in enumerate(dims))
        return _cut(rows, less, rule, parts, place, dict(others))
    refined, where, local, rest = [], [], [], []
    for names, size in zip(dims, x.shape, strict=True):
        sizes = [rule.factors[n].size for n in names] or [size]
        names = names or ("",)
        assert math.prod(sizes) == size, f"{names} do not make a dim of {size}"
        refined += sizes
        for name, whole in zip(names, sizes, strict=True):
            own, at = blocks(whole, parts.get(name, 1)), place.get(name, 0)
            where.append(slice(sum(own[:at]), sum(own[: at + 1])))
            rest.append((0, max(own) - own[at]))
        local.append(math.prod(max(blocks(s, parts.get(n, 1))) for n, s in zip(names, sizes, strict=True)))
    part = x.reshape(refined)[tuple(where)]
    return (np.pad(part, rest, constant_values=_rubbish(x.dtype)) if any(map(any, rest)) else part).reshape(local)


def _rubbish(dtype: Any) -> Any:
    """What no result may show: it stands in the padding of the smaller parts."""
    return True if dtype.kind == "b" else np.iinfo(dtype).max if dtype.kind in "iu" else np.nan


def _join(result: int, values: Any, rule: Rule, parts: Split, shape: tuple[int, ...], shown: str) -> Any:
    """The whole result from those of all parts."""
    names = [n for dim in rule.results[result] for n in dim]
    local = [max(blocks(rule.factors[n].size, parts.get(n, 1))) for n in names]
    if values[0].size != math.prod(local):
        raise VerificationError(f"{shown}: result {result} of a part has shape {values[0].shape}")
    found = [x.reshape(local) for x in values]
    for name, how in reversed(list(parts.items())):
        own = blocks(rule.factors[name].size, how)
        groups = [found[i : i + len(own)] for i in range(0, len(found), len(own))]
        found = [_join_one(result, name, group, own, rule, names, shown) for group in groups]
    return found[0].reshape(shape)


def _join_one(
    result: int, name: str, values: list[Any], own: tuple[int, ...], rule: Rule, names: list[str], shown: str
) -> Any:
    if combiner := rule.shares.get((name, result)):
        assert name not in names, f"{shown}: result {result} is both split along {name} and in shares of it"
        return functools.reduce(COMBINE[combiner], values)
    if name in names:
        axis = names.index(name)
        return np.concatenate([np.take(x, range(n), axis) for x, n in zip(values, own, strict=True)], axis)
    for other in values[1:]:
        compare(values[0], other, f"{shown}: result {result} does not carry {name}, so all its parts are equal")
    return values[0]


def is_key(x: Any) -> bool:
    """Whether ``x`` is an array of random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _plain(x: Any) -> Any:
    """A numpy array; a random key as the bytes of its words."""
    if not is_key(x):
        return np.asarray(x)
    words = np.ascontiguousarray(jax.random.key_data(x))
    return words.view(np.dtype((np.void, words.shape[-1] * words.itemsize)))[..., 0]


def compare(whole: Any, joined: Any, what: str, exact: bool = False) -> float:
    """The largest difference, as a fraction of the largest element; raises VerificationError where it is too large."""
    if (whole.shape, whole.dtype) != (joined.shape, joined.dtype):
        raise VerificationError(f"{what} is {joined.dtype}{list(joined.shape)}, not {whole.dtype}{list(whole.shape)}")
    if exact or whole.dtype.name not in TOLERANCE:
        if not np.array_equal(whole, joined, equal_nan=whole.dtype.name in TOLERANCE):
            count = np.sum(whole != joined)
            raise VerificationError(f"{what} differs in {count} of {whole.size} elements\n{whole}\n{joined}")
        return 0.0
    wide = complex if whole.dtype.kind == "c" else float
    whole, joined, tolerance = whole.astype(wide), joined.astype(wide), TOLERANCE[whole.dtype.name]
    scale = max(1.0, np.abs(whole[np.isfinite(whole)]).max(initial=0.0))
    with np.errstate(invalid="ignore"):
        off = np.where((whole == joined) | (np.isnan(whole) & np.isnan(joined)), 0.0, np.abs(whole - joined))
        allowed = tolerance * (np.where(np.isfinite(whole), np.abs(whole), 0.0) + scale)
    if not np.all(off <= allowed):
        at = np.unravel_index(int(np.argmax(np.where(np.isnan(off), np.inf, off))), off.shape)
        raise VerificationError(
            f"{what} differs by {off[at]:.3g} at {tuple(map(int, at))}: {joined[at]:.6g} from parts, {whole[at]:.6g} as a "
            f"whole; {tolerance * scale:.3g} is allowed"
        )
    return float(off.max(initial=0.0) / scale)
