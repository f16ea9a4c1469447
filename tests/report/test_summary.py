"""A plan in five lines."""

import jax
import jax.numpy as jnp

import jscaler
from jscaler.report.summary import summary


def test_five_lines() -> None:
    def step(w: jax.Array, batch: jax.Array) -> jax.Array:
        return w - jscaler.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)

    shape = jax.ShapeDtypeStruct
    lowered = jscaler.parallelize("data_parallel", devices=4)(step).lower(
        shape((8, 4), "float32"), shape((16, 8), "float32")
    )
    plan, split, memory, total, lost = summary(lowered.plan.report).splitlines()
    assert plan.startswith("plan data_parallel (")
    assert "on 4 devices" in plan
    assert split == "split: 2 of 3 forward ops, 2 of 4 backward ops, 0 of 1 update ops"
    assert memory.startswith("per device: parameter 128 B of 128 B")
    assert "input 128 B of 512 B; peak, as estimated, " in memory
    assert total.startswith("total: ")
    assert "all_reduce" in total
    assert lost == "lost: no parallelism"
