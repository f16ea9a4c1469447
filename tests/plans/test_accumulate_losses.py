"""Losses, masks and metrics under accumulation: the numbers of the whole batch, or a refusal that names the op."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from losing import losing
from of_the_day import of_the_day
from step_numbers import assert_trees_close

import jscaler
from jscaler import plans
from jscaler.errors import PlanError, PlanWarning
from models.master import next_scale

ROWS, CLASSES = 8, 4


def params_and_batch() -> tuple[Any, Any]:
    draws = np.random.default_rng(0)
    params = {"up": draws.normal(size=(6, 8)), "down": draws.normal(size=(8, CLASSES))}
    batch = {
        "x": draws.normal(size=(ROWS, 3, 6)),
        "labels": draws.integers(-1, CLASSES, (ROWS, 3)),
        "mask": (draws.uniform(size=(ROWS, 3)) > 0.4).astype(float),
        "weights": draws.uniform(size=ROWS),
    }
    return jax.tree.map(jnp.asarray, (params, batch))


def logits_of(params: Any, batch: Any) -> jax.Array:
    return jnp.tanh(batch["x"] @ params["up"]) @ params["down"]


def token_losses(logits: jax.Array, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["labels"], 0))


def descend(loss_fn: Callable[..., Any], tx: Any = None) -> Callable[..., Any]:
    """A step of gradient descent on a loss with metrics beside it."""

    def step(state: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        (loss, metrics), grads = value_and_grad(lambda p: loss_fn(p, batch), has_aux=True)(state["params"])
        moved = grads if tx is None else tx.update(grads, tx.init(state["params"]))[0]
        return {"params": jax.tree.map(lambda p, g: p - 0.3 * g, state["params"], moved)}, {"loss": loss, **metrics}

    return step


def by_mask(params: Any, batch: Any) -> Any:
    losses = token_losses(logits_of(params, batch), batch)
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"]), {}


def by_weights(params: Any, batch: Any) -> Any:
    losses = token_losses(logits_of(params, batch), batch).mean(-1)
    return jnp.sum(losses * batch["weights"]) / jnp.maximum(jnp.sum(batch["weights"]), 1), {}


def by_threshold(params: Any, batch: Any) -> Any:
    mask = jnp.abs(batch["x"][..., 0]) > 0.5
    losses = token_losses(logits_of(params, batch), batch)
    return jnp.sum(jnp.where(mask, losses, 0)) / jnp.maximum(mask.sum(), 1), {"share": mask.mean()}


def by_labels(params: Any, batch: Any) -> Any:
    """Tokens that have a label; accuracy and perplexity beside."""
    logits, valid = logits_of(params, batch), batch["labels"] != -1
    count = jnp.maximum(valid.sum(), 1)
    loss = jnp.sum(token_losses(logits, batch) * valid) / count
    right = jnp.sum((jnp.argmax(logits, -1) == batch["labels"]) * valid)
    return loss, {"accuracy": right / count, "perplexity": jnp.exp(loss), "tokens": valid.sum()}


def squared(params: Any, batch: Any) -> Any:
    """Not linear in what the micro-batches add up to; its derivative reads the sum again."""
    loss = token_losses(logits_of(params, batch), batch).mean()
    return loss**2 + 0.5 * loss, {}


def smooth_and_z(params: Any, batch: Any) -> Any:
    """Label smoothing, and the log of the partition function held near zero."""
    logits = logits_of(params, batch)
    labels = optax.smooth_labels(jax.nn.one_hot(batch["labels"], CLASSES), 0.1)
    z = jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
    return optax.softmax_cross_entropy(logits, labels).mean() + 1e-2 * z, {"z": z}


def balanced(params: Any, batch: Any) -> Any:
    """A product of two means over the batch, as in a mixture of experts: no sum over micro-batches."""
    logits = logits_of(params, batch)
    gates = jax.nn.softmax(logits)
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), CLASSES)
    balance = CLASSES * jnp.sum(jnp.mean(chosen, (0, 1)) * jnp.mean(gates, (0, 1)))
    return token_losses(logits, batch).mean() + 0.1 * balance, {"balance": balance}


def adversaries(state: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    """Two losses of two parts of the state, the second against what the first has moved."""

    def made(params: Any) -> jax.Array:
        return jnp.tanh(batch["x"] @ params["up"]) @ params["up"].T

    def judged(params: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params["up"]) @ params["down"][:, 0]

    def judge(params: Any) -> jax.Array:
        real, fake = judged(params, batch["x"]), judged(params, made(state["maker"]))
        return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(fake))

    def fool(params: Any, judges: Any) -> jax.Array:
        return jnp.mean(jax.nn.softplus(-judged(judges, made(params))))

    first, grads = value_and_grad(judge)(state["params"])
    judges = jax.tree.map(lambda p, g: p - 0.3 * g, state["params"], grads)
    second, grads = value_and_grad(lambda p: fool(p, judges))(state["maker"])
    maker = jax.tree.map(lambda p, g: p - 0.3 * g, state["maker"], grads)
    return {"params": judges, "maker": maker}, {"judge": first, "fool": second}


def scaled(state: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    """A scaled loss, whose step is left out where a gradient is not finite."""
    times = state["scale"].scale
    loss, grads = value_and_grad(lambda p: by_mask(p, batch)[0] * times)(state["params"])
    grads = jax.tree.map(lambda g: g / times, grads)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
    moved = jax.tree.map(lambda p, g: jnp.where(finite, p - 0.3 * g, p), state["params"], grads)
    return {"params": moved, "scale": next_scale(state["scale"], finite)}, {"loss": loss / times}


def assert_like_the_whole(step: Any, state: Any, batch: Any, plan: Any, devices: int) -> Any:
    lowered = jscaler.parallelize(plan, devices=devices)(step).lower(state, batch)
    jscaler.verify(lowered)
    ours = lowered.compile()
    whole = jax.jit(lambda state, batch: step(state, batch, jax.value_and_grad))
    theirs = whole.lower(state, batch).compile()
    got = want = state
    for _ in range(2):
        (got, metrics), (want, expected) = ours(got, batch), theirs(want, batch)
        for mine, other in zip(jax.tree.leaves((got, metrics)), jax.tree.leaves((want, expected)), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-11, atol=1e-12)
    return lowered.plan.graph


LOSSES = {f.__name__: descend(f) for f in (by_mask, by_weights, by_threshold, by_labels, smooth_and_z)}
LOSSES["clipped"] = descend(by_labels, optax.clip_by_global_norm(0.1))


@pytest.mark.parametrize("name", of_the_day(LOSSES, 3))
def test_a_loss_is_that_of_the_whole_batch(name: str) -> None:
    """Forward and backward share one loop, which hands no activation on: the count that divides them runs first."""
    with jax.enable_x64(True):
        params, batch = params_and_batch()
        devices = 2 if name == "by_labels" else 1
        plan = plans.accumulate(4, plans.data_parallel() if devices == 2 else None)
        graph = assert_like_the_whole(LOSSES[name], {"params": params}, batch, plan, devices)
        trained = {op.loop for op in graph.ops if op.kind == "backward" and op.loop is not None}
        assert len(trained) == 1
        assert not [loop.ys for loop in graph.loops.values() if loop.ys]


@losing
@pytest.mark.parametrize("devices", [1, 2])
def test_a_loss_that_needs_the_sum_before_its_gradient(devices: int) -> None:
    with jax.enable_x64(True):
        params, batch = params_and_batch()
        plan = plans.accumulate(4, plans.data_parallel() if devices == 2 else None)
        assert_like_the_whole(descend(squared), {"params": params}, batch, plan, devices)


@losing
def test_two_losses_in_a_step() -> None:
    with jax.enable_x64(True):
        params, batch = params_and_batch()
        state = {"params": params, "maker": {"up": params["up"] * 0.5}}
        graph = assert_like_the_whole(adversaries, state, batch, plans.accumulate(4), 1)
        assert {op.call for op in graph.ops if op.loop is not None} == {0, 1}


def test_a_scaled_loss() -> None:
    with jax.enable_x64(True):
        params, batch = params_and_batch()
        scale = DynamicScale(scale=jnp.float64(2.0**10), fin_steps=jnp.int32(0))  # type: ignore[arg-type]
        assert_like_the_whole(scaled, {"params": params, "scale": scale}, batch, plans.accumulate(4), 1)


def over_the_batch(params: Any, batch: Any) -> Any:
    """Softmax over the batch, in front of a layer."""
    with jax.named_scope("model"), jax.named_scope("among"):
        share = jax.nn.softmax(jnp.tanh(batch["x"] @ params["up"])[:, 0], 0)
    return jnp.sum((share @ params["down"]) ** 2), {}


def among_the_batch(params: Any, batch: Any) -> Any:
    """Every row against all others, as in contrastive learning."""
    with jax.named_scope("model"), jax.named_scope("pairs"):
        rows = logits_of(params, batch)[:, 0]
        likeness = rows @ rows.T
    return optax.softmax_cross_entropy_with_integer_labels(likeness, jnp.arange(ROWS)).mean(), {}


def sorted_batch(params: Any, batch: Any) -> Any:
    with jax.named_scope("model"), jax.named_scope("order"):
        found = jnp.sort(logits_of(params, batch)[:, 0, 0])
    return jnp.sum(found[: ROWS // 2]), {}


def far_apart(params: Any, batch: Any) -> Any:
    """Rows held apart from all others."""
    with jax.named_scope("model"), jax.named_scope("pairs"):
        rows = jnp.tanh(logits_of(params, batch)[:, 0])
        return jnp.mean(jnp.exp(-jnp.sum((rows[:, None] - rows[None]) ** 2, -1))), {}


@losing
def test_a_product_of_means_runs_in_loops_apart() -> None:
    """The means of all rows are made first; their product has the whole batch's."""
    params, batch = params_and_batch()
    step = descend(balanced)
    lowered = jscaler.parallelize(plans.accumulate(4), devices=1)(step).lower({"params": params}, batch)
    assert len(lowered.plan.graph.loops) == 3
    assert_trees_close(lowered.compile()({"params": params}, batch), jax.jit(step)({"params": params}, batch))


