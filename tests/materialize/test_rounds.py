"""Messages into rounds, on random multigraphs and on the patterns that training makes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jscaler.materialize.rounds import Edge, color_rounds, max_degree


def check(edges: list[Edge]) -> None:
    """Slow and obvious: every message in one round, one port in and one out, no fewer rounds possible."""
    rounds = color_rounds(edges)
    assert sorted(itertools.chain(*rounds)) == list(range(len(edges)))
    for chosen in rounds:
        for side in (0, 1):
            ends = [edges[i][side] for i in chosen]
            assert len(set(ends)) == len(ends), (edges, chosen)
    ends = [(side, edge[side]) for edge in edges for side in (0, 1)]
    assert len(rounds) == max((ends.count(end) for end in ends), default=0) == max_degree(edges)


@pytest.mark.smoke
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40))
def test_random_multigraphs(edges: list[Edge]) -> None:
    check(edges)
    assert color_rounds(edges) == color_rounds(list(edges))


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_patterns(count: int) -> None:
    everyone = list(itertools.product(range(count), range(count)))
    check([(a, b) for a, b in everyone if a != b])  # all-to-all
    check([(a, count + b) for a, b in everyone])  # between two groups
    check([(a, (a + step) % count) for step in (1, count - 1) for a in range(count)] * 3)  # halos, three boxes each
    check([(0, b) for b in range(count)] + [(a, 0) for a in range(count)])  # a star


def test_paths_that_alternate_through_many_devices() -> None:
    """A long ladder whose last rung meets no common free color."""
    ladder = [(i // 2, (i + 1) // 2) for i in range(41)]
    check([*ladder, (20, 0), (0, 20)])
    check([*ladder[::-1], *ladder, (20, 0)])


def test_no_messages() -> None:
    assert color_rounds([]) == ()
