"""The transitions, against the table at the head of the module (OSDI '24, section 4)."""

import pytest
from materialize.layouts import every_layout, mesh_of

from jscaler.materialize import Layout, Transition
from jscaler.materialize.transitions import transitions_from

MESH = mesh_of(4)
WHOLE = 8 * 8 * 4  # bytes
KINDS = {
    "R": Layout(MESH, ((8,), (8,)), ((), ())),
    "V": Layout(MESH, ((8,), (8,)), ((), ()), (("x0", "add"),)),
    "D0": Layout(MESH, ((8,), (8,)), (("x0",), ())),
    "D1": Layout(MESH, ((8,), (8,)), ((), ("x0",))),
}


@pytest.mark.parametrize(
    ("step", "source", "target", "sent"),
    [
        (Transition("all_gather", ("x0",), source=0), "D0", "R", 3 * WHOLE / 4),
        (Transition("all_reduce", ("x0",)), "V", "R", 2 * 3 / 4 * WHOLE),
        (Transition("reduce_scatter", ("x0",), target=0), "V", "D0", 3 / 4 * WHOLE),
        (Transition("all_to_all", ("x0",), source=0, target=1), "D0", "D1", 3 / 4 * WHOLE / 4),
        (Transition("slice", ("x0",), target=1), "R", "D1", 0),
        (Transition("value_mask", ("x0",)), "R", "V", 0),
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
    assert [step.kind for step in transitions_from(KINDS["D0"])] == ["all_gather", "all_to_all"]


def test_every_transition_ends_at_a_layout() -> None:
    """From every layout on 2 × 3 devices: all ends are layouts, and all layouts are ends."""
    layouts = set(every_layout(mesh_of(2, 3), ((6,), (4,)), ("add", "max", "min")))
    ends = {step.apply(layout) for layout in layouts for step in transitions_from(layout)}
    assert ends == layouts


def test_only_a_suffix_of_a_cut_can_leave() -> None:
    layout = Layout(mesh_of(2, 2), ((8,), (8,)), (("x1", "x0"), ()))
    assert {step.axes for step in transitions_from(layout) if step.kind == "all_to_all"} == {("x0",)}
    assert {step.axes for step in transitions_from(layout) if step.kind == "all_gather"} <= {("x0",), ("x1", "x0")}
    with pytest.raises(AssertionError, match="more than a suffix"):
        Transition("all_gather", ("x1",), source=0).apply(layout)


def test_a_new_axis_goes_last() -> None:
    layout = Layout(mesh_of(2, 2), ((8,),), (("x1",),))
    assert Transition("slice", ("x0",), target=0).apply(layout).cuts == (("x1", "x0"),)


def test_what_does_not_divide_is_not_offered() -> None:
    layout = Layout(mesh_of(2, 2), ((6,), (3,)), (("x0",), ()), (("x1", "add"),))  # local parts of 3 × 3
    assert [step.kind for step in transitions_from(layout)] == ["all_reduce", "all_gather"]


def test_maxima_cannot_be_scattered() -> None:
    layout = Layout(mesh_of(2), ((8,),), ((),), (("x0", "max"),))
    assert list(transitions_from(layout)) == [Transition("all_reduce", ("x0",), combiner="max")]


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


def test_str() -> None:
    assert str(Transition("all_reduce", ("x0", "x1"))) == "all_reduce over x0·x1"
