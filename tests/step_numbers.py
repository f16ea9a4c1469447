"""A model's train step under a plan against ``jax.jit`` on one device, leaf by leaf."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jscaler


def assert_step_like_jit(step: Callable[..., Any], state: Any, batch: Any, plan: str, devices: int, steps: int = 2) -> None:
    """States and metrics of ``step`` under ``plan`` equal those of ``jax.jit`` with JAX's own gradient."""
    lowered = jscaler.parallelize(plan, devices=devices)(step).lower(state, batch)
    ours = lowered.compile()
    whole = jax.jit(lambda state, batch: step(state, batch, jax.value_and_grad))
    theirs = whole.lower(state, batch).compile()
    want = got = state
    for _ in range(steps):
        (got, metrics), (want, expected) = ours(got, batch), theirs(want, batch)
        assert_trees_close(metrics, expected)
    assert_trees_close(got, want)


def assert_trees_close(ours: Any, theirs: Any) -> None:
    """Equal trees, and leaves equal to the rounding of their dtype."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, mine), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            mine, other = jax.random.key_data(mine), jax.random.key_data(other)
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype), jax.tree_util.keystr(path)
        tolerance = 1e-10 if other.dtype == jnp.float64 else 2e-5
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))
