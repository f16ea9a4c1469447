"""Irregular redistribution, planning only: symbols instead of numbers show what arrives, how often, and from where."""

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from materialize.holdings import (
    Case,
    box_mask,
    buffers_of,
    busiest,
    bytes_sent,
    cases,
    holdings,
    index_of,
    lower_bound,
    paths_of,
    pieces_of,
    run_in_numpy,
    source_of,
)  # fmt: skip
from of_the_day import drawn

from jscaler.errors import PlanError
from jscaler.ir.mask import Mask, Share
from jscaler.materialize.point_to_point import Holding, PointToPoint, plan_regions

Symbol = frozenset  # of ((path, element), how often)


def plan(case: Case) -> PointToPoint:
    return plan_regions(case.shape, case.held, case.wanted, case.num_devices)


def symbols(holding: Holding, case: Case) -> np.ndarray:
    """What a device holds: per element its path and flat index, once."""
    index = index_of(holding.mask, case.shape)
    found = np.empty(index.shape, object)
    found.flat = [Symbol({((holding.mask.shares, i), 1)}) for i in index.flat]
    return found


def join(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whatever the combiner is: what went into a value, and how often."""
    found = np.empty(a.shape, object)
    counts = [Counter(dict(x or ())) + Counter(dict(y or ())) for x, y in zip(a.flat, b.flat, strict=True)]
    found.flat = [Symbol(count.items()) for count in counts]
    return found


def wanted_symbol(want: tuple[Share, ...], index: int, held: set[tuple[Share, ...]]) -> Symbol:
    """All leaves of the value that the consumer takes, each once; nothing where another position takes the value."""
    path = source_of(want, held)
    if any(share.position for share in want[len(path) :]):
        return Symbol()
    return Symbol({((leaf, index), 1) for leaf in held if leaf[: len(path)] == path and not _has_above(leaf, path, held)})


def _has_above(leaf: tuple[Share, ...], path: tuple[Share, ...], held: set[tuple[Share, ...]]) -> bool:
    return any(leaf[:i] in held for i in range(len(path), len(leaf)))


def nothing(combiner: str) -> Any:
    return Symbol()


def held_symbols(case: Case) -> list[np.ndarray]:
    return buffers_of(case.held, case.num_devices, lambda holding: symbols(holding, case))


@pytest.mark.smoke
@drawn(300)
@given(cases())
def test_every_share_of_every_wanted_element_arrives_once(case: Case) -> None:
    held = paths_of(case)
    ended = run_in_numpy(plan(case), held_symbols(case), nothing, lambda combiner: join)
    for side, buffers in zip(case.wanted, ended, strict=True):
        for holding in side:
            index = index_of(holding.mask, case.shape)
            part = buffers[holding.position][(*map(slice, index.shape), ...)]
            for i, symbol in zip(index.flat, part.flat, strict=True):
                assert symbol == wanted_symbol(holding.mask.shares, i, held[i]), (i, holding)


@drawn(200)
@given(cases())
def test_nothing_held_is_sent_and_nothing_is_sent_twice(case: Case) -> None:
    regions = plan(case)
    has: list[set[Symbol]] = [set(part.flat) for part in held_symbols(case)]

    def watched(move: Any, pieces: dict[int, np.ndarray]) -> None:
        for receiver, piece in pieces.items():
            assert not has[receiver] & set(piece.flat), (receiver, move)
            has[receiver] |= set(piece.flat)

    buffers = [[part.reshape(regions.views[0])] for part in held_symbols(case)]
    for move in regions.rounds:
        if move.source == 0:
            watched(move, pieces_of(buffers, move))


@drawn(200)
@given(cases())
def test_rounds_are_matchings_and_bytes_are_what_is_sent(case: Case) -> None:
    regions = plan(case)
    assert regions == plan(case)
    hash(regions)
    for r in regions.rounds:
        assert all(a != b for a, b in r.pairs)
        for ends in zip(*r.pairs, strict=True):
            assert len(set(ends)) == len(ends)
    bound = lower_bound(case.shape, case.held, case.wanted, case.num_devices, 4)
    assert bound <= bytes_sent(regions, 4) + 1e-9
    if not any(h.mask.shares for side in (case.held, *case.wanted) for h in side):
        assert bytes_sent(regions, 4) == pytest.approx(bound)
    assert bytes_sent(regions, 4) <= busiest(regions, 4) <= bytes_sent(regions, 4) * case.num_devices


@settings(max_examples=100)
@given(st.data())
def test_replicas_share_the_load(data: Any) -> None:
    """Greedy bound: no replica sends more than the mean and one piece."""
    holders, takers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    whole = box_mask((8, 9), (0, 8), (0, 9))
    starts = [(data.draw(st.integers(0, 7)), data.draw(st.integers(0, 8))) for _ in range(takers)]
    wanted = [box_mask((8, 9), (a, data.draw(st.integers(a + 1, 8))), (b, 9)) for a, b in starts]
    regions = plan_regions((8, 9), holdings(*[whole] * holders), [holdings(*wanted, start=holders)], 8)
    sent = [0] * 8
    for move in regions.rounds:
        for sender, _ in move.pairs:
            sent[sender] += move.size
    assert max(sent[:holders]) <= sum(mask.size for mask in wanted) / holders + max(mask.size for mask in wanted)


def test_uneven_parts_with_a_halo() -> None:
    """The picture in the module's docstring."""
    held = holdings(*(box_mask((8,), box) for box in [(0, 3), (3, 6), (6, 8)]))
    wanted = holdings(*(box_mask((8,), box) for box in [(0, 4), (2, 7), (5, 8)]))
    regions = plan_regions((8,), held, [wanted], 3)
    assert regions.shapes == ((3,), (5,))
    assert {r.pairs for r in regions.rounds} == {((0, 1), (1, 2)), ((1, 0), (2, 1))}
    assert len(regions.rounds) == 2
    assert bytes_sent(regions, 4) == pytest.approx(16 / 3)
    assert busiest(regions, 4) == 8
    assert str(regions).splitlines()[0] == "0 fills, 2 copies, 2 rounds on 3 devices"  # copies of 3 rows, and of 2


def test_heads_of_a_flat_qkv_kernel_stay_boxes() -> None:
    """Thirds of q, k and v against thirds of the flat dim: (3, 6) sub-dims, so nine boxes and no runs of single rows."""
    heads = [Mask(((3, 6),), (((0, 3), (2 * d, 2 * d + 2)),)) for d in range(3)]
    flat = [box_mask((18,), (6 * d, 6 * d + 6)) for d in range(3)]
    regions = plan_regions((18,), holdings(*heads), [holdings(*flat)], 3)
    assert regions.views == ((3, 2), (1, 6))
    assert [move.shape for move in regions.rounds] == [(1, 2)] * 2


def test_refinements_without_common_boundaries_become_runs() -> None:
    heads = [Mask(((3, 8),), (((0, 3), (4 * d, 4 * d + 4)),)) for d in range(2)]
    other = [Mask(((4, 6),), (((0, 4), (3 * d, 3 * d + 3)),)) for d in range(2)]
    regions = plan_regions((24,), holdings(*heads), [holdings(*other)], 2)
    assert regions.views == ((12,), (12,))
    assert bytes_sent(regions, 1) == lower_bound((24,), holdings(*heads), [holdings(*other)], 2, 1)


def test_one_message_for_two_consumers() -> None:
    """The second consumer wants more: what both want is sent once, and written to each."""
    held = holdings(box_mask((8,), (0, 8)))
    few, more = (holdings(box_mask((8,), box), start=1) for box in [(2, 4), (2, 8)])
    regions = plan_regions((8,), held, [few, more], 2)
    assert bytes_sent(regions, 1) * 2 == 6
    assert sorted(len(move.writes) for move in regions.rounds) == [1, 2]


def test_a_sum_for_everybody_is_cut_among_them() -> None:
    """An all-reduce: each joins a slab and sends it on; 2 (n - 1) / n of the tensor per device."""
    parts = [box_mask((8, 3), (0, 8), (0, 3), shares=(Share(d, 4),)) for d in range(4)]
    wanted = holdings(*[box_mask((8, 3), (0, 8), (0, 3))] * 4)
    regions = plan_regions((8, 3), holdings(*parts), [wanted], 4)
    assert bytes_sent(regions, 1) == 2 * 3 / 4 * 24 == busiest(regions, 1)
    assert len(regions.rounds) == 6


def test_a_copy_for_everybody_is_spread() -> None:
    """One holder and seven takers: the holder sends a slab to each, and they exchange the slabs."""
    whole = box_mask((7, 4), (0, 7), (0, 4))
    regions = plan_regions((7, 4), holdings(whole), [holdings(*[whole] * 8)], 8)
    assert busiest(regions, 1) == 28
    assert bytes_sent(regions, 1) == 7 * 28 / 8


def test_a_stacked_parameter_by_stages() -> None:
    """Layers 0-4 and 5-6 of a stack on two stages of two devices, to one layer wherever it is wanted."""
    shape = (7, 4, 6)
    held = [box_mask(shape, layers, (0, 4), half) for layers in ((0, 5), (5, 7)) for half in ((0, 3), (3, 6))]
    wanted = [box_mask(shape, (d + 3, d + 4), (0, 4), (0, 6)) for d in range(4)]
    regions = plan_regions(shape, holdings(*held), [holdings(*wanted)], 4)
    assert regions.shapes == ((5, 4, 3), (1, 4, 6))
    assert {move.shape for move in regions.rounds} == {(1, 4, 3)}
    assert bytes_sent(regions, 1) == lower_bound(shape, holdings(*held), [holdings(*wanted)], 4, 1)


def test_elements_that_are_shared_differently() -> None:
    """Rows 0-1 as two summands, rows 1-3 as three: row 1 is summed from two only."""
    pairs = [box_mask((4,), (0, 2), shares=(Share(p, 2),)) for p in range(2)]
    triples = [box_mask((4,), (1, 4), shares=(Share(p, 3),)) for p in range(3)]
    case = Case((4,), holdings(*pairs, *triples), (holdings(box_mask((4,), (0, 4)), start=5),), 6)
    ended = run_in_numpy(plan(case), held_symbols(case), nothing, lambda combiner: join)[0][5]
    two, three = [(Share(p, 2),) for p in range(2)], [(Share(p, 3),) for p in range(3)]
    for row, leaves in enumerate([two, two, three, three]):
        assert ended[row] == Symbol(((leaf, row), 1) for leaf in leaves)


def test_nobody_holds_what_is_wanted() -> None:
    held = holdings(box_mask((8, 8), (0, 4), (0, 4)), box_mask((8, 8), (0, 8), (4, 8)))
    with pytest.raises(PlanError, match=r"device 1 wants \[2:6, 0:8\], but nobody holds \[4:6, 0:4\].*Assign an op"):
        plan_regions((8, 8), held, [holdings(box_mask((8, 8), (2, 6), (0, 8)), start=1)], 2)
    shared = holdings(box_mask((4,), (0, 4), shares=(Share(0, 2),)))
    with pytest.raises(PlanError, match=r"device 1 wants \[0:4\], but nobody holds \[0:4\] \(whole or"):
        plan_regions((4,), shared, [holdings(box_mask((4,), (0, 4)), start=1)], 2)


def test_mixed_combiners_are_reduced_first() -> None:
    paths = [(Share(a, 2), Share(b, 2, "max")) for a in range(2) for b in range(2)]
    held = holdings(*(box_mask((4,), (0, 4), shares=path) for path in paths))
    with pytest.raises(PlanError, match=r"different combiners \(add, max\). Reduce the inner shares first"):
        plan_regions((4,), held, [holdings(box_mask((4,), (0, 4)))], 4)
    inner = [holdings(box_mask((4,), (0, 4), shares=(Share(1, 2),)))]
    assert len(plan_regions((4,), held, inner, 4).rounds) == 2  # (1, 0) and (1, 1) to device 0


def test_nothing_to_do() -> None:
    whole = box_mask((4, 0), (0, 4), (0, 0))
    assert not plan_regions((4, 0), holdings(whole), [holdings(whole, whole)], 2).rounds
    assert plan_regions((4,), (), [()], 2).shapes == ((0,), (0,))
    part = [box_mask((4,), (0, 2)), box_mask((4,), (2, 4))]
    regions = plan_regions((4,), holdings(*part), [holdings(*part)], 2)
    assert (len(regions.rounds), bytes_sent(regions, 4), len(regions.copies)) == (0, 0.0, 1)


@pytest.mark.parametrize("pattern", ["halo", "transpose", "gather"])
def test_planning_64_devices_is_fast(pattern: str) -> None:
    """Generous against a busy machine; the bench measures it."""
    shape, rows, columns = (640, 640), [], []
    for d in range(64):
        low = 0 if pattern != "halo" else 2
        rows.append(box_mask(shape, (10 * d, 10 * d + 10), (0, 640)))
        wide = (max(0, 10 * d - low), min(640, 10 * d + 10 + low))
        columns.append(box_mask(shape, wide, (0, 640)) if pattern == "halo" else box_mask(shape, (0, 640), wide))
    if pattern == "gather":
        columns = [box_mask(shape, (0, 640), (0, 640))] * 64
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        plan_regions(shape, holdings(*rows), [holdings(*columns)], 64)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5
