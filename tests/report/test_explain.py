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


def test_explain_says_why_and_which_tensor_in_which_layouts() -> None:
    def step(state: dict[str, jax.Array], batch: jax.Array) -> dict[str, jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            with jax.named_scope("layer_0"):
                x = jnp.tanh(batch @ params["up"])
            with jax.named_scope("layer_1"):
                return jnp.square(x @ params["down"] - 1).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jscaler.grad(loss)(state))

    state = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}
    plan = jscaler.parallelize(jscaler.plans.tensor_parallel({"*/up": 1}), devices=4, donate_argnums=0)(step)
    lines = plan.lower(state, jnp.ones((2, 4))).plan.explain().splitlines()
    moved = [i for i, line in enumerate(lines) if "└" in line]
    assert len(moved) == 1  # the sum after the second kernel: x has no gradient
    sent = 2 * 3 / 4 * 2 * 4 * 4
    assert lines[moved[0]].strip() == f"└ layer_*/dot:0: R1 V4 D(1,1) → R4 V1 D(1,1), 1× all_reduce {sent:.0f} B"
    reader = lines[moved[0] - 1]
    assert "filled: " in reader
    assert any("layer_*/dot " in line and "policy" in line and "R1 V1 D(1,4)" in line for line in lines)
