"""Is a simulated step as long as a measured one? Two stages of dense layers on two CPU devices with one thread each: their
products are too small for XLA to share one between threads, so that a block alone has no more of the machine than beside
another.

The seconds of each block and each send are measured alone (``compiled.measure``); `jscaler.simulate` makes a step of
them, which is held against the median of steps as they run. The blocks are long enough that starting them does not count.
Needs two idle cores, and threads that stay on a core each: a kernel that packs what wakes up behind a short wait on one
core, as those of some virtual machines do, runs both devices at half speed for a while. So threads are scheduled in real
time where that is permitted (column ``real_time``; root's, in a container often). How much longer two blocks that have
nothing to do with each other take beside one another than alone is measured too (``together``): that is the machine's,
and no simulation of a step knows of it.
"""

import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jscaler
from bench.harness import Row, main
from jscaler import plans

COLUMNS = ("schedule", "microbatches", "measured", "simulated", "ratio", "together", "real_time")
WIDTH, ROWS, LAYERS = 96, 96, 4
DEPTH, AT_ONCE = 120, 12  # products of a layer, and those made again at a time
STEPS = 4  # of each round
OFF = 0.10  # of the measured step


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x, _ = jax.lax.scan(lambda x, _, w=w: (some(x, w), None), x, length=DEPTH // AT_ONCE)
    return jnp.mean(x**2)


@jax.checkpoint
def some(x: jax.Array, w: jax.Array) -> jax.Array:
    """``AT_ONCE`` products, made again for gradients: what a forward leaves is small, no new pages for each block."""
    return jax.lax.scan(lambda x, _: (x @ w, None), x, length=AT_ONCE)[0]


def sgd(params: Any, x: jax.Array) -> Any:
    loss, grads = jscaler.value_and_grad(loss_of)(params, x)
    return jax.tree.map(lambda p, g: p - 1e-6 * g, params, grads), loss


def measured(schedule: str, microbatches: int, rounds: int) -> Row:
    params = [jax.random.orthogonal(jax.random.key(i), WIDTH) for i in range(LAYERS)]
    x = jax.random.normal(jax.random.key(9), (ROWS * microbatches, WIDTH))
    compiled = (
        jscaler.parallelize(plans.pipeline(2, microbatches, schedule, batch="x"), devices=2)(sgd).lower(params, x).compile()
    )
    params, _ = jax.block_until_ready(compiled(params, x))
    seconds, simulated, together = list[float](), list[float](), list[float]()
    for _ in range(rounds):  # what else the machine does at a time, it does to both
        alone = compiled.measure(params, x)
        simulated.append(jscaler.simulate(compiled, seconds=alone.blocks, hops=alone.hops).makespan)
        together.append(beside_each_other(params, x[:ROWS]))
        for _ in range(STEPS):
            start = time.perf_counter()
            params, _ = jax.block_until_ready(compiled(params, x))
            seconds.append(time.perf_counter() - start)
    found, middle = statistics.median(simulated), statistics.median(seconds)
    return {
        "schedule": schedule, "microbatches": microbatches, "measured": middle, "simulated": found, "ratio": found / middle,
        "together": statistics.median(together),
    }  # fmt: skip


def beside_each_other(params: Any, x: jax.Array) -> float:
    """How much longer gradients of one micro-batch take on both devices at once than on one."""
    args = [jax.device_put((params, x), device) for device in jax.devices()[:2]]
    both: list[float] = []
    alone: list[float] = []
    for _ in range(6):  # the first warms up
        for own, taken in ((args[:1], alone), (args, both)):
            start = time.perf_counter()
            jax.block_until_ready([_gradients(*one) for one in own])
            taken.append(time.perf_counter() - start)
    return statistics.median(both[1:]) / statistics.median(alone[1:])


_gradients = jax.jit(jax.grad(loss_of))


def scheduled_in_real_time() -> bool:
    """Have threads that this one starts run on a free core at once; whether that is permitted."""
    if not hasattr(os, "sched_setscheduler"):
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    return True


def rows(quick: bool) -> Iterator[Row]:
    real_time = scheduled_in_real_time()
    jax.config.update("jax_num_cpu_devices", 2)
    for schedule in ("1f1b",) if quick else ("gpipe", "1f1b", "zb_h1", "interleaved"):
        row = {**measured(schedule, 8, 1 if quick else 5), "real_time": real_time}
        yield row if quick else {**row, "off": abs(row["ratio"] - 1), "bounds": {"off": OFF}}


if __name__ == "__main__":
    main("timeline", __doc__ or "", COLUMNS, rows)
