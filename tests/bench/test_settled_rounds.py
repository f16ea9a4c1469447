"""Rounds of a measurement go on while they find less."""

import pytest

from bench.planning import MOST, _settled


@pytest.mark.parametrize(
    ("seconds", "settled"),
    [
        ([], False),
        ([1.0, 1.0], False),  # too few
        ([1.0, 1.0, 1.0], True),
        ([1.0, 1.0, 0.995], True),  # no less that counts
        ([1.0, 1.0, 0.9], False),  # the last one found less
        ([1.0, 1.0, 0.9, 1.2], True),
        ([1.0 - 0.03 * n for n in range(3 * MOST)], True),  # at most
    ],
)
def test_rounds_go_on_while_they_find_less(seconds: list[float], settled: bool) -> None:
    assert _settled([seconds], 3) == settled
    assert not _settled([seconds, [1.0, 1.0, 0.5]], 3)  # all of them
