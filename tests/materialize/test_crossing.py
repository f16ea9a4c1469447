"""Crossings between device groups: against all layouts at either end, and numerically, also where groups overlap."""

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from materialize.layouts import assert_lies_as, every_layout, make_parts, mesh_of
from of_the_day import of_the_day

from jscaler.clusters import BYTES, FEW_STEPS, CostModel, find_cluster
from jscaler.errors import PlanError
from jscaler.lower.emit import stacked
from jscaler.materialize import DeviceMesh, Layout, find_adapter, parse_layout
from jscaler.materialize.crossing import Crossing, cheapest_crossings, find_crossing, hop_price
from jscaler.runtime.crossings import CrossingRun

V100 = find_cluster("v100-nvlink-ib100")  # hosts of eight
LARGE, SMALL = 1 << 18, 4


def layouts(sizes: Sequence[int], first: int, shape: Sequence[int]) -> list[Layout]:
    mesh = mesh_of(*sizes, devices=range(first, first + math.prod(sizes)))
    return list(every_layout(mesh, tuple((s,) for s in shape)))


def least(source: Layout, target: Layout, itemsize: int, cost: CostModel, ends: Sequence[Sequence[Layout]]) -> float:
    """Every layout that may leave with every one that may arrive."""
    leaves = [(find_adapter(source, end, itemsize, cost).cost, end) for end in ends[0]]
    arrives = [(find_adapter(end, target, itemsize, cost).cost, end) for end in ends[1]]
    return min(a + b + hop_price(x, y, itemsize, cost) for (a, x), (b, y) in itertools.product(leaves, arrives))


@pytest.mark.parametrize(
    ("sizes", "shape", "at_most"),
    of_the_day(
        [
            (((2, 2), (2, 2)), (8, 16), 1.001),
            (((2, 2), (2,)), (8, 12), 1.02),
            (((2,), (2, 2)), (8, 12), 1.02),
            (((2,), (3,)), (6, 12), 1.001),
            (((3,), (2,)), (6, 12), 1.001),
        ],
        2,
    ),
)
@pytest.mark.parametrize(("cost", "itemsize"), [(BYTES, SMALL), (V100, LARGE)])
def test_no_pair_of_ends_costs_less(
    sizes: Sequence[Sequence[int]], shape: Sequence[int], at_most: float, cost: CostModel, itemsize: int
) -> None:
    """Where groups are unequal, an exchange inside of the larger one may save a round of pieces: up to two percent."""
    ends = layouts(sizes[0], 0, shape), layouts(sizes[1], 8, shape)
    for source, target in random.Random(0).sample(list(itertools.product(*ends)), 10):
        found = find_crossing(source, target, itemsize, cost)
        assert found.cost <= at_most * least(source, target, itemsize, cost, ends), f"{source} -> {target}: {found}"


def crossed(crossing: Crossing) -> None:
    """Random parts, sent across, are what the target's masks say."""
    rng = np.random.default_rng(0)
    whole = rng.integers(-99, 99, crossing.source.shape).astype(np.int32)
    parts = np.stack(make_parts(crossing.source, whole, rng))
    devices = jax.devices()
    here = [devices[d] for d in crossing.source.mesh.devices]
    local = parts.shape[1:] or (1,)
    given = jax.make_array_from_single_device_arrays(
        stacked(len(parts), parts.shape[1:]),
        jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(here), ("x",)), jax.sharding.PartitionSpec("x")),
        [jax.device_put(part.reshape(local), d) for part, d in zip(parts, here, strict=True)],
    )
    came = np.asarray(CrossingRun(crossing, parts.dtype, devices, {})(given))
    shape = len(crossing.target.mesh.devices), *crossing.target.local_shape
    assert_lies_as(crossing.target, list(came.reshape(shape)), whole)