@pytest.mark.parametrize(("loss", "op"), [(among_the_batch, "pairs/dot"), (sorted_batch, "order/sort")])
def test_what_sees_all_rows_runs_once_between_loops(loss: Callable[..., Any], op: str) -> None:
    """No part of it has its numbers; what is in front, and behind, still runs micro-batch by micro-batch."""
    with jax.enable_x64(True):
        params, batch = params_and_batch()
        step = descend(loss)
        with pytest.warns(PlanWarning, match=rf"in \d loops, .* since '{op}.* needs '.*' of all micro-batches, which"):
            lowered = jscaler.parallelize(plans.accumulate(4), devices=1)(step).lower({"params": params}, batch)
        assert_trees_close(lowered.compile()({"params": params}, batch), jax.jit(step)({"params": params}, batch))


@pytest.mark.parametrize(
    ("loss", "reader"), [(among_the_batch, "pairs/dot.2"), (sorted_batch, "order/sort"), (far_apart, "pairs/tanh")]
)
def test_a_pipeline_names_what_sees_all_rows_and_what_runs_in_its_place(loss: Callable[..., Any], reader: str) -> None:
    params, batch = params_and_batch()
    said = (
        rf"this step needs several: '{reader}' .* needs '.*/dot.1:0' of all micro-batches, which '.*/dot.1' makes.*; "
        r"accumulate\(2, data_parallel\(\)\) runs the loops one behind the other on all devices, with the same numbers"
    )
    with pytest.raises(PlanError, match=said):
        jscaler.parallelize(plans.pipeline(2, 2), devices=2)(descend(loss)).lower({"params": params}, batch)


