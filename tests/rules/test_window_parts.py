"""Windowed equations on parts: whole against parts, forward and backward, with the rows around each part."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from parts import check, check_both, check_splits, fragment, primitives_in

from jscaler.ir import Halo

rng = np.random.default_rng(5)
LINE = ("NHC", "HIO", "NHC")
POOL: dict[str, Any] = {
    "max": nn.max_pool,
    "min": lambda x, *how: nn.pool(x, np.inf, lax.min, *how),
    "avg": nn.avg_pool,
}
Fun = Callable[..., Any]


def real(*shape: int) -> np.ndarray:
    return rng.normal(size=shape)


def conv(stride: int = 1, padding: Any = "SAME", **more: Any) -> Fun:
    return lambda x, k: lax.conv_general_dilated(x, k, (stride,), padding, dimension_numbers=LINE, **more)


def pool(kind: str, taps: int, stride: int, padding: Any = "SAME", **more: Any) -> Fun:
    return lambda x: POOL[kind](x, (taps,), (stride,), padding, **more)


CONVS: dict[str, tuple[Fun, int, int]] = {  # function, rows, taps
    "same": (conv(), 6, 3),
    "even window": (conv(), 6, 4),
    "stride": (conv(2), 12, 3),
    "stride larger than the window": (conv(3), 12, 1),
    "a patch": (conv(2, "VALID"), 8, 2),
    "dilated": (conv(rhs_dilation=(2,)), 8, 3),
    "padded on one side": (conv(padding=[(2, 0)]), 6, 3),
    "padded by hand": (lambda x, k: conv(padding="VALID")(jnp.pad(x, [(0, 0), (1, 1), (0, 0)]), k), 6, 3),
    "transposed": (conv(padding=[(2, 1)], lhs_dilation=(2,)), 6, 3),
    "halo larger than a part": (conv(), 6, 7),
    "behind a function that moves zero": (lambda x, k: conv()(jnp.exp(x) + 1, k), 6, 3),
    "behind positions": (lambda x, k: conv()(x + jnp.arange(x.shape[1])[:, None], k), 6, 3),
}
POOLS: dict[str, tuple[Fun, int]] = {
    "max": (pool("max", 3, 1), 6),
    "max with a stride": (pool("max", 3, 2), 8),
    "max of patches": (pool("max", 2, 2), 8),
    "max with gaps": (pool("max", 1, 2), 8),
    "max padded by hand": (pool("max", 3, 2, ((1, 1),)), 8),
    "max behind a function": (lambda x: pool("max", 5, 1)(-jnp.exp(x)), 6),
    "min": (pool("min", 3, 1), 6),
    "average": (pool("avg", 3, 1), 6),
    "average with a stride": (pool("avg", 3, 2), 8),
    "average of what is there": (pool("avg", 3, 1, count_include_pad=False), 6),
    "whole numbers": (lambda x: pool("max", 3, 1)(jnp.floor(8 * x).astype(jnp.int32)), 6),
    "dilated sum": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 1, 1), "SAME", None, (1, 2, 1)), 6),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", CONVS)
def test_convolutions(name: str) -> None:
    fun, rows, taps = CONVS[name]
    sizes = (2, 3, 2) if name == "same" else (1, 2, 1)  # samples, features
    made = check_both(fun, real(sizes[0], rows, sizes[1]), real(taps, *sizes[1:]))
    (index, *_) = made.rule.operands[0][1]
    assert index in made.open


@pytest.mark.smoke
@pytest.mark.parametrize("name", POOLS)
def test_pooling(name: str) -> None:
    fun, rows = POOLS[name]
    made = check_both(fun, real(1, rows, 2))
    (index, *_) = made.rule.operands[0][1]
    assert index in made.open


def test_behind_a_cast_zeros_are_zeros() -> None:
    x, k = (v.astype(np.float32) for v in (real(2, 6, 3), real(3, 3, 2)))
    assert 6 in check_both(lambda x, k: conv()(x.astype(jnp.float64), k), x, k.astype(np.float64)).open.values()


def test_rows_and_columns_at_once() -> None:
    """The corners of a part come from the neighbours across."""

    def net(x: Any, k: Any) -> Any:
        y = lax.conv_general_dilated(jnp.tanh(x), k, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return y * 2

    args = (real(1, 8, 6, 2), real(3, 5, 2, 2))
    made = fragment(net, *args)
    (rows, *_), (columns, *_) = made.rule.operands[0][1:3]
    check_splits(made, args, [{rows: 2, columns: 3}, {rows: 4, columns: 2}])


@pytest.mark.parametrize("taps", [(3, 5), (5, 3)], ids=str)
def test_an_operand_that_two_windows_read_has_the_rows_of_both(taps: tuple[int, int]) -> None:
    made = check_both(lambda x: pool("avg", taps[0], 1)(x) * pool("max", taps[1], 1)(x), real(1, 8, 2))
    (index,) = made.rule.operands[0][1]
    assert index in made.open
    assert made.rule.halos[index, 0, 1] == Halo(2, 2)


GRADIENT = (lambda x, dy: jax.vjp(pool("max", 3, 2), x)[1](dy)[0], (real(1, 8, 2), real(1, 4, 2)))
TANGENTS = (lambda x, dx: jax.jvp(pool("max", 3, 1), (x,), (dx,)), (real(2, 6, 3), real(2, 6, 3)))


def test_tangents_of_a_maximum() -> None:
    made = check(TANGENTS[0], *TANGENTS[1])
    assert "select_and_gather_add" in primitives_in(made)
    assert 6 in made.open.values()


def test_windows_of_windows_wait_for_a_cut() -> None:
    made = fragment(lambda x: pool("avg", 3, 1)(pool("max", 3, 1)(x)), real(2, 6, 3))
    (name,) = made.rule.operands[0][1]
    factor = made.rule.factors[name]
    assert factor.kind == "blocked"
    assert factor.reopens
    assert "what is read through a window is made of other rows" in factor.reason


def test_what_every_part_draws_for_itself_has_no_neighbours() -> None:
    noise = lambda shape: jax.random.normal(jax.random.key(0), shape)  # noqa: E731
    made = fragment(lambda k: conv()(noise((2, 6, 3)), k), real(3, 3, 2))
    (name,) = made.rule.results[0][1]
    assert not made.rule.factors[name].splittable
    made = fragment(lambda x: pool("max", 3, 1)(x + noise(x.shape)), real(2, 6, 3))  # but the sum may be sent
    (name,) = made.rule.operands[0][1]
    assert made.rule.factors[name].reopens
