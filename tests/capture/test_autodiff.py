"""Autodiff on the graph: op by op it gives what ``jax.jit`` of the undecorated step gives."""

from typing import Any

import flax.linen as nn
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given, settings
from jax import lax
from of_the_day import of_the_day
from reference import check_graph

import jscaler
from jscaler.capture.bodies import BodyTable
from jscaler.capture.residuals import with_backward_bodies

rng = np.random.default_rng(0)


def real(*shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


x = real(3, 4)
w = real(4, 4)
params = {"a": real(4, 4), "b": real(4), "unused": real(2)}


@jax.custom_vjp
def odd_square(x: jax.Array) -> jax.Array:
    return x**2


odd_square.defvjp(lambda x: (x**2, x), lambda x, g: (g * 7 * x,))  # a gradient that no derivation would give


def gradient_step(loss: Any) -> Any:
    return lambda p, x: jscaler.value_and_grad(loss)(p, x)


LOSSES: dict[str, Any] = {
    "linear": lambda p, x: (x @ p["a"] + p["b"]).sum(),
    "a parameter used twice": lambda p, x: (jnp.tanh(x @ p["a"]) @ p["a"]).mean(),
    "a parameter used three times in one op": lambda p, x: (x * p["b"] * p["b"] + p["b"]).sum(),
    "a tensor read by two ops": lambda p, x: ((h := jnp.tanh(x @ p["a"])) @ h.T).sum() + (h * p["b"]).sum(),
    "relu": lambda p, x: jax.nn.relu(x @ p["a"] - x @ p["a"]).sum() + jax.nn.relu(x * p["b"]).sum(),
    "custom vjp": lambda p, x: odd_square(x @ p["a"]).sum(),
    "remat": lambda p, x: jax.checkpoint(lambda h: jnp.sin(jnp.sin(h @ p["a"])))(x).sum(),
    "remat of a contraction": lambda p, x: (jax.checkpoint(lambda h, a: jnp.tanh(h @ a))(x, p["a"]) @ p["a"]).sum(),
    "scan": lambda p, x: lax.scan(lambda c, _: (jnp.tanh(c @ p["a"]), c.sum()), x, None, 3)[1].sum(),
    "scan over parameters": lambda p, x: lax.scan(lambda c, row: (c * row, ()), x[0], p["a"])[0].sum(),
    "cond": lambda p, x: lax.cond(x.sum() > 0, lambda h: h @ p["a"], lambda h: h * p["b"], x).sum(),
    "cond the other way": lambda p, x: lax.cond(x.sum() > 1e6, lambda h: h @ p["a"], lambda h: h * p["b"], x).sum(),
    "while, not differentiated": lambda p, x: (lax.fori_loop(0, 3, lambda i, v: v * 2, x) * p["b"]).sum(),
    "stopped": lambda p, x: (lax.stop_gradient(x @ p["a"]) * p["b"]).sum(),
    "wholly stopped": lambda p, x: lax.stop_gradient((x @ p["a"]).sum()),
    "constant": lambda p, x: jnp.float32(3),
    "a literal": lambda p, x: 3.0,
    "without parameters": lambda p, x: (x**2).sum(),
    "a parameter itself": lambda p, x: p["b"][0],
    "bfloat16 inside": lambda p, x: (x.astype(jnp.bfloat16) @ p["a"].astype(jnp.bfloat16)).astype(jnp.float32).sum(),
    "integers on the way": lambda p, x: (p["a"][jnp.argsort(x[0])] * jnp.arange(4)).sum(),
    "cross entropy": lambda p, x: optax.softmax_cross_entropy_with_integer_labels(x @ p["a"], jnp.arange(3)).mean(),
    "layer norm": lambda p, x: (nn.LayerNorm(use_bias=False).apply({"params": {"scale": p["b"]}}, x @ p["a"]) ** 3).sum(),
    "dropout": lambda p, x: nn.Dropout(0.5, deterministic=False).apply({}, x @ p["a"], rngs={"dropout": KEY}).sum(),
    "convolution": lambda p, x: lax.conv(x[None, None], p["a"][None, None, :2, :2], (1, 1), "SAME").sum(),
    "jitted inside": lambda p, x: jax.jit(lambda q: jnp.tanh(x @ q["a"]).sum())(p),
    "vmapped inside": lambda p, x: jax.vmap(lambda r: jnp.tanh(r @ p["a"]))(x).sum(),
    "a constant array": lambda p, x: (x @ p["a"] * jnp.asarray(CONSTANT)).sum(),
    "a scalar chain": lambda p, x: jnp.exp(-((x @ p["a"]).mean() ** 2)) * jnp.log(1 + (p["b"] ** 2).sum()),
}  # fmt: skip
KEY = jax.random.key(1)
CONSTANT = real(3, 4)


@pytest.mark.parametrize("name", of_the_day(LOSSES, 2))
def test_loss(name: str) -> None:
    tolerance = 2e-2 if "bfloat16" in name else 2e-5  # jit keeps more bits between bfloat16 operations
    check_graph(gradient_step(LOSSES[name]), params, x, tolerance=tolerance)


@pytest.mark.smoke
def test_a_train_step_of_flax_and_optax() -> None:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return x + nn.Dense(4)(nn.gelu(nn.Dense(8)(nn.LayerNorm()(x))))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(2):
                x = nn.remat(Block)()(x)
            return nn.Dense(3)(x)

    def step(state: TrainState, x: jax.Array, y: jax.Array) -> Any:
        def loss(p: Any) -> Any:
            logits = state.apply_fn({"params": p}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), {
                "correct": (logits.argmax(-1) == y).mean()
            }

        (value, metrics), grads = jscaler.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), metrics | {"loss": value, "norm": optax.tree.norm(grads)}

    net = Net()
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    state = TrainState.create(apply_fn=net.apply, params=jax.jit(net.init)(jax.random.key(0), x)["params"], tx=tx)
    graph = check_graph(step, state, x, np.array([0, 2, 1]))
    assert len(graph.next_version) == len(jax.tree.leaves(state))


