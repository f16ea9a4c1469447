"""``@jscaler.parallelize`` takes what ``jax.jit`` takes, and says what is wrong where it cannot."""

import functools
import gc
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler.runtime.executable import executable, lowered

on_eight = functools.partial(jscaler.parallelize, "data_parallel", devices=8)


def sgd(
    state: dict[str, jax.Array], batch: dict[str, jax.Array], rate: Any = 0.1
) -> tuple[dict[str, jax.Array], jax.Array]:
    """One step of least squares: state w (d o), batch x (b d) and y (b o)."""
    loss, grads = jscaler.value_and_grad(lambda s: ((batch["x"] @ s["w"] - batch["y"]) ** 2).mean())(state)
    return jax.tree.map(lambda p, g: p - rate * g, state, grads), loss


def state_and_batch(rows: int = 16) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    x, y = jax.random.normal(jax.random.key(0), (rows, 4)), jax.random.normal(jax.random.key(1), (rows, 3))
    return {"w": jnp.ones((4, 3))}, {"x": x, "y": y}


def assert_same(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.smoke
def test_arguments_by_position_by_name_and_by_default() -> None:
    state, batch = state_and_batch()
    step = on_eight()(sgd)
    assert_same(step(state, batch), jax.jit(sgd)(state, batch))
    assert_same(step(state, batch=batch, rate=0.5), jax.jit(sgd)(state, batch, 0.5))


def test_variable_arguments() -> None:
    def total(*xs: jax.Array, **named: jax.Array) -> jax.Array:
        return sum(x.sum() for x in xs) + named["batch"].sum() - named["other"].sum()

    one, two = jnp.ones(8), jnp.arange(8.0)
    step = on_eight()(total)
    assert_same(step(one, two, batch=two, other=one), total(one, two, batch=two, other=one))


def test_static_arguments_compile_once_for_each_value() -> None:
    @jscaler.parallelize("data_parallel", devices=8, static_argnames="power")
    def step(batch: jax.Array, power: int) -> jax.Array:
        return (batch**power).sum()

    batch = jnp.arange(8.0)
    assert step(batch, 2) == 140
    assert step(batch, power=3) == 784
    assert step(batch, 2) == 140
    assert len(step._compiled) == 2


def test_each_shape_compiles_separately() -> None:
    step = on_eight()(sgd)
    for rows in (8, 16, 8):
        assert_same(step(*state_and_batch(rows)), jax.jit(sgd)(*state_and_batch(rows)))
    assert len(step._compiled) == 2


def test_donated_state_is_consumed_and_stays_in_its_layout() -> None:
    state, batch = state_and_batch()
    step = on_eight(donate_argnums=0)(sgd)
    first, _ = step(state, batch)
    second, _ = step(first, batch)
    assert first["w"].is_deleted()
    assert second["w"].sharding == jax.tree.leaves(step.lower(state, batch).executable.in_shardings)[0]


def test_state_is_found_in_any_result() -> None:
    class Result(NamedTuple):
        loss: jax.Array
        state: dict[str, jax.Array]

    state, batch = state_and_batch()
    for wrap in (lambda s, v: s, lambda s, v: (v, s), lambda s, v: {"a": v, "state": s}, lambda s, v: Result(v, s)):
        step = on_eight()(functools.partial(lambda wrap, state, batch: wrap(*sgd(state, batch)), wrap))
        assert list(step.lower(state, batch).graph.next_version.values()) == [0]


@pytest.mark.one_day_in(2)
def test_the_cache_keeps_no_arrays_alive() -> None:
    state, batch = state_and_batch()
    step = on_eight()(sgd)
    step(state, batch)
    watched = weakref.ref(batch["x"])
    del batch
    gc.collect()
    assert watched() is None


@pytest.mark.smoke
def test_lower_and_compile_without_arrays() -> None:
    state, batch = state_and_batch()
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch))
    lowered = on_eight()(sgd).lower(*structs)
    compiled = lowered.compile()
    assert "all-reduce" in compiled.as_text()
    assert "all_reduce" in lowered.as_text()
    assert compiled.memory_analysis() is not None
    assert compiled.cost_analysis()["flops"] > 0
    assert "data_parallel" in compiled.plan.explain()
    assert_same(compiled(state, batch), jax.jit(sgd)(state, batch))


def test_numpy_arrays_and_python_scalars_are_arrays() -> None:
    state, batch = state_and_batch()
    host = jax.tree.map(np.asarray, batch)
    assert_same(on_eight()(sgd)(state, host, 0.25), jax.jit(sgd)(state, batch, 0.25))


def test_arrays_that_the_step_closes_over() -> None:
    weights = jnp.arange(3.0)

    def step(batch: jax.Array) -> jax.Array:
        return batch @ weights

    batch = jax.random.normal(jax.random.key(0), (8, 3))
    assert_same(on_eight()(step)(batch), step(batch))


