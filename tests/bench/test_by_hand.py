"""What plans are measured against computes the same: co-shard by hand, and accumulation by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from of_the_day import of_the_day

from bench import by_hand, temporaries
from bench.temporaries import Case
from models.gpt import GPTConfig

TINY = GPTConfig(hidden=8, layers=2, heads=4, sequence=4, dropout=0.0, dtype=jnp.float64, param_dtype=jnp.float64)


@pytest.mark.parametrize(("parts", "stacked", "remat"), of_the_day([(2, False, False), (4, True, True)], 2))
def test_layers_in_parts_are_the_model(parts: int, stacked: bool, remat: bool) -> None:
    with jax.enable_x64(True):
        case = Case("single", parts, stacked, remat)
        structs, shape = temporaries.arguments(case, TINY)
        x = jax.random.normal(jax.random.key(0), shape.shape, shape.dtype)
        params = jax.tree.map(lambda s: jax.random.normal(jax.random.key(s.size), s.shape, s.dtype), structs)
        sides = temporaries.by_hands(case, TINY), temporaries.by_model(case, TINY, remat=False)
        wanted = [jax.jit(jax.value_and_grad(side) if stacked else side) for side in sides]
        ours, model = (fun.lower(params, x).compile({"xla_backend_optimization_level": 0})(params, x) for fun in wanted)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), ours, model)


def test_accumulation_is_the_whole_batch() -> None:
    def loss_fn(w: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.square(jnp.tanh(batch @ w)).mean()

    with jax.enable_x64(True):
        w, batch = jax.random.normal(jax.random.key(0), (3, 5), float), jax.random.normal(jax.random.key(1), (8, 3), float)
        loss, gradient = jax.jit(lambda w, b: by_hand.accumulated(loss_fn, 4, w, b, jnp.float64))(w, batch)
        expected = jax.value_and_grad(loss_fn)(w, batch)
        np.testing.assert_allclose(loss, expected[0], rtol=1e-12)
        np.testing.assert_allclose(gradient, expected[1], rtol=1e-12)


def test_sums_are_in_the_dtype_that_was_asked_for() -> None:
    w, batch = jnp.ones((3,), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16)
    text = jax.jit(lambda w, b: by_hand.accumulated(lambda w, x: (x @ w).mean(), 4, w, b)).lower(w, batch).as_text()
    assert "tensor<3xf32>" in text
