"""`pipeline` and ``megatron(pp=)``: numbers, cuts, and mistakes."""

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from of_the_day import of_the_day

import jscaler
from jscaler import PlanError, SplitError, UnknownNameError, plans
from jscaler.clusters import Peak, find_cluster
from jscaler.clusters.device import find_kind
from jscaler.errors import OrderError, PlanWarning
from jscaler.tables.gpipe import gpipe
from models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(hidden=16, layers=2, heads=2, sequence=6, vocabulary=20, param_dtype=jnp.float64, dtype=jnp.float64)
OPTIMIZER = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)), 3)


def gpt_step(state: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    params, moments, key = state

    def loss_of(params: Any) -> jax.Array:
        logits = GPT(CONFIG).apply({"params": params}, batch["tokens"], train=True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    loss, grads = value_and_grad(loss_of)(params)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments, jax.random.fold_in(key, 1)), loss


def gpt_arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    batch = {name: jnp.asarray(rng.integers(0, 20, (8, 6)), jnp.int32) for name in ("tokens", "labels")}
    params = GPT(CONFIG).init(jax.random.key(0), batch["tokens"], train=False)["params"]
    return (params, OPTIMIZER.init(params), jax.random.key(1)), batch


@pytest.fixture(scope="module")
def one_device() -> Any:
    """Three steps of `jax.jit`."""
    with jax.enable_x64(True):
        (state, batch), losses = gpt_arguments(), []
        plain = jax.jit(lambda *args: gpt_step(*args, value_and_grad=jax.value_and_grad))
        for _ in range(3):
            state, loss = plain(state, batch)
            losses.append(float(loss))
        return jax.device_get(state[:2]), losses


CASES = {
    "pipeline(2, 4)": 2,
    "pipeline(2, 2, 'gpipe', plan=tensor_parallel())": 4,
    "pipeline(2, 2, plan=data_parallel())": 4,
    "pipeline(2, 2, plan=zero1())": 4,
    "pipeline(2, 2, plan=zero3())": 4,
    "pipeline(2, 2, plan=recompute_layers())": 2,
    "pipeline(2, 2, plan=co_shard(2))": 2,
    "megatron(dp=2, tp=2, pp=2, microbatches=2)": 8,
    "megatron(tp=2, pp=2, microbatches=4, sequence=True, schedule='gpipe')": 4,
}


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize("name", of_the_day(CASES, 3))
def test_optimizer_steps_are_those_of_one_device(name: str, one_device: Any) -> None:
    wanted, losses = one_device
    with jax.enable_x64(True):
        state, batch = gpt_arguments()
        train = jscaler.parallelize(plans.by_name(name), devices=CASES[name])(gpt_step)
        jscaler.verify(train.lower(state, batch))
        for true in losses:
            state, loss = train(state, batch)
            assert abs(float(loss) - true) < 1e-10
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10), jax.device_get(state[:2]), wanted
        )


def test_what_is_not_finite_on_one_stage_stops_every_stage_s_update() -> None:
    """And two stages of two micro-batches that accumulate over two steps (`optax.MultiSteps`)."""
    optimizer = optax.apply_if_finite(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), 3)

    def step(state: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        params, moments = state

        def loss_of(params: Any) -> jax.Array:
            with jax.named_scope("first"):
                h = jnp.tanh(x @ params["a"])
            with jax.named_scope("second"):
                return jnp.mean(jnp.log(h @ params["b"]) ** 2)

        loss, grads = value_and_grad(loss_of)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    with jax.enable_x64(True):
        params = {"a": jnp.full((4, 6), 0.2), "b": jnp.full((6, 2), 0.3)}
        ours = theirs = params, optimizer.init(params)
        train = jscaler.parallelize(plans.pipeline(2, 2, at=["second"], batch="x"), devices=2)(step)
        plain = jax.jit(lambda *args: step(*args, value_and_grad=jax.value_and_grad))
        good, bad = jnp.ones((4, 4)), jnp.ones((4, 4)).at[0].set(-1.0)  # the log of a negative number
        for x in (good, bad, good, good, good):
            (ours, mine), (theirs, true) = train(ours, x), plain(theirs, x)
            np.testing.assert_allclose(mine, true, rtol=1e-10)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), ours, theirs)


