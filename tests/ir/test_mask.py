"""Masks against sets of elements: what a box covers; and how masks are said."""

import itertools
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given
from masks import elements

from jscaler.ir import Mask, Share
from jscaler.ir.mask import runs

SUBDIMS = ((4,), (3, 2), (1,))


@st.composite
def boxes(draw: st.DrawFn) -> Mask:
    def interval(size: int) -> tuple[int, int]:
        start = draw(st.integers(0, size - 1))
        return start, draw(st.integers(start + 1, size))

    return Mask(SUBDIMS, tuple(tuple(interval(s) for s in dim) for dim in SUBDIMS), draw(share_paths()))


@st.composite
def share_paths(draw: st.DrawFn) -> tuple[Share, ...]:
    """A path in a fixed tree of summands: first two, each of them again in two."""
    depth = draw(st.integers(0, 2))
    return tuple(Share(draw(st.integers(0, 1)), 2) for _ in range(depth))


@pytest.mark.smoke
@given(boxes())
def test_size_counts_elements(a: Mask) -> None:
    found = list(elements(a))
    assert a.size == len(found) == len(set(found))
    assert all(0 <= i < math.prod(dim) for element in found for i, dim in zip(element, SUBDIMS, strict=True))


def test_the_picture_in_the_documentation() -> None:
    mask = Mask(((4,), (3, 2)), (((0, 2),), ((0, 3), (1, 2))))
    assert sorted(elements(mask)) == [(row, column) for row in (0, 1) for column in (1, 3, 5)]
    assert str(mask) == "[0:2, 0:3·1:2]"


@given(boxes())
def test_runs_have_the_elements_in_their_order(a: Mask) -> None:
    """Each as long as it can be where whole sub-dims follow, and all equally long."""
    dims = [[i for start, stop in runs(*dim) for i in range(start, stop)] for dim in zip(a.subdims, a.box, strict=True)]
    assert list(itertools.product(*dims)) == list(elements(a))
    assert all(len({stop - start for start, stop in runs(*dim)}) == 1 for dim in zip(a.subdims, a.box, strict=True))
    assert runs((4, 3, 2), ((1, 3), (0, 3), (0, 2))) == [(6, 18)]
    assert runs((3, 8), ((0, 3), (2, 4))) == [(2, 4), (10, 12), (18, 20)]
    assert runs((3, 8), ((1, 1), (2, 4))) == []


def test_the_whole_tensor() -> None:
    assert Mask.whole((2, 3)).size == 6
    assert list(elements(Mask.whole(()))) == [()]


def test_shares_are_said_from_the_outside() -> None:
    assert str(Mask(((4,),), (((0, 2),),), (Share(1, 2), Share(0, 3)))) == "[0:2] share 1/2 add share 0/3 add"
