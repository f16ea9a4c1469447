"""Is a simulated step as long as a measured one? Two stages of dense layers on two CPU devices with one thread each.

The seconds of each block and each send are measured alone (``compiled.measure``); `jscaler.simulate` makes a step of
them, which is held against the median of steps as they run. The blocks are long enough that starting them does not count.
Needs two idle cores: on a machine that does something else, a block takes longer beside the other stage than alone.
"""

import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp

import jscaler
from bench.harness import Row, main
from jscaler import plans

COLUMNS = ("schedule", "microbatches", "measured", "simulated", "ratio")
WIDTH, ROWS, LAYERS = 512, 512, 4
OFF = 0.10  # of the measured step


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def sgd(params: Any, x: jax.Array) -> Any:
    loss, grads = jscaler.value_and_grad(loss_of)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def measured(schedule: str, microbatches: int, steps: int) -> Row:
    params = [jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / WIDTH**0.5 for i in range(LAYERS)]
    x = jax.random.normal(jax.random.key(9), (ROWS * microbatches, WIDTH))
    compiled = (
        jscaler.parallelize(plans.pipeline(2, microbatches, schedule, batch="x"), devices=2)(sgd).lower(params, x).compile()
    )
    params, _ = jax.block_until_ready(compiled(params, x))
    alone = compiled.measure(params, x)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        params, _ = jax.block_until_ready(compiled(params, x))
        seconds.append(time.perf_counter() - start)
    found = jscaler.simulate(compiled, seconds=alone.blocks, hops=alone.hops).makespan
    middle = statistics.median(seconds)
    return {
        "schedule": schedule, "microbatches": microbatches, "measured": middle, "simulated": found, "ratio": found / middle,
    }  # fmt: skip


def rows(quick: bool) -> Iterator[Row]:
    jax.config.update("jax_num_cpu_devices", 2)
    for schedule in ("1f1b",) if quick else ("gpipe", "1f1b", "zb_h1", "interleaved"):
        row = measured(schedule, 8, 3 if quick else 20)
        yield row if quick else {**row, "off": abs(row["ratio"] - 1), "bounds": {"off": OFF}}


if __name__ == "__main__":
    main("timeline", __doc__ or "", COLUMNS, rows)
