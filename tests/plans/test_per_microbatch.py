"""BatchNorm on each micro-batch alone, against a ``lax.scan`` over micro-batches by hand."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losing import losing
from of_the_day import of_the_day
from step_numbers import assert_trees_close

import jscaler
from jscaler import Plan, TimeSplit, plans
from jscaler.errors import PlanError, PlanWarning, SplitError, UnknownNameError
from models.convnet import ConvConfig, ConvNet
from models.training import image_train_step, make_image_state

PARTS = 2


def state_and_batch(layers: int = 1) -> tuple[Any, Any]:
    kind = jnp.zeros(()).dtype
    config = ConvConfig(hidden=4, layers=layers, image=8, classes=3, dtype=kind, param_dtype=kind)
    state = make_image_state(ConvNet(config), (8, 8, 3), optax.sgd(0.1, momentum=0.9))
    state = state.replace(batch_stats=jax.tree.map(lambda x: x.astype(kind), state.batch_stats))
    images = np.random.default_rng(0).normal(size=(8, 8, 8, 3)) + 1
    return state, {"images": jnp.asarray(images, kind), "labels": jnp.arange(8) % 3}


def micro_batches(batch: Any, devices: int) -> Any:
    """Each device walks through its own block: a micro-batch has a piece of every block."""

    def cut(x: Any) -> Any:
        seen = x.reshape(devices, PARTS, -1, *x.shape[1:])
        return jnp.moveaxis(seen, 1, 0).reshape(PARTS, -1, *x.shape[1:])

    return jax.tree.map(cut, batch)


def by_hand(devices: int, state: Any, batch: Any) -> Any:
    """The loop as a user writes it: running statistics and gradients are carried."""

    def one(held: Any, micro: Any) -> Any:
        stats, sums = held

        def loss_fn(params: Any) -> Any:
            variables = {"params": params, "batch_stats": stats}
            logits, moved = state.apply_fn(variables, micro["images"], train=True, mutable=["batch_stats"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, micro["labels"]).mean()
            return loss, (moved["batch_stats"], jnp.mean(jnp.argmax(logits, -1) == micro["labels"]))

        (loss, (stats, accuracy)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return (stats, jax.tree.map(jnp.add, sums, (grads, loss, accuracy))), None

    zero = (jax.tree.map(jnp.zeros_like, state.params), jnp.zeros(()), jnp.zeros((), jnp.float32))
    (stats, sums), _ = jax.lax.scan(one, (state.batch_stats, zero), micro_batches(batch, devices))
    grads, loss, accuracy = jax.tree.map(lambda x: x / PARTS, sums)
    return state.apply_gradients(grads=grads, batch_stats=stats), {"loss": loss, "accuracy": accuracy}


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(
    ("devices", "blocks", "inner"),
    [(1, 1, None), (2, 2, plans.data_parallel()), (4, 2, plans.spatial(grid=(2,), dp=2))],
    ids=["one device", "data parallel", "data parallel and spatial"],
)
def test_like_the_loop_by_hand(devices: int, blocks: int, inner: Any) -> None:
    with jax.enable_x64(True):
        state, batch = state_and_batch(2 if devices == 1 else 1)
        plan = plans.accumulate(PARTS, inner, per_microbatch="norm")
        lowered = jscaler.parallelize(plan, devices=devices)(image_train_step).lower(state, batch)
        jscaler.verify(lowered)
        (loop,) = lowered.plan.graph.loops.values()
        assert not loop.ys, "no activation is handed on"
        ours = lowered.compile()
        theirs = jax.jit(functools.partial(by_hand, blocks)).lower(state, batch).compile()
        got = want = state
        for _ in range(2):
            (got, metrics), (want, expected) = ours(got, batch), theirs(want, batch)
            assert_trees_close(metrics, expected)
        assert_trees_close(got, want)
        moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), got.batch_stats, state.batch_stats)
        assert min(jax.tree.leaves(moved)) > 1e-3, "the running statistics move"


def test_the_plan_is_saved_and_says_so() -> None:
    state, batch = state_and_batch()
    plan = plans.accumulate(PARTS, per_microbatch=["stem/norm"])
    lowered = jscaler.parallelize(plan, devices=1)(image_train_step).lower(state, batch)
    made = lowered.plan.plan
    assert "alone     stem/norm/rsqrt" in str(made)
    again = Plan.from_json(made.to_json())
    assert again.decisions == made.decisions
    assert jscaler.parallelize(again, devices=1)(image_train_step).lower(state, batch).plan.digest == lowered.plan.digest


class Layer(nn.Module):
    """A kernel, BatchNorm and relu; as the body of a scan over layers."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        kind: Any = {"dtype": x.dtype, "param_dtype": x.dtype}
        x = nn.Dense(4, **kind)(x)
        return nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, **kind)(x)), None


