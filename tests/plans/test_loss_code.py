"""Models and losses that are one function, without modules: what they count, mask or average is no part of a layer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from of_the_day import of_the_day
from step_numbers import assert_trees_close

import jscaler
from jscaler import PlanError, PlanWarning, plans

ROWS, DIM, WORDS = 8, 6, 12
Loss = Callable[[Any, Any, Any], Any]  # of parameters, state and batch: the loss, and the next state


def tied(p: Any, state: Any, batch: Any) -> Any:
    """The transpose of the table is no part of the look-up."""
    x = p["emb"][batch["tokens"]]
    for w in p["layers"]:
        x = x + jnp.tanh(x @ w)
    logits = x @ p["emb"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean(), state


def centred(p: Any, state: Any, batch: Any) -> Any:
    """A running mean stands beside what it is taken from."""
    x = jnp.tanh(batch["x"] @ p["w"])
    y = (x - state) @ p["v"]
    return jnp.mean((y - batch["y"]) ** 2), 0.9 * state + 0.1 * jax.lax.stop_gradient(x.mean(0))


def masked(p: Any, state: Any, batch: Any) -> Any:
    """A mask that the first layer reads, and that is counted behind the last."""
    mask = batch["y"] >= 0
    y = jnp.tanh((batch["x"] * mask) @ p["w"]) @ p["v"]
    return jnp.sum((y - batch["y"]) ** 2 * mask) / mask.sum(), state


def counted(p: Any, state: Any, batch: Any) -> Any:
    """Tokens that count, in the model and in the mean."""
    mask = batch["tokens"] != 0
    x = p["emb"][batch["tokens"]] * mask[..., None]
    logits = (x + jnp.tanh(x @ p["w"])) @ p["emb"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return jnp.sum(losses * mask) / mask.sum(), state


def centroids(p: Any, state: Any, batch: Any) -> Any:
    """Sums over the batch by class, and how many rows each has."""
    z = jnp.tanh(batch["x"] @ p["w"])
    chosen = jax.nn.one_hot(batch["labels"][:, 0] % 4, 4)
    means = (chosen.T @ jax.lax.stop_gradient(z)) / (1 + chosen.sum(0))[:, None]
    loss = jnp.mean((chosen @ state - z) ** 2) + jnp.mean((z @ p["v"] - batch["y"]) ** 2)
    return loss, 0.9 * state + 0.1 * means


def views(p: Any, state: Any, batch: Any) -> Any:
    """Two views of the batch go through the net as one."""
    z = jnp.tanh(jnp.concatenate([batch["x"], batch["y"]]) @ p["w"]) @ p["v"]
    return jnp.mean((z[:ROWS] - z[ROWS:]) ** 2), state


def augmented(p: Any, state: Any, batch: Any) -> Any:
    """What is drawn for one view has nothing to do with what is drawn for another."""
    first, second = jax.random.split(batch["key"])
    x = batch["x"] * jax.random.bernoulli(first, 0.5, (ROWS, 1))
    y = batch["x"] + 0.1 * jax.random.normal(second, batch["x"].shape)
    return views(p, state, {"x": x, "y": y})


def crops(p: Any, state: Any, batch: Any) -> Any:
    """As many views as there are crops, taken apart by ``split`` and by ``reshape``; two are views of one."""
    x, y = batch["x"], batch["y"]
    first, second = jnp.split(jnp.tanh(jnp.concatenate([x, y]) @ p["w"]), 2)
    others = (jnp.concatenate([jnp.tile(x, (2, 1)), x - y]) @ p["w"]).reshape(3, ROWS, DIM)
    return -jnp.mean(jax.nn.log_softmax(others) * (first + second)), state


def preferred(p: Any, state: Any, batch: Any) -> Any:
    """Pairs of texts, through layers that are stacked: of each the one is to be likelier than the other."""
    tokens = jnp.concatenate([batch["tokens"], batch["labels"]])
    layers = jnp.stack([p["w"], p["v"]])
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), p["emb"][tokens], layers)
    words = jax.nn.log_softmax(x[:, :-1] @ p["emb"].T)
    found = jnp.take_along_axis(words, tokens[:, 1:, None], -1).sum((1, 2))
    return -jnp.mean(jax.nn.log_sigmoid(found[:ROWS] - found[ROWS:])), state


def by_chunks(p: Any, state: Any, batch: Any) -> Any:
    """The loss is added up over tokens, in the carry of a scan."""
    x = jnp.tanh(p["emb"][batch["tokens"]] @ p["w"])

    def chunk(total: jax.Array, own: Any) -> Any:
        logits = own[0] @ p["emb"].T
        return total + optax.softmax_cross_entropy_with_integer_labels(logits, own[1]).sum(), None

    total, _ = jax.lax.scan(chunk, jnp.zeros(()), (x.swapaxes(0, 1), batch["labels"].T))
    return total / batch["labels"].size, state


def by_chunks_of_mask(p: Any, state: Any, batch: Any) -> Any:
    """Tokens that count are counted in the same carry, whose iterations are computed again."""
    x = jnp.tanh(p["emb"][batch["tokens"]] @ p["w"])

    @jax.checkpoint
    def chunk(carry: Any, own: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(own[0] @ p["emb"].T, own[1])
        mask = own[1] > 2
        return (carry[0] + (losses * mask).sum(), carry[1] + mask.sum()), None

    (total, count), _ = jax.lax.scan(chunk, (0.0, 0), (x.swapaxes(0, 1), batch["labels"].T))
    return total / count, state


def penalised(p: Any, state: Any, batch: Any) -> Any:
    """Stacked layers add up a penalty on what they make."""

    def layer(carry: Any, w: jax.Array) -> Any:
        x = jnp.tanh(carry[0] @ w)
        return (x, carry[1] + jnp.mean(x**2)), None

    (x, penalty), _ = jax.lax.scan(layer, (batch["x"], 0.0), jnp.stack(p["layers"]))
    return jnp.mean((x - batch["y"]) ** 2) + 0.1 * penalty, state


def faded(p: Any, state: Any, batch: Any) -> Any:
    """Each step of a loop fades what the ones before have added."""
    x = batch["x"] @ p["w"]
    total = jax.lax.fori_loop(0, 3, lambda i, c: 0.9 * c + jnp.mean((x * i @ p["v"] - batch["y"]) ** 2), 0.0)
    return total, state


LOSSES: dict[str, tuple[Loss, tuple[int, ...]]] = {
    "tied": (tied, ()),
    "centred": (centred, (DIM,)),
    "masked": (masked, ()),
    "counted": (counted, ()),
    "centroids": (centroids, (4, DIM)),
    "views": (views, ()),
    "augmented": (augmented, ()),
    "crops": (crops, ()),
    "preferred": (preferred, ()),
    "by_chunks": (by_chunks, ()),
    "by_chunks_of_mask": (by_chunks_of_mask, ()),
    "penalised": (penalised, ()),
    "faded": (faded, ()),
}
PLANS = {"accumulate(2)": 1, "accumulate(2, zero2())": 2, "pipeline(2, 2)": 2}


def drawn(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jnp.asarray(0.4 * np.random.default_rng(seed).normal(size=shape))


def arguments(state: tuple[int, ...]) -> tuple[Any, Any]:
    tokens = np.random.default_rng(0).integers(0, WORDS, (ROWS, 5))
    batch: dict[str, Any] = {"x": drawn((ROWS, DIM), 1), "y": drawn((ROWS, DIM), 2)}
    batch |= {"tokens": tokens, "labels": tokens * 5 % WORDS, "key": jax.random.key(0)}
    params: dict[str, Any] = {"emb": drawn((WORDS, DIM), 3), "w": drawn((DIM, DIM), 4), "v": drawn((DIM, DIM), 5)}
    params["layers"] = [params["w"], params["v"]]
    return (params, drawn(state, 6)), batch


def begun(p: Any, state: Any, batch: Any) -> Any:
    """What is added to begins at one: it is no sum of what micro-batches add."""

    def layer(total: jax.Array, w: jax.Array) -> Any:
        return total + jnp.mean((batch["x"] @ w - batch["y"]) ** 2), None

    return jax.lax.scan(layer, 1.0, jnp.stack(p["layers"]))[0], state


def descent(loss: Loss) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        (value, after), grads = jscaler.value_and_grad(lambda p: loss(p, state[1], batch), has_aux=True)(state[0])
        return (jax.tree.map(lambda p, g: p - 0.1 * g, state[0], grads), after), value

    return step


def planned(loss: Loss, shape: tuple[int, ...], plan: str, devices: int) -> jscaler.Lowered:
    """The loss's step, whose numbers are those of one device."""
    with jax.enable_x64(True):
        state, batch = arguments(shape)
        lowered = jscaler.parallelize(plan, devices=devices)(descent(loss)).lower(state, batch)
        assert_trees_close(lowered.compile()(state, batch), jax.jit(descent(loss))(state, batch))
    return lowered


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(("name", "plan"), of_the_day([(n, p) for n in LOSSES for p in PLANS], 6))
def test_micro_batches_run_in_one_loop(name: str, plan: str) -> None:
    loops = planned(*LOSSES[name], plan, PLANS[plan]).plan.graph.loops.values()
    assert len([loop for loop in loops if loop.time]) == 1


