"""``explain`` says how each group of ops is split, who decided, and what is sent."""

import jax
import jax.numpy as jnp
import pytest

import jscaler


@pytest.mark.smoke
def test_explain_names_splits_deciders_and_bytes() -> None:
    def step(state: jax.Array, batch: jax.Array) -> jax.Array:
        with jax.named_scope("layer_0"):
            pass
        return state - jscaler.grad(lambda w: jnp.tanh(batch @ w).mean())(state)

    compiled = jscaler.parallelize("data_parallel", devices=4, donate_argnums=0)(step)
    text = compiled.lower(jnp.ones((8, 8)), jnp.ones((4, 8))).plan.explain()
    lines = text.splitlines()
    assert lines[0].startswith("plan data_parallel (")
    assert "on 4 device(s), mesh x0=4" in lines[0]
    assert any("loss/dot" in line and "a:4" in line and "policy" in line for line in lines)
    assert any("loss/dot@backward" in line and "mirrored" in line for line in lines)
    gradient = 2 * (4 - 1) / 4 * 8 * 8 * 4  # what each device sends in one all-reduce of the weights' gradient
    assert f"1× all_reduce {gradient:.0f} B" in text
