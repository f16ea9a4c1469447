"""A gradient that is not at the top level of a step is seen by plans, or refused with what to write instead."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jscaler
from jscaler import plans
from jscaler.errors import CaptureError, PlanWarning

draws = np.random.default_rng(0)
PARAMS = {"up": draws.normal(size=(4, 8)).astype(np.float32) / 2, "down": draws.normal(size=(8, 4)).astype(np.float32) / 2}
BATCH = draws.normal(size=(8, 4)).astype(np.float32)
ON_FOUR: dict[str, Any] = {
    "data_parallel": plans.data_parallel(),
    "zero3": plans.zero3(),
    "tensor_parallel": plans.tensor_parallel({"*/up": 1}),
}
Step = Callable[..., Any]


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)


def update(params: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def sum_of(params: Any, gradients: Any) -> Any:
    return update(params, jax.tree.map(lambda g: g.sum(0), gradients))


def scan(grad: Step, params: Any, batch: jax.Array) -> Any:
    """The usual accumulation by hand."""

    def add(total: Any, rows: jax.Array) -> Any:
        return jax.tree.map(jnp.add, total, grad(loss)(params, rows)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return update(params, lax.scan(add, zeros, batch.reshape(4, 2, 4))[0])


def mapped(grad: Step, params: Any, batch: jax.Array) -> Any:
    return sum_of(params, lax.map(lambda rows: grad(loss)(params, rows), batch.reshape(4, 2, 4)))


def fori(grad: Step, params: Any, batch: jax.Array) -> Any:
    return lax.fori_loop(0, 3, lambda i, p: update(p, grad(loss)(p, batch)), params)


def wait(grad: Step, params: Any, batch: jax.Array) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, update(c[1], grad(loss)(c[1], batch))), (0, params))[1]


def branch(grad: Step, params: Any, batch: jax.Array) -> Any:
    return lax.cond(batch.sum() > -99, lambda p: update(p, grad(loss)(p, batch)), lambda p: p, params)


def checkpoint(grad: Step, params: Any, batch: jax.Array) -> Any:
    return update(params, jax.checkpoint(jax.jit(grad(loss)))(params, batch))


def jitted(grad: Step, params: Any, batch: jax.Array) -> Any:
    return update(params, jax.jit(lambda p, b: jax.jit(grad(loss))(p, b * 2))(params, batch))


def rows(grad: Step, params: Any, batch: jax.Array) -> Any:
    """Each row's gradient, clipped by its own norm."""
    gradients = jax.vmap(grad(loss), (None, 0))(params, batch)
    norms = jnp.sqrt(sum(jnp.sum(g**2, (1, 2)) for g in jax.tree.leaves(gradients)))
    scale = 1 / jnp.maximum(1, norms / 0.1)
    return sum_of(params, jax.tree.map(lambda g: g * scale[:, None, None], gradients))


def ensemble(grad: Step, params: Any, batch: jax.Array) -> Any:
    members = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    return sum_of(params, jax.vmap(grad(loss), (0, None))(members, batch))