class Net(nn.Module):
    """One layer used twice, so that its statistics move twice; or a stack of layers."""

    stacked: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.stacked:
            layer = Layer()
            return layer(layer(x)[0])[0]
        axes: Any = {"params": 0, "batch_stats": 0}
        return nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=2)()(x, None)[0]


@pytest.mark.parametrize("how", of_the_day(["used twice", "stacked", "recomputed"], 2))
def test_statistics_go_from_use_to_use_and_from_layer_to_layer(how: str) -> None:
    """A step that is left out where a gradient is not finite; the statistics are chosen behind the loop."""

    def recomputed(graph: Any, devices: Any) -> None:
        if how == "recomputed":
            graph.recompute([op for op in graph.select("*") if op.backward is not None and "Layer" in op.path])
        plans.single()(graph, devices)

    def loss_of(params: Any, stats: Any, x: jax.Array) -> Any:
        y, moved = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return jnp.mean((y - x) ** 2), moved["batch_stats"]

    def step(state: Any, batch: Any) -> Any:
        read = jscaler.value_and_grad(loss_of, has_aux=True)
        (loss, stats), grads = read(state["params"], state["stats"], batch["x"])
        return chosen(state, grads, stats), loss

    def chosen(state: Any, grads: Any, stats: Any) -> Any:
        finite = jnp.isfinite(sum(jnp.sum(g) for g in jax.tree.leaves(grads)))
        moved = {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads), "stats": stats}
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state)

    with jax.enable_x64(True):
        model, x = Net(how == "stacked"), jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)))
        made = jax.jit(model.init)(jax.random.key(0), x)
        stats = jax.tree.map(lambda s: s.astype(x.dtype) + 0.5, made["batch_stats"])
        state = {"params": made["params"], "stats": stats}
        plan = plans.accumulate(PARTS, recomputed, per_microbatch="BatchNorm*")
        lowered = jscaler.parallelize(plan, devices=1)(step).lower(state, {"x": x})
        jscaler.verify(lowered)
        outer = [loop for loop in lowered.plan.graph.loops.values() if loop.parent is None]
        assert len(outer) == 1
        assert not outer[0].ys
        got, loss = lowered.compile()(state, {"x": x})
        one = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
        (first, stats), early = one(state["params"], stats, x[:4])
        (second, stats), late = one(state["params"], stats, x[4:])
        assert_trees_close(loss, (first + second) / 2)
        assert_trees_close(got, chosen(state, jax.tree.map(lambda a, b: (a + b) / 2, early, late), stats))


def norm_step(body: Callable[..., Any], layers: int = 1) -> Any:
    """A step whose loss reads ``body`` of the rows, in the scope ``norm``, between or behind its layers."""

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            x = batch["x"] @ w
            with jax.named_scope("model"), jax.named_scope("norm"):
                y, aux = body(x)
            y = y @ w if layers == 2 else y
            return jnp.sum(y**2 * batch["x"]), aux

        (loss, aux), grads = jscaler.value_and_grad(loss_fn, has_aux=True)(state)
        return state - 0.1 * grads, (loss, aux)

    return step


def standardized(x: jax.Array) -> Any:
    return (x - x.mean(0)) / (x.std(0, ddof=1) + 1e-3), ()


def softmax(x: jax.Array) -> Any:
    return jax.nn.softmax(x, 0), ()


def squared(x: jax.Array) -> Any:
    return x / jnp.sqrt((x * x).sum(0) * (1 / 8) + 1e-3), ()


def masked(x: jax.Array) -> Any:
    mask = x > -0.5
    return x - (x * mask).sum(0) / jnp.maximum(mask.sum(0), 1), ()


def by_one_count(x: jax.Array) -> Any:
    """The mask's count is a scalar, made in ops of its own."""
    mask = x[:, :1] > -0.5
    return x / (x.std(0) + 1e-3) - (x * mask).sum(0) / jnp.maximum(mask.sum(), 1), ()


def scaled_elsewhere(x: jax.Array) -> Any:
    """Rows read the statistic in an op of their own."""
    spread = x.std(0)
    with jax.named_scope("apply"):
        return x * jax.nn.sigmoid(x @ jnp.eye(4)) / spread, ()


BODIES = [standardized, softmax, squared, masked, by_one_count, scaled_elsewhere]


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_other_statistics_are_those_of_the_part(body: Callable[..., Any]) -> None:
    """Means by count, by count less one, by a factor, by a mask; and sums that are no means."""
    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        w, x = jnp.asarray(draws.normal(size=(4, 4))), jnp.asarray(draws.normal(size=(8, 4)))

        def whole(w: Any, x: Any) -> Any:
            own = body if body is not squared else lambda x: (x / jnp.sqrt((x * x).sum(0) * (1 / 4) + 1e-3), ())
            return jax.value_and_grad(lambda w: jnp.sum(own(x @ w)[0] ** 2 * x))(w)

        lowered = jscaler.parallelize(plans.accumulate(PARTS, per_microbatch="norm"), devices=1)(norm_step(body))
        lowered = lowered.lower(w, {"x": x})
        got, (loss, _) = lowered.compile()(w, {"x": x})
        parts = [whole(w, rows) for rows in x.reshape(PARTS, 4, 4)]
        np.testing.assert_allclose(loss, sum(p[0] for p in parts), rtol=1e-12)
        np.testing.assert_allclose(got, w - 0.1 * sum(p[1] for p in parts), rtol=1e-11)


