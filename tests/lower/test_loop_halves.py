"""A backward loop in two: gradients of inputs, which other stages wait for, and of weights, which none does."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import plans
from jscaler.errors import VerificationError
from jscaler.lower.flat_program import FlatLoop
from jscaler.lower.step_plan import StepPlan

LAYERS, WIDTH = 4, 8


def make(value_and_grad: Any, remat: bool = False) -> Any:
    def step(params: Any, x: jax.Array) -> Any:
        def layer(h: jax.Array, own: Any) -> tuple[jax.Array, None]:
            return h + jnp.tanh(h @ own["up"]) @ own["down"], None

        def loss_of(params: Any) -> jax.Array:
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params)[0] ** 2)

        loss, grads = value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def arguments() -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        name: 0.3 * jax.random.normal(key, (LAYERS, WIDTH, WIDTH), float)
        for name, key in zip(("up", "down"), keys, strict=False)
    }
    return params, jax.random.normal(keys[2], (16, WIDTH), float)


def lowered(remat: bool = False) -> Any:
    step = make(jscaler.value_and_grad, remat)
    return jscaler.parallelize(plans.pipeline(2, 4, "zb_h1", batch="x"), devices=2)(step).lower(*arguments())


def dots(plan: StepPlan, name: str) -> int:
    block = next(plan.blocks[n] for n in range(len(plan.blocks)) if plan.block_name(n) == name)
    return sum(eqn.primitive.name == "dot_general" for eqn in block.flat.equations)


@pytest.mark.parametrize("remat", [False, True])
def test_numbers_are_those_of_one_device_and_are_proven(remat: bool) -> None:
    with jax.enable_x64(True):
        given = lowered(remat)
        jscaler.verify(given)
        ours = given.compile()(*arguments())
        theirs = jax.jit(make(jax.value_and_grad, remat))(*arguments())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), ours, theirs)


def test_no_product_is_done_twice() -> None:
    """Of a layer the second stage has two products forward, two for its input's gradient and two for its weights'."""
    plan = lowered().plan
    assert dots(plan, "1F 1I") == 2 + 2
    assert dots(plan, "1W") == 2


def test_what_is_handed_on_is_least() -> None:
    """Of each layer the input and what is above the tanh (of which it is made again) and their two cotangents."""
    plan = lowered().plan
    block = next(plan.blocks[n] for n in range(len(plan.blocks)) if plan.block_name(n) == "1W")
    loop = next(item for item in block.flat.items if isinstance(item, FlatLoop))
    assert len(loop.xs) == 4
    assert not loop.carries


def test_a_half_that_makes_other_gradients_is_noticed() -> None:
    plan = lowered().plan
    segments = []
    for segment in plan.segments:
        blocks = []
        for block in segment.blocks:
            items = [
                _swapped(item) if isinstance(item, FlatLoop) and not item.carries else item for item in block.flat.items
            ]
            blocks.append(dataclasses.replace(block, flat=dataclasses.replace(block.flat, items=tuple(items))))
        segments.append(dataclasses.replace(segment, blocks=tuple(blocks)))
    with pytest.raises(VerificationError, match="computes another value"):
        jscaler.verify(dataclasses.replace(plan, segments=tuple(segments)))


def _swapped(loop: FlatLoop) -> FlatLoop:
    """The loop with the two cotangents that it takes swapped."""
    *others, (one, first), (other, second) = loop.xs
    return dataclasses.replace(loop, xs=(*others, (other, first), (one, second)))