def test_results_that_are_inputs_or_constants() -> None:
    def step(batch: jax.Array) -> dict[str, Any]:
        return {"same": batch, "constant": jnp.arange(3), "number": jnp.float32(2), "none": None}

    batch = jnp.ones((8, 2))
    assert_same(on_eight()(step)(batch), jax.jit(step)(batch))


def test_a_step_that_evaluates_needs_no_gradient() -> None:
    def evaluate(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        return (batch @ params["w"]).mean()

    state, batch = state_and_batch()
    assert_same(on_eight()(evaluate)(state, batch["x"]), evaluate(state, batch["x"]))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_dropout_masks_are_those_of_one_device(make_key: Any) -> None:
    def drop(batch: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.5, batch.shape), batch, 0)

    batch = jnp.arange(1.0, 97).reshape(8, 12)
    np.testing.assert_array_equal(on_eight()(drop)(batch, make_key(7)), drop(batch, make_key(7)))


def test_a_masked_loss_divides_by_the_whole_batch_s_count() -> None:
    def step(state: dict[str, jax.Array], batch: dict[str, jax.Array]) -> Any:
        def loss(s: dict[str, jax.Array]) -> jax.Array:
            each = ((batch["x"] @ s["w"] - batch["y"]) ** 2).sum(-1)
            mask = batch["x"][:, 0] > 0
            return jnp.where(mask, each, 0).sum() / mask.sum()

        return jscaler.value_and_grad(loss)(state)

    state, batch = state_and_batch()
    assert_same(on_eight()(step)(state, batch), jax.jit(step)(state, batch))


