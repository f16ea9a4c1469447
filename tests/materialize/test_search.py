"""The search finds the cheapest path: against the whole graph of layouts, relaxed until nothing falls."""

import itertools
import random
from collections.abc import Iterable

import pytest
from materialize.layouts import every_layout, mesh_of
from materialize.oracle import (
    LARGE,
    MODELS,
    SMALL,
    V100,
    V100_BY_4,
    Oracle,
    Pair,
    bytes_of,
    count_layouts,
    every_count,
    least_cost,
    meaning,
    price,
)
from of_the_day import of_the_day

from jscaler.clusters import BYTES, CostModel
from jscaler.materialize import Layout, OpenLayout, Path, cheapest_path, opened, parse_layout, runners_up
from jscaler.materialize import search as search_module
from jscaler.materialize.canonical import in_primes, on_common_mesh
from jscaler.materialize.search import _Goal, _Node, _Search
from jscaler.materialize.transitions import State

MESHES = [mesh_of(2, 2), mesh_of(2, 3), mesh_of(2, 2, devices=(3, 1, 0, 2))]
each_model = pytest.mark.parametrize(("cost", "itemsize"), MODELS, ids=str)


def on_meshes(source: Layout, target: Layout) -> Pair:
    """Both layouts on the meshes that the search walks through."""
    return on_common_mesh(source, target) or (in_primes(source), in_primes(target))


def check_path(path: Path, source: Layout, target: Layout | OpenLayout, itemsize: int, cost: CostModel) -> None:
    """It leads from source to target, and costs what its steps cost."""
    layouts = path.layouts
    assert layouts[0] == path.start
    assert meaning(path.start) == meaning(source)
    if isinstance(target, OpenLayout):
        assert opened(layouts[-1]) == target
    else:
        assert meaning(layouts[-1]) == meaning(target)
    walked = list(zip(layouts, path.steps, strict=False))
    assert path.cost == pytest.approx(sum(price(step, here, itemsize, cost) for here, step in walked))
    assert sum(step.kind == "permute" for step in path.steps) <= 1
    assert path.floor == path.cost or path.explored >= search_module.MOST_STATES


def check_optimum(pairs: Iterable[Pair], itemsize: int, cost: CostModel, combiners: tuple[str, ...] = ("add",)) -> None:
    for source, target in pairs:
        path = cheapest_path(source, target, itemsize, cost)
        least = least_cost(*on_meshes(source, target), itemsize, cost, combiners)
        assert path.cost == pytest.approx(least), f"{source} -> {target} by {[str(s) for s in path.steps]}"
        check_path(path, source, target, itemsize, cost)


# Against the exhaustive graph


@pytest.mark.smoke
@each_model
@pytest.mark.parametrize("mesh", of_the_day(MESHES), ids=lambda mesh: f"{mesh.axes[1][1]} {mesh.devices}")
def test_all_axis_assignments(mesh, cost: CostModel, itemsize: int) -> None:
    for subdims in (((12,),), ((6,), (12,))):  # on 2 × 2 devices, a dim of 6 cannot be cut twice
        check_optimum(itertools.product(every_layout(mesh, subdims), repeat=2), itemsize, cost)


@pytest.mark.parametrize(("cost", "itemsize"), of_the_day([MODELS[0], MODELS[3]]), ids=str)
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)], ids=str)
def test_all_axis_assignments_of_three_dims(sizes: tuple[int, ...], cost: CostModel, itemsize: int) -> None:
    layouts = list(every_layout(mesh_of(*sizes), ((6,), (2,), (12,))))
    check_optimum(itertools.product(layouts, repeat=2), itemsize, cost)


