"""Small train steps of the tests, and the check that a policy gives one device's numbers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jscaler
from jscaler import Split
from jscaler.lower.block_cuts import uncut
from jscaler.lower.step_plan import StepPlan

LEARNING_RATE = 0.1
MOMENTUM = optax.sgd(LEARNING_RATE, momentum=0.9)  # hides nothing: a gradient twice too large moves twice too far
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE))

Policy = Callable[[Any, np.ndarray], None]
LossFn = Callable[[Any, dict[str, jax.Array]], jax.Array]


def mlp_loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Ops up/dot, up/add, act/tanh, down/dot, down/add, loss/reduce_sum, loss/div."""
    with jax.named_scope("up"):
        x = batch["x"] @ params["up"]["kernel"] + params["up"]["bias"]
    with jax.named_scope("act"):
        x = jnp.tanh(x)
    with jax.named_scope("down"):
        x = x @ params["down"]["kernel"] + params["down"]["bias"]
    return jnp.mean((x - batch["y"]) ** 2)


def tied_loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """A kernel that is read twice, a normalisation, and a softmax: gradients to join, factors that are blocked."""
    kernel = params["up"]["kernel"]
    with jax.named_scope("up"):
        x = batch["x"] @ kernel + params["up"]["bias"]
    with jax.named_scope("norm"):
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)
    with jax.named_scope("back"):
        logits = jax.nn.relu(x) @ kernel.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def make_params() -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    return {
        "up": {"kernel": jax.random.normal(next(keys), (8, 16)), "bias": jax.random.normal(next(keys), (16,))},
        "down": {"kernel": jax.random.normal(next(keys), (16, 8)), "bias": jax.random.normal(next(keys), (8,))},
    }


def make_batch() -> dict[str, jax.Array]:
    x, y = jax.random.split(jax.random.key(1))
    return {"x": jax.random.normal(x, (16, 8)), "y": jax.random.normal(y, (16, 8)), "labels": jnp.arange(16) % 8}


def make_state(tx: optax.GradientTransformation) -> dict[str, Any]:
    params = make_params()
    return {"params": params, "opt": tx.init(params)}


def make_step(loss_fn: LossFn = mlp_loss, tx: optax.GradientTransformation = MOMENTUM) -> Callable[..., Any]:
    def step(state: dict[str, Any], batch: dict[str, jax.Array]) -> Any:
        loss, grads = jscaler.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


def split(graph: Any, path: str, what: tuple[str, int], devices: np.ndarray) -> None:
    graph.op_assign(graph.op_trans(graph[path], Split(what, devices.size)), devices)


def tensor_parallel(graph: Any, devices: np.ndarray) -> None:
    """First kernel by columns, second by rows."""
    split(graph, "up/dot", ("kernel", 1), devices)
    split(graph, "up/add", ("bias", 0), devices)
    split(graph, "act/tanh", ("up/add:0", 1), devices)
    split(graph, "down/dot", ("kernel", 0), devices)


def batch_and_hidden(graph: Any, devices: np.ndarray) -> None:
    """Data parallel by rows of the device grid, tensor parallel by its columns."""
    grid = devices.reshape(2, -1)
    for path, rows, columns in (
        ("up/dot", ("batch/x", 0), ("kernel", 1)),
        ("up/add", ("up/dot:0", 0), ("bias", 0)),
        ("act/tanh", ("up/add:0", 0), ("up/add:0", 1)),
        ("down/dot", ("act/tanh:0", 0), ("kernel", 0)),
    ):
        cells = graph.op_trans(graph[path], Split(rows, grid.shape[0]), Split(columns, grid.shape[1]))
        graph.op_assign(cells, grid)


def planned(policy: Any, devices: int, loss_fn: LossFn = mlp_loss, tx: optax.GradientTransformation = MOMENTUM) -> StepPlan:
    """The step under ``policy``, lowered to a program but not compiled; its redistribution is proven."""
    step = jscaler.parallelize(policy, devices=devices, donate_argnames="state")(make_step(loss_fn, tx))
    lowered = step.lower(make_state(tx), make_batch())
    jscaler.verify(lowered)
    return lowered.plan


def collectives(plan: StepPlan) -> list[str]:
    """``kind tensor`` of every collective in the plan's program; local slices and masks left out."""
    return [
        f"{step.kind} {adapt.tensor.name}"
        for adapt in plan.program.adapters
        for step in adapt.adapter.steps
        if step.kind not in ("slice", "value_mask")
    ]


@functools.cache
def reference(loss_fn: LossFn, tx: optax.GradientTransformation, num_steps: int) -> tuple[Any, tuple[jax.Array, ...]]:
    """State and losses after ``num_steps`` steps of ``jax.jit`` in float64."""
    fun, state, losses = jax.jit(make_step(loss_fn, tx)), make_state(tx), []
    for _ in range(num_steps):
        state, loss = fun(state, make_batch())
        losses.append(loss)
    return state, tuple(losses)


def assert_same_numbers(
    policy: Any, devices: int, loss_fn: LossFn = mlp_loss, tx: optax.GradientTransformation = MOMENTUM
) -> None:
    """Three optimizer steps in float64 under ``policy`` equal those of ``jax.jit``, leaf by leaf; and it is proven."""
    with jax.enable_x64(True):
        expected, losses = reference(loss_fn, tx, 3)
        step = jscaler.parallelize(policy, devices=devices)(make_step(loss_fn, tx))
        state = make_state(tx)
        jscaler.verify(step.lower(state, make_batch()))
        for want in losses:
            state, loss = step(state, make_batch())
            assert loss.dtype == jnp.float64
            _assert_close("loss", loss, want)
        for (path, leaf), want in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True):
            _assert_close(jax.tree_util.keystr(path), leaf, want)


def _assert_close(name: str, ours: jax.Array, theirs: jax.Array) -> None:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
    allowed = 1e-10 * max(np.abs(theirs).max(), LEARNING_RATE)
    assert np.abs(ours - theirs).max() <= allowed, f"{name}: {np.abs(ours - theirs).max()} against {allowed}"


def with_segment(plan: StepPlan, **changes: Any) -> StepPlan:
    """``plan``, with another ``program`` or ``flat`` of its only group."""
    (segment,) = plan.segments
    made = dataclasses.replace(segment, **changes)
    return dataclasses.replace(plan, segments=(dataclasses.replace(made, blocks=(uncut(made.program, made.flat),)),))