def test_without_it_the_norm_runs_on_the_whole_batch() -> None:
    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        w, batch = jnp.asarray(draws.normal(size=(4, 4))), {"x": jnp.asarray(draws.normal(size=(8, 4)))}
        step = norm_step(standardized, layers=2)
        said = r"since 'norm/\w+' .* of all micro-batches, .* per_microbatch='norm' does it"
        with pytest.warns(PlanWarning, match=said):
            got = jscaler.parallelize(plans.accumulate(2), devices=1)(step)(w, batch)
        assert_trees_close(got, jax.jit(step)(w, batch))


def test_what_it_refuses() -> None:
    w, batch = jnp.ones((4, 4)), {"x": jnp.ones((8, 4))}

    def lower(body: Callable[..., Any], plan: Any) -> Any:
        return jscaler.parallelize(plan, devices=1)(norm_step(body, layers=2)).lower(w, batch)

    with pytest.raises(UnknownNameError, match="no op named 'BatchNorm"):
        lower(standardized, plans.accumulate(2, per_microbatch="BatchNorm*"))
    with pytest.raises(PlanError, match=r"those that do: 'norm/\w+'"):
        lower(standardized, plans.accumulate(2, per_microbatch="dot*"))
    with pytest.raises(PlanError, match=r"'norm/\w+' runs on each micro-batch alone, and .*caller.* reads 'norm/"):
        lower(lambda x: (x - x.mean(0), jnp.argmax(x.std(0))), plans.accumulate(2, per_microbatch="norm"))

    def by_user(graph: Any, devices: Any) -> None:
        (op,) = graph.select("norm/*")
        factor = graph.factor_of("batch/x", 0)[op]
        graph.op_assign(graph.op_trans(op, TimeSplit(factor, 2)), devices)

    with pytest.raises(SplitError, match=r"needs the whole factor: .* graph\.per_microbatch\('norm/"):
        lower(standardized, by_user)


@losing
@pytest.mark.parametrize("layers", [(), (2,)], ids=["one layer", "a scan"])
@pytest.mark.parametrize("squared", [False, True], ids=["a mean", "squared"])
def test_rows_and_their_gradients_read_the_state_before(squared: bool, layers: tuple[int, ...]) -> None:
    """A loss that is squared is whole before the backward pass, which has a loop of its own; and so has each layer then."""

    def rows_of(ws: Any, stats: Any, x: jax.Array) -> Any:
        def one(x: jax.Array, own: Any) -> Any:
            w, before = own
            y = x @ w
            with jax.named_scope("model"), jax.named_scope("norm"):
                mean = y.mean(0)
                return jnp.tanh((y - mean) * before), 0.5 * before + jax.lax.stop_gradient(mean)

        return jax.lax.scan(one, x, (ws, stats)) if layers else one(x, (ws, stats))

    def join(mean: Any) -> Any:
        return mean + mean**2 if squared else mean

    def step(held: Any, batch: Any) -> Any:
        def loss_fn(ws: Any) -> Any:
            y, stats = rows_of(ws, held["stats"], batch["x"])
            return join(jnp.mean(y**2 * batch["x"])), stats

        (loss, stats), grads = jscaler.value_and_grad(loss_fn, has_aux=True)(held["ws"])
        return {"ws": held["ws"] - grads, "stats": stats}, loss

    def by_hand(held: Any, batch: Any) -> Any:
        def loss_fn(ws: Any) -> Any:
            stats, means = held["stats"], []
            for x in jnp.split(batch["x"], PARTS):
                y, stats = rows_of(ws, stats, x)
                means.append(jnp.mean(y**2 * x))
            return join(sum(means) / PARTS), stats

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(held["ws"])
        return {"ws": held["ws"] - grads, "stats": stats}, loss

    with jax.enable_x64(True):
        draws = np.random.default_rng(0)
        held = {"ws": draws.normal(size=(*layers, 4, 4)), "stats": draws.normal(size=(*layers, 4)) + 1}
        held, batch = jax.tree.map(jnp.asarray, (held, {"x": draws.normal(size=(8, 4))}))
        plan = plans.accumulate(PARTS, per_microbatch="norm")
        lowered = jscaler.parallelize(plan, devices=1)(step).lower(held, batch)
        jscaler.verify(lowered)
        assert_trees_close(lowered.compile()(held, batch), jax.jit(by_hand)(held, batch))
