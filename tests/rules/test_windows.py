"""How windows slide: the geometry against counting, and what each windowed primitive lets be split."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from parts import check, fragment, why_blocked

from jscaler.ir import Halo
from jscaler.lax_primitives.windows import Sweep, scattered

IMAGE = ("NHWC", "HWIO", "NHWC")


def every_sweep() -> Iterator[Sweep]:
    for size, base, stride, taps, dilation in itertools.product((4, 6, 12), (1, 2), (1, 2, 3), (1, 2, 3, 5), (1, 2)):
        for low, high in itertools.product((-1, 0, 1, 2), repeat=2):
            room = (size - 1) * base + 1 + low + high - (taps - 1) * dilation - 1
            if room >= 0:
                yield Sweep(size, base, room // stride + 1, stride, taps, dilation, low, True)


def rows_read(sweep: Sweep, chosen: range) -> set[int]:
    """The rows that some windows (or taps) read, beyond the border too, by trying all."""
    windows, taps = range(sweep.steps), range(sweep.taps)
    windows, taps = (windows, chosen) if sweep.over_taps else (chosen, taps)
    places = {w * sweep.stride + t * sweep.dilation - sweep.low for w in windows for t in taps}
    return {place // sweep.base for place in places if place % sweep.base == 0}


def test_halos_are_the_rows_that_parts_read() -> None:
    sweeps = [s for s in every_sweep() if s.alike]
    assert len(sweeps) > 80
    assert any(s.over_taps for s in sweeps)
    for sweep in sweeps:
        for parts in (n for n in range(1, sweep.parts + 1) if sweep.parts % n == 0):
            rows, count = sweep.size // parts, sweep.count // parts
            for part in range(parts):
                read = rows_read(sweep, range(part * count, (part + 1) * count))
                extended = range(part * rows - sweep.before, (part + 1) * rows + sweep.after)
                assert read <= set(extended), (sweep, parts, part)
                assert sweep.base > 1 or sweep.stride > 1 or sweep.dilation > 1 or read == set(extended)
            low, high = sweep.padding
            assert low >= 0 <= high
            # the windows of the extended part, with what is left to pad, are as many as the part's own
            length = (rows + sweep.before + sweep.after - 1) * sweep.base + 1 + low + high
            assert length == (count - 1) * sweep.step + sweep.span + 1


def test_a_maximum_s_gradient_looks_at_every_window_that_reads_a_row() -> None:
    sweeps = [s for s in every_sweep() if s.alike and not s.over_taps and s.base == s.dilation == 1 and s.low >= 0]
    assert len(sweeps) > 10
    for sweep in sweeps:
        (before, after), (above, below) = scattered(sweep)
        for parts in (n for n in range(1, sweep.parts + 1) if sweep.parts % n == 0):
            rows, count = sweep.size // parts, sweep.steps // parts
            windows = [
                w for w in range(-9, 99)
                if {w * sweep.stride + t - sweep.low for t in range(sweep.taps)} & set(range(rows))
            ]  # fmt: skip
            assert not windows or (-before, count + after) == (windows[0], windows[-1] + 1), (sweep, parts)
            if windows:
                first, last = (w * sweep.stride - sweep.low for w in (windows[0], windows[-1]))
                assert (-above, rows + below) == (first, last + sweep.taps), (sweep, parts)


def test_padding_decides_whether_parts_are_alike() -> None:
    image, kernel = np.ones((1, 12, 12, 1)), np.ones((3, 3, 1, 1))
    conv = lambda x, k: lax.conv_general_dilated(x, k, (1, 1), ("SAME", "VALID")[0], dimension_numbers=IMAGE)  # noqa: E731
    made = fragment(conv, image, kernel)
    assert made.rule.halos == {("a", 0, 1): Halo(1, 1), ("b", 0, 2): Halo(1, 1)}
    valid = fragment(lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=IMAGE), image, kernel)
    assert "windows of 3 rows and stride 1 make 10 rows of 12" in why_blocked(valid, 0, 1)
    assert "padding 'SAME' on a multiple of the stride" in why_blocked(valid, 0, 1)
    assert "the inside of a window" in why_blocked(valid, 1, 0)
    odd = fragment(lambda x: lax.reduce_window(x, 0.0, lax.add, (3,), (2,), "SAME"), np.ones(7))
    assert "stride 2 make 4 rows of 7" in why_blocked(odd, 0, 0)


@pytest.mark.parametrize(("taps", "stride", "padding", "open_"), [(4, 1, "VALID", {}), (8, 4, "SAME", {"a": 2})])
@pytest.mark.parametrize("kind", ["sum", "max"])
def test_a_window_as_long_as_the_rows_is_no_index(kind: str, taps: int, stride: int, padding: str, open_: Any) -> None:
    """Its taps are a dim of nothing, unlike those of a kernel, whose gradient slides over them."""
    what = (0.0, lax.add) if kind == "sum" else (-jnp.inf, lax.max)
    made = check(lambda x: lax.reduce_window(x, *what, (taps,), (stride,), padding), np.arange(taps) * 1.0)
    assert made.open == open_


def test_rows_of_a_stride_stay_together() -> None:
    """15 windows of stride 2 on 30 rows: what can be cut is the 15."""
    made = fragment(lambda x: lax.reduce_window(x, 0.0, lax.add, (3,), (2,), "SAME"), np.ones(30))
    assert [[made.rule.factors[f].size for f in dim] for dim in made.rule.operands[0]] == [[15, 2]]
    assert made.open == {"a": 15}


def test_windows_side_by_side_have_no_halo() -> None:
    made = fragment(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (2,), "VALID"), np.ones(8))
    assert made.open == {"a": 4}
    assert made.rule.halos == {}


def test_groups_of_features_are_left_alone() -> None:
    image, kernel = np.ones((2, 8, 8, 4)), np.ones((3, 3, 1, 4))
    grouped = lambda x, k: lax.conv_general_dilated(  # noqa: E731
        x, k, (1, 1), "SAME", dimension_numbers=IMAGE, feature_group_count=4
    )
    made = fragment(grouped, image, kernel)
    assert {made.rule.factors[f].size for f in made.open} >= {2, 8}


@pytest.mark.parametrize("kind", ["sum", "max"])
def test_an_inner_part_of_the_rows_has_no_neighbours(kind: str) -> None:
    """(4, 3) rows seen as 12: parts of the 3 do not lie in a row; parts of the 4 do."""
    what = (0.0, lax.add) if kind == "sum" else (-jnp.inf, lax.max)
    made = fragment(lambda x: lax.reduce_window(x.reshape(12), *what, (3,), (1,), "SAME"), np.ones((4, 3)))
    assert made.open == {}
    flat = fragment(lambda x: lax.reduce_window(x, *what, (3,), (1,), "SAME").reshape(4, 3), np.ones(12))
    assert flat.open == {"a": 4}
    assert "do not lie in a row" in next(f.reason for f in flat.rule.factors.values() if f.size == 3)