def test_op_order_inside_one_executable() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        second, first = graph.select("*dot*")[:2]
        graph.op_order(first, second)

    def step(batch: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return (batch @ a).sum() + (batch @ b).sum()

    x = jnp.ones((4, 4))
    compiled = jscaler.parallelize(policy, devices=2)(step).lower(x, x, 2 * x).compile()
    ran = [t.op.path for t in compiled.plan.program.tasks if hasattr(t, "op")]
    assert ran.index("loss/dot.1") < ran.index("loss/dot")
    assert_same(compiled(x, x, 2 * x), step(x, x, 2 * x))


# what is wrong, and what the message must say


def test_more_devices_than_there_are() -> None:
    with pytest.raises(jscaler.DeviceError, match=r"16 devices are asked for and 8 are at hand.*ask for 1 to 8"):
        jscaler.parallelize("single", devices=16)(sgd)(*state_and_batch())


def test_a_step_for_more_devices_than_there_are_is_planned_and_lowered() -> None:
    large = jscaler.parallelize("data_parallel", devices=1024)(sgd).lower(*state_and_batch(2048))
    assert "mhlo.num_partitions = 1024" in large.as_text()
    assert "1024" in large.plan.explain()
    with pytest.raises(jscaler.DeviceError, match="1024 devices are asked for and 8 are at hand"):
        large.compile()


def test_a_lowering_without_devices_says_what_one_with_them_says() -> None:
    present = on_eight()(sgd).lower(*state_and_batch(16))
    absent = executable(present.plan, (), ())
    (text,) = lowered(present.plan, absent)
    assert text.as_text() == present.as_text()


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(
        jscaler.SplitError,
        match=r"'batch/x' cannot split .* of size 12 into 8 parts; legal: 1, 2, 3, 4, 6, 12; "
        r"jscaler.pad_batch\(batch, 8\) makes it 16 rows and a mask for the loss, or leave out the last 4",
    ):
        on_eight()(sgd)(*state_and_batch(12))


def test_a_plan_with_a_typo_suggests_the_near_one() -> None:
    with pytest.raises(jscaler.UnknownNameError, match=r"no plan named 'data_paralel'.*did you mean 'data_parallel'"):
        jscaler.parallelize("data_paralel")


def test_an_argument_that_is_no_array() -> None:
    with pytest.raises(jscaler.CaptureError, match=r"argument 'batch/name' is a str, not an array.*static_argnames"):
        on_eight()(sgd)(state_and_batch()[0], {"name": "text"})


def test_a_static_argument_that_cannot_be_hashed() -> None:
    step = jscaler.parallelize("single", devices=1, static_argnames="rate")(sgd)
    with pytest.raises(jscaler.CaptureError, match="static argument 'rate' is a list, which is not hashable"):
        step(*state_and_batch(), [1])


def test_an_argument_name_with_a_typo() -> None:
    with pytest.raises(jscaler.UnknownNameError, match=r"no argument named 'stat'.*did you mean 'state'"):
        jscaler.parallelize("single", donate_argnames="stat")(sgd)


def test_a_training_step_without_a_visible_gradient() -> None:
    def step(state: dict[str, jax.Array], batch: jax.Array) -> dict[str, jax.Array]:
        grads = jax.grad(lambda s: (batch @ s["w"]).sum())(state)
        return jax.tree.map(lambda p, g: p - g, state, grads)

    with pytest.raises(jscaler.CaptureError, match=r"no gradient, and this plan needs one: use jscaler.value_and_grad"):
        on_eight()(step)({"w": jnp.ones((4, 2))}, jnp.ones((8, 4)))


def test_a_gradient_hidden_in_a_scan() -> None:
    def step(state: dict[str, jax.Array], batch: jax.Array) -> dict[str, jax.Array]:
        def body(s: Any, x: jax.Array) -> Any:
            return jax.tree.map(jnp.subtract, s, jscaler.grad(lambda p: (x @ p["w"]).sum())(s)), None

        return jax.lax.scan(body, state, batch)[0]

    with pytest.raises(jscaler.CaptureError, match="inside a scan") as refused:
        on_eight()(step)({"w": jnp.ones((4, 2))}, jnp.ones((8, 4)))
    assert "jax.value_and_grad" not in str(refused.value), "most plans need a gradient that they see"


@pytest.mark.parametrize(("plan", "devices"), [("pipeline(2, 2)", 2), ("accumulate(2)", 1)])
def test_a_scan_over_micro_batches_is_the_plans(plan: str, devices: int) -> None:
    """The remedy of the error about a gradient in a scan, carried out."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    def by_hand(params: Any, batch: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        def one(sums: Any, x: jax.Array) -> Any:
            return jax.tree.map(lambda s, g: s + g / 2, sums, value_and_grad(loss)(params, x)), None

        return jax.lax.scan(one, (0.0, jax.tree.map(jnp.zeros_like, params)), batch.reshape(2, 4, 4))[0]

    params = {"up": 0.1 * jnp.arange(32.0).reshape(4, 8), "down": jnp.eye(8, 4)}
    batch = jnp.sin(jnp.arange(32.0)).reshape(8, 4)
    with pytest.raises(jscaler.CaptureError, match=r"pipeline\(stages, 2\) or accumulate\(2\) of a step that takes one"):
        jscaler.parallelize(plan, devices=devices)(by_hand).lower(params, batch)
    whole = jscaler.parallelize(plan, devices=devices)(lambda p, batch: jscaler.value_and_grad(loss)(p, batch))
    want = by_hand(params, batch, jax.value_and_grad)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole(params, batch), want)


@pytest.mark.parametrize(("plan", "devices"), [("data_parallel", 2), ("pipeline(2, 2)", 2), ("zero3", 2)])
def test_a_complex_parameter_is_two_real_leaves(plan: str, devices: int) -> None:
    def loss(w: jax.Array, down: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.abs(jnp.tanh(batch @ w) @ down) ** 2)

    def step(state: Any, batch: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        value, grads = value_and_grad(lambda s: loss(jax.lax.complex(s["re"], s["im"]), s["down"], batch))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    ways = "as two real leaves, put together in the loss by jax.lax.complex"
    state = {"re": 0.1 * jnp.arange(32.0).reshape(4, 8), "im": jnp.ones((4, 8)), "down": jnp.eye(8, 4)}
    w, batch = jax.lax.complex(state["re"], state["im"]), jnp.sin(jnp.arange(32.0)).reshape(8, 4)
    for value_and_grad, said in ((jscaler.value_and_grad, ways), (jax.value_and_grad, "a complex one as two")):
        with pytest.raises(jscaler.CaptureError, match=said):
            jscaler.parallelize("recompute_layers", devices=1)(
                lambda w, batch, own=value_and_grad: own(lambda w: loss(w, state["down"], batch))(w)
            ).lower(w, batch)
    got = jscaler.parallelize(plan, devices=devices)(step)(state, batch)
    want = jax.jit(lambda s, b: step(s, b, jax.value_and_grad))(state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want)


def test_no_input_is_called_so() -> None:
    with pytest.raises(jscaler.UnknownNameError, match=r"no input named 'rows'; pass the plan batch=..."):
        jscaler.parallelize(jscaler.plans.data_parallel("rows"), devices=8)(lambda data: data * 2)(jnp.ones(8))


def test_a_call_inside_jit() -> None:
    step = on_eight()(sgd)
    with pytest.raises(jscaler.CaptureError, match=r"cannot run inside jax\.jit"):
        jax.jit(lambda s, b: step(s, b))(*state_and_batch())


def test_a_compiled_step_called_with_another_shape() -> None:
    compiled = on_eight()(sgd).lower(*state_and_batch(8)).compile()
    with pytest.raises(jscaler.CaptureError, match=r"'batch/x' is float32\[16, 4\] instead of float32\[8, 4\]"):
        compiled(*state_and_batch(16))