def checked(plan: Any, step: Step, *args: Any, devices: int = 4) -> Any:
    """The lowered step, whose numbers are those of ``jax.jit``."""
    lowered = jscaler.parallelize(plan, devices=devices)(step).lower(*args)
    wanted = jax.jit(lambda *args: step(*args))(*args)
    for got, right in zip(jax.tree.leaves(lowered.compile()(*args)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)
    return lowered


REFUSED: dict[Step, str] = {
    scan: "a scan of 4 iterations at {here}:NN, where … or accumulate(4) of a step that takes one gradient of the whole",
    mapped: "a scan of 4 iterations … rows are jax.vmap of the gradient",
    fori: "a scan of 3 iterations … a series of steps is a loop in Python around one",
    wait: "a while at {here}:NN, … a series of steps is a loop in Python around a step with one gradient",
    branch: "a cond at {here}:NN, … put the cond into the loss",
}


@pytest.mark.parametrize("of", REFUSED, ids=lambda of: of.__name__)
def test_in_a_loop_or_a_branch_it_is_refused(of: Step) -> None:
    def step(params: Any, batch: jax.Array) -> Any:
        return of(jscaler.grad, params, batch)

    said = "the step calls jscaler.value_and_grad at {here}:NN inside " + REFUSED[of]
    pattern = re.escape(said).replace("…", ".*").replace(r"\{here\}", r"\S*test_nested_gradients.py").replace("NN", r"\d+")
    with pytest.raises(CaptureError, match=pattern):
        jscaler.parallelize("single", devices=1)(step).graph(PARAMS, BATCH)


@pytest.mark.parametrize("of", [checkpoint, jitted, rows, ensemble], ids=lambda of: of.__name__)
@pytest.mark.parametrize("plan", ON_FOUR)
def test_elsewhere_it_is_seen(of: Step, plan: str) -> None:
    """Parallelism that is lost would be a warning, and so an error."""

    def step(params: Any, batch: jax.Array) -> Any:
        return of(jscaler.grad, params, batch)

    graph = checked(ON_FOUR[plan], step, PARAMS, BATCH).plan.graph
    assert len(graph.calls) == 1
    assert [op.path for op in graph.backward() if op.forward is not None]


def test_rows_are_split_and_what_is_made_of_them_is_theirs() -> None:
    def step(params: Any, batch: jax.Array) -> Any:
        return rows(jscaler.grad, params, batch)

    assert checked(plans.data_parallel(), step, PARAMS, BATCH).plan.lost.ops == ()
    checked(plans.accumulate(2, plans.data_parallel()), step, PARAMS, BATCH, devices=2)


def test_values_and_more_of_each_row() -> None:
    def step(params: Any, batch: jax.Array) -> Any:
        def with_aux(p: Any, x: jax.Array) -> Any:
            return loss(p, x), {"largest": x.max(), "same": p["up"]}

        return jax.vmap(jscaler.value_and_grad(with_aux, has_aux=True), (None, 0), 0)(params, batch)

    checked(plans.data_parallel(), step, PARAMS, BATCH)


def test_inside_of_a_loss_it_is_a_part_of_the_forward_program() -> None:
    """A penalty on a gradient, and forces along a path."""

    def penalised(params: Any, x: jax.Array) -> jax.Array:
        energy = lambda x: jnp.sum(jnp.tanh(x @ params["up"]) ** 2)  # noqa: E731
        path, _ = lax.scan(lambda x, _: (x - 0.1 * jscaler.grad(energy)(x), None), x, None, 2)
        return loss(params, path) + jnp.mean(jscaler.grad(loss, 1)(params, x) ** 2)

    def step(params: Any, batch: jax.Array) -> Any:
        value, gradients = jscaler.value_and_grad(penalised)(params, batch)
        return update(params, gradients), value

    graph = checked(plans.data_parallel(), step, PARAMS, BATCH).plan.graph
    assert len(graph.calls) == 1


def trained_beside(of: Step) -> Step:
    """A step with a gradient that plans see, and beside it one of JAX's own, which they do not."""

    def step(state: Any, batch: jax.Array) -> Any:
        gradients = jscaler.grad(loss)(state["seen"], batch)
        return {"seen": update(state["seen"], gradients), "other": of(jax.grad, state["other"], batch)}

    return step


@pytest.mark.parametrize("of", [scan, wait, branch, jitted, rows], ids=lambda of: of.__name__)
def test_numbers_of_a_gradient_of_jax_beside_it(of: Step) -> None:
    state = {"seen": PARAMS, "other": PARAMS}
    lowered = {}
    for name, plan in ON_FOUR.items():
        lost = {wait: r"1 op .*(?s:.)*while", scan: r"7 ops .*(?s:.)* takes its slices one after another"}.get(of)
        if lost and name != "tensor_parallel":
            with pytest.warns(PlanWarning, match="parallelism is lost: " + lost):
                lowered[name] = checked(plan, trained_beside(of), state, BATCH)
        else:
            lowered[name] = checked(plan, trained_beside(of), state, BATCH)
    copied = {op.path for op in lowered["data_parallel"].plan.lost.ops}
    assert len(copied) == {wait: 1, scan: 7}.get(of, 0)


def test_where_there_is_nothing_else_to_split_it_is_said() -> None:
    def trained(params: Any, batch: jax.Array) -> Any:
        return wait(jax.grad, params, batch)

    def summed(params: Any, batch: jax.Array) -> Any:
        return jnp.sum(trained(params, batch)["down"])

    said = r"nothing is split over 4 devices, not '.*/while' \(.*test_nested_gradients.py:\d+\), .*: it is blocked"
    for plan, step in (("data_parallel", summed), ("tensor_parallel", trained)):
        with pytest.warns(PlanWarning, match=said):
            checked(ON_FOUR[plan], step, PARAMS, BATCH)


@pytest.mark.parametrize("plan", [plans.data_parallel(), plans.zero3()], ids=["data_parallel", "zero3"])
@pytest.mark.parametrize("of", [scan, rows], ids=lambda of: of.__name__)
def test_a_training_step_with_gradients_of_jax_alone_is_refused(of: Step, plan: Any) -> None:
    def step(params: Any, batch: jax.Array) -> Any:
        return of(jax.grad, params, batch)

    with pytest.raises(CaptureError, match=r"use jscaler.value_and_grad .* instead of jax.value_and_grad"):
        jscaler.parallelize(plan, devices=4)(step).lower(PARAMS, BATCH)
