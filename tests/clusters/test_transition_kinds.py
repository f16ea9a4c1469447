"""The table of collectives, line by line against what an algorithm that sends message by message would send."""

import pytest

from jscaler.clusters.transition_kinds import COLLECTIVES

MEMBERS = [1, 2, 3, 4, 7, 8, 32]


def ring_bytes(kind: str, n: int, x: int) -> float:
    """What one member sends in the textbook algorithm: blocks around a ring, or one block for each other member."""
    match kind:
        case "all_gather":  # every step passes on one member's whole x
            return sum(x for _ in range(n - 1))
        case "reduce_scatter" | "all_to_all":  # x falls into n blocks; all but the own one are sent
            return sum(x / n for _ in range(n - 1))
        case "all_reduce":  # a reduce-scatter, then an all-gather of the blocks
            return ring_bytes("reduce_scatter", n, x) + ring_bytes("all_gather", n, x // n)
        case "permute" | "point_to_point" | "halo":  # in one round, to one neighbour
            return x if n > 1 else 0
        case _:
            return 0


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("n", MEMBERS)
def test_bytes_are_those_of_the_algorithm(kind: str, n: int) -> None:
    x = 1344  # a multiple of every n
    assert COLLECTIVES[kind].sent(n) * x == pytest.approx(ring_bytes(kind, n, x))


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("all_gather", [0, 1, 2, 2, 3, 3, 5]),
        ("reduce_scatter", [0, 1, 2, 2, 3, 3, 5]),
        ("all_reduce", [0, 2, 4, 4, 6, 6, 10]),
        ("all_to_all", [0, 1, 1, 1, 1, 1, 1]),
        ("slice", [0] * 7),
        ("value_mask", [0] * 7),
    ],
)
def test_steps_are_those_of_a_tree(kind: str, steps: list[int]) -> None:
    assert [COLLECTIVES[kind].steps(n) for n in MEMBERS] == steps


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_what_sends_nothing_takes_no_step(kind: str) -> None:
    for n in MEMBERS:
        assert (COLLECTIVES[kind].sent(n) == 0) == (COLLECTIVES[kind].steps(n) == 0)
