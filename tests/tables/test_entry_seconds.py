"""What an overlapped entry takes, by hand and within its bounds."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jscaler.tables.entry_seconds import Part, entry_seconds, hidden_seconds

SECONDS = st.floats(0, 100)
PARTS = st.lists(st.builds(Part, SECONDS, SECONDS, SECONDS), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("parts", "interference", "seconds"),
    [
        ([Part(6, 3), Part(4, 2)], 1.0, 10),  # all of both hides
        ([Part(6, 3), Part(4, 2)], 1.25, 10 + 5 - 5 / 1.25),  # the arithmetic beside it gets on more slowly
        ([Part(6, 9), Part(4, 2)], 1.0, 10 + 11 - 4 - 2),  # 4 seconds have room behind the other's arithmetic
        ([Part(6, 9), Part(4, 2)], 2.0, 10 + 11 - 4 - 1),  # in which 8 of the 9 are sent
        ([Part(6, 3, 5), Part(4, 2, 1)], 1.0, 10 + 6),  # what is sent in loops hides nowhere
        ([Part(6, 3)], 1.0, 9),  # nothing beside it
        ([Part(0, 3), Part(0, 2)], 1.0, 5),
        ([Part(1, 9), Part(1, 9), Part(1, 9)], 1.0, 27),  # each could hide 2, and there are 3 to hide behind
    ],
)
def test_by_hand(parts: list[Part], interference: float, seconds: float) -> None:
    assert entry_seconds(parts, interference) == pytest.approx(seconds)


@given(PARTS, st.floats(1, 4))
def test_no_more_than_one_after_another_and_no_less_than_all_of_either(parts: list[Part], interference: float) -> None:
    arithmetic, sent = sum(p.arithmetic for p in parts), sum(p.collectives + p.others for p in parts)
    seconds = entry_seconds(parts, interference)
    assert max(arithmetic, sent) <= seconds * (1 + 1e-9) + 1e-9
    assert seconds <= (arithmetic + sent) * (1 + 1e-9)
    assert hidden_seconds(parts, interference) <= hidden_seconds(parts)
