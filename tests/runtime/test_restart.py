"""A state of pipelined layers is saved from one number of stages and restored into another: equal to the bit."""

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from of_the_day import of_the_day

import jscaler
from jscaler import plans

OPTIMIZER = optax.adam(1e-2)
INNER = {"none": "None", "tp": "tensor_parallel(columns=['*/up'])", "zero3": "zero3('x')"}
INNER |= {"zero1": "zero1('x')"}
ORDERS = {
    "1f1b": "", "interleaved": "schedule='interleaved', chunks=2, ", "zb_v": "schedule='zb_v', ",
    "chimera": "schedule='chimera', ", "unequal": "",
}  # fmt: skip
PLACES = [(stages, order, inner) for stages in (2, 4) for order in ORDERS for inner in INNER]
PLACES += [(stages, "1f1b", inner) for stages in (1, 3) for inner in INNER]
PAIRS = list(itertools.product(PLACES, PLACES))


def step(state: Any, x: jax.Array) -> Any:
    params, moments = state

    def loss_of(params: Any) -> jax.Array:
        def layer(x: jax.Array, p: Any) -> Any:
            return x + jnp.tanh(x @ p["up"]) @ p["down"], None

        y, _ = jax.lax.scan(layer, x @ params["first"], params["layers"])
        return jnp.mean((y @ params["head"]) ** 2)

    loss, grads = jscaler.value_and_grad(loss_of)(params)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def make_state(layers: int) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    params = {
        "first": jax.random.normal(next(keys), (4, 4)),
        "layers": {
            "up": 0.3 * jax.random.normal(next(keys), (layers, 4, 8)),
            "down": 0.3 * jax.random.normal(next(keys), (layers, 8, 4)),
        },
        "head": jax.random.normal(next(keys), (4, 2)),
    }
    return params, OPTIMIZER.init(params)


X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
KNOWN: dict[Any, Any] = {}


def staged(stages: int, order: str, inner: str, layers: int) -> Any:
    """The step on so many stages, compiled once."""
    if (stages, order, inner, layers) not in KNOWN:
        sizes = [layers - 1, 1] if stages == 2 else [layers - 4, 1, 2, 1]
        how = ORDERS[order] + (f"layers={sizes}, " if order == "unequal" else "")
        policy = eval(f"plans.pipeline({stages}, 4, {how}batch='x', plan={INNER[inner]})", vars(plans) | {"plans": plans})
        devices = stages * (1 if inner == "none" else 2)
        KNOWN[stages, order, inner, layers] = jscaler.parallelize(policy, devices=devices, donate_argnames="state")(step)
    return KNOWN[stages, order, inner, layers]


def for_orbax(state: Any) -> Any:
    """``state`` with ordinary arrays in the place of those in chunks, which Orbax does not know."""
    return jax.tree.map(lambda leaf: leaf.whole() if isinstance(leaf, jscaler.ChunkedArray) else leaf, state)


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("layers", of_the_day([12, 9], 2))  # of nine, two and four stages have not as many
@pytest.mark.parametrize(("first", "second"), of_the_day(PAIRS, 460))
def test_what_is_restored_is_what_was_saved(first: Any, second: Any, layers: int, tmp_path: Path) -> None:
    one, other = staged(*first, layers), staged(*second, layers)
    state, _ = one(one.init(make_state, layers, x=X), X)
    kept = jax.device_get(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", for_orbax(state))
        checkpointer.wait_until_finished()
        target = other.abstract_state(make_state, layers, x=X)
        restored = checkpointer.restore(tmp_path / "state", target)
        plain = checkpointer.restore(tmp_path / "state", jax.tree.map(np.zeros_like, kept))  # into none
    for ours, alone, true, wanted in zip(*map(jax.tree.leaves, (restored, plain, kept, target)), strict=True):
        np.testing.assert_array_equal(ours, true)
        np.testing.assert_array_equal(alone, true)
        assert ours.sharding == wanted.sharding
    (_, mine), (_, true) = other(restored, X), one(state, X)
    np.testing.assert_allclose(mine, true, rtol=1e-5)