def test_results_of_every_row_and_an_evaluation_that_follows() -> None:
    """What micro-batches leave row by row is put together; `follow` runs the forward stages alone, where the state lies."""

    def loss_of(params: Any, x: jax.Array) -> Any:
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2), x

    def step(params: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        (loss, out), grads = value_and_grad(lambda p: loss_of(p, x), has_aux=True)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], {"loss": loss, "out": out, "max": out.max()}

    with jax.enable_x64(True):
        rng = np.random.default_rng(2)
        params = [jnp.asarray(rng.normal(size=(6, 6))) for _ in range(4)]
        x = jnp.asarray(rng.normal(size=(16, 6)))
        train = jscaler.parallelize(plans.pipeline(2, 4, plan=plans.data_parallel("x"), batch="x"), devices=4)(step)
        jscaler.verify(train.lower(params, x))
        ours, theirs = train(params, x), jax.jit(lambda *args: step(*args, value_and_grad=jax.value_and_grad))(params, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), ours, theirs)
        evaluate = train.follow(lambda params, x: loss_of(params, x)[0])
        np.testing.assert_allclose(evaluate(ours[0], x), loss_of(theirs[0], x)[0], rtol=1e-11)
        lowered = evaluate.lower(ours[0], x)
        assert str(lowered.plan.instructions.table) == "0F0 0F1 0F2 0F3\n1F0 1F1 1F2 1F3"
        assert lowered.executable.in_shardings[:4] == tuple(p.sharding for p in ours[0])


def test_batch_norm_on_each_micro_batch_keeps_running_state_in_order() -> None:
    """As `accumulate` has it on one device: statistics of each micro-batch, and the running ones after the last."""

    def step(state: Any, x: jax.Array) -> Any:
        params, running = state

        def loss_of(params: Any) -> Any:
            with jax.named_scope("first"):
                h = x @ params["a"]
            with jax.named_scope("norm"):
                mean = h.mean(0)
                new = 0.9 * running + 0.1 * mean
                h = jnp.tanh(h - mean)
            with jax.named_scope("second"):
                return jnp.mean((h @ params["b"]) ** 2), new

        (loss, running), grads = jscaler.value_and_grad(loss_of, has_aux=True)(params)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), running), loss

    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        params = {"a": jnp.asarray(rng.normal(size=(4, 6))), "b": jnp.asarray(rng.normal(size=(6, 3)))}
        ours = theirs = params, jnp.zeros(6)
        x = jnp.asarray(rng.normal(size=(8, 4)))
        with pytest.warns(PlanWarning, match=r"since 'norm/\w+' .*; per_microbatch='norm' does it"):
            jscaler.parallelize(plans.pipeline(2, 4, at=["second"], batch="x"), devices=2)(step).lower(ours, x)
        turned = str(gpipe(2, 4)).replace("0F0 0F1", "0F1 0F0")  # the state advances with the forward
        staged = plans.pipeline(2, 4, turned, at=["second"], batch="x", per_microbatch="norm")
        with pytest.raises(OrderError, match=r"0F1 \(.*next on devices \[0\], waits for 0F0"):
            jscaler.parallelize(staged, devices=2)(step).lower(ours, x)
        plain = jscaler.parallelize(plans.accumulate(4, batch="x", per_microbatch="norm"), devices=1)(step)
        overlapped = str(gpipe(2, 4)).replace("0F0 0F1", "(0F0;0F1)")  # not as one executable: 0F1 takes what 0F0 leaves
        handed = r"overlaps 0F0;0F1, which hand on a state .* run one after another, as 0F0, 0F1"
        for table, said in (("1f1b", contextlib.nullcontext()), (overlapped, pytest.warns(PlanWarning, match=handed))):
            staged = plans.pipeline(2, 4, table, at=["second"], batch="x", per_microbatch="norm")
            train = jscaler.parallelize(staged, devices=2)(step)
            with said:
                jscaler.verify(train.lower(ours, x))
            for _ in range(2):
                (ours, mine), (theirs, true) = train(ours, x), plain(theirs, x)
                np.testing.assert_allclose(mine, true, rtol=1e-12)
                jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), ours, theirs)


def in_scopes(params: Any, x: jax.Array, norm: Callable[[jax.Array], jax.Array] = lambda h: h) -> jax.Array:
    """A loss of four products, with ``norm`` behind the first."""
    with jax.named_scope("first"):
        h = jnp.tanh(x @ params["a"])
    with jax.named_scope("norm"):
        h = norm(h)
    for scope, name in (("second", "b"), ("third", "c"), ("fourth", "d")):
        with jax.named_scope(scope):
            h = jnp.tanh(h @ params[name])
    return jnp.mean(h**2)


