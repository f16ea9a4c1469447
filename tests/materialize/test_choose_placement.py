"""The choice for one op: no candidate has a lower price than the chosen placement."""

import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import pytest
from materialize.layouts import mesh_of

import jscaler
from jscaler.clusters import FEW_STEPS
from jscaler.ir import Op
from jscaler.materialize import Layout, Placement
from jscaler.materialize.choose_placement import PlacementChoice
from jscaler.materialize.groups import Groups, Home, OnGroups
from jscaler.materialize.layouts_at_hand import LayoutsAtHand
from jscaler.materialize.mesh import DeviceMesh
from jscaler.materialize.placement import Combiners
from jscaler.materialize.shards import Shards
from jscaler.primitives import make_plan


def two_ops(x: jax.Array, kernel: jax.Array) -> jax.Array:
    with jax.named_scope("up"):
        x = x @ kernel
    with jax.named_scope("act"):
        return jnp.tanh(x)


def choice_on(mesh: DeviceMesh) -> PlacementChoice:
    """The choice for the ops of `two_ops`, of which the policy places none."""
    arguments = jnp.ones((64, 16)), jnp.ones((16, 32))
    captured = jscaler.parallelize("single", devices=1)(two_ops).lower(*arguments).captured
    graph, bodies = captured.graph, captured.bodies
    plan = make_plan(lambda graph, devices: None, graph, len(mesh.devices), bodies, ())
    placed = OnGroups(graph, {}, Groups((mesh,), {}, {}, {}), {op.path: Home(mesh) for op in graph.ops}, bodies)
    at_hand = LayoutsAtHand(placed, Shards(), {}, FEW_STEPS)
    return PlacementChoice(placed, plan, captured.rules, FEW_STEPS, at_hand)


def layout(mesh: DeviceMesh, shape: tuple[int, ...], cuts: Sequence[str], values: str = "") -> Layout:
    """Each dim cut by one axis, or by none where that is empty, and sums along the axis ``values``."""
    by_dim = tuple((axis,) if axis else () for axis in cuts)
    return Layout(mesh, tuple((size,) for size in shape), by_dim, ((values, "add"),) if values else ())


def candidates(choice: PlacementChoice, op: Op, mesh: DeviceMesh) -> Iterator[Placement]:
    """Every use of every axis, in every order of the axes.

    An axis makes a copy, passes the value shares of the inputs on, or splits a factor along which it cuts some input.
    """
    rule = choice.book.rule(op)
    lying = [choice.at_hand.by_tensor[t][0] for t in op.inputs]
    cut = {
        (name, axis)
        for at, dims in zip(lying, rule.operands, strict=True)
        for names, (axes,) in zip(dims, at.by_dim, strict=True)
        for name, axis in itertools.product(names, axes)
    }
    for axes in itertools.permutations(mesh.names):
        for uses in itertools.product(["copy", "share", *rule.factors], repeat=len(axes)):
            factors: dict[str, tuple[str, ...]] = {}
            shares: dict[str, Combiners] = {}
            for axis, use in zip(axes, uses, strict=True):
                if use == "share":
                    shares[axis] = tuple(dict(at.values).get(axis) for at in lying)
                elif use != "copy":
                    factors[use] = (*factors.get(use, ()), axis)
            passed = all(any(c) and choice.book.passes(op, c) is not None for c in shares.values())
            if passed and all((name, axis) in cut for name in factors for axis in factors[name]):
                yield Placement(mesh, factors, shares=shares)


CASES = {
    "rows and contraction": ("up/dot", [(("x0", ""), ""), (("x0", ""), "")]),
    "rows and columns": ("up/dot", [(("x0", ""), ""), (("", "x1"), "")]),
    "a sum in parts": ("up/dot", [(("x1", ""), "x0"), (("", ""), "")]),
    "crosswise": ("up/dot", [(("x0", "x1"), ""), (("x1", "x0"), "")]),
    "a sum where no sum may pass": ("act/tanh", [(("x1", ""), "x0")]),
    "two cuts": ("act/tanh", [(("x1", "x0"), "")]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2)], ids=str)
def test_the_chosen_placement_has_the_least_price_of_all_candidates(case: str, sizes: tuple[int, int]) -> None:
    path, lying = CASES[case]
    mesh = mesh_of(*sizes)
    choice = choice_on(mesh)
    op = choice.graph.by_path[path]
    for tensor, (cuts, values) in zip(op.inputs, lying, strict=True):
        choice.at_hand.by_tensor[tensor] = (layout(mesh, tensor.shape, cuts, values),)
    placement = choice.placement(op)
    prices = [choice.price(op, other) for other in candidates(choice, op, mesh)]
    assert len(set(prices)) > 1
    assert choice.price(op, placement) == min(prices)


def test_an_op_that_waits_makes_the_layout_of_its_reader() -> None:
    mesh = mesh_of(2, 2)
    choice = choice_on(mesh)
    op = choice.graph.by_path["act/tanh"]
    assert choice.waits(op)
    wanted = layout(mesh, (64, 32), ("x1", "x0"))
    laid = choice.for_reader(op, op.outputs[0], wanted)
    assert (laid.inputs, laid.outputs) == ((wanted,), (wanted,))
    summed = layout(mesh, (64, 32), ("x1", ""), "x0")  # a tanh makes no value shares
    assert choice.for_reader(op, op.outputs[0], summed).placement.describe() == "copy"