PAIRS = [
    ("R4 V1 D(1,1) on [0-3]", "R4 V1 D(1,1) on [4-7]"),
    ("R1 V4 D(1,1) on [0-3]", "R2 V1 D(1,2) on [7 5 4 6]"),
    ("R1 V1 D(4,1) on [3 1 0 2]", "R1 V1 D(1,3) on [5-7]"),
    ("R1 V2 D(1,3) on [0-5]", "R1 V2 D(1,1) on [6 7]"),
    ("R1 V1 D(1,1) on [2]", "R4 V1 D(1,1) on [4-7]"),
    ("R1 V1 D(3,2) on [0-5]", "R4 V1 D(1,1) on [4-7]"),  # 4 and 5 are in both
    ("R1 V2max D(2,1) on [0-3]", "R1 V1 D(1,5) on [3-7]"),
    ("R2 V1 D(2,1) on [0-3]", "R1 V1 D(4,2) on [0-7]"),  # all of one group is in the other
    ("R1 V1 D(5+2,1) on [0 1]", "R1 V1 D(1,2+8) on [1 2]"),
    ("R1 V1 D(2,2) on [0-3]", "R1 V4 D(1,1) on [4-7]"),
]


@pytest.mark.parametrize(("source", "target"), of_the_day(PAIRS, 2))
def test_it_delivers(source: str, target: str) -> None:
    before, after = (parse_layout(text, (7, 10)) for text in (source, target))
    assert isinstance(before, Layout)
    assert isinstance(after, Layout)
    crossed(find_crossing(before, after, SMALL))


@pytest.mark.parametrize("shape", [(0, 4), (1, 1)])
@pytest.mark.parametrize(
    ("source", "target"),
    [("R2 V1 D(1,1) on [0 1]", "R1 V3 D(1,1) on [1-3]"), ("R2 V1 D(1,1) on [0 1]", "R2 V1 D(1,1) on [1 0]")],
)
def test_it_delivers_next_to_nothing(shape: Sequence[int], source: str, target: str) -> None:
    before, after = (parse_layout(text, shape) for text in (source, target))
    crossed(find_crossing(before, after, SMALL))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "target", "each"),
    [
        ("R2 V1 D(1,1) on [0 1]", "R2 V1 D(1,1) on [4 5]", True),
        ("R1 V1 D(1,2) on [0 1]", "R1 V1 D(1,2) on [5 4]", True),
        ("R1 V1 D(1,1) on [0]", "R1 V2 D(1,1) on [4 5]", False),  # 5 has zeros of its own
        ("R1 V1 D(1,2) on [0 1]", "R1 V1 D(2,1) on [4 5]", False),
    ],
)
def test_parts_go_as_they_are_if_each_consumer_gets_one(source: str, target: str, each: bool) -> None:
    before, after = (parse_layout(text, (4, 6)) for text in (source, target))
    assert find_crossing(before, after, SMALL).is_equal is each  # type: ignore[arg-type]


def test_a_scalar_crosses() -> None:
    before, after = (Layout(mesh_of(2, devices=range(at, at + 2)), (), (), (), ()) for at in (0, 3))
    crossed(find_crossing(dataclasses.replace(before, values=(("x0", "add"),)), after, SMALL))


@pytest.mark.parametrize("cost", [BYTES, V100])
def test_how_finely_a_mesh_is_written_is_no_matter(cost: CostModel) -> None:
    """Sixteen devices with sixteen replicas are one axis of 16, or four of 2: the same ends are tried, and not 3^4."""
    ends = [
        [Layout(mesh_of(*sizes, devices=range(at, at + 16)), ((32,), (64,)), ((), ())) for at in (0, 16)]
        for sizes in ((16,), (2, 2, 2, 2))
    ]
    coarse, fine = (find_crossing(*pair, SMALL, cost) for pair in ends)
    assert coarse.cost == fine.cost


