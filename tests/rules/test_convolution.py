"""Convolutions: samples, features and groups of features, forward and backward."""

from typing import Any

import numpy as np
import pytest
from jax import lax
from parts import check_both, check_splits

rng = np.random.default_rng(9)
LAYOUT = ("NHWC", "HWIO", "NHWC")


def real(*shape: int) -> np.ndarray:
    return rng.normal(size=shape)


def conv(groups: int, strides: tuple[int, int] = (1, 1), padding: str = "SAME") -> Any:
    def run(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=LAYOUT, feature_group_count=groups)

    return run


CASES: dict[str, tuple[Any, tuple[np.ndarray, np.ndarray], str, str]] = {
    # name: function, operands, rule, its open factors
    "plain": (conv(1), (real(2, 1, 3, 4), real(1, 1, 4, 6)), "a 1 b c, 1 1 c d -> a 1 b d", "abcd"),
    "grouped": (conv(2), (real(2, 1, 3, 8), real(1, 1, 4, 6)), "a 1 b (c d), 1 1 d (c e) -> a 1 b (c e)", "abcde"),
    "depthwise": (conv(4), (real(2, 1, 3, 4), real(1, 1, 1, 4)), "a 1 b c, 1 1 1 c -> a 1 b c", "abc"),
    "two each": (conv(4), (real(2, 1, 1, 4), real(1, 1, 1, 8)), "a 1 1 b, 1 1 1 (b c) -> a 1 1 (b c)", "abc"),
}


@pytest.mark.parametrize("name", CASES)
def test_features_and_groups(name: str) -> None:
    fun, args, rule, factors = CASES[name]
    made = check_both(fun, *args)
    assert (str(made.rule), "".join(made.open)) == (rule, factors)


def test_groups_and_features_of_a_group_at_once() -> None:
    args = (real(2, 2, 2, 8), real(1, 1, 4, 6))
    made = check_both(conv(2), *args)
    (group, inside), out = made.rule.operands[0][3], made.rule.results[0][3][1]
    check_splits(made, args, [{group: 2, inside: 2}, {inside: 4, out: 3}])