def test_a_carry_that_begins_at_one() -> None:
    with pytest.warns(PlanWarning, match="micro-batches run in"):
        planned(begun, (), "accumulate(2)", 1)


@pytest.mark.parametrize("name", of_the_day(["views", "crops", "preferred"], 1))
def test_views_of_the_batch_stay_where_they_are(name: str) -> None:
    """Each device has the rows of all views of its part of the batch."""
    assert planned(*LOSSES[name], "data_parallel", 2).plan.report.total.keys() == {"all_reduce"}


def alike(p: Any, state: Any, batch: Any) -> Any:
    """Each row against all others."""
    z = jnp.tanh(jnp.concatenate([batch["x"], batch["y"]]) @ p["w"])
    others = jnp.concatenate([jnp.arange(ROWS, 2 * ROWS), jnp.arange(ROWS)])
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, others).mean(), state


def both_ways(p: Any, state: Any, batch: Any) -> Any:
    """Texts to images and images to texts (CLIP), with a temperature that is trained."""
    u, v = jnp.tanh(batch["x"] @ p["w"]), jnp.tanh(batch["y"] @ p["v"])
    scores = u @ v.T * jnp.exp(p["emb"][0, 0])
    losses = [optax.softmax_cross_entropy_with_integer_labels(s, jnp.arange(ROWS)).mean() for s in (scores, scores.T)]
    return sum(losses), state


