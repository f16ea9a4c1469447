"""Patterns: shares collapse when all are there, and everything else stays visible."""

import numpy as np
import pytest

from jscaler.ir.mask import Mask, Share
from jscaler.verification.frames import Frame
from jscaler.verification.symbols import Broken, Constant, Leaves, Patterns, Symbolic, compact, joined, spread


def leaf(*shares: tuple[int, int] | tuple[int, int, str]) -> Leaves:
    return Leaves(None, ((tuple(Share(*s) for s in shares), 1),))


WHOLE = leaf()


def fold(combiner: str, *patterns):
    result = patterns[0]
    for pattern in patterns[1:]:
        result = joined(result, pattern, combiner)
    return result


def test_all_shares_are_the_whole_in_any_order() -> None:
    assert fold("add", leaf((1, 3)), leaf((0, 3)), leaf((2, 3))) == WHOLE
    assert fold("max", leaf((1, 2, "max")), leaf((0, 2, "max"))) == WHOLE


def test_nested_shares_collapse_from_either_side() -> None:
    cells = [leaf((i, 2), (j, 2)) for i in range(2) for j in range(2)]
    assert fold("add", *cells) == WHOLE
    assert fold("add", cells[0], cells[2]) != fold("add", cells[0], cells[1]) == leaf((0, 2))
    assert joined(fold("add", cells[0], cells[2]), fold("add", cells[1], cells[3]), "add") == WHOLE


def test_a_sum_of_maxima_joins_from_the_inside() -> None:
    cells = [[leaf((i, 2), (j, 2, "max")) for j in range(2)] for i in range(2)]
    inner = [fold("max", *row) for row in cells]
    assert inner == [leaf((0, 2)), leaf((1, 2))]
    assert fold("add", *inner) == WHOLE
    outer = fold("add", cells[0][0], cells[1][0])
    assert isinstance(outer, Broken)
    assert outer.reason == "the sum of shares of a maximum"


def test_a_summand_twice_is_seen_and_a_maximum_twice_is_not() -> None:
    assert joined(WHOLE, WHOLE, "add") == Leaves("add", (((), 2),))
    assert joined(WHOLE, WHOLE, "max") == WHOLE
    assert joined(WHOLE, leaf((0, 2, "max")), "max") == WHOLE
    assert fold("add", leaf((0, 2)), leaf((0, 2)), leaf((1, 2))) != WHOLE
    assert fold("min", leaf((0, 2, "min")), leaf((0, 2, "min")), leaf((1, 2, "min"))) == WHOLE
    assert fold("add", leaf((0, 2)), leaf((1, 2)), leaf((0, 2)), leaf((1, 2))) == Leaves("add", (((), 2),))


def test_an_incomplete_sum_has_no_maximum() -> None:
    half = fold("add", leaf((0, 3)), leaf((1, 3)))
    assert joined(half, half, "max") == half
    assert joined(half, leaf((2, 3)), "max") == Broken("the maximum of an incomplete sum")


def test_neutral_constants_leave_data_alone_and_others_do_not() -> None:
    zero, nothing = Constant(frozenset({"add"})), Constant(frozenset())
    assert joined(zero, WHOLE, "add") == joined(WHOLE, zero, "add") == WHOLE
    assert isinstance(joined(zero, WHOLE, "max"), Broken)
    assert joined(zero, zero, "add") == zero
    assert joined(zero, nothing, "add") == nothing


@pytest.mark.parametrize(
    ("dtype", "values", "neutral"),
    [
        ("float32", [0, -np.inf, np.inf, np.nan, 1], ["add", "max", "min", "", ""]),
        ("int8", [0, -128, 127, 5], ["add", "max", "min", ""]),
        ("uint8", [0, 255], ["add max", "min"]),
        ("bool", [False, True], ["add max", "min"]),
    ],
)
def test_what_constants_are_neutral_for(dtype: str, values: list, neutral: list[str]) -> None:
    patterns = Patterns((4,))
    cells = patterns.constants(np.array([values], dtype))
    assert (cells.element == -1).all()
    assert [patterns[i] for i in cells.pattern[0]] == [Constant(frozenset(n.split())) for n in neutral]


def test_cells_of_refined_masks_with_padding() -> None:
    """Dim of 6 as (2, 3), the minor cut in two: 2 and 1 of 3."""
    masks = [Mask(((2, 3),), (((0, 2), (0, 2)),)), Mask(((2, 3),), (((0, 2), (2, 3)),))]
    patterns = Patterns((6,))
    by_sub_dim, by_dim = Frame(masks), Frame(masks, packed=True)
    assert patterns.held(by_sub_dim).element.tolist() == [[0, 1, 3, 4], [2, -1, 5, -1]]
    packed = patterns.held(by_dim)
    assert packed.element.tolist() == [[0, 1, 3, 4], [2, 5, -1, -1]]
    assert isinstance(patterns[packed.pattern[1, 3]], Broken)
    assert by_dim.part(packed.element[1], 1).tolist() == [[2], [5]]


def test_a_device_that_holds_nothing() -> None:
    patterns = Patterns((3,))
    cells = patterns.held(Frame([None, Mask.whole((3,))]))
    assert cells.element.tolist() == [[-1] * 3, [0, 1, 2]]
    assert all(isinstance(patterns[i], Broken) for i in cells.pattern[0])


def test_replicas_take_no_memory() -> None:
    cells = Patterns((1000,)).held(Frame([Mask.whole((1000,))] * 64))
    assert [a.size for a in compact(cells.element)] == [1000]
    assert [a.size for a in compact(cells.pattern)] == [64]
    assert spread(np.add, cells.element, cells.element).strides[0] == 0


def test_different_elements_do_not_join() -> None:
    patterns = Patterns((2, 2))
    whole = np.full((1, 2), patterns.whole, np.int32)
    a, b = Symbolic(np.array([[0, 1]]), whole), Symbolic(np.array([[0, 3]]), whole)
    cells = patterns.join(a, b, "max", lambda: "here")
    assert patterns[cells.pattern[0, 0]] == WHOLE
    assert patterns[cells.pattern[0, 1]] == Broken("the maximum of element (0, 1) with element (1, 1), here")


def test_descriptions_name_the_shares_of_the_source() -> None:
    patterns = Patterns((2,))
    leaves = [(Share(0, 2),), (Share(1, 2),)]
    twice = patterns.number(fold("add", leaf((0, 2)), leaf((1, 2)), leaf((0, 2))))
    assert patterns.describe(twice, leaves) == "shares 0 0 1"
    assert patterns.describe(patterns.number(joined(WHOLE, WHOLE, "add")), leaves) == "shares 0 0 1 1"
    assert patterns.describe(patterns.whole, [()]) == "share whole"
    assert patterns.describe(patterns.number(Constant(frozenset({"add"}))), leaves) == "nothing (neutral for add)"
