"""Collectives in HLO: of lines, of texts that XLA wrote for CUDA, and of programs compiled here."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from report.programs import ALL, FOLDED, MERGED, PROGRAMS, launches

from jscaler.report.hlo import AS_WRITTEN, collectives, totals

TUPLE = "%a = (f32[4,8]{1,0}, bf16[3]{0}) all-reduce(%p, %q), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add"
START = "%s = (f32[4]{0}, f32[32]{0}) all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={0}"
SCATTER = "%r = f32[1,8]{1,0} reduce-scatter(%p), replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}"
PERMUTE = "%c = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}"
EXCHANGE = "%x = (f32[4,2]{1,0}, f32[4,2]{1,0}) all-to-all(%a, %b), replica_groups={{0,1}}"
NESTED = "ROOT %s.1 = ((f32[4]{0}), f32[4]{0}) all-reduce-start(%p), replica_groups=mesh['x'=8] {'x'}, to_apply=%add"
LONG = "%t = (f32[1]{0}, /*index=1*/f32[2]{0}) all-reduce-start(%p, /*index=1*/%q), replica_groups={{0,1}}"


@pytest.mark.parametrize(
    ("line", "kind", "arrays", "nbytes", "members", "sent"),
    [
        (TUPLE, "all-reduce", 2, 4 * 8 * 4 + 3 * 2, 4, 2 * 3 * 134 / 4),
        (START, "all-gather", 1, 32 * 4, 8, 7 * 16),
        (SCATTER, "reduce-scatter", 1, 8 * 4 * 4, 4, 3 * 32),
        (PERMUTE, "collective-permute", 1, 2 * 4, 2, 8),
        (EXCHANGE, "all-to-all", 1, 2 * 4 * 2 * 4, 2, 32),
        (NESTED, "all-reduce", 1, 16, 8, 2 * 7 * 16 / 8),
        (LONG, "all-reduce", 2, 12, 2, 12),
    ],
)
def test_one_collective(line: str, kind: str, arrays: int, nbytes: int, members: int, sent: float) -> None:
    (found,) = collectives(line)
    assert (found.kind, found.arrays, found.nbytes, found.members, found.sent) == (kind, arrays, nbytes, members, sent)


def test_totals_by_kind_and_nothing_else() -> None:
    text = "\n".join(
        [TUPLE, TUPLE, START, "%g = f32[4]{0} get-tuple-element(%all-reduce), index=0", "%d = f32[] all-reduce-done(%s)"]
    )
    table = totals(text)
    assert list(table) == ["all-reduce", "all-gather"]
    assert (table["all-reduce"].count, table["all-reduce"].arrays) == (2, 4)


def stored(path: Path) -> dict[str, str]:
    """Text of each program in a file that ``programs.py`` wrote."""
    _, *blocks = re.split(r"^// (.*)\n", path.read_text(), flags=re.MULTILINE)
    return dict(zip(blocks[::2], blocks[1::2], strict=True))


CUDA = {path.stem: stored(path) for path in sorted((Path(__file__).parent / "hlo").glob("*.txt"))}


@pytest.mark.parametrize("version", CUDA)
@pytest.mark.parametrize("name", PROGRAMS)
def test_text_that_xla_wrote_for_cuda(version: str, name: str) -> None:
    assert launches(CUDA[version][name]) == PROGRAMS[name].launches


@pytest.mark.parametrize("version", CUDA)
@pytest.mark.parametrize("name", MERGED)
def test_neighbours_that_xla_merged_for_cuda(version: str, name: str) -> None:
    (one,) = launches(CUDA[version][name])
    assert one == (MERGED[name].kinds[0], sum(MERGED[name].sent), MERGED[name].members[0])


@pytest.mark.parametrize("name", PROGRAMS | MERGED | FOLDED)
def test_programs_compiled_here(name: str) -> None:
    program = (PROGRAMS | MERGED | FOLDED)[name]
    assert launches(program.compiled(jax.devices(), AS_WRITTEN).as_text()) == program.launches


@pytest.mark.parametrize("name", PROGRAMS | MERGED | FOLDED)
def test_merged_or_not_the_bytes_are_the_same(name: str) -> None:
    program = (PROGRAMS | MERGED | FOLDED)[name]
    found = collectives(program.compiled(jax.devices()).as_text())
    assert {c.kind for c in found} == set(program.kinds)
    assert sum(c.sent for c in found) == sum(program.sent)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (P("x"), P(None, "x"), [("all-to-all", 7 * 64 * 8 * 4 / 8, ALL)]),
        (P("x"), P(), [("all-gather", 7 * 64 * 8 * 4, ALL)]),
        (P(None, "x"), P(None, "x"), []),
    ],
)
def test_what_gspmd_adds(before: P, after: P, expected: list) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    double = jax.jit(lambda a: a * 2, out_shardings=NamedSharding(mesh, after))
    array = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, before))
    assert launches(double.lower(array).compile().as_text()) == expected


def test_a_permute_counts_the_devices_that_send_to_another() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    swap = jax.jit(lambda a: a * 2, out_shardings=NamedSharding(mesh, P(("b", "a"))))
    array = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, P(("a", "b"))))
    (permute,) = collectives(swap.lower(array).compile().as_text())
    moving = {(2, 4), (3, 5), (4, 2), (5, 3)}
    assert set(permute.pairs) == moving | {(i, i) for i in (0, 1, 6, 7)}
    assert permute.sent == 16 * 64 * 4 * 4 / 8