def test_stacked_layers_that_take_turns_on_stages_name_what_sees_all_rows() -> None:
    """Each range of layers has loops over micro-batches of its own, in its loop over layers."""

    def stacked(params: jax.Array, batch: Any) -> Any:
        rows = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)[0]
        return jnp.mean(jnp.exp(rows @ rows.T)), {}

    shapes = {"params": jax.ShapeDtypeStruct((4, 6, 6), "float32")}, {"x": jax.ShapeDtypeStruct((ROWS, 6), "float32")}
    said = r"this step needs several: 'loss/dot.1' .* needs 'loss/transpose:0' .*; accumulate\(2, megatron\(dp=2\)\), with"
    policy = plans.megatron(dp=1, pp=2, microbatches=2, schedule="chimera")
    with pytest.raises(PlanError, match=said):
        jscaler.parallelize(policy, devices=2)(descend(stacked)).lower(*shapes)


def test_what_needs_the_whole_batch_runs_on_it() -> None:
    said = r"since 'among/.*' .* needs '.*' of all micro-batches, .* per_microbatch='among' does it"
    with jax.enable_x64(True):
        params, batch = params_and_batch()
        with pytest.warns(PlanWarning, match=said):
            assert_like_the_whole(descend(over_the_batch), {"params": params}, batch, plans.accumulate(4), 1)
