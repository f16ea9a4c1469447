"""Sub-dims that two shapes share, against counting; and reshapes on parts."""

import itertools
import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from parts import check, check_both, check_uneven

from jscaler.lax_primitives.reshapes import common_refinement, shared_digits


@pytest.mark.parametrize(
    ("a", "b", "pieces", "matched"),
    [
        ((6, 4), (3, 8), [3, 2, 4], True),
        ((2, 3, 4), (24,), [2, 3, 4], True),
        ((4, 9), (6, 6), [2, 3], False),
        ((4, 9), (3, 12), [3], False),
        ((4, 9), (2, 18), [2, 2, 9], True),
        ((3, 5), (5, 3), [], False),
        ((8, 6, 10), (8, 4, 15), [8, 2, 5], False),
        ((6, 15, 2), (10, 18), [2, 3, 2], False),
        ((1, 4, 1), (2, 1, 2), [2, 2], True),
        ((), (1, 1), [], True),
    ],
)
def test_common_refinement(a: tuple[int, ...], b: tuple[int, ...], pieces: list[int], matched: bool) -> None:
    assert common_refinement(a, b) == (pieces, matched)


def shapes(total: int) -> Iterator[tuple[int, ...]]:
    """All shapes of ``total`` elements without dims of size 1."""
    yield from [(total,)] if total > 1 else [()]
    for first in range(2, total):
        if total % first == 0:
            yield from ((first, *rest) for rest in shapes(total // first))


def digits_of(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    ends = [math.prod(sizes[i:]) for i in range(len(sizes) + 1)]
    return list(itertools.pairwise(reversed(ends)))


@pytest.mark.parametrize("total", [12, 24, 36, 60])
def test_shared_digits_lie_inside_a_dim_of_each_side_and_none_is_missed(total: int) -> None:
    """A digit that is no side's own, between neighbours that are shared, has coprime sizes on the two sides."""
    for a, b in itertools.product(shapes(total), repeat=2):
        found = shared_digits(a, b)
        assert all(high <= low for (_, high), (low, _) in itertools.pairwise(found))
        for low, high in found:
            for sizes in (a, b):
                assert any(x <= low and high <= y for x, y in digits_of(sizes)), (a, b, found)
        assert found == shared_digits(b, a)
        gaps = [(x, y) for x, y in itertools.pairwise([1, *(n for d in found for n in d), total]) if (x, y) not in found]
        for low, high in gaps:
            inner = [[n for n in {x for d in digits_of(s) for x in d} if low < n < high] for s in (a, b)]
            assert low == high or all(inner), (a, b, found)
            assert low == high or math.gcd(*(min(i) // low for i in inner)) == 1, (a, b, found)
            assert low == high or math.gcd(*(high // max(i) for i in inner)) == 1, (a, b, found)


@pytest.mark.smoke
def test_what_a_reshape_mixes_leaves_the_batch_alone() -> None:
    made = check_both(lambda x: (x * 2).reshape(4, 4, 15), np.random.default_rng(0).normal(size=(4, 6, 10)))
    assert str(made.rule) == "a (b c) (d e) -> a (b f) (g e)"
    assert made.open == {"a": 4, "b": 2, "e": 5}
    check_uneven(lambda x: x.reshape(4, 4, 15), np.arange(240.0).reshape(4, 6, 10))


def test_unequal_reshapes_of_one_tensor_share_a_divisor() -> None:
    made = check(lambda x: x.reshape(4, 6) + x.reshape(6, 4).T, np.arange(24.0))
    assert made.open == {}
    made = check(lambda x: x.reshape(4, 6).sum(0)[None] + x.reshape(2, 12)[:, :6], np.arange(24.0))
    assert made.open


@pytest.mark.parametrize("target", [(0, 6), (0, 3, 2), (2, 0, 3), (0,), (6, 5, 0)])
def test_empty_tensors(target: tuple[int, ...]) -> None:
    check(
        lambda x, y: jnp.concatenate([y, (2 * x).reshape(target).reshape(0, 6), x[:, 0]]),
        np.ones((0, 1, 6)),
        np.ones((2, 6)),
    )
