"""Prefix: running sums split along the dim that they walk, forward and backward."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from losing import losing

import jscaler
from jscaler import PlanError, Prefix, Split, SplitError
from jscaler.lax_primitives import TABLE
from jscaler.primitives import GridAxis, Planner

CASES = [
    (name, reverse, (i + reverse) % 2)
    for i, name in enumerate(one.name for one in TABLE.values() if one.running)
    for reverse in (False, True)
]


def every_kind(x: jax.Array) -> list[jax.Array]:
    found = []
    for i, (name, reverse, axis) in enumerate(CASES):
        with jax.named_scope(f"case{i}"):
            found.append(getattr(lax, name)(x + i, axis=axis, reverse=reverse) * 2)
    with jax.named_scope("integers"):
        return [*found, lax.cumsum((x * 100).astype(jnp.int32), axis=1), lax.cummin((x * 100).astype(jnp.int32), axis=1)]


def all_by_prefix(graph: Any, devices: np.ndarray) -> None:
    for op in graph.ops:
        rule = graph.rule(op)
        blocked = next(f for f in rule.factors.values() if f.kind == "blocked")
        graph.op_assign(graph.op_trans(op, Prefix(blocked.name, 4)), devices)


@losing
@pytest.mark.smoke
def test_every_kind_forward() -> None:
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (8, 12))
        step = jscaler.parallelize(all_by_prefix, devices=4)(every_kind)
        jscaler.verify(step.lower(x))
        for case, ours, theirs in zip([*CASES, "integers", "integers"], step(x), every_kind(x), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11, err_msg=str(case))


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    """Two running sums in a row, one value that is read before and after them, and a product whose backward is no scan."""
    with jax.named_scope("walk"):
        y = lax.cumsum(x * w, axis=1) * 2 + x
        y = jnp.tanh(lax.cumsum(y, axis=1, reverse=True)) + x * w
    with jax.named_scope("product"):
        z = lax.cumprod(1 + y / 16, axis=1)
    with jax.named_scope("end"):
        return (z * z).sum()


def rows_and_columns(graph: Any, devices: np.ndarray) -> None:
    for path, tensor in (("walk/*", "x"), ("product/*", "walk/cumsum:0")):
        (op,) = graph.select(path)
        cells = graph.op_trans(op, Split((tensor, 0), 2), Prefix((tensor, 1), 4))
        graph.op_assign(cells, devices.reshape(2, 4))


@pytest.mark.one_day_in(2)
@losing
def test_forward_and_backward_with_another_split() -> None:
    with jax.enable_x64(True):
        w, x = (jax.random.normal(jax.random.key(i), (4, 8)) for i in (0, 1))
        step = jscaler.parallelize(rows_and_columns, devices=8)(jscaler.value_and_grad(loss))
        lowered = step.lower(w, x)
        jscaler.verify(lowered)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), step(w, x), jax.value_and_grad(loss)(w, x))
        ops = lowered.plan.completed.ops
        shown = {path: laid.placement.describe() for path, laid in ops.items()}
        for piece in ("within", "within1", "add", "@backward/within2", "@backward/within3", "@backward/add"):
            path = f"walk/cumsum{piece}" if piece.startswith("@") else f"walk/cumsum/{piece}"
            assert shown[path] == "a:2 b:4", path
        assert shown["walk/cumsum/carry"] == "a:2"  # every part adds up all totals
        kinds = {step.kind for adapt in lowered.plan.program.adapters for step in adapt.adapter.steps}
        assert kinds <= {"all_gather", "slice", "all_reduce"}


@pytest.fixture
def planner() -> Planner:
    step = jscaler.parallelize("single")(jscaler.value_and_grad(loss))
    return Planner(step.graph(jnp.ones((4, 8)), jnp.ones((4, 8))), 4)


def test_the_grid_says_what_it_is_made_of(planner: Planner) -> None:
    grid = planner.op_trans("product/cumprod", Prefix("b", 4))
    assert grid.axes == (GridAxis("b", 4, algorithm=Prefix("b", 4)),)
    assert str(grid) == "Grid(product/cumprod = within, carry, add [b:4 by Prefix])"


def test_what_has_no_running_sum(planner: Planner) -> None:
    with pytest.raises(SplitError, match=r"factor 'a' of size 4 into 2 parts; Prefix\(.*\) finds nothing in it"):
        planner.op_trans("walk/cumsum", Prefix("a", 2))


def test_parts_that_do_not_divide(planner: Planner) -> None:
    with pytest.raises(SplitError, match="factor 'b' of size 8 into 3 parts; legal: 1, 2, 4, 8"):
        planner.op_trans("walk/cumsum", Prefix("b", 3))


def test_one_algorithm_in_one_go(planner: Planner) -> None:
    with pytest.raises(PlanError, match=r"meets b:2 by Prefix; one algorithm cuts an op, in one go"):
        planner.op_trans("walk/cumsum", Prefix("b", 2), Prefix("b", 2))
    with pytest.raises(
        SplitError, match=r"multiplied along; Prefix\('b', 2\) in place of Split cuts it; free here: a \(4\)"
    ):
        planner.op_trans("product/cumprod", Split("b", 2))