def of_scopes(loss: Callable[..., jax.Array]) -> tuple[Callable[..., Any], Any, jax.Array]:
    """A step of gradient descent, and its arguments."""

    def step(params: Any, x: jax.Array) -> Any:
        value, grads = jscaler.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    draws = np.random.default_rng(0)
    return step, {name: jnp.asarray(draws.normal(size=(6, 6))) for name in "abcd"}, jnp.asarray(draws.normal(size=(8, 6)))


@pytest.mark.parametrize(("at", "ordered"), [("norm", "none"), ("second", "none"), ("third", "one")])
def test_what_needs_the_whole_batch_stands_between_loops_of_stages(at: str, ordered: str) -> None:
    """Whichever stage it is on, and however little is held: that stages wait is said."""
    said = rf"parallelism is lost: .* since 'norm/\w+' .* orders {ordered} of these loops; per_microbatch='norm'"
    with jax.enable_x64(True):
        step, params, x = of_scopes(lambda p, x: in_scopes(p, x, lambda h: h - h.mean(0)))
        params["unread"] = jnp.zeros((1000, 1000))
        with pytest.warns(PlanWarning, match=said):
            got = jscaler.parallelize(plans.pipeline(2, 4, at=[at], batch="x"), devices=2)(step)(params, x)
        want = jax.jit(step)(params, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), got, want)


def test_loops_that_a_schedule_does_not_order() -> None:
    """Co-shard's, of one micro-batch, and those of a teacher, whose statistics no gradient flows through."""

    def taught(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("teacher"):
            goal = jax.lax.stop_gradient(jax.nn.softmax(jnp.tanh(x @ params["a"]) @ params["b"], 0))
        with jax.named_scope("student"):
            return jnp.mean((jnp.tanh(x @ params["c"]) @ params["d"] - goal) ** 2)

    with jax.enable_x64(True):
        in_parts = "pipeline(2, 1, batch='x', plan=co_shard(2), at=['third'])"
        of_teacher = "pipeline(2, 4, 'gpipe', batch='x', at=['student'])"
        for loss, plan, warned in ((in_scopes, in_parts, set()), (taught, of_teacher, {"run in 4 loops", "has 0B"})):
            step, params, x = of_scopes(loss)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                got = jscaler.parallelize(plan, devices=2)(step)(params, x)
            assert {text for text in warned if any(text in str(one.message) for one in said)} == warned
            assert len(said) == len(warned)
            want = jax.jit(step)(params, x)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), got, want)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "dualpipe_v", "zb_h1"])
def test_a_loss_that_is_not_returned_is_a_forward_too(name: str) -> None:
    """Nobody reads it, but the table has its stage's forward apart from the backward."""
    step, params, x = stack_of([4] * 5)

    def quiet(params: Any, x: jax.Array) -> Any:
        return step(params, x)[0]

    params, x = jax.tree.map(lambda t: jnp.ones(t.shape) / 8, (params, x))
    staged = plans.pipeline(2, 4, name, at=[f"layer_{i}" for i in ((1, 2, 3) if name == "dualpipe_v" else (2,))], batch="x")
    with jax.enable_x64(True):
        lowered, whole = (jscaler.parallelize(staged, devices=2)(one).lower(params, x) for one in (quiet, step))
        assert lowered.plan.instructions.table == whole.plan.instructions.table
        assert lowered.plan.under_way == whole.plan.under_way
        ours = jscaler.parallelize(staged, devices=2)(quiet)(params, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), ours, jax.jit(quiet)(params, x))


