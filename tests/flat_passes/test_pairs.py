"""Both products of an attention's backward stand in front of what is made of either."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import jscaler
from jscaler.capture.jaxprs import shape
from jscaler.lower.flat_program import FlatProgram

HEADS, ROWS, SIZE = 4, 16, 2
State = dict[str, Any]


def attention(p: State, batch: State) -> jax.Array:
    """Scores are larger than what they are made of; all of it again in the backward."""

    def core_(x: jax.Array) -> jax.Array:
        with jax.named_scope("qkv"):
            q, k, v = jnp.einsum("bsd,tdhk->tbshk", x, p["qkv"])
        with jax.named_scope("scores"):
            scores = jnp.einsum("bshk,bthk->bhst", q, k)
        with jax.named_scope("mix"):
            return jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores), v)

    with jax.named_scope("out"):
        out = jnp.einsum("bshk,hkd->bsd", jax.checkpoint(core_)(batch["x"]), p["out"])
    return ((out - batch["x"]) ** 2).mean()


def step(p: State, batch: State) -> Any:
    value, gradients = jscaler.value_and_grad(attention)(p, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value


def arguments() -> tuple[State, State]:
    keys = jax.random.split(jax.random.key(0), 3)
    d = HEADS * SIZE
    p = {"qkv": jax.random.normal(keys[0], (3, d, HEADS, SIZE)), "out": jax.random.normal(keys[1], (HEADS, SIZE, d))}
    return p, {"x": jax.random.normal(keys[2], (4, ROWS, d))}


def lowered(plan: str, devices: int) -> Any:
    return jscaler.parallelize(plan, devices=devices)(step).lower(*arguments())


def equations(flat: FlatProgram) -> list[core.JaxprEqn]:
    return [item for item in flat.items if isinstance(item, core.JaxprEqn)]


def pairs(eqns: list[core.JaxprEqn]) -> list[core.JaxprEqn]:
    """The fences of two products."""
    made = {v: eqn for eqn in eqns for v in eqn.outvars}
    fences = [e for e in eqns if e.primitive.name == "optimization_barrier" and len(e.invars) == 2]
    return [e for e in fences if all(v in made and made[v].primitive.name == "dot_general" for v in e.invars)]


def test_what_the_backward_makes_of_probabilities_and_scores_is_fenced() -> None:
    eqns = equations(lowered("data_parallel", 4).plan.flat)
    found = pairs(eqns)
    assert len(found) == 2  # (d(probabilities), dv) and (dq, dk)
    scores = (1, HEADS, ROWS, ROWS)
    shapes = [sorted(math.prod(shape(v)) for v in fence.outvars) for fence in found]
    small = int(np.prod(scores)) * SIZE // ROWS
    assert shapes == [[small, int(np.prod(scores))], [small, small]]
    for fence in found:
        behind = eqns[eqns.index(fence) + 1 :]
        reading = [e for e in eqns if set(fence.invars) & {v for v in e.invars if isinstance(v, core.Var)}]
        assert reading == [fence]
        assert all(any(v in e.invars for e in behind) for v in fence.outvars)


def test_without_collectives_nothing_is_fenced() -> None:
    assert not pairs(equations(lowered("single", 1).plan.flat))


@pytest.mark.parametrize(("plan", "devices"), [("data_parallel", 4), ("zero3", 2)])
def test_numbers_are_those_of_one_device(plan: str, devices: int) -> None:
    jscaler.verify(lowered(plan, devices))
    run = jscaler.parallelize(plan, devices=devices)(step)
    for a, b in zip(jax.tree.leaves(run(*arguments())), jax.tree.leaves(jax.jit(step)(*arguments())), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
