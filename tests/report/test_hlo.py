"""Bytes of collectives, from the three ways in which HLO spells groups."""

import pytest

from jscaler.report.hlo import collectives, totals

TUPLE = "%a = (f32[4,8]{1,0}, bf16[3]{0}) all-reduce(%p, %q), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add"
START = "%s = (f32[4]{0}, f32[32]{0}) all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={0}"
SCATTER = "%r = f32[1,8]{1,0} reduce-scatter(%p), replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}"
PERMUTE = "%c = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}"
EXCHANGE = "%x = (f32[4,2]{1,0}, f32[4,2]{1,0}) all-to-all(%a, %b), replica_groups={{0,1}}"


@pytest.mark.parametrize(
    ("line", "kind", "arrays", "nbytes", "members"),
    [
        (TUPLE, "all-reduce", 2, 4 * 8 * 4 + 3 * 2, 4),
        (START, "all-gather", 1, 32 * 4, 8),
        (SCATTER, "reduce-scatter", 1, 8 * 4 * 4, 4),
        (PERMUTE, "collective-permute", 1, 2 * 4, 2),
        (EXCHANGE, "all-to-all", 1, 2 * 4 * 2 * 4, 2),
    ],
)
def test_one_collective(line: str, kind: str, arrays: int, nbytes: int, members: int) -> None:
    (found,) = collectives(line)
    assert (found.kind, found.arrays, found.nbytes, found.members) == (kind, arrays, nbytes, members)


def test_totals_by_kind_and_nothing_else() -> None:
    text = "\n".join(
        [TUPLE, TUPLE, START, "%g = f32[4]{0} get-tuple-element(%all-reduce), index=0", "%d = f32[] all-reduce-done(%s)"]
    )
    table = totals(text)
    assert list(table) == ["all-reduce", "all-gather"]
    assert (table["all-reduce"].count, table["all-reduce"].arrays) == (2, 4)