@each_model
@pytest.mark.parametrize(
    ("num_devices", "sizes", "combiners"),
    of_the_day(
        [
            (4, (4, 8), ("add",)),
            (4, (2, 6), ("max",)),
            (6, (6,), ("add", "max")),
            (6, (6, 12), ("add",)),
            (6, (6, 4), ("min",)),
        ]
    ),
    ids=str,
)
def test_all_count_layouts(
    num_devices: int, sizes: tuple[int, ...], combiners: tuple[str, ...], cost: CostModel, itemsize: int
) -> None:
    """Among them pairs like R2 D3 -> R3 D2, which no common mesh is regular for."""
    layouts = count_layouts(num_devices, sizes, combiners)
    check_optimum(itertools.product(layouts, repeat=2), itemsize, cost, combiners)


@pytest.mark.parametrize("num_devices", [4, 6])
def test_all_count_layouts_of_three_dims(num_devices: int) -> None:
    check_optimum(itertools.product(count_layouts(num_devices, (6, 12, 12)), repeat=2), SMALL, BYTES)


@pytest.mark.parametrize(("cost", "itemsize"), of_the_day([MODELS[0], MODELS[3]]), ids=str)
@pytest.mark.parametrize(("num_devices", "sizes"), [(4, (4, 8)), (6, (6,))], ids=str)
def test_random_device_orders(num_devices: int, sizes: tuple[int, ...], cost: CostModel, itemsize: int) -> None:
    rng = random.Random(num_devices)
    pairs = [rng.choices(count_layouts(num_devices, sizes, rng=rng), k=2) for _ in range(40)]
    check_optimum([(a, b) for a, b in pairs], itemsize, cost)


