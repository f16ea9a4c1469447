"""Ops on the same devices in several orders: the numbers are those of one device, and no more moves than has to.

Orders that are transposes of one another lie on one mesh, in one program; others are groups of their own, with crossings.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from of_the_day import of_the_day
from plans.plan_steps import collectives

import jscaler
from jscaler import PlanError, Split

TX = optax.sgd(0.1, momentum=0.9)
SQUARE = np.arange(4).reshape(2, 2)
TURNED = [a[::i, ::j].ravel().tolist() for a in (SQUARE, SQUARE.T) for i, j in itertools.product((1, -1), repeat=2)]


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope("first"):
        h = jnp.tanh(x @ params["a"] * params["both"])
    with jax.named_scope("second"):
        return jnp.mean((h @ params["b"] * params["both"]) ** 2)


def layers_loss(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> Any:
        with jax.named_scope("first"):
            h = jnp.tanh(x @ w)
        with jax.named_scope("second"):
            return h @ w.T, None

    return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)


def step_of(loss: Callable[..., jax.Array], value_and_grad: Any = jscaler.value_and_grad) -> Callable[..., Any]:
    def step(state: Any, x: jax.Array) -> Any:
        params, moments = state
        found, grads = value_and_grad(loss)(params, x)
        updates, moments = TX.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), found

    return step


STEP, LAYERS = step_of(loss_of), step_of(layers_loss)


def arguments(**shapes: tuple[int, ...]) -> tuple[Any, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    params = {name: jax.random.normal(next(keys), shape, float) for name, shape in shapes.items()}
    return (params, TX.init(params)), jax.random.normal(next(keys), (8, 4), float)


def rows_on(first: Any, second: Any) -> Callable[..., None]:
    """The rows of both scopes split over these arrays of devices, by each of their axes."""

    def policy(graph: Any, devices: Any) -> None:
        del devices
        rows = graph.factor_of("x", 0)
        for scope, array in (("first", np.array(first)), ("second", np.array(second))):
            for op in graph.select(f"*{scope}/*", kind="forward"):
                if op in rows:
                    graph.op_assign(graph.op_trans(op, *(Split(rows[op], n) for n in array.shape)), array)

    return policy


def check_steps(step: Any, plain: Any, policy: Any, state: Any, x: jax.Array, devices: int) -> Any:
    """Two steps in float64 against ``jax.jit``; the lowered step."""
    run, plain = jscaler.parallelize(policy, devices=devices)(step), jax.jit(plain)
    lowered = run.lower(state, x)
    jscaler.verify(lowered)
    ours = theirs = state
    for _ in range(2):
        (ours, loss), (theirs, true) = run(ours, x), plain(theirs, x)
        np.testing.assert_allclose(loss, true, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-11, 1e-12), *jax.device_get((ours, theirs)))
    return lowered


PAIRS = [*itertools.product([TURNED[0], TURNED[3], TURNED[6]], TURNED), ([0, 1], [1, 0])]


@pytest.mark.parametrize(("first", "second"), of_the_day(PAIRS), ids=str)
def test_train_steps_on_turned_squares_are_those_of_one_device(first: Sequence[int], second: Sequence[int]) -> None:
    with jax.enable_x64(True):
        state, x = arguments(a=(4, 8), b=(8, 4), both=(1, 1))
        plain = step_of(loss_of, jax.value_and_grad)
        check_steps(STEP, plain, rows_on(first, second), state, x, len(first))


def test_a_transposed_order_lies_on_one_mesh_also_in_a_loop() -> None:
    with jax.enable_x64(True):
        state, x = arguments(w=(3, 4, 8))
        plain = step_of(layers_loss, jax.value_and_grad)
        lowered = check_steps(LAYERS, plain, rows_on([0, 1, 2, 3], [0, 2, 1, 3]), state, x, 4)
    (mesh,) = lowered.plan.completed.groups
    assert (mesh.devices, mesh.axes) == ((0, 1, 2, 3), (("x0", 2), ("x1", 2)))
    assert not lowered.plan.transfers


def test_what_stays_on_its_device_in_two_orders_moves_nothing() -> None:
    state, x = arguments(a=(4, 8), b=(8, 4), both=(1, 1))

    def moved(first: Any, second: Any) -> set[str]:
        lowered = jscaler.parallelize(rows_on(first, second), devices=4)(STEP).lower(state, x)
        assert not lowered.plan.transfers
        return {tensor.name for _, tensor in collectives(lowered.plan) if "tanh" in tensor.name}

    assert moved([0, 2, 1, 3], [[0, 2], [1, 3]]) == set()  # the same rows on every device
    assert "first/tanh:0" in moved([0, 1, 2, 3], [0, 2, 1, 3])  # two of four devices change theirs


def test_orders_of_no_common_mesh_are_refused_in_a_loop_over_layers() -> None:
    state, x = arguments(w=(3, 4, 8))
    with pytest.raises(PlanError, match=r"\[0, 1, 2, 3\] .* \[3, 2, 1, 0\].*transposes of one another"):
        jscaler.parallelize(rows_on([0, 1, 2, 3], [3, 2, 1, 0]), devices=4)(LAYERS).lower(state, x)