def decorrelated(p: Any, state: Any, batch: Any) -> Any:
    """Statistics of all rows, behind the last layer (Barlow Twins, VICReg)."""
    u, v = (jnp.tanh(batch[view] @ p["w"]) for view in ("x", "y"))
    u, v = ((z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-4) for z in (u, v))
    return jnp.sum((u.T @ v / ROWS - jnp.eye(DIM)) ** 2), state


@pytest.mark.parametrize(("loss", "loops"), [(alike, 3), (both_ways, 5), (decorrelated, 5)])
def test_rows_against_all_rows_run_in_loops_apart(loss: Loss, loops: int) -> None:
    """What needs the whole batch stands between the loops over micro-batches, in front of it and behind."""
    with pytest.warns(PlanWarning, match=f"micro-batches run in {loops} loops"):
        planned(loss, (), "accumulate(2)", 1)
    with pytest.raises(PlanError, match=r"needs several: '.* accumulate\(2.*\) runs the loops one behind the other"):
        planned(loss, (), "pipeline(2, 2)", 2)


@pytest.mark.parametrize("plan", PLANS)
def test_blocks_of_layers_that_are_computed_again(plan: str) -> None:
    """A scan in a checkpoint in a scan: the fence in front of each block hands on parts that an outer loop carries."""

    def layer(x: jax.Array, w: jax.Array) -> Any:
        return x + jnp.tanh(x @ w), None

    def blocks(w: Any, state: Any, batch: Any) -> Any:
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, ws: jax.lax.scan(layer, x, ws)), batch["x"], w)
        return jnp.mean((x - batch["y"]) ** 2), state

    with jax.enable_x64(True):
        state, batch = (drawn((2, 2, DIM, DIM), 0), ()), arguments(())[1]
        lowered = jscaler.parallelize(plan, devices=PLANS[plan])(descent(blocks)).lower(state, batch)
        assert_trees_close(lowered.compile()(state, batch), jax.jit(descent(blocks))(state, batch))
    assert len([loop for loop in lowered.plan.graph.loops.values() if loop.time]) == 1