def test_a_parameter_that_is_differentiated_and_closed_over() -> None:
    def step(p: jax.Array, x: jax.Array) -> Any:
        return jscaler.value_and_grad(lambda q: (x @ q @ p).sum() + (q * p).sum())(p)

    check_graph(step, w, x)


def test_one_parameter_as_two_arguments() -> None:
    check_graph(lambda p, x: jscaler.value_and_grad(lambda q, r: (x @ q @ r).sum(), (0, 1))(p, p), w, x)


def test_the_gradient_of_an_input() -> None:
    check_graph(lambda p, x: jscaler.grad(lambda q, v: (v @ q).sum() ** 2, (0, 1))(p, x), w, x)


def test_two_gradient_calls() -> None:
    def step(p: Any, x: jax.Array) -> Any:
        one, g = jscaler.value_and_grad(lambda q: (x @ q["a"]).sum() ** 2)(p)
        two, h = jscaler.value_and_grad(lambda q: jnp.tanh(x * q["b"]).sum() + one)(p)
        return one + two, jax.tree.map(jnp.add, g, h)

    check_graph(step, params, x)


def test_the_second_call_starts_where_the_first_one_led() -> None:
    def step(p: jax.Array, x: jax.Array) -> Any:
        def loss(q: jax.Array) -> jax.Array:
            return (jnp.tanh(x @ q) ** 2).sum()

        _, g = jscaler.value_and_grad(loss)(p)
        value, h = jscaler.value_and_grad(loss)(p - 0.1 * g)
        return value, p - 0.1 * h

    check_graph(step, w, x)


def test_a_parameter_that_the_step_makes_itself() -> None:
    def step(x: jax.Array) -> Any:
        return jscaler.value_and_grad(lambda delta: ((x + delta) ** 2).sum())(jnp.zeros(4))

    check_graph(step, x)
    check_graph(lambda x: jscaler.value_and_grad(lambda scale: (x * scale).sum())(2.0), x)


