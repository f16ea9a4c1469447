"""Adapters: whatever the refinements, sizes and device orders, there is one, and it costs no more than a full copy."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

import pytest
from masks import elements
from materialize.layouts import every_layout, mesh_of
from materialize.oracle import LARGE, MODELS, SMALL, V100, count_layouts, every_count, meaning, price
from of_the_day import of_the_day

from jscaler.clusters import BYTES, CLUSTERS, CostModel, find_cluster
from jscaler.clusters.cost_model import FEW_STEPS
from jscaler.materialize import Adapter, Layout, cheapest_path, find_adapter, opened, parse_layout
from jscaler.materialize.adapter import _through_copy, alternatives
from jscaler.materialize.bounds import bytes_at_least
from jscaler.materialize.layout import on_devices
from jscaler.materialize.transitions import price_of

Blocks = dict[int, frozenset[tuple[int, ...]]]


def blocks(layout: Layout, shape: tuple[int, ...]) -> Blocks:
    """The elements that each device holds; without those that pad the layout's sizes."""
    return {
        device: frozenset(e for e in elements(layout.mask(p)) if all(i < s for i, s in zip(e, shape, strict=True)))
        for p, device in enumerate(layout.mesh.devices)
    }


def check(adapter: Adapter, source: Layout, target: Layout, itemsize: int, cost: CostModel) -> None:
    """Its stages connect source and target, and it costs what its steps cost."""
    assert (adapter.source, adapter.target) == (source, target)
    held, shares, view = blocks(source, source.shape), source.shares, math.prod(source.local_sizes)
    for stage in adapter.stages:
        first, last = stage.layouts[0], stage.layouts[-1]
        assert stage.steps
        assert math.prod(stage.view) == view
        assert all(a <= b for a, b in zip(stage.view, first.local_sizes, strict=True))
        assert all(a <= b for a, b in zip(stage.result, last.local_sizes, strict=True))
        assert (blocks(first, source.shape), first.shares) == (held, shares)
        held, shares, view = blocks(last, source.shape), last.shares, math.prod(stage.result)
    assert (held, shares, view) == (blocks(target, target.shape), target.shares, math.prod(target.local_sizes))
    total = 0.0
    for here, step in adapter.walk:
        exchange = step.kind == "point_to_point"
        total += price_of(here, step, itemsize, cost) if exchange else price(step, here, itemsize, cost)
    assert adapter.cost == pytest.approx(total)


@pytest.mark.parametrize("target", ["R1 V1 D(1,8)", "R8 V1 D(1,1)", "R2 V1 D(1,4)"])
@pytest.mark.parametrize("devices", [range(8, 16), range(15, 7, -1), range(4, 12)])
def test_devices_that_lie_alike_on_hosts_have_one_adapter(target: str, devices: range) -> None:
    """What it takes to plan does not grow with device groups; half on one host and half on the next is not alike."""
    cluster = find_cluster("4x8xV100-32GB")
    numbers = {device: device - 8 for device in devices} if 15 in devices else {}
    source, wanted = (
        parse_layout(f"{text} on [{' '.join(map(str, devices))}]", (64, 64)) for text in ("R1 V2 D(4,1)", target)
    )
    found = find_adapter(source, wanted, 4, cluster)
    check(found, source, wanted, 4, cluster)
    if numbers:
        first, last = on_devices(source, numbers), on_devices(wanted, numbers)
        assert found.on_devices(numbers) == find_adapter(first, last, 4, cluster)


def through_copy(source: Layout, target: Layout, itemsize: int, cost: CostModel) -> float:
    """What gathering all and cutting it again costs, and the local steps that a path's finer axes may take more."""
    return _through_copy(source, target, itemsize, cost).cost * (1 + 1e-9) + 4 * cost.local_step


def uneven(num_devices: int, shape: tuple[int, ...], rng: random.Random | None = None) -> list[Layout]:
    """All counts, whether they divide the sizes or not; cuts of different dims, since those of refined dims must divide."""
    order, found = list(range(num_devices)), []
    for counts in every_count(num_devices, [s * num_devices for s in shape]):
        if rng is not None:
            rng.shuffle(order)
        found.append(parse_layout(f"{counts} on [{' '.join(map(str, order))}]", shape))
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("sizes", of_the_day([(2, 2), (2, 3)], 2), ids=str)
def test_all_pairs_of_different_refinements_connect(sizes: tuple[int, ...]) -> None:
    mesh = mesh_of(*sizes)
    refinements = [((24,), (6,)), ((4, 6), (6,)), ((3, 8), (2, 3)), ((2, 12), (3, 2))]
    layouts = [layout for subdims in refinements for layout in every_layout(mesh, subdims)]
    for source, target in random.Random(0).sample(list(itertools.product(layouts, repeat=2)), 500):
        found = find_adapter(source, target, SMALL)
        check(found, source, target, SMALL, BYTES)
        assert found.cost <= through_copy(source, target, SMALL, BYTES)


