"""Kinds of tensors of a training step."""

import jax
import jax.numpy as jnp
import optax

import jscaler
from jscaler.ir.kinds import tensor_kinds


def test_parameters_moments_batch_and_gradients_are_told_apart():
    optimizer = optax.adam(1e-3)

    def step(params, moments, batch):
        def loss(p):
            return jnp.mean((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2)

        value, gradients = jscaler.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    params = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
    batch = {"x": jnp.ones((2, 4)), "y": jnp.ones((2, 3))}
    graph = jscaler.parallelize("single", devices=1)(step).graph(params, optimizer.init(params), batch)
    kinds = tensor_kinds(graph)
    by_name = {t.name: kind for t, kind in kinds.items()}
    assert by_name["params/w"] == by_name["params/b"] == "parameter"
    assert {k for n, k in by_name.items() if n.startswith("moments/")} == {"optimizer"}
    assert by_name["batch/x"] == by_name["batch/y"] == "input"
    assert [kinds[g] for g in graph.calls[0].gradients] == ["gradient", "gradient"]


def test_master_weights_behind_a_cast_are_parameters():
    def step(master, x):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), master)
        gradients = jscaler.grad(lambda p: jnp.sum(x @ p["w"]).astype(jnp.float32))(half)
        return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), master, gradients)

    graph = jscaler.parallelize("single", devices=1)(step).graph({"w": jnp.ones((4, 3))}, jnp.ones((2, 4), jnp.bfloat16))
    kinds = {t.name: kind for t, kind in tensor_kinds(graph).items()}
    assert kinds["master/w"] == "parameter"
    assert kinds["x"] == "input"


def test_a_frozen_layer_of_a_state_is_a_parameter_and_its_settings_are_not():
    def step(state, x):
        gradient = jscaler.grad(lambda head: jnp.sum(x @ state["base"] @ head * state["scale"]))(state["head"])
        head = state["head"] - state["rates"][0] * gradient
        return state | {"head": head, "sums": state["sums"] + 1}

    shapes = {"base": (4, 3), "head": (3, 2), "rates": (2,), "sums": (2,), "scale": ()}
    state = {name: jnp.ones(shape) for name, shape in shapes.items()}
    graph = jscaler.parallelize("single", devices=1)(step).graph(state, jnp.ones((5, 4)))
    kinds = {t.name: kind for t, kind in tensor_kinds(graph).items()}
    assert kinds["state/base"] == kinds["state/head"] == "parameter"
    assert {kinds[f"state/{n}"] for n in ("rates", "sums", "scale")} == {"optimizer"}


def test_a_frozen_stack_of_layers_is_a_parameter():
    def step(state, x):
        def loss(head):
            return jnp.sum(jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, state["layers"])[0] @ head)

        return state | {"head": state["head"] - jscaler.grad(loss)(state["head"])}

    state = {"layers": jnp.ones((2, 4, 4)), "head": jnp.ones((4, 2))}
    graph = jscaler.parallelize("single", devices=1)(step).graph(state, jnp.ones((5, 4)))
    assert {tensor_kinds(graph)[graph.input(f"state/{name}")] for name in state} == {"parameter"}