def test_metrics_from_inputs_only_and_constant_metrics() -> None:
    def step(p: Any, x: jax.Array) -> Any:
        def loss(q: Any) -> Any:
            return (x @ q["a"]).sum(), {"tokens": (x > 0).sum(), "one": jnp.ones(()), "range": jnp.arange(3), "same": x}

        return jscaler.value_and_grad(loss, has_aux=True)(p)

    check_graph(step, params, x)


def test_results_that_are_arguments_or_come_twice() -> None:
    def step(p: Any, x: jax.Array) -> Any:
        value, g = jscaler.value_and_grad(LOSSES["linear"])(p, x)
        return value, value, g["a"], g["a"], x, p["b"], 1.0, jnp.zeros(3)

    check_graph(step, params, x)


def test_a_step_without_a_gradient() -> None:
    graph = check_graph(lambda p, x: jnp.tanh(x @ p["a"] + p["b"]), params, x)
    assert graph.of_kind("backward") == ()
    with pytest.raises(jscaler.CaptureError, match="no gradient"):
        graph.backward()


def test_unused_parameters_get_zeros() -> None:
    graph = check_graph(gradient_step(LOSSES["linear"]), params, x)
    assert graph["p/unused@unused"].outputs[0].shape == (2,)


def test_a_tensor_with_two_readers_gets_one_join_of_two_gradients() -> None:
    graph = check_graph(gradient_step(LOSSES["a parameter used twice"]), params, x)
    (join,) = graph.select("*@join", kind="backward")
    assert len(join.inputs) == 2
    assert join.path == "p/a@join"


def test_a_backward_op_reads_only_what_it_needs() -> None:
    graph = with_backward_bodies(check_graph(gradient_step(lambda p, x: (x @ p["a"]).sum()), params, x), BodyTable())
    (dot,) = graph.select("*dot", kind="forward")
    backward = graph[dot.path + "@backward"]
    assert [t.name for t in backward.inputs if t.role == "input"] == ["x"]  # not the kernel: no gradient flows to x


def test_equal_layers_share_their_backward_bodies() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ p[i])
        return x.sum()

    graph = check_graph(gradient_step(loss), [real(4, 4) for _ in range(3)], x)
    full = with_backward_bodies(graph, BodyTable())
    inner = [full[f"layer_{i}/dot@backward"].body for i in (1, 2)]
    assert inner[0] is inner[1]
    assert full["layer_0/dot@backward"].body is not inner[0]  # the first layer has no gradient to hand on


# Random steps: a few tensors, combined again and again, so that tensors have many readers.

STEPS = (
    lambda a, b: a @ b,
    lambda a, b: jnp.tanh(a) + b,
    lambda a, b: a * b,
    lambda a, b: a.sum(0) * b,
    lambda a, b: jax.nn.softmax(a) @ b,
    lambda a, b: jax.nn.relu(a - b.mean()),
    lambda a, b: jax.checkpoint(lambda v: jnp.sin(v) * b)(a),
    lambda a, b: odd_square(a) + 1,
    lambda a, b: jnp.where(jnp.arange(4) > 1, a, lax.stop_gradient(b)),
)


@pytest.mark.one_day_in(3)
@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9), st.integers(0, 2)), max_size=7)
)
def test_random_steps(chosen: list[tuple[int, int, int, int]]) -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        pool = [x, p["a"], p["b"]]
        for step, i, j, scope in chosen:
            with jax.named_scope(f"scope_{scope}"):
                pool.append(STEPS[step](pool[-1 - i % len(pool)], pool[-1 - j % len(pool)]) / 4)
        return sum((v**2).mean() for v in pool[-2:])

    square = {"a": jnp.asarray(w), "b": jnp.asarray(w.T * 0.3)}
    check_graph(gradient_step(loss), square, jnp.asarray(w + 0.1))