@pytest.mark.parametrize(
    "places", [([8, 9, 16, 17], [0, 1, 2, 3]), ([5, 4, 12, 13], [12, 13, 14, 31]), ([1, 2, 3, 4], [5, 6, 24, 7])]
)
def test_only_hosts_say_what_a_crossing_costs(places: tuple[Sequence[int], Sequence[int]]) -> None:
    """The search is made once for devices that stand to one another alike, overlapping groups too."""
    here, there = places
    swapped = {device: (3 - device // 8) * 8 + 7 - device % 8 for device in range(32)}  # hosts, and devices of each
    for source, target in [("R1 V2 D(2,1)", "R4 V1 D(1,1)"), ("R2 V1 D(2,1)", "R1 V1 D(1,4)")]:
        found = [
            find_crossing(
                parse_layout(f"{source} on [{' '.join(str(number(d)) for d in here)}]", (8, 16)),
                parse_layout(f"{target} on [{' '.join(str(number(d)) for d in there)}]", (8, 16)),
                LARGE, V100,
            )
            for number in (int, swapped.__getitem__)
        ]  # fmt: skip
        assert found[0].cost == found[1].cost
        assert str(found[0]) == str(found[1])
        assert found[1].source.mesh.devices == tuple(map(swapped.__getitem__, here))
        bare = (cheapest_crossings(one.source, one.target, LARGE, V100)[0].cost for one in found)
        assert all(cost == found[0].cost for cost in bare)


def test_dims_smaller_than_the_group_are_cut_together() -> None:
    before, after = (Layout(mesh_of(8, devices=range(at, at + 8)), ((4,), (4,)), ((), ())) for at in (0, 8))
    assert find_crossing(before, after, SMALL).sent == 16
    assert find_crossing(before, after, LARGE, V100).sent == 16


def test_runners_up_are_other_crossings_in_the_order_of_their_cost() -> None:
    before, after = (parse_layout(text, (12, 12)) for text in ("R1 V2 D(2,1) on [0-3]", "R3 V1 D(1,1) on [4-6]"))
    found = cheapest_crossings(before, after, SMALL, V100, 4)  # type: ignore[arg-type]
    assert found[0] == find_crossing(before, after, SMALL, V100)  # type: ignore[arg-type]
    assert len({(c.leave.target, c.arrive.source) for c in found}) == 4
    assert [c.cost for c in found] == sorted(c.cost for c in found)


def test_replicas_are_made_behind_the_hop() -> None:
    before, after = (parse_layout(f"R4 V1 D(1,1) on [{d}]", (8, 8)) for d in ("0-3", "8-11"))
    found = find_crossing(before, after, LARGE, V100)  # type: ignore[arg-type]
    assert found.sent == 64
    assert len(found.hop.rounds) == 1
    assert {a for a, _ in found.hop.rounds[0].pairs} == {0, 1, 2, 3}  # each sends a part
    assert [step.kind for step in found.arrive.steps] == ["all_gather"]


def test_shares_are_joined_before_they_leave() -> None:
    before, after = (parse_layout(text, (8, 8)) for text in ("R1 V4 D(1,1) on [0-3]", "R1 V1 D(4,1) on [8-11]"))
    found = find_crossing(before, after, LARGE, V100)  # type: ignore[arg-type]
    assert (found.sent, found.is_equal) == (64, True)
    assert [step.kind for step in found.leave.steps] == ["reduce_scatter"]


def test_what_lies_there_does_not_move() -> None:
    before, after = (parse_layout(text, (8, 8)) for text in ("R1 V1 D(4,1) on [0-3]", "R1 V1 D(2,1) on [0 4]"))
    found = find_crossing(before, after, LARGE, V100)  # type: ignore[arg-type]
    assert found.sent == 64 - 16


def test_another_shape_is_refused() -> None:
    before, after = (parse_layout("R1 V1 D(2,1)", shape) for shape in ((8, 8), (8, 4)))
    with pytest.raises(PlanError, match=r"is of shape \(8, 8\) and .* of shape \(8, 4\); a layout changes no shape"):
        find_crossing(before, after, SMALL)  # type: ignore[arg-type]


@pytest.mark.parametrize("turned", [False, True])
def test_unequal_parts_of_a_minor_subdim_cross_to_other_subdims(turned: bool) -> None:
    """Each is padded inside of the dim: rows 0 and 4 of 8 = 2 · 4 stand two apart in a part that has one of four."""
    mesh = DeviceMesh((5, 0, 2, 1, 3, 4), (("s", 3), ("r", 2)))
    unequal = Layout(mesh, ((2, 4), (4,), (8,)), ((), ("s",), (), ()), uneven=((1, (2, 1, 1)),))
    equal = Layout(DeviceMesh((2, 3, 5, 1), (("a", 4),)), ((8,), (4,), (8,)), (("a",), (), ()))
    crossed(find_crossing(*((equal, unequal) if turned else (unequal, equal)), 8, FEW_STEPS))