def flat(p: Any, state: Any, batch: Any) -> Any:
    """The first product reads what is looked up as it is, and the head is no table."""
    x = jnp.tanh(p["emb"][batch["tokens"]] @ p["w"]) @ p["v"]
    logits = x @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean(), state


@pytest.mark.parametrize("loss", [tied, flat], ids=lambda loss: loss.__name__)
def test_tables_of_words_are_found(loss: Loss) -> None:
    """They are the ends of an interlaced pipeline."""

    def step(params: Any, batch: Any) -> Any:
        return jscaler.value_and_grad(lambda p: loss(p, (), batch)[0])(params)

    with jax.enable_x64(True):
        (params, _), batch = arguments(())
        params["head"] = drawn((DIM, WORDS), 7)
        lowered = jscaler.parallelize(plans.interlaced(2, 2), devices=2)(step).lower(params, batch)
        table = next(t for t in lowered.plan.graph.inputs if t.name == "params/emb")
        assert str(lowered.plan.completed.inputs[table]) == "R1 V1 D(2,1) on [0 1]"
        assert_trees_close(lowered.compile()(params, batch), jax.jit(step)(params, batch))


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = (nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(2))
        self.norm = nnx.BatchNorm(DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.norm(self.up(x))))


@pytest.mark.one_day_in(2)
def test_an_nnx_batch_norm_runs_on_each_micro_batch_alone() -> None:
    """What makes the next statistics, behind a ``stop_gradient``, is the norm's."""

    def halves(model: Normed, batch: Any) -> jax.Array:
        xs, ys = (jnp.split(batch[name], 2) for name in ("x", "y"))
        return sum(jnp.mean((model(x) - y) ** 2) for x, y in zip(xs, ys, strict=True)) / 2  # type: ignore[return-value]

    def step(model: Normed, optimizer: Any, batch: Any) -> jax.Array:
        loss = lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2)  # noqa: E731
        value, grads = jscaler.nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    batch = {"x": drawn((ROWS, DIM), 1), "y": drawn((ROWS, DIM), 2)}
    ours, theirs = Normed(nnx.Rngs(0)), Normed(nnx.Rngs(0))
    ours_tx, theirs_tx = (nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param) for m in (ours, theirs))
    planned = jscaler.parallelize(plans.accumulate(2, per_microbatch="norm"), devices=1)(step)
    for _ in range(2):
        expected, grads = nnx.value_and_grad(halves)(theirs, batch)
        theirs_tx.update(theirs, grads)
        np.testing.assert_allclose(planned(ours, ours_tx, batch), expected, rtol=1e-5)
    np.testing.assert_allclose(ours.norm.mean[...], theirs.norm.mean[...], rtol=1e-5)
    np.testing.assert_allclose(ours.norm.var[...], theirs.norm.var[...], rtol=1e-5)


@pytest.mark.parametrize("apart", [True, False], ids=["two arguments", "one"])
def test_a_norm_whose_statistics_are_beside_the_parameters(apart: bool) -> None:
    """A model that is split into parameters and the rest has its modules below both."""
    definition, params, rest = nnx.split(Normed(nnx.Rngs(0)), nnx.Param, ...)

    def step(params: Any, rest: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            model = nnx.merge(definition, p, rest, copy=True)
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2), nnx.split(model, nnx.Param, ...)[2]

        (value, after), grads = jscaler.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), after, value

    batch = {"x": drawn((ROWS, DIM), 1), "y": drawn((ROWS, DIM), 2)}
    halves = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, ROWS // 2), slice(ROWS // 2, None))]
    planned = jscaler.parallelize(plans.accumulate(2, per_microbatch="norm"), devices=1, donate_argnames=())
    if apart:
        after, found = planned(step)(params, rest, batch)[1:]
    else:

        def whole(state: Any, batch: Any) -> Any:
            *state, value = step(*state, batch)
            return tuple(state), value

        (_, after), found = planned(whole)((params, rest), batch)
    first, second = (step(params, rest, half) for half in halves)
    np.testing.assert_allclose(found, (first[2] + second[2]) / 2, rtol=1e-5)
    mean = step(params, first[1], halves[1])[1]  # the second half's, behind the first's
    assert_trees_close(after, mean)
