"""Bytes over time as bars: each the most of its stretch."""

import math

from jscaler.text.bars import bars, stretches


def test_bars_keep_the_fullest_moment_of_each_stretch() -> None:
    assert bars([0, 1, 7, 2, 8, 9], 8, width=3).plain == "▁▇▲"
    assert bars([4], 8).plain == "▄"
    parts = stretches(10, 4)
    assert [i for part in parts for i in part] == list(range(10))
    assert {len(part) for part in parts} <= {math.floor(10 / 4), math.ceil(10 / 4)}
