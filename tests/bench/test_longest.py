"""The search finds the last that fits, in few compilations, whatever the curve."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bench.longest import longest


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 60), st.integers(1, 60))
def test_finds_the_last_that_fits(constant: int, linear: int, square: int, last: int, guess: int) -> None:
    def peak(n: int) -> int:
        return constant + linear * n + square * n * n

    found = longest(peak, peak(last), guess)
    assert (found.steps, found.peak) == (last, peak(last))
    assert len(found.seen) <= 9


@given(st.lists(st.integers(0, 1000), min_size=60, max_size=60), st.integers(0, 30000), st.integers(1, 50))
def test_any_rising_curve(rises: list[int], limit: int, guess: int) -> None:
    def peak(n: int) -> int:
        return sum(rises[:n]) + max(0, n - len(rises)) * 10**6

    found = longest(peak, limit, guess)
    assert found.steps == max((n for n in range(61) if peak(n) <= limit and n), default=0)


def test_a_good_guess_takes_two_compilations() -> None:
    assert len(longest(lambda n: 1000 * n * n, 7.5**2 * 1000, guess=7).seen) == 2


@pytest.mark.parametrize("guess", [1, 9])
def test_nothing_fits(guess: int) -> None:
    assert longest(lambda n: 100 + n, 50, guess).steps == 0
