"""Fusing forward ops before autodiff: one op with one backward, and the same numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from losing import losing
from lower.steps import ADAMW, assert_same_numbers, make_batch, make_params, mlp_loss, planned, tied_loss

import jscaler
from jscaler import Chunk, PlanError, Split, SplitError, UnknownNameError
from jscaler.primitives import Fuse, GridAxis, Planner, Trans

PATHS = ("back/dot", "loss/where", "loss/gather")


@pytest.fixture
def planner() -> Planner:
    return Planner(jscaler.parallelize("single")(jscaler.grad(tied_loss)).graph(make_params(), make_batch()), 2)


def whole_loss(graph: Any) -> Any:
    return graph.fuse(*PATHS, name="loss/chunked")


def chunked(graph: Any, devices: np.ndarray) -> None:
    loss = whole_loss(graph)
    graph.op_trans(loss, Chunk(graph.factor_of("batch/labels", 0)[loss], 4))


def chunked_parts(graph: Any, devices: np.ndarray) -> None:
    loss = whole_loss(graph)
    rows = graph.factor_of("batch/labels", 0)[loss]
    graph.op_assign(graph.op_trans(loss, Split(rows, 2), Chunk(rows, 4)), devices)


@pytest.mark.smoke
def test_one_op_with_one_backward(planner: Planner) -> None:
    before = planner.graph
    op = whole_loss(planner)
    assert [t.name for t in op.inputs] == ["norm/rsqrt:0", "params/up/kernel", "batch/labels"]
    assert [t.name for t in op.outputs] == ["loss/gather:0"]  # the logits are inside
    assert op.backward is planner["loss/chunked@backward"]
    assert [t.name for t in op.backward.outputs] == ["d(norm/rsqrt:0)@loss/chunked", "d(params/up/kernel)@loss/chunked"]
    paths = [o.path for o in planner.graph.ops]
    assert not {p for path in PATHS for p in (path, path + "@backward")} & set(paths)
    assert len(paths) == len(before.ops) - 3  # two forward ops less, and one backward: where had none
    assert planner.graph.calls == before.calls
    assert planner.graph.outputs == before.outputs
    assert planner.plan("p").decisions == (Fuse(PATHS, "loss/chunked"),)
    assert "fuse      back/dot + loss/where + loss/gather -> loss/chunked" in str(planner.plan("p"))


def test_by_default_it_is_called_like_its_last_op(planner: Planner) -> None:
    assert planner.fuse("loss/gather", planner["loss/where"]).path == "loss/gather"
    assert planner["loss/gather"].backward is not None


def test_what_others_read_is_handed_on(planner: Planner) -> None:
    op = planner.fuse("norm/rsqrt", "up/add")
    assert [t.name for t in op.outputs] == ["norm/rsqrt:0"]
    again = planner.fuse("up/dot", op, name="first")
    assert [t.name for t in again.inputs] == ["batch/x", "params/up/kernel", "params/up/bias"]
    assert planner.graph.factor_of("batch/x", 0)[again] == "a"


@pytest.mark.parametrize(
    ("paths", "name", "message"),
    [
        (("back/dot",), None, "fuse takes two or more ops; 'back/dot' was given"),
        (
            ("back/dot", "back/dot@backward"),
            None,
            "fuse takes forward ops, .*; 'back/dot@backward' are none",
        ),
        (("up/dot", "norm/rsqrt"), None, "'up/dot', 'norm/rsqrt' cannot be one op: 'up/add' reads some"),
        (("up/dot", "back/dot"), None, "cannot be one op: 'up/add', 'norm/rsqrt' reads some of them and is read by others"),
        (("up/dot", "up/add"), "back/dot", "the graph has an op 'back/dot' already; give the fused op another name"),
    ],
)
def test_what_cannot_be_one_op(planner: Planner, paths: tuple[str, ...], name: str | None, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planner.fuse(*paths, name=name)


def test_the_edge_of_a_loop_lies_between() -> None:
    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("before"):
            x = x @ params["s"]
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
        return jnp.sum(x)

    weights = {"s": jnp.ones((4, 4)), "w": jnp.ones((3, 4, 4))}
    planner = Planner(jscaler.parallelize("single")(jscaler.grad(loss_fn)).graph(weights, jnp.ones((2, 4))), 1)
    assert [op.loop for op in planner.forward()] == [None, "loss/scan", "loss/scan", None]
    first, dot, tanh, last = (op.path for op in planner.forward())
    for pair in ((first, dot), (tanh, last), (first, last)):
        with pytest.raises(PlanError, match="the edge of a loop or of a checkpointed region lies between them"):
            planner.fuse(*pair)
    assert planner.fuse(dot, tanh).loop == "loss/scan"


def test_fuse_before_splitting(planner: Planner) -> None:
    planner.op_trans("up/dot", Split("a", 2))
    with pytest.raises(PlanError, match=r"'up/dot' was split before, .*; fuse ops before they are split"):
        planner.fuse("up/dot", "up/add")
    with pytest.raises(UnknownNameError, match="no op named 'up/ad'; did you mean 'up/add'"):
        planner.fuse("up/ad", "back/dot")


def test_fuse_before_ordering_and_saving(planner: Planner) -> None:
    planner.residuals("up/dot", "saved")
    planner.op_order("norm/rsqrt", "back/dot")
    for paths, decision in ((("up/dot", "up/add"), "residuals up/dot saved"), (("up/add", "norm/rsqrt"), "op_order")):
        with pytest.raises(
            PlanError, match=f"named by a decision before, '{decision}.*fuse ops first, and name the fused op"
        ):
            planner.fuse(*paths)
    assert planner.fuse("loss/where", "loss/gather").path == "loss/gather"


def test_ops_of_different_gradient_calls() -> None:
    def step(params: Any, batch: Any) -> Any:
        return jscaler.grad(mlp_loss)(params, batch), jscaler.grad(mlp_loss)(params, batch)

    planner = Planner(jscaler.parallelize("single")(step).graph(make_params(), make_batch()), 1)
    first, second = (next(op for op in planner.forward() if op.call == call) for call in (0, 1))
    with pytest.raises(PlanError, match="belong to different gradient calls and cannot be one op"):
        planner.fuse(first, second)


def test_chunks_are_no_axis_of_the_grid(planner: Planner) -> None:
    op = whole_loss(planner)
    grid = planner.op_trans(op, Chunk("a", 4), Split("a", 2))
    assert grid.shape == (2,)
    assert str(grid) == "Grid(loss/chunked [a:2, a:4 chunks])"
    assert planner.plan("p").decisions[-1] == Trans("loss/chunked", (GridAxis("a", 2),), (GridAxis("a", 4),))
    assert str(planner.plan("p").decisions[-1]) == "op_trans  loss/chunked -> [a:2] in chunks of a:4"
    with pytest.raises(PlanError, match="'loss/chunked' runs in chunks of a:4 already; an op is chunked along one factor"):
        planner.op_trans(grid, Chunk("a", 2))


def test_chunks_that_cannot_be(planner: Planner) -> None:
    op = whole_loss(planner)
    with pytest.raises(SplitError, match="cannot split factor 'a' of size 8 into 16 parts; legal: 1, 2, 4, 8"):
        planner.op_trans(op, Split("a", 2), Chunk("a", 16))
    with pytest.raises(
        SplitError, match=r"'b' of size 16 into 2 parts; one after another: it needs the whole .*; take another one"
    ):
        planner.op_trans(op, Chunk("b", 2))
    with pytest.raises(PlanError, match=r"factor 'a' is split by a:9\+7"):
        planner.op_trans(op, Split("a", sizes=(9, 7)), Chunk("a", 2))


@pytest.mark.parametrize(("policy", "devices"), [(chunked, 1), (chunked_parts, 2)], ids=["one device", "two devices"])
def test_optimizer_steps_are_those_of_one_device(policy: Any, devices: int) -> None:
    assert_same_numbers(policy, devices, tied_loss, ADAMW)


def test_the_backward_is_chunked_too() -> None:
    plan = planned(chunked_parts, 2, tied_loss)
    for path in ("loss/chunked", "loss/chunked@backward"):
        assert plan.completed.ops[path].placement.describe() == "a:2 a:4 chunks"
        (task,) = [t for t in plan.program.tasks if getattr(getattr(t, "op", None), "path", "") == path]
        assert "scan" in [e.primitive.name for e in task.jaxpr.eqns]


def split_on_its_own(graph: Any, devices: np.ndarray) -> None:
    """A forward that runs in chunks, and a backward of which each device has so little that it cannot."""
    chunked = graph.op_trans("up/dot", Split(("kernel", 1), devices.size), Chunk("a", 8))
    graph.op_assign(chunked, devices)
    graph.op_assign(graph.op_trans("up/dot@backward", Split("a", devices.size)), devices)


@losing
def test_a_backward_that_is_split_in_another_way_runs_in_chunks_only_if_they_divide_its_parts() -> None:
    plan = planned(split_on_its_own, 4, tied_loss)
    used = [plan.completed.ops[p].placement.describe() for p in ("up/dot", "up/dot@backward")]
    assert used == ["c:4 a:8 chunks", "a:4"]
    assert_same_numbers(split_on_its_own, 4, tied_loss)


def test_a_finished_plan_fuses_again() -> None:
    step = jscaler.parallelize(chunked_parts, devices=2)(jscaler.value_and_grad(tied_loss))
    plan = step.lower(make_params(), make_batch()).plan.plan
    again = jscaler.parallelize(plan, devices=2)(jscaler.value_and_grad(tied_loss)).lower(make_params(), make_batch())
    assert again.plan.digest == plan.digest


def test_intermediate_results_are_still_handed_out() -> None:
    """A fused op whose inside the step returns, and gradients with respect to what is made before."""

    def loss_fn(w: jax.Array, x: jax.Array) -> Any:
        with jax.named_scope("dot"):
            y = x @ w
        with jax.named_scope("act"):
            z = jnp.tanh(y)
        with jax.named_scope("out"):
            return (z @ w.T).sum(), z

    def policy(graph: Any, devices: np.ndarray) -> None:
        graph.fuse("dot/dot", "act/tanh", "out/dot", name="all")

    w, x = jnp.eye(4) + 0.1, jnp.arange(8.0).reshape(2, 4) / 8
    ours = jscaler.parallelize(policy, devices=1)(jscaler.value_and_grad(loss_fn, has_aux=True))(w, x)
    theirs = jax.value_and_grad(loss_fn, has_aux=True)(w, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)
