"""``x[arange(n), labels]`` is a look-up batched over the rows: same numbers, and no row of another device is read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import jscaler
from jscaler.capture.jaxprs import open_jaxpr
from jscaler.capture.own_rows import own_rows

X, LABELS = jnp.linspace(-1, 1, 8 * 4 * 5).reshape(8, 4, 5), jnp.arange(32).reshape(8, 4) * 7 % 5
ROWS = jnp.arange(8)
Look = Callable[[jax.Array, jax.Array], jax.Array]


def tall(x: jax.Array, rows: int) -> jax.Array:
    return jnp.arange(rows * 5.0).reshape(rows, 5) + x[0, 0]


def many(y: jax.Array, rows: int) -> jax.Array:
    return jnp.arange(rows) % 5 + 0 * y[0, 0]


# a look-up, and the dims of the operand that are the rows' own
LOOKS: dict[str, tuple[Look, tuple[int, ...]]] = {
    "labels of rows": (lambda x, y: x[:, 0][jnp.arange(8), y[:, 0]], (0,)),
    "a row each": (lambda x, y: x[jnp.arange(8), y[:, 0] % 4], (0,)),
    "from the end": (lambda x, y: x[jnp.arange(8), y[:, 0] % 4 - 4], (0,)),
    "of two dims": (lambda x, y: x[jnp.arange(8)[:, None], jnp.arange(4)[None], y], (0, 1)),
    "counted by numpy": (lambda x, y: x[np.arange(8), y[:, 0] % 4], (0,)),
    "counted outside": (lambda x, y: x[ROWS, y[:, 0] % 4], (0,)),
    "counted in another type": (lambda x, y: x[jnp.arange(8).astype("int16"), y[:, 0] % 4], (0,)),
    "the second dim": (lambda x, y: x[y[:4, 0], jnp.arange(4)], (1,)),
    "a diagonal": (lambda x, y: x[:4, :, 0][jnp.arange(4), jnp.arange(4)], (0,)),
    "outside": (lambda x, y: x.at[jnp.arange(8), y[:, 0] + 3].get(mode="fill", fill_value=7.0), (0,)),
    "written": (lambda x, y: x.at[jnp.arange(8), 1, y[:, 0]].set(3.0), (0,)),
    "added": (lambda x, y: x.at[jnp.arange(8)[:, None], jnp.arange(4), y].add(x[:, :, 0]), (0, 1)),
    "written where it is inside": (lambda x, y: x.at[jnp.arange(8), y[:, 0] + 2].mul(x[:, 0], mode="drop"), (0,)),
    "in a loop": (lambda x, y: jax.lax.scan(lambda c, w: (c + 1, w[jnp.arange(4), (c + y[0]) % 5]), 0, x)[1], (0,)),
    "counted in a type of as many": (lambda x, y: tall(x, 256)[jnp.arange(256, dtype=jnp.uint8), many(y, 256)], (0,)),
    "a counter that begins again": (lambda x, y: tall(x, 260)[jnp.arange(260, dtype=jnp.uint8), many(y, 260)], ()),
    "one with a sign, cast back": (
        lambda x, y: tall(x, 260)[jnp.arange(260).astype("uint8").astype("int32"), many(y, 260)],
        (),
    ),
    "one that is not whole": (
        lambda x, y: tall(x, 2100)[jnp.arange(2100, dtype="float16").astype("int32"), many(y, 2100)],
        (),
    ),
    "fewer rows": (lambda x, y: x[jnp.arange(3), y[:3, 0] % 4], ()),
    "turned round": (lambda x, y: x[jnp.arange(8)[::-1], y[:, 0] % 4], ()),
    "two steps": (lambda x, y: x[jnp.arange(8) * 2 % 8, y[:, 0] % 4], ()),
    "all rows": (lambda x, y: x[jnp.arange(8)] + y[0, 0], ()),
    "from another row on": (lambda x, y: x[jnp.arange(8) - 1, y[:, 0] % 4], ()),
}


def dims_of(eqns: Any) -> tuple[int, ...]:
    """The operand's batched dims of look-ups, here and in programs inside."""
    found: tuple[int, ...] = ()
    for eqn in eqns:
        found += tuple(getattr(eqn.params.get("dimension_numbers"), "operand_batching_dims", ()))
        for inner in core.jaxprs_in_params(eqn.params):
            found += dims_of(open_jaxpr(inner)[0].eqns)
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("name", LOOKS)
def test_look_ups_give_the_same(name: str) -> None:
    look, own = LOOKS[name]
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(look)(X, LABELS))
    made = own_rows(jaxpr.eqns, zip(jaxpr.constvars, consts, strict=True))
    assert dims_of(eqn for eqns in made for eqn in eqns) == own
    assert all(eqns == [eqn] for eqns, eqn in zip(made, jaxpr.eqns, strict=True)) == (not own)
    new = jaxpr.replace(eqns=[eqn for eqns in made for eqn in eqns])
    wanted, found = (jax.core.eval_jaxpr(one, consts, X, LABELS)[0] for one in (jaxpr, new))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("plan", ["data_parallel", "zero3", "accumulate(2)"])
def test_a_loss_of_labels_needs_its_own_rows_alone(plan: str) -> None:
    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(jnp.tanh(x @ params["w"]))
        return -scores[jnp.arange(len(y)), y].mean()

    def step_of(value_and_grad: Any) -> Callable[..., Any]:
        def step(params: Any, batch: Any) -> Any:
            value, grads = value_and_grad(loss)(params, batch["x"], batch["y"])
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return step

    params, batch = {"w": X[:, 0].T @ X[:, :, 1]}, {"x": X[:, 1], "y": LABELS[:, 1] % 4}
    run = jscaler.parallelize(plan, devices=4)(step_of(jscaler.value_and_grad))
    lowered = run.lower(params, batch)
    jscaler.verify(lowered)
    assert not lowered.plan.lost.ops
    moved = {move.tensor for row in lowered.plan.report.ops for move in row.moves if "all_gather" in move.moved}
    assert moved <= {"params/w"}
    (new, value), (wanted, right) = run(params, batch), jax.jit(step_of(jax.value_and_grad))(params, batch)
    np.testing.assert_allclose(value, right, rtol=1e-6)
    np.testing.assert_allclose(new["w"], wanted["w"], rtol=1e-5, atol=1e-7)
