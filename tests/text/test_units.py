"""Counts as people read them."""

from jscaler.text.units import counted


def test_one_has_no_s() -> None:
    assert [counted(n, "block") for n in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]
    assert [counted(n, "leaf", "leaves") for n in (1, 2)] == ["1 leaf", "2 leaves"]
