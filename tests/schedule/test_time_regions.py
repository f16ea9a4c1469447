"""Ops in time form convex regions: nothing that leaves one comes back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from of_the_day import of_the_day
from plans.plan_steps import gpt, planned

import jscaler
from jscaler import TimeSplit
from jscaler.ir import Graph, Nest
from jscaler.ir.loop import Item
from jscaler.plans import accumulate, co_shard

X = np.linspace(-1.0, 1.0, 32).reshape(8, 4)


def chain(*names: str) -> Any:
    """A step of elementwise functions, each in a scope of its own, with a sum over everything after the second."""

    def step(x: jax.Array) -> Any:
        for name in names:
            with jax.named_scope(name):
                x = x - x.sum() if name == "whole" else jnp.sin(x)
        return x

    return step


def rows_of(*paths: str) -> Any:
    def policy(graph: Any, _: Any) -> None:
        rows = graph.factor_of("x", 0)
        for op in graph.ops:
            if op.path.split("/")[0] in paths and op in rows:
                graph.op_trans(op, TimeSplit(rows[op], 4))

    return policy


def loops_of(step: Any, policy: Any) -> list[list[str]]:
    """The planned ops of every loop, in order; the numbers are those of ``jax.jit``."""
    with jax.enable_x64(True):
        lowered = jscaler.parallelize(policy, devices=1)(step).lower(X)
        jscaler.verify(lowered)
        ours = lowered.compile()(X)
        for mine, true in zip(jax.tree.leaves(ours), jax.tree.leaves(jax.jit(step)(X)), strict=True):
            np.testing.assert_allclose(mine, true, rtol=1e-12, atol=1e-12)
    graph = lowered.plan.graph
    return [[op.path for op in graph.ops if op.loop == name and "@" not in op.path] for name in graph.loops]


def test_neighbours_share_a_loop() -> None:
    assert loops_of(chain("a", "b", "c"), rows_of("a", "b", "c")) == [["a/sin", "b/sin", "c/sin"]]


def test_an_op_between_that_no_plan_splits_goes_on_with_the_parts() -> None:
    assert loops_of(chain("a", "b", "c"), rows_of("a", "c")) == [["a/sin", "b/sin", "c/sin"]]


@pytest.mark.smoke
def test_what_reads_a_sum_over_all_parts_stands_in_a_later_loop() -> None:
    def step(x: jax.Array) -> Any:
        return jscaler.value_and_grad(lambda x: chain("a", "whole", "c")(x).sum())(x)

    first, second, *_ = loops_of(step, rows_of("a", "whole", "c"))
    assert "a/sin" in first
    assert "c/sin" in second


def test_sums_that_depend_on_inputs_alone_run_before_on_all() -> None:
    """A mask's count, by which a loss is divided: what reads it need not wait for a loop to end."""
    assert loops_of(chain("a", "whole", "c"), rows_of("a", "whole", "c")) == [["whole/sub", "c/sin"]]


def test_a_path_that_leaves_and_comes_back_parts_a_region() -> None:
    """``d`` reads ``a`` part by part, but also what is made of all of ``a``: it cannot stand in the loop of ``a``."""

    def step(x: jax.Array) -> Any:
        with jax.named_scope("a"):
            a = jnp.sin(x)
        with jax.named_scope("sort"):
            s = jnp.sort(a, 0)
        with jax.named_scope("d"):
            return jnp.cos(a) * s

    first, second = loops_of(step, rows_of("a", "d"))
    assert first == ["a/sin"]
    assert all(path.startswith("d/") for path in second)


def test_independent_ops_of_one_axis_are_regions_of_their_own() -> None:
    def step(x: jax.Array) -> Any:
        with jax.named_scope("a"):
            a = jnp.sin(x)
        with jax.named_scope("b"):
            return a, jnp.cos(x)

    assert sorted(loops_of(step, rows_of("a", "b"))) == [["a/sin"], ["b/cos"]]


PLANS = {"accumulate": accumulate(2), "co_shard": co_shard(2), "both": accumulate(2, co_shard(2))}


@pytest.mark.parametrize("name", of_the_day(PLANS, 2))
def test_every_loop_is_convex_and_data_comes_first(name: str) -> None:
    """Of a loop's tensors no op outside makes one that the loop reads; every item stands after what it reads."""
    graph = planned(PLANS[name], gpt(), 1).graph
    known = {*graph.inputs, *(t for t, _ in graph.constants)}
    check_order(graph, graph.tree, set(known))


def check_order(graph: Graph, items: tuple[Item, ...], known: set[Any]) -> None:
    for item in items:
        if isinstance(item, Nest):
            loop = item.loop
            assert set(loop.operands) <= known, loop.name
            check_order(graph, item.items, {*known, *loop.inner})
            known.update(loop.results)
        else:
            assert set(item.inputs) <= known, item.path
            known.update(item.outputs)


def test_clones_wait_for_the_backward_pass() -> None:
    """What is computed again could run long before its readers: it stands in their iterations."""
    graph = planned(co_shard(2), gpt(layers=2), 1).graph
    for op in graph.ops:
        if op.again is not None and op.loop is not None:
            assert any(r.loop == op.loop and r.kind == "backward" for t in op.outputs for r in graph.consumers[t]), op.path
            assert f"{op.again.path}@backward" in {o.path for o in graph.ops if o.loop == op.loop}
