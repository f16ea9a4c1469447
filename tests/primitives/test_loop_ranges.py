"""Loops over layers in ranges, and leaves in parts: the graph that is left computes what the whole one does."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from capture.reference import graph_of, interpret
from hypothesis import given
from hypothesis import strategies as st
from lower.layers import PROGRAMS, batch, handed_through, net_batch, net_state, net_step, params, step_of
from of_the_day import drawn, of_the_day

import jscaler
from jscaler import PlanError, Replicate, UnknownNameError
from jscaler.capture.bodies import BodyTable
from jscaler.capture.loop_ranges import with_ranges
from jscaler.ir import Graph
from jscaler.ir.name import without
from jscaler.primitives.leaf_parts import leaves_in, with_leaf_parts
from jscaler.rules.rule_book import RuleBook


def outer_loops(graph: Graph) -> list[str]:
    """The loops of the model that may be cut."""
    return [n for n, loop in graph.loops.items() if loop.forward is None and loop.parent is None and loop.length > 1]


def bodies_of(graph: Graph) -> BodyTable:
    assert isinstance(graph.rules, RuleBook)
    return graph.rules.bodies


def parts_of(graph: Graph, leaves: Sequence[Any]) -> list[Any]:
    """Of the step's leaves, what the graph takes."""
    found = []
    for leaf, count in zip(leaves, graph.leaf_parts or (1,) * len(leaves), strict=True):
        own = graph.inputs[len(found) : len(found) + count]
        ends = list(itertools.accumulate(t.shape[0] for t in own[:-1])) if count > 1 else []
        found += jnp.split(leaf, ends) if count > 1 else [leaf]
    return found


def whole_of(graph: Graph, outputs: Sequence[Any]) -> list[Any]:
    """The step's results, of the graph's."""
    each = iter(outputs)
    rows = [list(itertools.islice(each, n)) for n in graph.result_parts or (1,) * len(outputs)]
    return [jnp.concatenate(own) if len(own) > 1 else own[0] for own in rows]


def check(graph: Graph, changed: Graph, leaves: Sequence[Any]) -> None:
    wanted, found = interpret(graph, leaves), whole_of(changed, interpret(changed, parts_of(changed, leaves)))
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("loss_fn", of_the_day([*PROGRAMS, handed_through], 3), ids=lambda f: f.__name__)
def test_ranges_of_every_loop_compute_what_it_does(loss_fn: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        arguments = params(), batch()
        graph = graph_of(step_of(loss_fn), *arguments)
        bodies = bodies_of(graph)
        changed = graph
        for number, name in enumerate(outer_loops(graph)):
            length = graph.loops[name].length
            changed = with_ranges(changed, name, [length - 1, 1] if number % 2 else [1] * length, bodies)
            assert name not in changed.loops
        check(graph, changed, jax.tree.leaves(arguments))


@pytest.mark.one_day_in(3)
@drawn(24, 8)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.booleans(), st.booleans(), st.sampled_from("abcd"))
def test_leaves_in_parts_compute_what_whole_ones_do(sizes: list[int], reverse: bool, remat: bool, kind: str) -> None:
    """A stack under an optimizer: read by a loop, through a cast, in a penalty of all layers, and one of a single layer."""
    optimizers = {
        "a": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)), "b": optax.adafactor(0.1),
        "c": optax.chain(optax.trace(0.9), optax.lamb(0.1)), "d": optax.apply_if_finite(optax.lion(0.1), 2),
    }  # fmt: skip
    optimizer, length = optimizers[kind], sum(sizes)

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w["k"]) + w["b"], x.sum()

    def step(state: Any, x: Any) -> Any:
        p, moments = state

        def loss_fn(p: Any) -> Any:
            narrow = jax.tree.map(lambda w: (w * 1.5).astype(jnp.float32).astype(jnp.float64), p)
            y, sums = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, narrow, reverse=reverse)
            return y.sum() + (sums**2).sum() + 0.1 * (p["k"] ** 2).sum() + p["b"][1].sum()

        loss, grads = jscaler.value_and_grad(loss_fn)(p)
        updates, moments = optimizer.update(grads, moments, p)
        return (optax.apply_updates(p, updates), moments), loss, grads["b"]

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        p = {"k": jnp.asarray(rng.normal(size=(length, 3, 3))), "b": jnp.asarray(rng.normal(size=(length, 3)))}
        arguments = (p, optimizer.init(p)), jnp.asarray(rng.normal(size=(2, 3)))
        graph = graph_of(step, *arguments)
        bodies = bodies_of(graph)
        (name,) = outer_loops(graph)
        leaves = leaves_in(graph, [x.stack for x in graph.loops[name].xs], sizes, bodies)
        assert "state/0/k" in leaves  # of the biases a layer is taken in the same op that casts them
        stacked = {t.name for t in graph.inputs if t.shape[:1] == (length,)}
        if len(set(sizes)) == 1:  # ops of some kinds have no parts of other sizes, and need the whole
            assert {leaf for leaf in leaves if leaf.endswith("k")} == {leaf for leaf in stacked if leaf.endswith("k")}
        changed = with_leaf_parts(graph, leaves, sizes, bodies)
        assert {without(t.name, "layers") for t in changed.inputs} == {t.name for t in graph.inputs}
        check(graph, changed, jax.tree.leaves(arguments))
        ranges = with_ranges(changed, name, sizes, bodies)
        check(graph, ranges, jax.tree.leaves(arguments))