@pytest.mark.parametrize(("cost", "itemsize"), of_the_day(MODELS, 2), ids=str)
@pytest.mark.parametrize(("num_devices", "shape"), [(2, (3, 5)), (3, (7,)), (4, (6, 3)), (6, (5,))], ids=str)
def test_sizes_that_do_not_divide(num_devices: int, shape: tuple[int, ...], cost: CostModel, itemsize: int) -> None:
    for source, target in itertools.product(uneven(num_devices, shape), repeat=2):
        found = find_adapter(source, target, itemsize, cost)
        check(found, source, target, itemsize, cost)
        assert found.cost <= through_copy(source, target, itemsize, cost)
        assert found.nothing == (meaning(source) == meaning(target)) or not found.bytes(itemsize)


def test_sizes_that_do_not_divide_in_other_device_orders() -> None:
    rng = random.Random(0)
    for num_devices, shape in ((4, (6, 3)), (6, (7,))):
        layouts = uneven(num_devices, shape, rng)
        for source, target in [rng.choices(layouts, k=2) for _ in range(60)]:
            check(find_adapter(source, target, SMALL), source, target, SMALL, BYTES)


def test_an_uneven_dim_beside_a_refined_one() -> None:
    mesh = mesh_of(2, 2)
    flat = Layout(mesh, ((7,), (24,)), (("x0",), ("x1",)))
    heads = Layout(mesh, ((7,), (4, 6)), (("x1", "x0"), (), ()))
    for source, target in ((flat, heads), (heads, flat)):
        check(find_adapter(source, target, SMALL), source, target, SMALL, BYTES)


def test_one_padding_for_both_sides_keeps_the_collectives() -> None:
    source, target = (parse_layout(text, (5, 8)) for text in ("R1 V1 D(4,1)", "R1 V1 D(1,4)"))
    (stage,) = find_adapter(source, target, SMALL, FEW_STEPS).stages
    assert [step.kind for step in stage.steps] == ["all_to_all"]
    assert (stage.start.shape, stage.view, stage.result) == ((8, 8), (2, 8), (5, 2))


def test_two_paddings_send_pieces() -> None:
    """Blocks of three against blocks of two of the same six rows."""
    source, target = (parse_layout(text, (5,)) for text in ("R2 V1 D(2)", "R1 V1 D(4)"))
    found = find_adapter(source, target, SMALL)
    assert [step.kind for step in found.steps] == ["point_to_point"]
    assert found.bytes(SMALL) == bytes_at_least(source, target, SMALL)


def test_refined_alike_nothing_is_to_do() -> None:
    """A cut of the flat dim is a cut of its major sub-dim: nothing to send, nothing to do."""
    mesh = mesh_of(2, 2)
    flat, heads = Layout(mesh, ((24,),), (("x0", "x1"),)), Layout(mesh, ((4, 6),), (("x0", "x1"), ()))
    for source, target in ((flat, heads), (heads, flat)):
        found = find_adapter(source, target, SMALL)
        assert (found.stages, found.cost, found.nothing, str(found)) == ((), 0.0, True, "nothing")


def test_host_memory_is_a_copy_and_no_step() -> None:
    here = parse_layout("R1 V1 D(2)", (4,))
    there = dataclasses.replace(here, memory="host")
    found = find_adapter(here, there, SMALL)
    assert (found.steps, found.nothing, str(found)) == ((), False, "copy to host")


@pytest.mark.parametrize(("cost", "itemsize"), of_the_day(MODELS, 2), ids=str)
def test_never_above_a_full_copy_nor_above_the_cheapest_path(cost: CostModel, itemsize: int) -> None:
    rng, exchanges = random.Random(1), 0
    layouts = count_layouts(4, (4, 8), rng=rng) + count_layouts(4, (4, 8)) + list(every_layout(mesh_of(2, 2), ((4,), (8,))))
    for source, target in [rng.choices(layouts, k=2) for _ in range(150)]:
        found = find_adapter(source, target, itemsize, cost)
        check(found, source, target, itemsize, cost)
        path = cheapest_path(source, target, itemsize, cost)
        assert found.cost <= min(path.cost * (1 + 1e-9), through_copy(source, target, itemsize, cost))
        assert found.bytes(itemsize) >= bytes_at_least(source, target, itemsize) - 1e-6
        assert cost.floor(bytes_at_least(source, target, itemsize)) <= found.cost * (1 + 1e-9)
        exchanges += any(step.kind == "point_to_point" for step in found.steps)
    assert exchanges or cost is V100


def test_the_cluster_decides() -> None:
    """Across hosts with one slow network, less is sent between them, or in fewer steps."""
    rng, differ = random.Random(2), 0
    layouts = list(every_layout(mesh_of(2, 2), ((4,), (8,))))
    for source, target in [rng.choices(layouts, k=2) for _ in range(60)]:
        by_bytes, by_seconds = find_adapter(source, target, LARGE), find_adapter(source, target, LARGE, V100)
        differ += by_bytes.steps != by_seconds.steps
        seconds = sum(price_of(here, step, LARGE, V100) for here, step in by_bytes.walk)
        assert by_seconds.cost <= seconds * (1 + 1e-9)
    assert differ


