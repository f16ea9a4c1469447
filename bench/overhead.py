"""What does jscaler cost where it has nothing to do? The plan ``single`` against ``jax.jit`` of the undecorated step.

``time_ratio``: median step times, run in turn. ``compile_ratio``: tracing and lowering (XLA's own compilation is not
ours), medians of several, held to 4. ``flops_ratio``: FLOPs of the compiled programs, which is exact and held to 1 %.
Times are goals (1.03 for mini), not bounds: machines are noisy.
"""

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jscaler
from bench.harness import Row, main

COLUMNS = ("case", "target", "time_ratio", "compile_ratio", "flops_ratio")


def measure(size: str, batch: int, rounds: int) -> Row:
    from jscaler.report.timing import interleaved, median_ratio
    from models.gpt import GPT, SIZES
    from models.text import batch_at, load_bytes
    from models.training import make_optimizer, make_state, train_step

    config = SIZES[size]
    arrays = batch_at(load_bytes(), 0, batch, config.sequence)
    plain = functools.partial(train_step, value_and_grad=jax.value_and_grad)

    first = make_state(GPT(config), config.sequence, make_optimizer())

    def fresh() -> Any:
        return jax.tree.map(jnp.copy, first)

    def lower_jit() -> Any:
        return jax.jit(lambda state, batch: plain(state, batch), donate_argnums=0).lower(first, arrays)

    def lower_ours() -> Any:
        return jscaler.parallelize("single", devices=1, donate_argnames="state")(train_step).lower(first, arrays)

    seconds: list[list[float]] = [[], []]
    for _ in range(5):
        for i, lower in enumerate((lower_jit, lower_ours)):
            started = time.perf_counter()
            lower()
            seconds[i].append(time.perf_counter() - started)
    jit, ours = lower_jit().compile(), lower_ours().compile()
    flops = ours.cost_analysis()["flops"] / jit.cost_analysis()["flops"]
    times = interleaved([_Loop(jit, fresh(), arrays), _Loop(ours, fresh(), arrays)], rounds)
    return {
        "case": f"gpt-{size}, plan single",
        "target": jax.devices()[0].platform,
        "time_ratio": round(median_ratio(times[1], times[0]), 4),
        "compile_ratio": round(statistics.median(seconds[1]) / statistics.median(seconds[0]), 3),
        "flops_ratio": round(flops, 5),
        "bounds": {"compile_ratio": 4.0, "flops_ratio": 1.01},
    }


class _Loop:
    """A training loop on one batch; the state is donated and kept."""

    def __init__(self, step: Any, state: Any, batch: Any):
        self.step, self.state, self.batch = step, state, batch

    def __call__(self) -> Any:
        self.state, metrics = self.step(self.state, self.batch)
        return self.state, metrics


def rows(quick: bool) -> Iterator[Row]:
    if quick:
        yield measure("nano", 16, 10)
        return
    yield measure("nano", 16, 60)
    yield measure("mini", 8, 30)


if __name__ == "__main__":
    main("overhead", __doc__ or "", COLUMNS, rows, devices=1)
