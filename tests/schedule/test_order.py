"""Execution order: data and op_order together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower.steps import assert_same_numbers, planned

import jscaler
from jscaler import OrderError, UnknownNameError
from jscaler.ir import Graph
from jscaler.lower.program import Compute
from jscaler.primitives import Order
from jscaler.schedule import ordered_ops


def scoped(name: str, x: jax.Array) -> jax.Array:
    with jax.named_scope(name):
        return jnp.sin(x)


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Two chains: a/sin -> b/sin, and c/sin -> d/sin."""

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return scoped("b", scoped("a", x)), scoped("d", scoped("c", x + 1))

    return jscaler.parallelize("single")(step).graph(jnp.ones(4))


def paths(graph: Graph, *orders: tuple[str, str]) -> list[str]:
    return [op.path for op in ordered_ops(graph, [Order(*order) for order in orders])]


def test_without_orders_the_graphs_own_order_stays(graph: Graph) -> None:
    assert paths(graph) == [op.path for op in graph.ops]
    assert ordered_ops(graph, []) is graph.ops


@pytest.mark.smoke
def test_an_order_moves_no_more_than_it_must(graph: Graph) -> None:
    plain = paths(graph)
    assert plain.index("b/sin") < plain.index("d/sin")
    moved = paths(graph, ("d/sin", "b/sin"))
    assert moved.index("d/sin") < moved.index("b/sin")
    assert [p for p in moved if p != "b/sin"] == [p for p in plain if p != "b/sin"]


def test_every_order_respects_data(graph: Graph) -> None:
    for before in graph.ops:
        for after in graph.ops:
            try:
                order = paths(graph, (before.path, after.path))
            except OrderError:
                continue
            assert order.index(before.path) < order.index(after.path)
            assert sorted(order) == sorted(paths(graph))
            for op in graph.ops:
                sources = [graph.producer[t].path for t in op.inputs if t in graph.producer]
                assert all(order.index(source) < order.index(op.path) for source in sources)


def test_an_order_against_the_data_is_a_cycle_that_names_its_ops(graph: Graph) -> None:
    with pytest.raises(OrderError) as error:
        paths(graph, ("b/sin", "a/sin"))
    message = str(error.value)
    assert message.startswith("the order is cyclic: ")
    assert "b/sin < a/sin" in message
    assert "a/sin -> b/sin" in message
    assert "drop one of the op_order calls" in message


def test_a_cycle_of_orders_names_only_its_ops(graph: Graph) -> None:
    with pytest.raises(OrderError) as error:
        paths(graph, ("b/sin", "c/sin"), ("d/sin", "a/sin"))
    arrows = str(error.value).removeprefix("the order is cyclic: ").split(" (")[0].split("; ")
    assert {"b/sin < c/sin", "d/sin < a/sin"} < set(arrows)
    assert len(arrows) == 4 + sum("add" in arrow for arrow in arrows)


def test_an_op_before_itself_is_a_cycle(graph: Graph) -> None:
    with pytest.raises(OrderError, match="a/sin < a/sin"):
        paths(graph, ("a/sin", "a/sin"))


def test_an_order_of_an_unknown_op(graph: Graph) -> None:
    with pytest.raises(UnknownNameError, match="no op named 'a/sinn'; did you mean 'a/sin'"):
        paths(graph, ("a/sinn", "b/sin"))


def test_a_policys_order_is_that_of_the_programs_tasks() -> None:
    """The update of the second layer's kernel before that of the first's bias, and both after the loss."""
    first, second = ("update/state/params/down/bias/add", "update/state/params/up/kernel/add")

    def policy(graph: Any, devices: np.ndarray) -> None:
        graph.op_order(graph["loss/div"], graph[second])
        graph.op_order(graph[second], graph[first])

    def tasks(plan: Any) -> list[str]:
        return [task.op.path for task in plan.program.tasks if isinstance(task, Compute)]

    plain, ordered = tasks(planned("single", 4)), tasks(planned(policy, 4))
    assert plain.index(first) < plain.index(second)
    assert ordered.index("loss/div") < ordered.index(second) < ordered.index(first)
    assert_same_numbers(policy, 4)


def test_a_cyclic_policy_is_refused_before_anything_is_compiled() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        graph.op_order(graph["down/dot"], graph["up/dot"])

    with pytest.raises(OrderError, match="down/dot < up/dot"):
        planned(policy, 4)
