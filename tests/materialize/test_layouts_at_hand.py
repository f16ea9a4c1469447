"""The layouts that a completion has fixed: per group, by readers, and taken back by a snapshot."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from materialize.layouts import mesh_of

import jscaler
from jscaler.clusters import FEW_STEPS
from jscaler.ir import Op
from jscaler.materialize import Layout, OpLayouts, Placement
from jscaler.materialize.groups import Groups, Home, OnGroups
from jscaler.materialize.layouts_at_hand import LayoutsAtHand
from jscaler.materialize.shards import Shards

LEFT, RIGHT = mesh_of(2, devices=(0, 1)), mesh_of(2, devices=(2, 3))
ROWS, COLUMNS = (Layout(LEFT, ((8,), (4,)), cuts) for cuts in ((("x0",), ()), ((), ("x0",))))


@pytest.fixture
def tanh() -> tuple[LayoutsAtHand, Op]:
    """The layouts at hand in a step of one op, on the left group; nothing lies anywhere."""
    captured = jscaler.parallelize("single", devices=1)(jax.numpy.tanh).lower(jnp.ones((8, 4))).captured
    graph = captured.graph
    homes = {op.path: Home(LEFT) for op in graph.ops}
    placed = OnGroups(graph, {}, Groups((LEFT, RIGHT), {}, {}, {}), homes, captured.bodies)
    (op,) = graph.ops
    return LayoutsAtHand(placed, Shards(), {}, FEW_STEPS), op


def test_an_input_lies_as_its_first_reader_wants_it_on_its_group_alone(tanh: Any) -> None:
    at_hand, op = tanh
    (x,) = op.inputs
    assert at_hand.first(x, LEFT) == at_hand.whole(x, LEFT)
    at_hand.read(x, ROWS)
    at_hand.read(x, COLUMNS)
    assert at_hand.inputs == {x: ROWS}
    assert at_hand.on_group(x, LEFT) == (ROWS, COLUMNS)
    assert at_hand.on_group(x, RIGHT) == ()
    assert at_hand.first(x, RIGHT) == at_hand.whole(x, RIGHT)


def test_an_undecided_slice_lies_in_the_option_that_is_nearest_to_its_first_reader(tanh: Any) -> None:
    at_hand, op = tanh
    (x,) = op.inputs
    whole = at_hand.whole(x, LEFT)
    at_hand.by_tensor[x] = (ROWS, whole)
    at_hand.undecided.add(x)
    at_hand.read(x, COLUMNS)  # a slice of the whole, which no device has to send
    assert at_hand.by_tensor[x] == (whole, COLUMNS)
    assert not at_hand.undecided


def test_a_snapshot_is_restored_as_often_as_is_wanted(tanh: Any) -> None:
    at_hand, op = tanh
    (x,), (y,) = op.inputs, op.outputs
    at_hand.waiting[y] = op
    start = at_hand.snapshot()
    for layout in (ROWS, COLUMNS):
        at_hand.fix(op, OpLayouts(Placement(LEFT), (layout,), (layout,)))
        at_hand.read(x, layout)
        assert (at_hand.by_tensor, list(at_hand.ops)) == ({x: (layout,), y: (layout,)}, [op.path])
        assert not at_hand.waiting
        at_hand.restore(start)
        assert (at_hand.by_tensor, at_hand.ops, at_hand.inputs, at_hand.waiting) == ({}, {}, {}, {y: op})
