"""Whole against parts, for every open factor and every number of parts; see ``verification.whole_against_parts``."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import trace_flat
from jscaler.errors import divisors
from jscaler.verification.whole_against_parts import FragmentInParts, PartsComparison, Split, compare_all


def fragment(fun: Callable[..., Any], *args: Any) -> FragmentInParts:
    """Of a function of arrays to any tree."""
    return FragmentInParts.of(trace_flat(lambda *xs: jax.tree.leaves(fun(*xs)), [jax.typeof(x) for x in args]))


def primitives_in(made: FragmentInParts) -> set[str]:
    return {e.primitive.name for e in made.analysis.jaxpr.eqns}


def why_blocked(made: FragmentInParts, operand: int, dim: int) -> str:
    """Why the one factor of an operand's dim is blocked; empty if it is not."""
    (name,) = made.rule.operands[operand][dim]
    return made.rule.factors[name].reason


def check_splits(
    made: FragmentInParts,
    args: Any,
    splits: Sequence[Split],
    exact: bool = False,
    one_by_one: bool = False,
    part: Callable[[Split], core.Jaxpr] | None = None,
) -> None:
    """Assert that whole and parts agree for each of ``splits``: factor -> number of parts, or their sizes.

    Args:
        part: makes the program of one part; by default ``made.local``.
    """
    programs = [(part or made.local)(split) for split in splits]
    compare_all([PartsComparison(made, args, splits, programs)], exact, one_by_one)


def check_uneven(fun: Callable[..., Any], *args: Any, exact: bool = False) -> FragmentInParts:
    """Assert that whole and parts of unequal sizes agree for every open factor, the function's and its backward's."""
    made = fragment(fun, *args)
    pair = backward(fun, *args)
    for one, given in ((made, args), *(((fragment(pair[0], *pair[1]), pair[1]),) if pair else ())):
        check_splits(one, given, [{name: how} for name, size in one.open.items() for how in uneven(size)], exact)
    return made


def uneven(size: int) -> list[tuple[int, ...]]:
    """Some ways to cut ``size`` into unequal parts: a small one last, and one in the middle."""
    found = [(size - 1, 1), (size - size // 3 - 1, 1, size // 3)]
    return [how for how in found if all(how) and len(set(how)) > 1]


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


def check(fun: Callable[..., Any], *args: Any, exact: bool = False, most: int = 9) -> FragmentInParts:
    """Assert that whole and parts agree for every open factor and every number of parts (the ``most`` smallest)."""
    comparison = _every_split(fragment(fun, *args), args, most)
    compare_all([comparison], exact)
    return comparison.made


def check_both(fun: Callable[..., Any], *args: Any) -> FragmentInParts:
    """`check` the function, and its backward if it has one (in the fewest parts), in one compilation."""
    comparison, pair = _every_split(fragment(fun, *args), args), backward(fun, *args)
    compare_all([comparison, *([_every_split(fragment(pair[0], *pair[1]), pair[1], most=1)] if pair else [])])
    return comparison.made


def _every_split(made: FragmentInParts, args: Sequence[Any], most: int = 9) -> PartsComparison:
    splits: list[Split] = [{name: n} for name, size in made.open.items() for n in divisors(size)[1 : most + 1]]
    return PartsComparison(made, args, splits, [made.local(split) for split in splits])
