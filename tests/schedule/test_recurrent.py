"""Models that hand their state from step to step, and leave it at each: its gradient comes from two sides."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jscaler
from jscaler import plans

KINDS: dict[str, Any] = {"param_dtype": jnp.float64}


class Tagger(nn.Module):
    """Labels of tokens, read in both directions."""

    cell: type[nn.RNNCellBase]

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(16, 8, **KINDS)(tokens)
        x = nn.RNN(self.cell(8, **KINDS))(x)  # type: ignore[call-arg]
        x = nn.Bidirectional(nn.RNN(self.cell(8, **KINDS)), nn.RNN(self.cell(8, **KINDS)))(x)  # type: ignore[call-arg]
        return nn.Dense(16, **KINDS)(x)


def step_of(model: Tagger, value_and_grad: Any) -> Any:
    def loss_of(params: Any, batch: jax.Array) -> jax.Array:
        found = jax.nn.log_softmax(model.apply(params, batch[:, :-1]))  # type: ignore[arg-type]
        return -jnp.mean(jnp.take_along_axis(found, batch[:, 1:, None], -1))

    def train(params: Any, batch: jax.Array) -> Any:
        loss, grads = value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

    return train


@pytest.fixture(autouse=True)
def _in_64_bits() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    with jax.enable_x64(True):
        yield


@functools.cache
def of_one_device(cell: type[nn.RNNCellBase]) -> Any:
    model = Tagger(cell)
    batch = jax.random.randint(jax.random.key(1), (8, 6), 0, 16)
    params = model.init(jax.random.key(0), batch[:, :-1])
    return model, params, batch, jax.jit(step_of(model, jax.value_and_grad))(params, batch)


PLANS = {
    "data_parallel": plans.data_parallel(),
    "accumulate": plans.accumulate(4),
    "accumulate, data_parallel": plans.accumulate(2, plans.zero2()),
    "pipeline": plans.pipeline(2, 2),
}


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize("cell", [nn.OptimizedLSTMCell, nn.GRUCell])
@pytest.mark.parametrize("plan", PLANS)
def test_numbers_of_recurrent_models(plan: str, cell: type[nn.RNNCellBase]) -> None:
    model, params, batch, want = of_one_device(cell)
    train = jscaler.parallelize(PLANS[plan], devices=2)(step_of(model, jscaler.value_and_grad))
    got = train(params, batch)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-13), got, want)


def test_a_recurrent_layer_runs_wholly_in_the_loop_over_micro_batches() -> None:
    model, params, batch, _ = of_one_device(nn.GRUCell)
    lowered = jscaler.parallelize(plans.accumulate(4), devices=1)(step_of(model, jscaler.value_and_grad)).lower(
        params, batch
    )
    loops = lowered.plan.graph.loops
    outer = [name for name, loop in loops.items() if loop.parent is None]
    assert len(outer) == 1
    assert loops[outer[0]].length == 4
    assert sum(loop.length == 5 and loop.parent == outer[0] for loop in loops.values()) == 6  # three, and their backwards
