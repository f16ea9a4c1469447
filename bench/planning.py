"""How long does planning take? From the call to lowered StableHLO for GPT-3 15B (48 layers, clip and AdamW)
under ``megatron(tp=8, zero=1)``, beside ``jax.jit``'s own trace and lowering of the undecorated step.

Everything is given by shape: no array is allocated, and no device need be at hand. The layers are one stack
(``nn.scan``) or a Python loop. ``seconds`` and ``jit_seconds`` are CPU seconds of this process, which other programs
move less than they move a clock: medians of interleaved rounds, after a small model has warmed both up. ``ratio``
(ours / jit's) is held to 3 for the stack and to 4 for the loop. ``growth`` is 1,024 devices against 32 in the same
rounds, held to 1.3: planning works on axes and device arrays, not on devices. ``explain_seconds`` is the plan's table
with its estimate of the peak, held to 5.
"""

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jscaler
from bench.harness import Row, main

TENSOR = 8  # parts of each layer
DEVICES = (32, 1024)
BATCH = 128  # sequences
COLUMNS = ("case", "layers", "devices", "seconds", "jit_seconds", "ratio", "growth", "explain_seconds")
BOUNDS = {"stacked": 3.0, "Python loop": 4.0}
ROUNDS = {"stacked": 9, "Python loop": 3}


def arguments_of(layers: int, stacked: bool) -> tuple[Any, Any]:
    """State and batch of GPT-3 15B with ``layers`` layers, as shapes."""
    from models.gpt import GPT, SIZES
    from models.training import TrainState, make_optimizer

    config = dataclasses.replace(SIZES["15b"], layers=layers, stacked=stacked)
    model, optimizer = GPT(config), make_optimizer()

    def make_state() -> TrainState:
        keys = jax.random.split(jax.random.key(0))
        params = model.init(keys[0], jnp.zeros((1, config.sequence), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer, key=keys[1])

    tokens = jax.ShapeDtypeStruct((BATCH, config.sequence), jnp.int32)
    return jax.eval_shape(make_state), {"tokens": tokens, "labels": tokens}


def lower_jit(state: Any, batch: Any) -> Any:
    from models.training import train_step

    plain = functools.partial(train_step, value_and_grad=jax.value_and_grad)
    return jax.jit(lambda state, batch: plain(state, batch), donate_argnums=0).lower(state, batch)


def lower_planned(devices: int, state: Any, batch: Any) -> Any:
    from models.training import train_step

    plan = jscaler.plans.megatron(dp=devices // TENSOR, tp=TENSOR, zero=1)
    return jscaler.parallelize(plan, devices=devices, donate_argnames="state")(train_step).lower(state, batch)


def cpu_seconds(fun: Callable[[], Any]) -> tuple[float, Any]:
    """What a call takes, and its result. Garbage is collected, of what the call itself has made."""
    gc.collect()
    gc.freeze()
    started = time.process_time()
    result = fun()
    seconds = time.process_time() - started
    gc.unfreeze()
    return seconds, result


def measure(case: str, layers: int, rounds: int) -> Iterator[Row]:
    """One row per number of devices, all from the same rounds."""
    for one in (lower_jit, *(functools.partial(lower_planned, n) for n in DEVICES)):
        one(*arguments_of(2, case == "stacked"))
    arguments = arguments_of(layers, case == "stacked")
    jit: list[float] = []
    planned: dict[int, list[float]] = {n: [] for n in DEVICES}
    explained: dict[int, list[float]] = {n: [] for n in DEVICES}
    for _ in range(rounds):
        jit.append(cpu_seconds(lambda: lower_jit(*arguments))[0])
        for devices in DEVICES:
            seconds, lowered = cpu_seconds(functools.partial(lower_planned, devices, *arguments))
            planned[devices].append(seconds)
            explained[devices].append(cpu_seconds(lowered.plan.explain)[0])
            del lowered
    for devices in DEVICES:
        row = {
            "case": case,
            "layers": layers,
            "devices": devices,
            "seconds": round(statistics.median(planned[devices]), 3),
            "jit_seconds": round(statistics.median(jit), 3),
            "ratio": round(statistics.median(planned[devices]) / statistics.median(jit), 2),
            "explain_seconds": round(statistics.median(explained[devices]), 3),
            "bounds": {"explain_seconds": 5.0},
        }
        if devices == DEVICES[0]:
            row["bounds"]["ratio"] = BOUNDS[case]
        else:
            growth = statistics.median(planned[devices]) / statistics.median(planned[DEVICES[0]])
            row |= {"growth": round(growth, 3), "bounds": {**row["bounds"], "growth": 1.3}}
        yield row


def rows(quick: bool) -> Iterator[Row]:
    for case, rounds in ROUNDS.items():
        yield from measure(case, 4 if quick else 48, 5 if quick else rounds)


if __name__ == "__main__":
    main("planning", __doc__ or "", COLUMNS, rows)
