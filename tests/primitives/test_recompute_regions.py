"""Recompute as a decision: what becomes a region, what is refused, and what the region then is."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from plans.plan_steps import repeated

import jscaler
from jscaler import Plan, PlanError, PlanFitError, UnknownNameError
from jscaler.capture.bodies import BodyTable
from jscaler.ir import Graph
from jscaler.lower.step_plan import StepPlan
from jscaler.primitives.plan_matches import check_fits
from jscaler.stages import Captured, lower, transform

Policy = Callable[[Any, Any], Any]
NAMES = ("a", "b", "c", "d")
PARAMS = {n: jax.random.normal(jax.random.key(i), (4, 4)) / 2 for i, n in enumerate(NAMES)} | {"w": jnp.ones((3, 4, 4)) / 8}
X = jax.random.normal(jax.random.key(9), (2, 4))
ACTIVATIONS = {"a": jnp.sin, "b": jnp.cos, "c": jnp.tanh, "d": jnp.exp}


def layer(name: str, params: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope(name):
        return ACTIVATIONS[name](x @ params[name])


def chain(params: Any, x: jax.Array) -> jax.Array:
    """Four layers of a dot and a function of their own each, and the second layer's result added to the last's."""
    first = layer("b", params, layer("a", params, x))
    return jnp.sum(layer("d", params, layer("c", params, first)) + first)


def checkpointed(params: Any, x: jax.Array) -> jax.Array:
    both = jax.checkpoint(lambda x: layer("c", params, layer("b", params, x)))
    return jnp.sum(layer("d", params, both(layer("a", params, x))))


def stack(params: Any, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, w: jax.Array) -> Any:
        with jax.named_scope("inner"):
            y = jnp.tanh(x @ w)
        return jnp.cos(y @ w), None

    return jnp.sum(layer("b", params, lax.scan(body, layer("a", params, x), params["w"])[0]))


def step_of(loss_fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    return lambda params, x: jscaler.value_and_grad(loss_fn)(params, x)


@functools.cache
def captured(loss_fn: Callable[..., jax.Array] = chain) -> Captured:
    return jscaler.parallelize("single", devices=1)(step_of(loss_fn)).lower(PARAMS, X).captured


def planned(policy: Policy, loss_fn: Callable[..., jax.Array] = chain) -> StepPlan:
    known = captured(loss_fn)
    return lower(known, transform(known, policy, 1))


def more(policy: Policy, loss_fn: Callable[..., jax.Array] = chain) -> dict[str, int]:
    """What runs more often under ``policy`` than if nothing is computed again."""
    before, after = repeated(planned(lambda graph, devices: None, loss_fn)), repeated(planned(policy, loss_fn))
    assert not before - after
    return {k: n for k, n in (after - before).items() if k in ("dot_general", "sin", "cos", "tanh", "exp")}


def refused(selection: Any, loss_fn: Callable[..., jax.Array] = chain, keep: Any = ()) -> str:
    with pytest.raises((PlanError, UnknownNameError)) as error:
        planned(lambda graph, devices: graph.recompute(selection, keep), loss_fn)
    return str(error.value)


def assert_like_jax(policy: Policy, loss_fn: Callable[..., jax.Array]) -> None:
    ours = jscaler.parallelize(policy, devices=1)(step_of(loss_fn))(PARAMS, X)
    for mine, true in zip(jax.tree.leaves(ours), jax.tree.leaves(jax.value_and_grad(loss_fn)(PARAMS, X)), strict=True):
        assert jnp.allclose(mine, true, rtol=1e-5, atol=1e-6)


def test_each_selected_op_whose_result_the_backward_reads_runs_once_more() -> None:
    assert more(lambda graph, _: graph.recompute(["b/*", "c/*"])) == {"dot_general": 2, "cos": 1, "tanh": 1}
    assert more(lambda graph, _: graph.recompute("d/*")) == {"dot_general": 1, "exp": 1}
    assert more(lambda graph, _: graph.recompute("d/dot")) == {}  # its result is the region's own, and saved


def test_what_is_kept_is_not_computed_again() -> None:
    for keep, dots in (("b/dot", 1), (["b/dot", "c/dot"], 0), ("*/dot", 0), ("b/dot:0", 1)):
        assert more(lambda graph, _, k=keep: graph.recompute(["b/*", "c/*"], k)).get("dot_general", 0) == dots
    assert more(lambda graph, _: graph.recompute(["b/*", "c/*"], graph["b/dot"])) == {"dot_general": 1, "cos": 1, "tanh": 1}
    # what the kept op's own backward reads is computed again
    assert more(lambda graph, _: graph.recompute(["b/*", "c/*"], "b/cos")) == {"dot_general": 2, "tanh": 1}


def test_a_chain_in_one_selection_keeps_what_enters_it_alone() -> None:
    together = planned(lambda graph, _: graph.recompute(["b/*", "c/*", "d/*"]))
    apart = planned(lambda graph, _: [graph.recompute(f"{name}/*") for name in "bcd"])
    assert fenced(together) == {"a/sin:0"}
    assert fenced(apart) == {"a/sin:0", "b/cos:0", "c/tanh:0"}


def fenced(step: StepPlan) -> set[str]:
    """What clones read of the forward pass, parameters left out."""
    reads = {t.name for op in step.graph.ops if op.again is not None for t in op.inputs if "@fence" in t.name}
    return {name.partition("@fence")[0] for name in reads if "/" in name and not name.startswith("params/")}


@pytest.mark.parametrize(
    ("loss_fn", "selections"),
    [
        (chain, [["b/*", "c/*"], ["d/*"]]),
        (checkpointed, [["a/*", "b/*", "c/*"]]),
        (checkpointed, [["b/cos"], ["d/dot", "d/exp"]]),
        (stack, [["inner/*", "loss/dot", "loss/cos"]]),
        (stack, [["a/sin", "inner/*", "loss/dot", "loss/cos", "b/dot"]]),
    ],
    ids=["apart", "around a region", "inside a region", "a layer", "a stack"],
)
def test_numbers_are_those_of_jax(loss_fn: Callable[..., jax.Array], selections: list[list[str]]) -> None:
    def policy(graph: Any, devices: Any) -> None:
        for selection in selections:
            graph.recompute(selection, keep=selection[0])

    assert_like_jax(policy, loss_fn)


def test_a_region_of_the_model_inside_the_selection_becomes_part_of_it() -> None:
    step = planned(lambda graph, _: graph.recompute(["a/*", "b/*", "c/*"]), checkpointed)
    assert [region.name for region in step.source["b/dot"].remat] == ["a/dot/again", "remat"]
    assert fenced(step) == {"x"}
    within = planned(lambda graph, _: graph.recompute("b/cos"), checkpointed)
    assert repeated(within) == repeated(planned(lambda graph, _: None, checkpointed))


def test_clones_know_what_they_repeat() -> None:
    step = planned(lambda graph, _: graph.recompute("*inner/*"), stack)
    clones = [op for op in step.graph.ops if op.again is not None]
    assert clones
    for op in clones:
        assert op.again is not None
        assert op.path == f"{op.again.path}@again"
        assert (op.body, op.named) == (op.again.body, op.again.named)
        assert step.graph.loops[op.loop or ""].forward == op.again.loop


def test_what_cannot_be_a_region_is_refused_by_name() -> None:
    assert "no op named 'e/*'" in refused("e/*")
    assert "'b/dot', 'b/cos' reads some of them and is read by others; select it too" in refused(["a/*", "c/*"])
    assert "all of loop 'loss/scan'" in refused(["a/dot", "inner/*"], stack)
    assert "'b/cos' are part of region 'remat', and so are 'c/dot', 'c/tanh'" in refused(["a/*", "b/*"], checkpointed)
    assert "none was given" in refused([])
    assert "no selected op or result named 'd/dot'" in refused(["b/*", "c/*"], keep="d/dot")
    assert "takes forward ops" in refused(captured().graph["b/dot"].backward)
    assert "takes ops, grids, paths and patterns, not 3" in refused(3)


def test_two_decisions_meet_half() -> None:
    def policy(graph: Any, devices: Any) -> None:
        graph.recompute(["a/*", "b/*"])
        graph.recompute(["b/*", "c/*"])

    with pytest.raises(PlanError, match="'b/dot', 'b/cos' are part of region 'a/dot/again', and so are 'a/dot', 'a/sin'"):
        planned(policy)


def test_what_no_gradient_flows_through_is_not_saved_anyway() -> None:
    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("count"):
            count = jnp.sum(jnp.where(x > 0, 1, 2))
        return jnp.sum(layer("a", params, x)) / count

    assert "no gradient flows through 'count/" in refused("count/*", loss_fn)


def test_fused_ops_are_computed_again_as_one() -> None:
    def policy(graph: Any, devices: Any) -> None:
        fused = graph.fuse("b/dot", "b/cos", "c/dot", name="middle")
        graph.recompute([fused, "c/tanh"])

    assert repeated(planned(policy))["cos"] == repeated(planned(lambda graph, _: None))["cos"] + 1
    assert_like_jax(policy, chain)
    with pytest.raises(PlanError, match="is named by a decision before, 'recompute b/dot"):
        planned(lambda graph, _: (graph.recompute("b/*"), graph.fuse("b/dot", "b/cos")))


def test_a_plan_file_holds_it_and_another_graph_is_checked() -> None:
    known = captured()
    made = transform(known, lambda graph, _: graph.recompute(["b/*", "c/*"], "b/dot"), 1)
    loaded = Plan.from_json(made.to_json())
    assert loaded == made
    assert '{"kind": "recompute", "ops": ["b/dot", "b/cos", "c/dot", "c/tanh"], "keep": ["b/dot"]}' in made.to_json()
    assert "recompute b/dot + b/cos + c/dot + c/tanh, keeping b/dot" in str(made)
    check_fits(loaded, known.graph, BodyTable())
    assert repeated(lower(known, loaded)) == repeated(lower(known, made))
    other: Graph = captured(checkpointed).graph
    half = transform(known, lambda graph, _: graph.recompute(["a/*", "b/*"]), 1)
    with pytest.raises(PlanFitError, match="are part of region 'remat'"):
        check_fits(half, other, BodyTable())


def test_an_evaluation_that_follows_has_nothing_to_compute_again() -> None:
    def policy(graph: Any, devices: Any) -> None:
        graph.recompute("b/*")

    def step(params: Any, x: jax.Array) -> Any:
        loss, grads = jscaler.value_and_grad(chain)(params, x)
        return jax.tree.map(jnp.subtract, params, grads), loss

    train = jscaler.parallelize(policy, devices=1)(step)
    train(PARAMS, X)
    assert jnp.allclose(train.follow(lambda params, x: chain(params, x))(PARAMS, X), chain(PARAMS, X), rtol=1e-5)