@pytest.mark.parametrize(("cost", "itemsize"), [MODELS[0], MODELS[3]], ids=str)
def test_an_open_order_is_decided(cost: CostModel, itemsize: int) -> None:
    for source, layout in itertools.product(every_layout(mesh_of(2, 2), ((4,), (8,))), count_layouts(4, (4, 8))):
        found = find_adapter(source, opened(layout), itemsize, cost)
        assert opened(found.target) == opened(layout)
        check(found, source, found.target, itemsize, cost)


def test_nesting_that_fits_no_mesh_goes_through_the_full_copy() -> None:
    source, target = (parse_layout(f"R1 V2·2max D(1) on [{order}]", (4,)) for order in ("0 1 2 3", "0 2 1 3"))
    found = find_adapter(source, target, SMALL)
    assert [step.kind for step in found.steps] == ["reduce_scatter", "all_reduce", "all_gather", "value_mask", "value_mask"]
    check(found, source, target, SMALL, BYTES)


def pairs() -> Iterator[tuple[Layout, Layout]]:
    rng = random.Random(3)
    layouts = [*every_layout(mesh_of(2, 2), ((4,), (8,))), *uneven(4, (4, 8)), *every_layout(mesh_of(2, 2), ((4,), (4, 2)))]
    for _ in range(100):
        source, target = rng.choices(layouts, k=2)
        yield source, target


@pytest.mark.parametrize(("cost", "itemsize"), [MODELS[0], MODELS[3]], ids=str)
def test_alternatives(cost: CostModel, itemsize: int) -> None:
    seen = 0
    for source, target in pairs():
        best = find_adapter(source, target, itemsize, cost)
        others = alternatives(source, target, itemsize, cost, 3)
        assert len(others) <= 3
        assert all(a.cost <= b.cost for a, b in itertools.pairwise([best, *others]))
        ways = {tuple((step.kind, str(step.apply(here))) for here, step in other.walk) for other in [best, *others]}
        assert len(ways) == len(others) + 1
        for other in others:
            check(other, source, target, itemsize, cost)
        seen += len(others)
    assert seen > 100


def test_alternatives_with_an_open_order() -> None:
    source, target = parse_layout("R1 V1 D(4,1)", (4, 8)), parse_layout("R1 V1 D(2,2)", (4, 8))
    best = find_adapter(source, opened(target), SMALL)
    for other in alternatives(source, opened(target), SMALL, BYTES, 3):
        assert other.cost >= best.cost
        assert opened(other.target) == opened(target)
        check(other, source, other.target, SMALL, BYTES)


@pytest.mark.parametrize("cost", [BYTES, CLUSTERS["h100"]], ids=lambda cost: cost.name)
@pytest.mark.parametrize("devices", [6, 8])
def test_an_open_order_is_never_dearer_than_the_plain_one(devices: int, cost: CostModel) -> None:
    shape = (24, 24)
    splits = [(r, a, b) for r, a, b in itertools.product(range(1, devices + 1), repeat=3) if r * a * b == devices]
    layouts = [parse_layout(f"R{r} V1 D({a},{b})", shape) for r, a, b in splits]
    cheaper = 0
    for source, target in itertools.permutations(layouts, 2):
        free, plain = find_adapter(source, opened(target), 4, cost), find_adapter(source, target, 4, cost)
        assert free.cost <= plain.cost * (1 + 1e-9), f"{source} -> {target}: {free} against {plain}"
        cheaper += free.cost < plain.cost * (1 - 1e-9)
    assert cheaper


def test_itemsize_topology_and_cost_model_are_in_the_key_of_the_cache() -> None:
    """Asked twice in both orders: nothing of the one answer is found in the other."""
    source, target = parse_layout("R1 V1 D(16)", (64,)), parse_layout("R16 V1 D(1)", (64,))
    shuffled = parse_layout("R1 V1 D(16) on [0 8 1 9 2 10 3 11 4 12 5 13 6 14 7 15]", (64,))
    h100 = CLUSTERS["h100"]
    asked = [
        (source, 4, BYTES), (source, 8, BYTES), (source, 4, h100), (source, 4, CLUSTERS["v100-nvlink-ib100"]),
        (source, 4, dataclasses.replace(h100, devices_per_host=4)), (shuffled, 4, BYTES),
    ]  # fmt: skip
    first = [find_adapter(one, target, itemsize, cost) for one, itemsize, cost in asked]
    find_adapter.cache_clear()
    again = [find_adapter(one, target, itemsize, cost) for one, itemsize, cost in reversed(asked)][::-1]
    assert first == again
    assert len({adapter.cost for adapter in first[:4]}) == 4
    assert [stage.start.mesh.devices for stage in first[5].stages] == [shuffled.mesh.devices]
    assert [stage.start.mesh.devices for stage in first[0].stages] == [source.mesh.devices]
