"""What does a state of many leaves cost per call? A step that hardly computes, called with the state that it returned.

``call_ratio``: the fastest call (until it returns; the step itself runs on) against ``jax.jit`` of the same function under
the same shardings, in turn: flattening, recognising the arguments and dispatching, held to 1.5 with 300 leaves.
``extra_us_per_leaf``: their difference. ``moved``: arrays that are moved between calls; ``live_growth``: arrays
that 20 calls leave behind; both are held to 0.

The last case is a pipeline, a quarter of the leaves on each of four stages, beside the same step on one device group: its
calls run many blocks, so ``call_ratio`` is held to 1.5 and 15 µs for each run of a block.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jscaler
from bench.harness import Row, main
from jscaler.lower.instructions import Run, Send

LEAVES, STAGES = 300, 4
COLUMNS = ("case", "target", "call_ratio", "extra_us_per_leaf", "moved", "live_growth")


def add(state: dict[str, jax.Array], batch: jax.Array) -> dict[str, jax.Array]:
    """Add the mean of the batch to every leaf."""
    return jax.tree.map(lambda x: x + batch.mean(), state)


def scale(state: dict[str, jax.Array], batch: jax.Array) -> dict[str, jax.Array]:
    """A step of gradient descent on a model that multiplies by every leaf."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        x = batch
        for name, leaf in params.items():
            with jax.named_scope(name):
                x = x * leaf
        return x.mean()

    return jax.tree.map(lambda p, g: p - 1e-9 * g, state, jscaler.grad(loss)(state))


def whole(graph: Any, devices: np.ndarray) -> None:
    """A copy on every device."""
    graph.op_assign(graph.ops[0], devices)


def measure(devices: int, rounds: int) -> Row:
    ours = jscaler.parallelize(whole, devices=devices, donate_argnames="state")(add)
    batch = jnp.ones(8)
    first = {f"layer_{i}/kernel": jnp.full(8, float(i), jnp.float32) for i in range(LEAVES)}
    shardings = ours.lower(first, batch).executable.in_shardings
    batch = jax.device_put(batch, shardings[-1])
    of_state = dict(zip(sorted(first), shardings, strict=False))
    jit = jax.jit(add, in_shardings=(of_state, shardings[-1]), out_shardings=of_state, donate_argnums=0)
    calls = [_Calls(step, jax.device_put(jax.tree.map(jnp.copy, first), of_state), batch) for step in (jit, ours)]
    for call in calls:
        call(3)
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for i, call in enumerate(calls):
            seconds[i].append(call(1))
    fastest = [min(s) for s in seconds]
    live = len(jax.live_arrays())
    moved = _count_moves(lambda: calls[1](20))
    return {
        "case": f"state of {LEAVES} leaves, {devices} devices",
        "target": jax.devices()[0].platform,
        "call_ratio": round(fastest[1] / fastest[0], 3),
        "extra_us_per_leaf": round(1e6 * (fastest[1] - fastest[0]) / LEAVES, 3),
        "moved": moved,
        "live_growth": len(jax.live_arrays()) - live,
        "bounds": {"call_ratio": 1.5, "moved": 0, "live_growth": 0},
    }


def measure_stages(rounds: int) -> Row:
    """Four stages of as many leaves each, two micro-batches: the time that Python takes, beside that on one group."""
    first = {f"layer_{i:03}": jnp.full(8, 1.0 + i / 1000, jnp.float32) for i in range(LEAVES)}
    batch = jnp.ones((2, 8))
    calls, runs = [], 0
    for plan, devices in (("accumulate(2, single())", 1), (f"pipeline({STAGES}, 2)", STAGES)):
        step = jscaler.parallelize(plan, devices=devices, donate_argnames="state")(scale)
        lowered = step.lower(first, batch)
        place = lowered.executable.in_shardings
        state = {name: jax.device_put(jnp.copy(leaf), at) for (name, leaf), at in zip(first.items(), place, strict=False)}
        compiled = lowered.compile()
        runs = sum(isinstance(one, Run) for one in lowered.plan.instructions.steps)
        calls.append((compiled, _Calls(compiled, state, jax.device_put(batch, place[-1]))))
    calls[1][1](3)
    live = len(jax.live_arrays())
    moved = _count_moves(lambda: calls[1][1](20)) - 20 * sum(isinstance(one, Send) for one in _steps(calls[1][0]))
    growth = len(jax.live_arrays()) - live
    alone = [_Calls(_without_devices(compiled, call), call.state, call.batch) for compiled, call in calls]
    seconds = [[call(1) for _ in range(rounds)] for call in alone]
    fastest = [min(own) for own in seconds]
    return {
        "case": f"Python of a call, {LEAVES} leaves, {STAGES} stages, {runs} runs of blocks",
        "target": jax.devices()[0].platform,
        "call_ratio": round(fastest[1] / fastest[0], 3),
        "extra_us_per_leaf": round(1e6 * (fastest[1] - fastest[0]) / LEAVES, 3),
        "moved": moved,
        "live_growth": growth,
        "bounds": {"call_ratio": round(1.5 + 15e-6 * runs / fastest[0], 3), "moved": 0, "live_growth": 0},
    }


def _steps(compiled: Any) -> tuple[Any, ...]:
    return compiled.plan.instructions.steps


def _without_devices(compiled: Any, call: "_Calls") -> Any:
    """``compiled`` where every block and hop at once returns what it once has returned: what is left is Python.

    (A copy between virtual CPU devices waits for what it copies, as none between GPUs does.)
    """
    made = compiled.lowered.executable
    blocks = [_Recorded(one) for one in compiled.segments]
    hops = tuple(_Recorded(hop) if hop is not None else None for hop in made.between.hops)
    between = dataclasses.replace(made.between, hops=hops)
    again = dataclasses.replace(made, make_between=lambda: between)
    lowered = dataclasses.replace(compiled.lowered, executable=again)
    recorded = dataclasses.replace(compiled, lowered=lowered, segments=tuple(blocks))
    call.state = recorded(call.state, call.batch)
    return recorded


class _Recorded:
    """Returns what ``run`` has returned when it was first called."""

    def __init__(self, run: Callable[..., Any]):
        self.run, self.result = run, None

    def __call__(self, *given: Any) -> Any:
        if self.result is None:
            self.result = self.run(*given)
        return self.result


class _Calls:
    """Calls of a step with the state that it returned."""

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any):
        self.step, self.state, self.batch = step, state, batch

    def __call__(self, count: int) -> float:
        """Call ``count`` times; the seconds that the last call took to return."""
        seconds = 0.0
        for _ in range(count):
            started = time.perf_counter()
            self.state = self.step(self.state, self.batch)
            seconds = time.perf_counter() - started
            jax.block_until_ready(self.state)
        return seconds


def _count_moves(run: Callable[[], Any]) -> int:
    """How often ``jax.device_put`` is called."""
    real, count = jax.device_put, 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return real(*args, **kwargs)

    jax.device_put = counting
    try:
        run()
    finally:
        jax.device_put = real
    return count


def rows(quick: bool) -> Iterator[Row]:
    for devices in (1, 2) if quick else (1, 2, 8):
        yield measure(devices, 200 if quick else 1000)
    if not quick:
        yield measure_stages(300)


if __name__ == "__main__":
    main("state", __doc__ or "", COLUMNS, rows)