@pytest.mark.parametrize(
    ("cost", "itemsize", "count"), of_the_day([(BYTES, SMALL, 100), (V100_BY_4, LARGE, 60)], 2), ids=str
)
def test_a_sample_on_eight_devices(cost: CostModel, itemsize: int, count: int) -> None:
    rng = random.Random(8)
    layouts = list(every_layout(mesh_of(2, 2, 2), ((8,), (8,))))
    check_optimum([tuple(rng.choices(layouts, k=2)) for _ in range(count)], itemsize, cost)
    counts = count_layouts(8, (8, 4))
    check_optimum([tuple(rng.choices(counts, k=2)) for _ in range(count // 2)], itemsize, cost)


@pytest.mark.parametrize("combiners", of_the_day([("max",), ("add", "max", "min")], 2), ids=str)
def test_maxima_and_nested_shares(combiners: tuple[str, ...]) -> None:
    layouts = list(every_layout(mesh_of(2, 2), ((4,),), combiners))
    assert len(combiners) == 1 or any(len(layout.shares) == 2 for layout in layouts)
    check_optimum(itertools.product(layouts, repeat=2), SMALL, BYTES, combiners)
    check_optimum(itertools.product(layouts, repeat=2), LARGE, V100, combiners)


@each_model
@pytest.mark.parametrize(
    ("layouts", "combiners"),
    [
        (list(every_layout(mesh_of(2, 2), ((2,), (4,)), ("add", "max"))), ("add", "max")),
        (count_layouts(6, (6, 4)), ("add",)),
        (count_layouts(8, (8, 8)), ("add",)),
    ],
    ids=["2 x 2", "6 devices, two meshes", "8 devices, two meshes"],
)
def test_estimates_never_say_too_much(
    layouts: list[Layout], combiners: tuple[str, ...], cost: CostModel, itemsize: int
) -> None:
    """For every state of both meshes; no cost of what is left is below its estimate."""
    rng = random.Random(0)
    for source, target in (rng.choices(layouts, k=2) for _ in range(25)):
        first, last = on_meshes(source, target)
        oracle = Oracle.of(first.mesh, last.mesh, first.subdims, itemsize, cost, combiners)
        found = _Search(first, last, _Goal.of(last), itemsize, cost, frozenset())
        goal = oracle.after.index(last)
        for moved, states, rest in ((False, oracle.before, oracle.least), (True, oracle.after, oracle.rest)):
            for layout, true in zip(states, rest[:, goal].tolist(), strict=True):
                estimate = found._rest(_Node(moved, State(layout.cuts, layout.values)))
                assert estimate <= true * (1 + 1e-9), f"{layout} -> {last}: {estimate} > {true}"


# Device orders


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(("cost", "itemsize"), of_the_day([MODELS[0], MODELS[3]], 2), ids=str)
def test_an_open_order_is_the_best_of_all_orders(cost: CostModel, itemsize: int) -> None:
    """Up to local steps: the open search walks through axes of two, which closed targets may see as one."""
    rng = random.Random(0)
    cases = [(s, c, (4,)) for s in every_layout(mesh_of(2, 2), ((4,),)) for c in every_count(4, (4,))]
    wide = list(every_layout(mesh_of(2, 2), ((4,), (8,))))
    cases += [(rng.choice(wide), rng.choice(list(every_count(4, (4, 8)))), (4, 8)) for _ in range(15)]
    for source, counts, shape in cases:
        target = parse_layout(f"{counts} on any", shape)
        path = cheapest_path(source, target, itemsize, cost)
        check_path(path, source, target, itemsize, cost)
        orders = [cheapest_path(source, target.on(o), itemsize, cost).cost for o in itertools.permutations(range(4))]
        assert path.cost <= min(orders) * (1 + 1e-9) + 2 * cost.local_step, f"{source} -> {target}"
        if cost is BYTES:
            assert path.cost >= min(orders) - 1e-9, f"{source} -> {target}"


def test_an_open_order_costs_less_than_a_given_one() -> None:
    source = parse_layout("R1 V1 D(4,1)", (8, 8))
    path = cheapest_path(source, parse_layout("R2 V1 D(2,1) on any", (8, 8)), SMALL)
    assert [step.kind for step in path.steps] == ["all_gather"]
    assert str(path.layouts[-1]) == "R2 V1 D(2,1) on [0 2 1 3]"  # neighbours gather
    given = cheapest_path(source, parse_layout("R2 V1 D(2,1)", (8, 8)), SMALL)
    assert bytes_of(given, SMALL) > bytes_of(path, SMALL)


def test_another_device_order_is_one_permute() -> None:
    source, target = (parse_layout(f"R1 V1 D(4) on [{order}]", (8,)) for order in ("0 1 2 3", "0 3 2 1"))
    (step,) = cheapest_path(source, target, SMALL).steps
    assert step.kind == "permute"
    assert step.bytes(source, SMALL) == 2 / 4 * 2 * SMALL  # two of four devices, two elements each


def test_meshes_without_a_common_refinement() -> None:
    """Cut all, change the order by one permute, gather: half the bytes of a detour through the full copy."""
    source, target = (parse_layout(text, (6,)) for text in ("R2 V1 D(3)", "R3 V1 D(2)"))
    path = cheapest_path(source, target, 4)
    assert [step.kind for step in path.steps] == ["slice", "permute", "all_gather"]
    assert bytes_of(path, 4) < 2 / 3 * 6 * 4


# What single paths look like


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.devices))
def test_no_two_neighbours_could_be_one_collective(mesh) -> None:
    for source, target in itertools.product(every_layout(mesh, ((6,), (12,))), repeat=2):
        path = cheapest_path(source, target, SMALL)
        assert bool(path.steps) == (source != target)
        for first, second in itertools.pairwise(path.steps):
            assert not first.kind == second.kind == "all_reduce", f"{source} -> {target}"
            assert not first.kind == second.kind == "all_gather" or first.source != second.source, f"{source} -> {target}"


def test_gathers_of_one_dim_run_as_one_collective_major_axis_first() -> None:
    mesh = mesh_of(2, 3)
    source = Layout(mesh, ((6,),), (("x1", "x0"),))
    path = cheapest_path(source, Layout.replicated(mesh, (6,)), 4)
    (step,) = path.steps
    assert bytes_of(path, 4) == 5 * 4
    assert source.mesh.groups(("x1", "x0")).tolist() == path.start.mesh.groups(step.axes).tolist()


def test_sums_that_are_wanted_whole_are_not_scattered_first() -> None:
    """One all-reduce over both axes sends no more than scattering and gathering would, and is one step, not two."""
    mesh = mesh_of(2, 2)
    source = Layout(mesh, ((8,), (8,)), ((), ()), (("x0", "add"), ("x1", "add")))
    path = cheapest_path(source, Layout.replicated(mesh, (8, 8)), 4)
    assert [step.kind for step in path.steps] == ["all_reduce"]
    assert bytes_of(path, 4) == 2 * 3 / 4 * 64 * 4


def test_few_steps_where_bytes_cost_little() -> None:
    """Replicas of a small tensor of sums: scattering first sends less, one all-reduce starts less often."""
    source = parse_layout("R2 V2 D(1)", (8,))
    steps = [[s.kind for s in cheapest_path(source, parse_layout("R4 V1 D(1)", (8,)), 4, cost).steps] for cost, _ in MODELS]
    assert steps[1] == ["all_reduce"]


def test_replicas_join_a_reduction_where_that_spares_the_network() -> None:
    """Two rings share the hosts' networks; one ring over all devices, half of them with zeros, crosses each once."""
    source, target = parse_layout("R2 V3 D(1)", (6,)), parse_layout("R1 V1 D(6) on [0 3 1 4 2 5]", (6,))
    assert [s.kind for s in cheapest_path(source, target, LARGE, V100).steps] == ["value_mask", "reduce_scatter"]


def test_an_optimum_that_is_not_proved_says_how_far_off_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = list(every_layout(mesh_of(2, 2, 2), ((8,), (8,))))
    rng, hurried = random.Random(1), 0
    monkeypatch.setattr(search_module, "MOST_STATES", 4)
    for source, target in (rng.choices(layouts, k=2) for _ in range(60)):
        path = cheapest_path.__wrapped__(source, target, LARGE, V100_BY_4)
        least = least_cost(*on_meshes(source, target), LARGE, V100_BY_4)
        assert path.floor <= least * (1 + 1e-9)
        assert least <= path.cost * (1 + 1e-9)
        hurried += path.floor < path.cost
        check_path(path, source, target, LARGE, V100_BY_4)
    assert hurried


@each_model
def test_runners_up(cost: CostModel, itemsize: int) -> None:
    layouts = list(every_layout(mesh_of(2, 2), ((4,), (8,))))
    rng, seen = random.Random(2), 0
    for source, target in (rng.choices(layouts, k=2) for _ in range(60)):
        best = cheapest_path(source, target, itemsize, cost)
        others = runners_up(source, target, itemsize, cost, 3)
        assert len(others) <= 3
        assert len({path.steps for path in [best, *others]}) == 1 + len(others)
        costs = [path.cost for path in [best, *others]]
        assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(costs))
        for path in others:
            check_path(path, source, target, itemsize, cost)
        seen += len(others)
        assert bool(best.steps) or not others
    assert seen > 60


def test_runners_up_with_an_open_order() -> None:
    source, target = parse_layout("R1 V1 D(4,1)", (8, 8)), parse_layout("R2 V1 D(1,2) on any", (8, 8))
    others = runners_up(source, target, SMALL, BYTES, 5)
    assert others
    for path in others:
        check_path(path, source, target, SMALL, BYTES)


def test_nothing_to_do() -> None:
    source = parse_layout("R2 V1 D(2,1)", (8, 8))
    path = cheapest_path(source, source, SMALL)
    assert (path.steps, path.cost, bytes_of(path, SMALL), path.layouts) == ((), 0.0, 0.0, (path.start,))
    assert runners_up(source, source, SMALL, BYTES, 3) == []
    scalar = Layout(mesh_of(2, 2), (), (), (("x0", "add"), ("x1", "add")))
    assert bytes_of(cheapest_path(scalar, Layout.replicated(scalar.mesh, ()), 4), 4) == 2 * 3 / 4 * 4
