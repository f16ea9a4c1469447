"""Flags of Python in front of arrays, and equations whose parameters hold several programs: right under every plan."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify
from of_the_day import of_the_day

import jscaler
from jscaler.capture.jaxprs import map_programs, open_jaxpr
from tests.step_numbers import assert_trees_close

PARAMS = {name: jax.random.normal(jax.random.key(i), (4, 4)) / 3 for i, name in enumerate(("w", "v"))}
BATCH = {"x": jax.random.normal(jax.random.key(2), (8, 4))}
Loss = Callable[[Any, Any], jax.Array]


def net(p: Any, b: Any) -> jax.Array:
    return ((jnp.tanh(b["x"] @ p["w"]) @ p["v"]) ** 2).mean()


def square(p: Any, row: Any = 0.0) -> jax.Array:
    return p["w"] @ p["w"].T + 3 * jnp.eye(4) + jnp.diag(row * jnp.ones(4))


def checked(p: Any, b: Any) -> jax.Array:
    def fun(x: jax.Array) -> jax.Array:
        checkify.check(x > -1e9, "x is {}", x)
        return 2 * x

    return checkify.checkify(fun)(net(p, b))[1]


def solved_by_hand(p: Any, b: Any) -> jax.Array:
    a = square(p)
    by = [lambda _, y, m=m: jnp.linalg.solve(m, y) for m in (a, a.T)]
    return lax.custom_linear_solve(lambda x: a @ x, b["x"][0], *by).sum() + net(p, b)


def gradients_within(p: Any, b: Any) -> jax.Array:
    """A solve whose programs hold a gradient."""
    matvec = jax.jvp(lambda x: square(p) @ x, (b["x"][0],), (b["x"][0],))[1]
    return jnp.linalg.solve(square(p), jax.grad(lambda x: (x * matvec).sum())(b["x"][1])).sum() + net(p, b)


LOSSES: dict[str, Loss] = {
    "where": lambda p, b: jnp.where(True, net(p, b), 0.0),
    "where, inside": lambda p, b: jnp.where(True, jnp.tanh(b["x"] @ p["w"]), 0.0).mean(),
    "select": lambda p, b: lax.select(True, net(p, b), jnp.zeros(())),
    "in a checkpoint": lambda p, b: jax.checkpoint(lambda q: jnp.where(True, net(q, b), 0.0))(p),
    "in a loop": lambda p, b: lax.scan(lambda c, x: (jnp.where(False, c, c + x.sum()), None), 0.0, b["x"] @ p["w"])[0],
    "cond": lambda p, b: lax.cond(True, lambda: net(p, b), lambda: 0.0),
    "switch": lambda p, b: lax.switch(1, [lambda x: 2 * x, lambda x: 3 * x], net(p, b)),
    "checkify": checked,
    "solve": lambda p, b: jnp.linalg.solve(square(p), b["x"].T).mean() + net(p, b),
    "inv": lambda p, b: jnp.linalg.inv(square(p)).mean() + net(p, b),
    "slogdet": lambda p, b: jnp.linalg.slogdet(square(p))[1] + net(p, b),
    "cg": lambda p, b: jax.scipy.sparse.linalg.cg(square(p), b["x"][0], maxiter=3)[0].sum() + net(p, b),
    "by hand": solved_by_hand,
    "gradients within": gradients_within,
    "row by row": lambda p, b: jax.vmap(lambda r: jnp.linalg.solve(square(p, r), r))(b["x"]).mean() + net(p, b),
    "logarithms row by row": lambda p, b: jax.vmap(lambda r: jnp.linalg.slogdet(square(p, r))[1])(b["x"]).mean(),
    "a root": lambda p, b: lax.custom_root(
        lambda x: x**3 + x - net(p, b), 0.5,
        lambda f, x: lax.fori_loop(0, 9, lambda i, x: x - f(x) / (3 * x * x + 1), x), lambda g, y: y / g(1.0),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::jscaler.PlanWarning", "ignore::jscaler.UnknownPrimitiveWarning")
@pytest.mark.smoke
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("plan", of_the_day(["single", "data_parallel", "zero3"], 3))
def test_numbers(plan: str, name: str) -> None:
    def step(value_and_grad: Any) -> Callable[..., Any]:
        def train_step(params: Any, batch: Any) -> Any:
            loss, gradients = value_and_grad(LOSSES[name])(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

        return train_step

    ours = jscaler.parallelize(plan, devices=1 if plan == "single" else 2)(step(jscaler.value_and_grad))
    assert_trees_close(ours(PARAMS, BATCH), jax.jit(step(jax.value_and_grad))(PARAMS, BATCH))


def test_programs_of_named_tuples_stay_there() -> None:
    solve = jax.make_jaxpr(lambda a, b: jnp.linalg.solve(a, b))(jnp.eye(3), jnp.ones(3))
    every = [
        solve,
        *(inner for eqn in open_jaxpr(solve)[0].eqns for inner in eqn.params.values() if hasattr(inner, "eqns")),
    ]
    found = [e for jaxpr in every for e in open_jaxpr(jaxpr)[0].eqns if e.primitive.name == "custom_linear_solve"]
    (jaxprs,) = [eqn.params["jaxprs"] for eqn in found]
    assert map_programs(lambda program: program, jaxprs) is jaxprs
    seen = []
    made = map_programs(lambda program: seen.append(program) or open_jaxpr(program)[0], jaxprs)  # type: ignore[func-returns-value]
    assert type(made) is type(jaxprs)
    assert len(seen) == sum(one is not None for one in jaxprs)
    assert map_programs(lambda program: program, ("a", 1)) == ("a", 1)
