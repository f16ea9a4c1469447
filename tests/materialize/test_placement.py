"""A placement says what the mesh axes mean for one op; the layouts of its operands and results follow."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from materialize.layouts import mesh_of

import jscaler
from jscaler import PlanError, UnknownNameError
from jscaler.ir import Graph, Op, Place, Rule
from jscaler.materialize import Layout, Placement
from jscaler.materialize.placement import (
    Decided,
    check_devices,
    decided_placements,
    operand_layout,
    placed_grids,
    placement_of,
    result_layout,
)
from jscaler.primitives import Assign, GridAxis, Plan, Trans

MESH = mesh_of(2, 3)


def places(*devices: int) -> tuple[Place, ...]:
    return tuple(map(Place, devices))


def heads(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """(6, 8) @ (8, 36) with the last dim refined to (3, 6, 2): q, k and v of six heads."""
    with jax.named_scope("net"), jax.named_scope("qkv"):
        return (x @ kernel).reshape(6, 3, 6, 2)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return jscaler.parallelize("single")(heads).graph(jnp.ones((6, 8)), jnp.ones((8, 36)))


def laid(graph: Graph, op: Op, placement: Placement) -> tuple[list[Layout], list[Layout]]:
    rule: Rule = graph.rule(op)
    inputs = [operand_layout(rule, placement, op, i) for i in range(len(op.inputs))]
    return inputs, [result_layout(rule, placement, op, i, {}) for i in range(len(op.outputs))]


@pytest.mark.smoke
def test_layouts_of_a_contraction(graph: Graph) -> None:
    """a b, b c -> a c: rows over one axis, the contraction over the other, which leaves sums."""
    op = graph["qkv/dot"]
    a, b = (graph.rule(op).operands[0][d][0] for d in (0, 1))
    (x, kernel), (y,) = laid(graph, op, Placement(MESH, {a: ("x1",), b: ("x0",)}))
    assert (x.local_shape, kernel.local_shape, y.local_shape[:1]) == ((2, 4), (4, 36), (2,))
    assert (x.values, kernel.values, y.values) == ((), (), (("x0", "add"),))
    assert (x.free, kernel.free, y.free) == ((), ("x1",), ())


def test_a_dim_is_refined_only_where_it_is_cut() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.sin(x.reshape(6, 3, 6, 2))

    graph = jscaler.parallelize("single")(step).graph(jnp.ones((6, 36)))
    (op,) = graph.ops
    rows, (_, middle, _) = graph.rule(op).operands[0]
    (x,), _ = laid(graph, op, Placement(MESH, {rows[0]: ("x1",)}))
    assert x.subdims == ((6,), (36,))
    (x,), (y,) = laid(graph, op, Placement(MESH, {middle: ("x0",)}))
    assert x.subdims == ((6,), (3, 6, 2))
    assert x.cuts == ((), (), ("x0",), ())
    assert (x.local_shape, y.local_shape) == ((6, 18), (6, 3, 3, 2))


def test_shares_that_pass_through(graph: Graph) -> None:
    op = graph["qkv/dot"]
    rule, placement = graph.rule(op), Placement(MESH, shares={"x1": ("add", None)})
    assert operand_layout(rule, placement, op, 0).values == (("x1", "add"),)
    assert operand_layout(rule, placement, op, 1).values == ()
    assert result_layout(rule, placement, op, 0, {"x1": ("add",)}).values == (("x1", "add"),)


def test_shares_are_listed_in_the_order_of_the_mesh(graph: Graph) -> None:
    op = graph["qkv/dot"]
    b = graph.rule(op).operands[0][1][0]
    placement = Placement(MESH, {b: ("x0",)}, shares={"x1": ("add", None)})
    assert result_layout(graph.rule(op), placement, op, 0, {"x1": ("add",)}).values == (("x0", "add"), ("x1", "add"))


def test_describe() -> None:
    assert Placement(MESH, {"a": ("x0", "x1"), "b": ()}).describe() == "a:6"
    assert Placement(MESH, {"a": ("x0",)}, {"x1": ("add",)}).describe() == "a:2 share:3"
    assert Placement(MESH).describe() == "copy"


def test_placement_of_grid_axes() -> None:
    """Axes of one factor come together, major first; copies use up their axes silently."""
    axes = (GridAxis("a", 2), GridAxis(None, 2), GridAxis("a", 2), GridAxis("b", 1))
    decided = Decided(axes, places(*range(8)))
    assert placement_of(decided, mesh_of(2, 2, 2), [("x0",), ("x1",), ("x2",), ()]).factors == {"a": ("x0", "x2")}
    assert placed_grids({"op": decided})["op"].shape == (2, 2, 2, 1)


# Decisions


def plan(*decisions: Any) -> Plan:
    return Plan("test", 6, decisions)


TRANS = Trans("qkv/dot", (GridAxis("b", 2), GridAxis("a", 3)))


def test_sub_grids_add_up_to_one_table(graph: Graph) -> None:
    table = decided_placements(
        graph,
        plan(
            TRANS,
            Assign("qkv/dot", ((1, 2), (0, 3)), places(3, 4, 5)),
            Assign("qkv/dot", ((0, 1), (0, 3)), places(2, 1, 0)),
        ),
    )
    assert table == {"qkv/dot": Decided(TRANS.axes, places(2, 1, 0, 3, 4, 5))}
    check_devices(table)


def test_a_missing_assignment_lists_the_cells(graph: Graph) -> None:
    with pytest.raises(PlanError, match=r"'qkv/dot' was split into 6 cells and 3 of them have no device: '\[0, 0\]'"):
        decided_placements(graph, plan(TRANS, Assign("qkv/dot", ((1, 2), (0, 3)), places(3, 4, 5))))
    with pytest.raises(PlanError, match=r"6 of them have no device.*call op_assign"):
        decided_placements(graph, plan(TRANS))


def test_a_double_assignment_names_the_cell_and_both_devices(graph: Graph) -> None:
    twice = plan(
        TRANS, Assign("qkv/dot", ((0, 2), (0, 3)), places(*range(6))), Assign("qkv/dot", ((1, 2), (2, 3)), places(0))
    )
    with pytest.raises(PlanError, match=r"cell \[1, 2\] of 'qkv/dot' is assigned twice: to d5 and to d0"):
        decided_placements(graph, twice)


def test_a_plan_for_another_graph_is_refused(graph: Graph) -> None:
    with pytest.raises(UnknownNameError, match="no op named 'qvk/dot'; did you mean 'qkv/dot'"):
        decided_placements(graph, plan(Trans("qvk/dot", ())))


def test_cells_that_no_split_has_made_are_refused(graph: Graph) -> None:
    with pytest.raises(PlanError, match="'qkv/dot' is assigned to devices before it is split"):
        decided_placements(graph, Plan("p", 2, (Assign("qkv/dot", (), places(0)),)))
    with pytest.raises(UnknownNameError, match="nothing"):
        decided_placements(graph, Plan("p", 2, (Assign("nothing", (), places(0)),)))


def test_cells_that_share_a_device() -> None:
    with pytest.raises(PlanError, match=r"'op' has 4 cells on 2 devices: .*time axis"):
        check_devices({"op": Decided((GridAxis("a", 4),), places(0, 0, 1, 1))})


def test_the_policys_device_order_reaches_the_parts() -> None:
    """Row i of the batch lies where the policy put cell i."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        (op,) = graph.ops
        graph.op_assign(graph.op_trans(op, jscaler.Split(("x", 0), 4)), [2, 0, 3, 1])

    compiled = jscaler.parallelize(policy, devices=4)(lambda x: jnp.sin(x)).lower(jnp.arange(4.0)).compile()
    shards = {shard.index[0].start: shard.device.id for shard in compiled(jnp.arange(4.0)).addressable_shards}
    assert shards == {0: 2, 1: 0, 2: 3, 3: 1}