def test_a_stack_whose_parts_nobody_reads_whole_is_never_joined() -> None:
    graph = graph_of(net_step(True), net_state(), net_batch())
    bodies = bodies_of(graph)
    (name,) = outer_loops(graph)
    leaves = leaves_in(graph, [x.stack for x in graph.loops[name].xs], [1, 2], bodies)
    assert len(leaves) == 3 * 6  # parameters and both moments
    changed = with_ranges(with_leaf_parts(graph, leaves, [1, 2], bodies), name, [1, 2], bodies)
    paths = [op.path for op in changed.ops if op.path.endswith("@joined") or "@ranges" in op.path]
    sums = [path for path in paths if path.startswith("update/reduce_sum")]
    assert sorted(set(paths) - set(sums)) == sorted(p for p in paths if "random" in p)  # keys of dropout are split alone
    assert len(sums) == 6  # of the global norm
    mlp = changed.select("*/mlp/up/*")
    assert {op.path[-5:] for op in mlp} == {"[0:1]", "[1:3]"}
    assert len(mlp) == 2 * len(graph.select("*/mlp/up/*"))
    assert {op.body for op in changed.select("*/mlp/up/*[[]0:1]")} == {op.body for op in graph.select("*/mlp/up/*")}


def policy(loop: str, sizes: Sequence[int], apart: bool = False) -> Callable[..., None]:
    def plan(graph: Any, devices: np.ndarray) -> None:
        graph.ranges(next(iter(graph.loops)) if loop == "first" else loop, sizes, apart)

    return plan


def test_what_cannot_be_cut_is_said() -> None:
    arguments = net_state(), net_batch()

    def lower(plan: Any) -> Any:
        return jscaler.parallelize(plan, devices=1)(net_step(False)).lower(*arguments)

    with pytest.raises(UnknownNameError, match="no loop over layers named 'lairs'"):
        lower(policy("lairs", [1, 2]))
    with pytest.raises(PlanError, match=r"has 3 iterations, and ranges of \[1, 1\] are asked for, 2 in all"):
        lower(policy("first", [1, 1]))

    def named_before(graph: Any, devices: np.ndarray) -> None:
        graph.op_trans(graph.select("*/mlp/up/*")[0], Replicate(1))
        graph.ranges(next(iter(graph.loops)), [1, 2])

    with pytest.raises(PlanError, match="is named by a decision before; cut the loop"):
        lower(named_before)
