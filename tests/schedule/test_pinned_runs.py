"""Runs follow each other as data and orders allow, and each waits for all that the one before it leaves."""

import jax
import jax.numpy as jnp
import pytest

import jscaler
from jscaler.errors import OrderError
from jscaler.ir import Graph
from jscaler.primitives import Order
from jscaler.schedule.pinned_runs import Runs, pins


def graph() -> Graph:
    """Four chains of two ops each, all of one input."""

    def fun(x: jax.Array) -> jax.Array:
        total = x
        for i in range(4):
            with jax.named_scope(f"c{i}"):
                y = jnp.cumsum(x + i)
                total = total + jnp.sort(y)
        return total

    return jscaler.parallelize("single", devices=1)(fun).lower(jnp.zeros(3)).plan.graph


def chains(found: Graph) -> list[list[str]]:
    return [[p for p in found.by_path if p.startswith(f"c{i}/") and ("sort" in p or "cumsum" in p)] for i in range(4)]


def order_of(orders: list[Order]) -> list[str]:
    """The chains in the order that pins make."""
    pairs = list(dict.fromkeys((o.before.split("/")[0], o.after.split("/")[0]) for o in orders))
    found = [pairs[0][0]]
    for before, after in pairs:
        assert before == found[-1]
        found.append(after)
    return found


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([], "c0 c1 c2 c3"),
        ([(2, 1)], "c0 c2 c1 c3"),  # in a region of their own, c2 and c3 keep their order
        ([(3, 0)], "c2 c3 c0 c1"),
    ],
)
def test_runs_follow_each_other(asked: list[tuple[int, int]], expected: str) -> None:
    found = graph()
    own = chains(found)
    assert all(own)
    runs = Runs()
    for i, paths in enumerate(own):
        runs.add(None, f"region {i // 2}", paths)
    orders = [Order(own[a][0], own[b][0]) for a, b in asked]
    assert order_of(pins(found, runs, orders)) == expected.split()


def test_a_cycle_names_its_orders() -> None:
    found = graph()
    own = chains(found)
    runs = Runs()
    runs.add(None, "all", own[0])
    orders = [Order(own[0][0], own[1][0]), Order(own[1][0], own[0][0])]
    with pytest.raises(OrderError, match=r"c0/\S+ < c1/\S+; c1/\S+ < c0/\S+; drop one of the op_order calls"):
        pins(found, runs, orders)