def test_two_backwards_of_one_executable_both_add_to_a_gradient() -> None:
    step, params, x = stack_of([4] * 7)
    params, x = jax.tree.map(lambda t: jnp.arange(float(t.size)).reshape(t.shape) / t.size, (params, x))
    split = plans.tensor_parallel(columns=["params/0", "params/2", "params/4"])
    staged = plans.pipeline(2, 2, "0F0 0F1 (0B0;0B1)\n1F0 1B0 1F1 1B1", plan=split, at=["layer_4"], batch="x")
    with jax.enable_x64(True):
        lowered = jscaler.parallelize(staged, devices=4)(step).lower(params, x)
        assert "0B 0B" in {lowered.plan.block_name(n) for n in range(len(lowered.plan.blocks))}
        (ours, _), (theirs, _) = jscaler.parallelize(staged, devices=4)(step)(params, x), jax.jit(step)(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


def stack_of(widths: list[int]) -> tuple[Callable[..., Any], Any, jax.Array]:
    def step(params: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            h = x
            for i, w in enumerate(params):
                with jax.named_scope(f"layer_{i}"):
                    h = jnp.tanh(h @ w)
            with jax.named_scope("loss"):
                return jnp.mean(h**2)

        loss, grads = jscaler.value_and_grad(loss_of)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], loss

    params = [jax.ShapeDtypeStruct(pair, "float32") for pair in itertools.pairwise(widths)]
    return step, params, jax.ShapeDtypeStruct((512, widths[0]), "float32")  # type: ignore[return-value]


def stages_of(lowered: Any) -> dict[str, int]:
    groups = [group.devices for group in lowered.plan.completed.groups]
    ops = lowered.plan.completed.ops
    return {
        path: groups.index(laid.placement.group.devices)
        for path, laid in ops.items()
        if path.endswith("/dot") and "@" not in path
    }


def test_stages_are_balanced_or_begin_where_they_are_told() -> None:
    for widths, wanted in (([512] * 7, [0, 0, 0, 1, 1, 1]), ([8192, *[512] * 5], [0, 1, 1, 1, 1])):
        step, params, x = stack_of(widths)
        balanced = jscaler.parallelize(plans.pipeline(2, 2, batch="x"), devices=2)(step).lower(params, x)
        assert list(stages_of(balanced).values()) == wanted
    step, params, x = stack_of([512] * 7)
    told = jscaler.parallelize(plans.pipeline(3, 2, at=["layer_1", "layer_3"], batch="x"), devices=3)(step).lower(params, x)
    assert list(stages_of(told).values()) == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("plan", "devices", "error", "match"),
    [
        (
            lambda: plans.pipeline(3, 2, batch="x"),
            4,
            PlanError,
            r"4 devices do not divide into 3 stages; legal: \[1, 2, 4\]",
        ),
        (lambda: plans.pipeline(2, 3, batch="x"), 2, SplitError, "of size 512 into 3 parts"),
        (lambda: plans.pipeline(0, 2), 2, PlanError, "stages is a positive whole number, not 0"),
        (lambda: plans.pipeline(2, 2, "2f2b"), 2, UnknownNameError, "no schedule named '2f2b'"),
        (lambda: plans.pipeline(2, 2, batch="x", at=["layer_9"]), 2, UnknownNameError, "no module named 'layer_9'"),
        (lambda: plans.pipeline(3, 2, batch="x", at=["layer_1"]), 3, PlanError, "begin at 2 modules behind the first"),
        (lambda: plans.pipeline(3, 2, batch="x", at=["layer_1", "layer_1"]), 3, PlanError, "a stage is empty"),
        (lambda: plans.pipeline(12, 2, batch="x"), 12, PlanError, "too few for 12 stages"),
        (lambda: plans.megatron(pp=2), 4, PlanError, "give microbatches="),
    ],
)
def test_mistakes(plan: Callable[[], Any], devices: int, error: type[Exception], match: str) -> None:
    step, params, x = stack_of([512, 512, 512, 512])
    with pytest.raises(error, match=match):
        jscaler.parallelize(plan(), devices=devices)(step).lower(params, x)


def test_stages_are_balanced_for_the_devices_of_the_cluster():
    """A product, and then arithmetic: on devices of slow products the first is as much as all the rest."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            with jax.named_scope("layer_0"):
                h = x @ params["w"]
            for i in range(1, 8):
                with jax.named_scope(f"layer_{i}"):
                    h = jnp.sin(h) * params["scale"]
            return jnp.mean(h)

        return jscaler.value_and_grad(loss_of)(params)

    kind = find_kind("H100-80GB")
    slow_products = dataclasses.replace(kind, peak=Peak(1e9, 1e9, 1e9, 1e9, 1e9))
    first_op_of_last_stage = {}
    for name, device in (("products", slow_products), ("memory", dataclasses.replace(kind, bandwidth=1e6))):
        cluster = dataclasses.replace(find_cluster("2xH100-80GB"), device=device)
        parallel = jscaler.parallelize(plans.pipeline(2, 2, batch="x"), devices=2, cluster=cluster)(step)
        lowered = parallel.lower({"w": jnp.ones((64, 64)), "scale": jnp.ones(64)}, jnp.ones((8, 64)))
        (last,) = (row for row in lowered.plan.report.blocks if row.name.startswith("1F"))
        first_op_of_last_stage[name] = last.first
    assert first_op_of_last_stage["products"].startswith("layer_1/")
    assert not first_op_of_last_stage["memory"].startswith("layer_1/")
