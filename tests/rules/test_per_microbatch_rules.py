"""Programs on a part alone: what their results leave as. (Numbers: `tests/plans/test_per_microbatch.py`.)"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jscaler.capture.jaxprs import trace_flat
from jscaler.rules.per_microbatch_rules import Whole, with_own_counts

ROWS, PARTS = 8, 2


def mean(x: Any) -> Any:
    return [x.mean(0)]


def total(x: Any) -> Any:
    return [2 * x.sum(0)]


def two_means(x: Any) -> Any:
    return [x.mean(0) + (x * x).mean(0)]


def loss_behind_statistics(x: Any) -> Any:
    y = (x - x.mean(0)) / x.std(0)
    return [y, jnp.mean(y**4), jnp.sum(y**3)]


def product_of_means(x: Any) -> Any:
    return [x.mean(0) * jnp.abs(x).mean(0)]


def mean_and_sum(x: Any) -> Any:
    return [x.mean(0) + (x * x).sum(0)]


def largest(x: Any) -> Any:
    return [x.max(0), jnp.exp(x.max(0))]


CASES: list[tuple[Callable[..., Any], tuple[Whole, ...]]] = [
    (mean, ("mean",)),
    (total, ("sum",)),
    (two_means, ("mean",)),
    (loss_behind_statistics, ("", "mean", "sum")),
    (product_of_means, ("mean",)),
    (mean_and_sum, ("mixed",)),
    (largest, ("mixed", "mean")),
]


@pytest.mark.parametrize(("fun", "wholes"), CASES, ids=lambda f: getattr(f, "__name__", ""))
def test_what_leaves_as_what(fun: Callable[..., Any], wholes: tuple[Whole, ...]) -> None:
    whole = trace_flat(fun, [jax.ShapeDtypeStruct((ROWS, 3), jnp.float32)])
    made = with_own_counts(whole, (0, 0, 0), PARTS)
    assert made.wholes == wholes
    assert [v.aval for v in made.jaxpr.outvars] == [v.aval for v in whole.outvars], "still at the whole's shapes"


def test_what_a_part_has_for_itself_stays_its_own() -> None:
    jaxpr = trace_flat(
        lambda x, own: [x * own, own * 2.0],
        [jax.ShapeDtypeStruct((ROWS,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)],
    )
    assert with_own_counts(jaxpr, (0, 0, 0), PARTS, {1}).wholes == ("", "mean")
    assert with_own_counts(jaxpr, (0, 0, 0), PARTS).wholes == ("", "")


@pytest.mark.parametrize("features", [6, 7, 8])
def test_a_mean_over_what_was_added_up_last_is_that_mean(features: int) -> None:
    """Not one over the rows, though their number, or that less one, is the same."""

    def mean_of_features(x: Any) -> Any:
        return [jnp.tanh(x.mean(0)), jnp.mean(jnp.sum(x * x, 0))]

    whole = trace_flat(mean_of_features, [jax.ShapeDtypeStruct((ROWS, features), jnp.float32)])
    made = with_own_counts(whole, (0, 0, 0), PARTS).jaxpr
    divisors = [float(e.invars[1].val) for e in made.eqns if e.primitive.name == "div"]
    assert divisors == [ROWS // PARTS, features]
