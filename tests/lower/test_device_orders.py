"""Ops on the same devices in several orders: the numbers are those of one device, and no more moves than has to.

Orders that are transposes of one another lie on one mesh; others on meshes with the same axes. All are in one program.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lower.test_halo import IMAGE
from of_the_day import of_the_day
from plans.plan_steps import collectives

import jscaler
from jscaler import PlanError, Split, TimeSplit

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


def units_on(first: Any, second: Any) -> Callable[..., None]:
    """The columns of the first product, and the rows of the second, split over arrays of devices: weights in parts."""

    def policy(graph: Any, devices: Any) -> None:
        del devices
        leaf = next(t for t in graph.inputs if t.name in ("state/0/a", "state/0/w"))
        columns = graph.factor_of(leaf.name, len(leaf.shape) - 1)
        for scope, array in (("first", np.array(first)), ("second", np.array(second))):
            for op in graph.select(f"*{scope}/*", kind="forward"):
                if op in columns:
                    graph.op_assign(graph.op_trans(op, *(Split(columns[op], n) for n in array.shape)), array)

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


PAIRS = [*itertools.product([TURNED[0], TURNED[3], TURNED[6]], TURNED), ([0, 1], [1, 0]), ([2, 0, 3, 1], [[0, 1], [2, 3]])]


def shapes_of(step: Any) -> dict[str, tuple[int, ...]]:
    return {"w": (3, 4, 8)} if step is LAYERS else {"a": (4, 8), "b": (8, 4), "both": (1, 1)}


CASES = [*itertools.product((STEP, LAYERS), (rows_on, units_on), PAIRS)]


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(("step", "policy", "pair"), of_the_day(CASES))
def test_train_steps_on_two_orders_are_those_of_one_device(step: Any, policy: Any, pair: Any) -> None:
    with jax.enable_x64(True):
        state, x = arguments(**shapes_of(step))
        plain = step_of(layers_loss if step is LAYERS else loss_of, jax.value_and_grad)
        lowered = check_steps(step, plain, policy(*pair), state, x, np.size(pair[0]))
    assert len(lowered.plan.completed.groups) == 1
    assert not lowered.plan.transfers


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


def check_on(policy: Any, step: Any = STEP, devices: int = 4, batch: int = 8) -> Any:
    with jax.enable_x64(True):
        state, _ = arguments(**shapes_of(step))
        x = jax.random.normal(jax.random.key(5), (batch, 4), float)
        plain = step_of(layers_loss if step is LAYERS else loss_of, jax.value_and_grad)
        return check_steps(step, plain, policy, state, x, devices)


def test_state_in_parts_lies_in_one_order() -> None:
    def policy(graph: Any, devices: Any) -> None:
        rows_on([3, 2, 1, 0], [1, 3, 0, 2])(graph, devices)
        for name in ("a", "b"):
            graph.shard(f"state/0/{name}", 0, [0, 1, 2, 3], stored=True)

    lowered = check_on(policy)
    (group,) = lowered.plan.completed.groups
    lies = {t.name: layout for t, layout in lowered.plan.completed.inputs.items()}
    assert group.devices == (0, 1, 2, 3)
    assert all(layout.mesh == group for layout in lies.values())
    assert lies["state/0/a"].counts == lies["state/1/0/trace/b"].counts == "R1 V1 D(4,1)"


@pytest.mark.parametrize("step", [STEP, LAYERS])
def test_micro_batches_on_two_orders(step: Any) -> None:
    def policy(graph: Any, devices: Any) -> None:
        del devices
        rows = graph.factor_of("x", 0)
        for op in graph.select("*", kind="forward"):
            if op in rows:
                order = [0, 1] if "first" in op.path else [1, 0]
                graph.op_assign(graph.op_trans(op, TimeSplit(rows[op], 2, "t"), Split(rows[op], 2)), [order])

    lowered = check_on(policy, step, 2)
    assert not lowered.plan.transfers
    assert len([loop for loop in lowered.plan.graph.loops.values() if loop.time]) == 1


@pytest.mark.parametrize("time", [False, True])
def test_groups_each_with_ops_in_two_orders(time: bool) -> None:
    orders = {"first": itertools.cycle([[0, 1], [1, 0]]), "second": itertools.cycle([[3, 2], [2, 3]])}

    def policy(graph: Any, devices: Any) -> None:
        del devices
        rows = graph.factor_of("x", 0)
        for op in graph.select("*", kind="forward"):
            if op in rows:
                in_time = [TimeSplit(rows[op], 2, "t")] if time else []
                order = np.array(next(orders["first" if "first" in op.path else "second"]))
                graph.op_assign(graph.op_trans(op, *in_time, Split(rows[op], 2)), order[None] if time else order)

    lowered = check_on(policy)
    placed = {place.placement.group.devices for place in lowered.plan.completed.ops.values()}
    assert placed == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert [set(group.devices) for group in lowered.plan.completed.groups] == [{0, 1}, {2, 3}]
    orders = {group.devices for group in lowered.plan.completed.groups}
    ends = [end for t in lowered.plan.transfers for end in (t.crossing.source, t.crossing.target)]
    assert ends
    assert all(end.mesh.devices in orders for end in ends)


def test_windows_reach_neighbours_in_both_orders() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        image = x.reshape(2, 16, 4, 1)
        for name in ("first", "second"):
            with jax.named_scope(name):
                image = jax.lax.conv_general_dilated(image, params[name], (1, 1), "SAME", dimension_numbers=IMAGE)
                image = jnp.tanh(image)
        return jnp.mean(image**2)

    def policy(graph: Any, devices: Any) -> None:
        del devices
        for scope, order in (("first", [0, 1, 2, 3]), ("second", [2, 0, 3, 1])):
            (op,) = graph.select(f"*{scope}/conv*", kind="forward")
            rows = graph.rule(op).operands[0][1]
            graph.op_assign(graph.op_trans(op, Split(rows[0], 4)), order)

    with jax.enable_x64(True):
        state, x = arguments(first=(3, 3, 1, 2), second=(3, 3, 2, 1))
        x = jax.random.normal(jax.random.key(5), (32, 4), float)
        lowered = check_steps(step_of(loss), step_of(loss, jax.value_and_grad), policy, state, x, 4)
    assert len(lowered.plan.program.halos) >= 2


SIX = np.arange(6)
OTHER_CUTS = [SIX.reshape(2, 3), SIX[::-1].reshape(3, 2)]  # cut after 3 devices, and after 2


def test_orders_that_are_cut_otherwise_are_groups_of_their_own() -> None:
    lowered = check_on(rows_on(*OTHER_CUTS), devices=6, batch=12)
    assert [set(group.devices) for group in lowered.plan.completed.groups] == [set(range(6))] * 2


def test_orders_that_are_cut_otherwise_are_refused_in_a_loop_over_layers() -> None:
    with pytest.raises(
        PlanError, match=r"\[0, 1, 2, 3, 4, 5\] .* \[5, 4, 3, 2, 1, 0\] \(in another order and cut 3x2, not 2x3"
    ):
        check_on(rows_on(*OTHER_CUTS), LAYERS, 6, 12)
