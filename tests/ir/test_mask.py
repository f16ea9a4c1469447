"""Masks against sets of elements: what a box and its shares cover, and where two of them meet."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jscaler.ir import Mask, Share

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


def covered(mask: Mask) -> set[tuple[tuple[int, ...], tuple[int, int]]]:
    """Brute force: every element with every summand of depth two that the mask covers."""
    leaves = [(i, j) for i in (0, 1) for j in (0, 1)]
    path = tuple(s.position for s in mask.shares)
    mine = [leaf for leaf in leaves if leaf[: len(path)] == path]
    return {(element, leaf) for element in mask.elements() for leaf in mine}


@pytest.mark.smoke
@given(boxes(), boxes())
def test_intersection_is_that_of_the_sets(a: Mask, b: Mask) -> None:
    both = a.intersect(b)
    assert (covered(both) if both else set()) == covered(a) & covered(b)
    assert a.overlaps(b) == bool(covered(a) & covered(b))


@given(boxes(), boxes())
def test_intersection_does_not_depend_on_the_order(a: Mask, b: Mask) -> None:
    assert a.intersect(b) == b.intersect(a)


@given(boxes())
def test_size_counts_elements(a: Mask) -> None:
    elements = list(a.elements())
    assert a.size == len(elements) == len(set(elements))
    assert all(0 <= i < math.prod(dim) for element in elements for i, dim in zip(element, SUBDIMS, strict=True))


@given(boxes())
def test_a_mask_meets_itself_and_the_whole(a: Mask) -> None:
    everything = Mask(SUBDIMS, tuple(tuple((0, s) for s in dim) for dim in SUBDIMS))
    assert a.intersect(a) == a
    assert a.intersect(everything) == a


def test_the_picture_in_the_documentation() -> None:
    mask = Mask(((4,), (3, 2)), (((0, 2),), ((0, 3), (1, 2))))
    assert sorted(mask.elements()) == [(row, column) for row in (0, 1) for column in (1, 3, 5)]
    assert str(mask) == "[0:2, 0:3·1:2]"


def test_the_whole_tensor() -> None:
    assert Mask.whole((2, 3)).size == 6
    assert list(Mask.whole(()).elements()) == [()]
    assert Mask.whole(()).overlaps(Mask.whole(()))


def test_two_summands_of_one_element_do_not_depend_on_each_other() -> None:
    first, second = (Mask(((4,),), (((0, 4),),), (Share(i, 2),)) for i in (0, 1))
    assert not first.overlaps(second)
    assert first.overlaps(Mask.whole((4,)))


def test_a_summand_of_a_summand_meets_its_own_parent_only() -> None:
    inner = Mask(((4,),), (((0, 4),),), (Share(1, 2), Share(0, 3)))
    parents = [Mask(((4,),), (((0, 2),),), (Share(i, 2),)) for i in (0, 1)]
    assert [inner.overlaps(p) for p in parents] == [False, True]
    meeting = inner.intersect(parents[1])
    assert meeting is not None
    assert (meeting.shares, meeting.size) == (inner.shares, 2)
    assert str(meeting) == "[0:2] share 1/2 add share 0/3 add"


def test_masks_over_different_refinements_are_an_error_of_ours() -> None:
    with pytest.raises(AssertionError, match="refine first"):
        Mask.whole((6,)).intersect(Mask(((3, 2),), (((0, 3), (0, 2)),)))
