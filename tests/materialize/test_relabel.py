"""Which axes may stand in the place of which: against all layouts of the mesh."""

import random

import pytest
from materialize.layouts import every_layout, mesh_of

from jscaler.materialize import DeviceMesh, Layout, parse_layout
from jscaler.materialize.relabel import MOST_AXES, MOST_SUFFIXES, relabelings
from jscaler.materialize.transitions import State, moves, steps_from


def parts_of(layout: Layout) -> tuple[int, ...]:
    return tuple(layout.mesh.size(axes) for axes in layout.cuts)


@pytest.mark.parametrize(
    "mesh", [mesh_of(2, 2), mesh_of(2, 3), mesh_of(2, 2, 2), mesh_of(4, 2, 3)], ids=lambda m: str(m.axes)
)
def test_all_states_of_equal_parts_and_shares(mesh) -> None:
    combiners = ("add", "max") if len(mesh.axes) < 3 else ("add",)
    size = len(mesh.devices)
    by_counts: dict[tuple, set[State]] = {}
    for layout in every_layout(mesh, ((size,), (size,)), combiners):
        by_counts.setdefault((parts_of(layout), layout.shares), set()).add(State(layout.cuts, layout.values))
    for (parts, shares), states in by_counts.items():
        found = relabelings(mesh, parts, shares, None)
        assert len(found) == len(set(found))
        assert set(found) == states, f"{parts} {shares}"
        assert relabelings(mesh, parts, shares, next(iter(states))) == found, "few axes: the goal does not matter"


def test_every_relabeling_is_one_permute_away() -> None:
    layout = parse_layout("R2 V2 D(1,2)", (4, 4))
    for state in relabelings(layout.mesh, parts_of(layout), layout.shares, None):
        to = Layout(layout.mesh, layout.subdims, state.cuts, state.values)
        assert len(moves(layout, to)) <= 8


def test_counts_that_no_axes_have() -> None:
    assert relabelings(mesh_of(2, 3), (4, 1), (), None) == ()
    assert relabelings(mesh_of(2, 3), (1, 1), ((4, "add"),), None) == ()


def drawn(mesh: DeviceMesh, rng: random.Random) -> Layout:
    """A random use of every axis, in random order."""
    cuts, values, size = [[], []], [], len(mesh.devices)
    for axis in rng.sample(mesh.names, len(mesh.names)):
        use = rng.choice([None, "add", 0, 1])
        if use == "add":
            values.append((axis, "add"))
        elif use is not None:
            cuts[use].append(axis)
    values.sort(key=lambda v: mesh.names.index(v[0]))
    return Layout(mesh, ((size,), (size,)), tuple(map(tuple, cuts)), tuple(values))


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2, 2), (2, 3, 2, 2, 3)], ids=str)
def test_beyond_a_few_axes_states_that_gathers_and_masks_turn_into_the_goal(sizes: tuple[int, ...]) -> None:
    rng, mesh, some = random.Random(0), mesh_of(*sizes), 0
    assert len(mesh.axes) > MOST_AXES
    for _ in range(2000):
        source, target = drawn(mesh, rng), drawn(mesh, rng)
        found = relabelings(mesh, parts_of(source), source.shares, State(target.cuts, target.values))
        assert len(found) <= MOST_SUFFIXES
        some += bool(found)
        for state in found:
            layout = Layout(mesh, target.subdims, state.cuts, state.values)
            assert (parts_of(layout), layout.shares) == (parts_of(source), source.shares)
            assert leads_to(layout, State(target.cuts, target.values)), f"{layout} -> {target}"
    assert some > 100


def leads_to(layout: Layout, goal: State) -> bool:
    """Each dim's cut begins with the goal's, so that one gather of the suffix makes it; shares are kept, or made then."""
    for dim, cut in enumerate(goal.cuts):
        suffix = layout.cuts[dim][len(cut) :]
        steps = steps_from(layout.mesh, layout.sizes, State(layout.cuts, layout.values))
        if layout.cuts[dim][: len(cut)] != cut or (
            suffix and not any(s.kind == "all_gather" and (s.source, s.axes) == (dim, suffix) for s in steps)
        ):
            return False
    return layout.values in ((), goal.values)
