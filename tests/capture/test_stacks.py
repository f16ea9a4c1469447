"""Stacks of layers in the graph: the body once, the backward a loop, and what crosses between them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capture.reference import check_graph, graph_of
from jax import lax
from lower.layers import (
    HIDDEN,
    LAYERS,
    PROGRAMS,
    UP,
    batch,
    handed_through,
    net_batch,
    net_state,
    net_step,
    params,
    step_of,
)

import jscaler
from jscaler.capture.bodies import BodyTable
from jscaler.capture.recompute import recompute
from jscaler.capture.residuals import with_backward_bodies
from jscaler.capture.saved import thread_saved
from jscaler.errors import UnknownNameError
from jscaler.ir import Graph
from models.gpt import GPT, GPTConfig
from models.training import make_optimizer, make_state, train_step


def full(graph: Graph) -> Graph:
    bodies = BodyTable()
    return thread_saved(recompute(with_backward_bodies(graph, bodies), bodies))


def saved(graph: Graph) -> dict[str, int]:
    """What the forward loops save for the backward, in bytes."""
    return {y.slice.name: y.stack.nbytes for loop in full(graph).loops.values() for y in loop.ys if y.saved}


@pytest.fixture(scope="module")
def net() -> Graph:
    return graph_of(net_step(False), net_state(), net_batch())


@pytest.mark.parametrize("loss_fn", [*PROGRAMS[2::2], handed_through], ids=lambda f: f.__name__)
def test_the_graph_computes_what_jax_does(loss_fn: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        graph = check_graph(step_of(loss_fn), params(), batch(), tolerance=1e-11)
    assert {op.primitive.name for o in graph.ops if o.body for op in o.body.jaxpr.eqns}.isdisjoint({"scan", "remat2"})


def test_a_loop_may_take_nothing_and_hand_on_nothing() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        made = lax.scan(lambda _, __: (None, jnp.tanh(batch @ params["w"])), None, None, length=3)[1]
        return jnp.mean(made**2)

    rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    check_graph(jscaler.value_and_grad(loss), {"w": rows[:4] / 4}, rows)


@pytest.mark.smoke
def test_the_body_stands_in_the_graph_once_under_its_own_paths(net: Graph) -> None:
    (dot,) = net.select("*/mlp/up/dot")
    assert (dot.path, dot.loop) == ("layers/mlp/up/dot", "scan")
    assert dot.inputs[1].shape == (HIDDEN, 2 * HIDDEN)
    assert dot.backward is not None
    assert dot.backward.loop == "scan@backward"
    forward, backward = (net.loops[name] for name in ("scan", "scan@backward"))
    assert (forward.length, forward.reverse, backward.reverse, backward.forward) == (LAYERS, False, True, "scan")
    with pytest.raises(UnknownNameError):
        net.select("layers_0/*")


def test_a_dim_reaches_through_loops(net: Graph) -> None:
    """From the stack to its slice, through carries to what follows, and to the optimizer; layers themselves are no dim."""
    hidden = {op.path: factor for op, factor in net.factor_of(UP, 2).items()}
    assert {"layers/mlp/up/dot", "layers/mlp/down/dot", "layers/mlp/up/dot@backward"} <= hidden.keys()
    assert any(path.startswith("update/state/params") for path in hidden)
    assert not any("norm" in path for path in hidden if path.startswith("layers"))
    rows = {op.path for op in net.factor_of("batch/x", 0)}
    assert {"layers/norm/rsqrt", "layers/add", "head/dot", "head/dot@backward", "layers/add@backward"} <= rows
    assert not any(op.loop for op in net.factor_of(UP, 0))


def test_a_checkpointed_layer_saves_what_it_starts_from_alone(net: Graph) -> None:
    remat = graph_of(net_step(True), net_state(), net_batch())
    activation = net.loops["scan"].carries[0].inside.nbytes
    assert saved(remat) == {"scan:carry0": LAYERS * activation}
    assert sum(saved(net).values()) > 4 * LAYERS * activation
    again = [op for op in full(remat).ops if op.again]
    assert {op.loop for op in again} == {"scan@backward"}
    assert all(op.path == f"{op.again.path}@again" and op.kind == "backward" for op in again if op.again)
    assert not any(op.name == "dot@again" and "down" in op.path for op in again)  # nobody reads what it makes


def test_outside_a_loop_inputs_and_cotangents_are_fenced_together() -> None:
    def loss(p: Any, b: Any) -> Any:
        layer = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))
        return layer(layer(b["x"], p["w"][0]), p["s"]).sum()

    graph = full(graph_of(step_of(loss), params(), batch()))
    fences = [op for op in graph.ops if op.anywhere == "fence"]
    assert len(fences) == 2
    for fence in fences:
        assert {t.role for t in fence.inputs} >= {"gradient", "activation"}
        inside = {t for op in graph.ops if op.again for t in op.inputs}
        assert inside & set(fence.outputs)


def test_what_every_layer_reads_and_keys_that_never_change_are_not_saved() -> None:
    def loss(p: Any, b: Any) -> Any:
        def body(carry: Any, w: Any) -> Any:
            x, key = carry
            return (jnp.tanh(x @ w @ p["s"]) * jax.random.uniform(key, x.shape), key), None

        return lax.scan(body, (b["x"], b["key"]), p["w"])[0][0].sum()

    graph = full(graph_of(step_of(loss), params(), batch()))
    forward = next(loop for loop in graph.loops.values() if loop.forward is None and any(y.saved for y in loop.ys))
    assert all(y.slice.shape == (2, 4) for y in forward.ys)
    sums = [c for loop in graph.loops.values() for c in loop.carries if c.is_sum]
    assert [c.out.shape for c in sums] == [(4, 4)]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_a_users_op_makes_a_stack_too(wrap: Callable[..., Any]) -> None:
    """What it holds is not looked into."""
    layer = jscaler.op("b h, h o -> b o")(lambda x, w: jnp.tanh(x @ w))
    loss = lambda p, b: lax.scan(wrap(lambda x, w: (layer(x, w), None)), b["x"], p["w"])[0].sum()  # noqa: E731
    graph = graph_of(lambda p, b: jscaler.value_and_grad(loss)(p, b), params(), batch())
    assert graph["loss/<lambda>"].loop == "loss/scan"
    assert graph["loss/<lambda>"].inputs[1].shape == (4, 4)


def test_loops_without_contractions_stay_one_op() -> None:
    def summed(p: Any, b: Any) -> Any:
        return lax.scan(lambda x, w: (x + w.sum(), None), b["x"], p["w"])[0].sum()

    graph = graph_of(lambda p, b: jscaler.value_and_grad(summed)(p, b), params(), batch())
    assert not graph.loops
    assert "loss/scan" in graph.by_path


def test_equal_layers_of_a_python_loop_share_their_bodies() -> None:
    """However many layers there are: a layer's number, from which its dropout draws, is no part of its body."""

    def bodies(layers: int) -> dict[str, int]:
        model = GPT(GPTConfig(hidden=8, layers=layers, heads=2, sequence=4, vocabulary=8))
        tokens = np.zeros((2, 4), np.int32)
        state = jax.eval_shape(lambda: make_state(model, 4, make_optimizer()))
        graph = graph_of(train_step, state, {"tokens": tokens, "labels": tokens})
        graph = with_backward_bodies(graph, BodyTable())
        return {kind: len({op.body for op in graph.of_kind(kind)}) for kind in ("forward", "backward")}

    assert bodies(2) == bodies(4)
