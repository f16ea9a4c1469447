"""An evaluation that follows a train step reads its state where it lies."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jscaler
from jscaler.primitives import Store
from tests.runtime.test_training_state import (
    KeyedState,
    Net,
    assert_equal,
    columns_then_rows,
    make_nnx,
    make_state,
    net_batch,
    net_step,
    net_train_step,
    nnx_step,
)


def evaluate(state: KeyedState, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    out = state.apply_fn({"params": state.params}, batch["x"])
    return {"loss": ((out - batch["y"]) ** 2).mean(), "out": out}


def as_it_lies(graph: Any, devices: np.ndarray) -> None:
    """Nothing is said: everything follows from the layout of the state."""


def up_whole(graph: Any, devices: np.ndarray) -> None:
    graph.op_assign(graph["up/dot"], devices)


def started(step: jscaler.Parallelized) -> KeyedState:
    return step.init(make_state, Net(), jax.random.key(0), 1e-2, batch=net_batch())


@pytest.fixture(scope="module")
def trained() -> tuple[jscaler.Parallelized, KeyedState]:
    step = jscaler.parallelize(columns_then_rows, devices=4)(net_step)
    return step, step(started(step), net_batch())[0]


def assert_untouched(step: jscaler.Parallelized, arguments: tuple[Any, ...], state: Any, monkeypatch: Any) -> Any:
    """Run a step twice, and see that no leaf of its state is moved or copied."""
    lowered = step.compiled(step.bind(*arguments)).lowered
    given = zip(lowered.call.owners, step.leaves(*arguments), lowered.executable.in_shardings, strict=True)
    for owner, leaf, sharding in given:
        if owner != "batch":
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    out = step(*arguments)
    moved, real = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *args, **kw: moved.append(x) or real(x, *args, **kw))
    before = len(jax.live_arrays())
    kept = step(*arguments)
    assert all(x is not leaf for x in moved for leaf in jax.tree.leaves(state))
    assert len(jax.live_arrays()) == before + len(jax.tree.leaves(kept))
    return out


@pytest.mark.smoke
def test_the_state_stays_where_it_lies(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = trained
    out = assert_untouched(step.follow(evaluate), (state, net_batch()), state, monkeypatch)
    whole = jax.tree.map(np.asarray, state.params)
    for name, value in evaluate(state.replace(params=whole), net_batch()).items():
        np.testing.assert_allclose(out[name], value, rtol=1e-5, atol=1e-6)


def test_the_policy_of_the_train_step_is_used_where_it_fits(trained: Any) -> None:
    step, state = trained
    plan = step.follow(evaluate).lower(state, net_batch()).plan
    assert plan.completed.ops["up/dot"].placement.origin == "policy"
    assert (
        plan.completed.ops["up/dot"].placement.factors
        == step.lower(state, net_batch()).plan.completed.ops["up/dot"].placement.factors
    )
    assert "store     state/params/up/kernel(whole, x0) on 4 [0 1 2 3]" in str(plan.plan)
    stored = step.follow(evaluate, plan=up_whole).lower(state, net_batch()).plan
    assert stored.completed.ops["up/dot"].placement.factors == {}
    assert stored.completed.inputs == {
        t: plan.completed.inputs[next(u for u in plan.graph.inputs if u.name == t.name)] for t in stored.graph.inputs
    }


def test_where_the_state_lies_goes_before_what_a_saved_plan_says(trained: Any) -> None:
    step, state = trained
    saved = step.follow(evaluate).lower(state, net_batch()).plan
    kernel = Store("state/params/up/kernel", (4,), (0, 1, 2, 3), ((), ()))
    decisions = [kernel if isinstance(d, Store) and d.leaf == kernel.leaf else d for d in saved.plan.decisions]
    assert kernel in decisions
    moved = dataclasses.replace(saved.plan, decisions=tuple(decisions))
    assert step.follow(evaluate, plan=moved).lower(state, net_batch()).plan.digest == saved.digest


def test_a_policy_that_does_not_fit_is_filled_in_from_the_state(trained: Any) -> None:
    def needs_a_gradient(graph: Any, devices: np.ndarray) -> None:
        columns_then_rows(graph, devices)
        graph.require_gradient()

    step = jscaler.parallelize(needs_a_gradient, devices=4)(net_step)
    state = started(step)
    follows = step.follow(evaluate)
    with pytest.warns(jscaler.PlanWarning, match="'net_step' does not fit 'evaluate'.*no gradient"):
        out = follows(state, net_batch())
    lowered = follows.compiled(follows.bind(state, net_batch())).lowered
    assert lowered.plan.completed.ops["up/dot"].placement.parts  # the kernel lies split
    np.testing.assert_allclose(out["loss"], trained[0].follow(evaluate)(state, net_batch())["loss"], rtol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_a_plan = jscaler.parallelize(lowered.plan.plan, devices=4)
        assert callable(of_a_plan)


def test_part_of_the_state_by_its_path(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = trained

    @step.follow(paths={"params": "state/params"}, static_argnames="scale")
    def predict(params: Any, batch: jax.Array, scale: float) -> jax.Array:
        return scale * state.apply_fn({"params": params}, batch)

    arguments = (state.params, net_batch()["x"], 2.0)
    out = assert_untouched(predict, arguments, state, monkeypatch)
    np.testing.assert_allclose(out, predict.fun(jax.tree.map(np.asarray, state.params), *arguments[1:]), rtol=1e-5)


@pytest.mark.smoke
def test_the_modules_of_an_nnx_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step = jscaler.parallelize(columns_then_rows, devices=4)(nnx_step)
    model, optimizer = step.init(make_nnx, 0, batch=net_batch())

    @step.follow
    def predict(model: nnx.Module, batch: dict[str, jax.Array]) -> jax.Array:
        return model(batch["x"])

    for _ in range(2):
        step(model, optimizer, net_batch())
        held = jax.tree.leaves(nnx.state(model))
        out = assert_untouched(predict, (model, net_batch()), held, monkeypatch)
        assert all(a is b for a, b in zip(jax.tree.leaves(nnx.state(model)), held, strict=True))
    whole = nnx.clone(model)
    nnx.update(whole, jax.tree.map(np.asarray, nnx.state(model)))
    np.testing.assert_allclose(out, whole(net_batch()["x"]), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_followed(trained: Any) -> None:
    step, state = trained
    with pytest.raises(jscaler.CaptureError, match=r"'net_step' has no plan yet.*net_step\.init"):
        net_train_step().follow(evaluate)(state, net_batch())
    with pytest.raises(jscaler.CaptureError, match=r"none of the arguments params is called as the state.*paths="):
        step.follow(lambda params: params, plan=as_it_lies)(state.params)
    with pytest.raises(jscaler.UnknownNameError, match="state/parms"):
        step.follow(lambda params: params, plan=as_it_lies, paths={"params": "state/parms"})(state.params)
    with pytest.raises(jscaler.UnknownNameError, match="weights"):
        step.follow(lambda params: params, plan=as_it_lies, paths={"weights": "state/params"})(state.params)
    with pytest.raises(jscaler.CaptureError, match="follow takes a step function, not a int"):
        step.follow(3)
    with pytest.raises(jscaler.CaptureError, match="paths says which argument is what"):
        step.follow(evaluate, paths="state/params")
    with pytest.raises(jscaler.PlanError, match="a plan is a policy"):
        step.follow(evaluate, plan=3)
    with pytest.raises(jscaler.PlanFileError, match=r"none\.json"):
        step.follow(evaluate, plan=Path("none.json"))
    narrow = jax.tree.map(lambda x: x[..., :2] if x.ndim else x, state.params)
    with pytest.raises(jscaler.CaptureError, match=r"'state/params/down/bias' is float32\[2\], and .* is float32\[4\]"):
        step.follow(lambda state: state.step, plan=as_it_lies)(state.replace(params=narrow))


def test_a_loop_over_layers_reads_stacks_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(params: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = jscaler.value_and_grad(lambda p: forward(p, batch).mean())(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    def forward(params: Any, batch: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["a"]) @ w["b"], None), batch, params)[0]

    def hidden(graph: Any, devices: np.ndarray) -> None:
        for op, factor in graph.factor_of("params/a", 2).items():
            if op.kind == "forward" and op.loop is not None and graph.rule(op).factors[factor].kind != "blocked":
                graph.op_assign(graph.op_trans(op, jscaler.Split(factor, devices.size)), devices)

    params = {"a": jnp.linspace(-1, 1, 3 * 4 * 8).reshape(3, 4, 8), "b": jnp.linspace(-1, 1, 96).reshape(3, 8, 4)}
    train = jscaler.parallelize(hidden, devices=4)(step)
    batch = jnp.ones((2, 4))
    params, _ = train(params, batch)
    assert params["a"].addressable_shards[0].data.shape == (3, 4, 2)
    out = assert_untouched(train.follow(forward, plan=as_it_lies), (params, batch), params, monkeypatch)
    np.testing.assert_allclose(out, forward(jax.tree.map(np.asarray, params), batch), rtol=1e-5)


def test_the_same_state_comes_from_another_device_order() -> None:
    def turned(graph: Any, devices: np.ndarray) -> None:
        columns_then_rows(graph, devices.reshape(2, 2).T.reshape(-1))

    step = jscaler.parallelize(turned, devices=4)(net_step)
    state = started(step)
    assert_equal(state, started(net_train_step()), rtol=1e-6)
    out = step.follow(evaluate)(state, net_batch())
    whole = evaluate(state.replace(params=jax.tree.map(np.asarray, state.params)), net_batch())
    np.testing.assert_allclose(out["out"], whole["out"], rtol=1e-5, atol=1e-6)


def test_sharded_parameters_are_gathered_where_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    step = jscaler.parallelize("zero3", devices=4)(net_step)
    state = started(step)
    assert state.params["up"]["kernel"].addressable_shards[0].data.size == 16 * 64 // 4
    out = assert_untouched(step.follow(evaluate), (state, net_batch()), state, monkeypatch)
    whole = evaluate(state.replace(params=jax.tree.map(np.asarray, state.params)), net_batch())
    np.testing.assert_allclose(out["out"], whole["out"], rtol=1e-5, atol=1e-6)
