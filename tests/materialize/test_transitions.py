"""The transitions, against the table at the head of the module (OSDI '24, section 4)."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from masks import elements
from materialize.layouts import every_layout, mesh_of
from materialize.oracle import MODELS, price, transitions_from

from jscaler.materialize import Layout, Transition, parse_layout
from jscaler.materialize.transitions import moves, price_of, regions_between

MESH = mesh_of(4)
WHOLE = 8 * 8 * 4  # bytes
KINDS = {
    "R": Layout(MESH, ((8,), (8,)), ((), ())),
    "V": Layout(MESH, ((8,), (8,)), ((), ()), (("x0", "add"),)),
    "M": Layout(MESH, ((8,), (8,)), ((), ()), (("x0", "max"),)),
    "D0": Layout(MESH, ((8,), (8,)), (("x0",), ())),
    "D1": Layout(MESH, ((8,), (8,)), ((), ("x0",))),
}


@pytest.mark.parametrize(
    ("step", "source", "target", "sent"),
    [
        (Transition("all_gather", ("x0",), source=0), "D0", "R", 3 * WHOLE / 4),
        (Transition("all_reduce", ("x0",)), "V", "R", 2 * 3 / 4 * WHOLE),
        (Transition("all_reduce", ("x0",), combiner="max"), "M", "R", 2 * 3 / 4 * WHOLE),
        (Transition("reduce_scatter", ("x0",), target=0), "V", "D0", 3 / 4 * WHOLE),
        (Transition("reduce_scatter", ("x0",), target=1, combiner="max"), "M", "D1", 3 / 4 * WHOLE),
        (Transition("all_to_all", ("x0",), source=0, target=1), "D0", "D1", 3 / 4 * WHOLE / 4),
        (Transition("slice", ("x0",), target=1), "R", "D1", 0),
        (Transition("value_mask", ("x0",)), "R", "V", 0),
        (Transition("value_mask", ("x0",), combiner="max"), "R", "M", 0),
    ],
    ids=lambda x: x.kind if isinstance(x, Transition) else "",
)
def test_the_table(step: Transition, source: str, target: str, sent: float) -> None:
    assert step in transitions_from(KINDS[source])
    assert step.apply(KINDS[source]) == KINDS[target]
    assert step.bytes(KINDS[source], itemsize=4) == sent


def test_which_transitions_each_layout_allows() -> None:
    assert [step.kind for step in transitions_from(KINDS["R"])] == ["slice"] * 2 + ["value_mask"] * 3
    assert [step.kind for step in transitions_from(KINDS["V"])] == ["all_reduce"] + ["reduce_scatter"] * 2
    assert [step.kind for step in transitions_from(KINDS["M"])] == ["all_reduce"] + ["reduce_scatter"] * 2
    assert [step.kind for step in transitions_from(KINDS["D0"])] == ["all_gather", "all_to_all"]


def test_every_transition_ends_at_a_layout() -> None:
    """From every layout on 2 × 3 devices: all ends are layouts, and all layouts are ends."""
    layouts = set(every_layout(mesh_of(2, 3), ((6,), (4,)), ("add", "max", "min")))
    ends = {step.apply(layout) for layout in layouts for step in transitions_from(layout)}
    assert ends == layouts


def test_only_a_suffix_of_a_cut_can_leave() -> None:
    layout = Layout(mesh_of(2, 2), ((8,), (8,)), (("x1", "x0"), ()))
    for kind in ("all_to_all", "all_gather"):
        assert {step.axes for step in transitions_from(layout) if step.kind == kind} == {("x0",), ("x1", "x0")}
    with pytest.raises(AssertionError, match="more than a suffix"):
        Transition("all_gather", ("x1",), source=0).apply(layout)


def test_one_exchange_over_two_axes_sends_less_than_two() -> None:
    layout = Layout(mesh_of(2, 2), ((8,), (8,)), (("x0", "x1"), ()))
    both = Transition("all_to_all", ("x0", "x1"), 0, 1)
    assert both.apply(layout).cuts == ((), ("x0", "x1"))
    assert both.bytes(layout, 4) == 3 / 4 * WHOLE / 4
    one, other = (Transition("all_to_all", (axis,), 0, 1) for axis in ("x1", "x0"))
    assert one.bytes(layout, 4) + other.bytes(one.apply(layout), 4) == WHOLE / 4


def test_a_new_axis_goes_last() -> None:
    layout = Layout(mesh_of(2, 2), ((8,),), (("x1",),))
    assert Transition("slice", ("x0",), target=0).apply(layout).cuts == (("x1", "x0"),)


def test_what_does_not_divide_is_not_offered() -> None:
    layout = Layout(mesh_of(2, 2), ((6,), (3,)), (("x0",), ()), (("x1", "add"),))  # local parts of 3 × 3
    assert [step.kind for step in transitions_from(layout)] == ["all_reduce", "all_gather"]


@pytest.mark.parametrize("combiner", ["add", "max", "min"])
def test_one_reduce_scatter_in_any_order_of_its_axes(combiner: str) -> None:
    layout = Layout(mesh_of(2, 2), ((8,),), ((),), (("x0", combiner), ("x1", combiner)))
    steps = [step for step in transitions_from(layout) if step.kind == "reduce_scatter"]
    assert {step.axes for step in steps} == {("x0",), ("x1",), ("x0", "x1"), ("x1", "x0")}
    for step in steps:
        assert step.combiner == combiner
        assert step.apply(layout).cuts == (step.axes,)
        assert step.bytes(layout, 4) == (1 / 2 if len(step.axes) == 1 else 3 / 4) * 8 * 4


def test_one_reduce_scatter_of_many_axes_in_their_order() -> None:
    """Every order of some of four axes would be 64 steps per dim; those of one axis and of all are five."""
    layout = Layout(mesh_of(2, 2, 2, 2), ((16,),), ((),), tuple((f"x{i}", "add") for i in range(4)))
    axes = {step.axes for step in transitions_from(layout) if step.kind == "reduce_scatter"}
    assert axes == {("x0",), ("x1",), ("x2",), ("x3",), ("x0", "x1", "x2", "x3")}


def test_one_all_reduce_joins_any_of_the_axes() -> None:
    """One collective over several axes sends less than one after another."""
    layout = Layout(mesh_of(2, 3), (), (), (("x0", "add"), ("x1", "add")))
    assert {step.axes for step in transitions_from(layout)} == {("x0",), ("x1",), ("x0", "x1")}
    both = Transition("all_reduce", ("x0", "x1"))
    assert both.apply(layout) == Layout.replicated(layout.mesh, ())
    assert both.bytes(layout, itemsize=4) == 2 * 5 / 6 * 4


def test_one_all_reduce_has_one_combiner() -> None:
    layout = Layout(mesh_of(2, 2), (), (), (("x0", "max"), ("x1", "add")))
    assert all(len(step.axes) == 1 for step in transitions_from(layout))


def test_shares_of_shares_are_joined_from_the_inside() -> None:
    """A maximum of sums is not the sum of maxima: the inner shares first."""
    layout = Layout(mesh_of(2, 2), ((4,),), ((),), (("x0", "max"), ("x1", "add")))
    assert {step.axes for step in transitions_from(layout) if step.kind in ("all_reduce", "reduce_scatter")} == {("x1",)}


def test_shares_are_made_outside_of_those_that_lie_inside() -> None:
    """Shares along x0 nest outside those along x1, so they can be made afterwards only where one joining does both."""
    layout = Layout(mesh_of(2, 2), ((4,),), ((),), (("x1", "add"),))
    masks = [step for step in transitions_from(layout) if step.kind == "value_mask"]
    assert masks == [Transition("value_mask", ("x0",))]
    assert masks[0].apply(layout).values == (("x0", "add"), ("x1", "add"))
    inner = Layout(mesh_of(2, 2), ((4,),), ((),), (("x0", "add"),))
    masks = [step for step in transitions_from(inner) if step.kind == "value_mask"]
    assert [step.apply(inner).values[-1] for step in masks] == [("x1", c) for c in ("add", "max", "min")]


# Permutes and point-to-point exchanges


@st.composite
def permutes(draw: Any) -> tuple[Layout, Layout]:
    """Two layouts of equal parts and equal shares in any two device orders."""
    num_devices, counts = draw(
        st.sampled_from(
            [
                (4, "R2 V1 D(2,1)"), (4, "R1 V2 D(1,2)"), (4, "R1 V1 D(4,1)"), (4, "R2 V2max D(1,1)"), (6, "R3 V1 D(2,1)"),
                (6, "R1 V3 D(1,2)"), (6, "R6 V1 D(1,1)"), (6, "R1 V6 D(1,1)"), (8, "R2 V2 D(1,2)"), (8, "R4 V1 D(2,1)"),
                (8, "R1 V2·2max D(2,1)"), (8, "R1 V1 D(2,4)"),
            ]
        )
    )  # fmt: skip
    orders = [draw(st.permutations(range(num_devices))) for _ in range(2)]
    before, after = (parse_layout(f"{counts} on [{' '.join(map(str, order))}]", (4, 4)) for order in orders)
    return before, after


def held(layout: Layout) -> dict[int, int]:
    return dict(zip(layout.mesh.devices, layout.blocks().tolist(), strict=True))


@given(permutes())
def test_every_receiver_gets_what_it_needs_and_nobody_else_receives(pair: tuple[Layout, Layout]) -> None:
    before, after = pair
    pairs = moves(before, after)
    senders, receivers = pairs[:, 0].tolist(), pairs[:, 1].tolist()
    has, wants = held(before), held(after)
    assert len(set(senders)) == len(senders)
    assert len(set(receivers)) == len(receivers)
    assert all(has[a] == wants[b] for a, b in pairs.tolist())
    assert set(receivers) == {d for d in has if has[d] != wants[d]}, "who has what it needs, keeps it"
    for device, position in zip(before.mesh.devices, range(len(before.mesh.devices)), strict=True):
        mine, needed = before.mask(position), after.mask(after.mesh.devices.index(device))
        assert (mine == needed) == (has[device] == wants[device])
    step = Transition("permute", to=after)
    assert step.apply(before) == after
    assert step.bytes(before, 4) == 4 * np.prod(before.local_shape) * len(pairs) / len(has)
    assert not len(moves(before, before))


def test_a_permute_needs_equal_parts() -> None:
    with pytest.raises(AssertionError, match="do not have the same parts"):
        moves(KINDS["D0"], parse_layout("R2 V1 D(2,1)", (8, 8)))


@pytest.mark.smoke
def test_the_bytes_of_a_point_to_point_exchange_are_what_devices_do_not_hold() -> None:
    layouts = [layout for layout in every_layout(mesh_of(2, 2), ((4,), (8,))) if not layout.values]
    for before, after in itertools.product(layouts, repeat=2):
        step = Transition("point_to_point", to=after)
        masks = [(before.mask(p), after.mask(p)) for p in range(4)]
        missing = sum(len(set(elements(wanted)) - set(elements(had))) for had, wanted in masks)
        assert step.bytes(before, 4) == missing * 4 / 4, f"{before} -> {after}"
        assert step.apply(before) == after


def test_positions_of_a_point_to_point_exchange_are_those_of_the_layout_before() -> None:
    before, after = (parse_layout(f"R1 V1 D(2) on [{order}]", (4,)) for order in ("5 3", "3 5"))
    regions = regions_between(before, after)
    assert sorted(pair for r in regions.rounds for pair in r.pairs) == [(0, 1), (1, 0)]
    assert not regions_between(before, before).rounds


@pytest.mark.parametrize(("cost", "itemsize"), MODELS, ids=str)
def test_prices(cost, itemsize: int) -> None:
    """What a step costs is what its groups and bytes say."""
    for layout in every_layout(mesh_of(2, 3), ((6,), (12,)), ("max",)):
        for step in transitions_from(layout):
            assert price_of(layout, step, itemsize, cost) == pytest.approx(price(step, layout, itemsize, cost))
    before, after = (parse_layout(f"R1 V1 D(4) on [{order}]", (8,)) for order in ("0 1 2 3", "0 3 2 1"))
    step = Transition("permute", to=after)
    assert price_of(before, step, itemsize, cost) == price(step, before, itemsize, cost)
    rounds = Transition("point_to_point", to=after)  # the same two messages, in one round
    assert price_of(before, rounds, itemsize, cost) == pytest.approx(
        price_of(before, step, itemsize, cost) + cost.local_step
    )


def test_str() -> None:
    assert str(Transition("all_reduce", ("x0", "x1"))) == "all_reduce over x0·x1"
    assert str(Transition("permute", to=KINDS["D0"])) == "permute to R1 V1 D(4,1) on [0 1 2 3]"
