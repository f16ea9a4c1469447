"""A pipeline gains by a schedule what the schedule's bubbles say: estimated steps beside ``told``."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jscaler
from bench.schedule_bubbles import told
from jscaler import plans
from jscaler.clusters import find_cluster
from jscaler.estimate.block_costs import block_seconds

GROUPS, MICROBATCHES = 4, 16
PEAKS = find_cluster("4xH100-80GB").at_peaks()


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    """Sixteen layers in front of a head that takes as long as another."""
    if isinstance(params["layers"], list):
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
    else:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.mean(jnp.sin(x @ params["head"]))


def train_step(params: Any, x: jax.Array) -> Any:
    loss, grads = jscaler.value_and_grad(loss_fn)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def seconds_of(schedule: str, chunks: int, stacked: bool, layers: int) -> tuple[float, float]:
    """Of a step, without sends: as it is estimated, and as it is told."""
    w = jax.ShapeDtypeStruct((1024, 1024), "float32")
    stack = jax.ShapeDtypeStruct((layers, 1024, 1024), "float32")
    params = {"layers": stack if stacked else [w] * layers, "head": w}
    plan = plans.pipeline(GROUPS, MICROBATCHES, schedule, batch="x", chunks=chunks if chunks > 1 else None)
    x = jax.ShapeDtypeStruct((16 * 4096, 1024), "float32")
    step = jscaler.parallelize(plan, devices=GROUPS, cluster=PEAKS)(train_step).lower(params, x).plan
    blocks = block_seconds(step, PEAKS)
    named = [own if n in step.instructions.names else 0.0 for n, own in enumerate(blocks)]
    return jscaler.simulate(step, PEAKS, seconds=named, hops=[0.0] * len(step.transfers)).makespan, told(step, named)


@pytest.mark.parametrize(("stacked", "layers"), [(True, 16), (False, 15), (False, 17)])
def test_a_step_takes_what_the_bubbles_say_beside_1f1b(stacked: bool, layers: int) -> None:
    first = seconds_of("1f1b", 1, stacked, layers)
    for schedule, ratio in (("interleaved", (16 + 1.5) / (16 + 3)), ("zb_v", None)):
        found = seconds_of(schedule, 2, stacked, layers)
        as_told = found[1] / first[1]
        assert found[0] / first[0] <= 1.03 * as_told, schedule
        assert ratio is None or as_told == pytest.approx(ratio, rel=0.02)
