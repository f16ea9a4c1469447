"""How long does planning take? From the call to lowered StableHLO for GPT-3 15B (48 layers, clip and AdamW)
under ``megatron(tp=8, zero=1)``, beside ``jax.jit``'s own trace and lowering of the undecorated step.

Everything is given by shape: no array is allocated, and no device need be at hand. Plans are not proven, which
`bench.proofs` has the cost of. The layers are one stack (``nn.scan``) or a Python loop. ``seconds`` and
``jit_seconds`` are CPU seconds of this process, which other programs move less than they move a clock: the least of
interleaved rounds, after a small model has warmed both up (what another program does to the caches only adds: medians of
one case spread from 2.4 to 3.1, the least from 2.6 to 2.9). Rounds go on while they still find less, as they do where
another program ends: a third of them must have lowered none. ``ratio``
(ours / jit's) is held to 3 for the stack and to 4 for the loop. ``growth`` is 1,024 devices against 32 in the same
rounds, held to 1.3: planning works on axes and device arrays, not on devices. ``explain_seconds`` is the plan's table
with its estimate of the peak, held to 5.

Llama 8B, a stack of 32 layers of nnx, stands beside ``nnx.jit`` in the full form; its ``ratio`` is shown, and not held.

With stages: ``growth`` is 4 stages of dp 4 × tp 8 with 32 micro-batches against the same without stages (held to 1.5),
and 8 stages on 1,024 devices against those 4 (held to 1.3): the middle one of the rounds' ratios, since a machine's speed
drifts by more from minute to minute. Of how deep a stack is, blocks know a number and no more: ``growth`` of their
StableHLO text from 8 layers to 32 is held to 1.01.
"""

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jscaler
from bench.harness import Row, main

TENSOR = 8  # parts of each layer
DEVICES = (32, 1024)
BATCH = 128  # sequences
COLUMNS = ("case", "layers", "devices", "seconds", "jit_seconds", "ratio", "growth", "explain_seconds")
QUICK = 4  # layers
LESS = 0.99  # of the least before: what is found anew
MOST = 3  # times the rounds, at most


def arguments_of(layers: int, stacked: bool, batch: int = BATCH) -> tuple[Any, Any]:
    """State and batch of GPT-3 15B with ``layers`` layers, as shapes."""
    from models.gpt import GPT, SIZES
    from models.training import TrainState, make_optimizer

    config = dataclasses.replace(SIZES["15b"], layers=layers, stacked=stacked)
    model, optimizer = GPT(config), make_optimizer()

    def make_state() -> TrainState:
        keys = jax.random.split(jax.random.key(0))
        params = model.init(keys[0], jnp.zeros((1, config.sequence), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer, key=keys[1])

    tokens = jax.ShapeDtypeStruct((batch, config.sequence), jnp.int32)
    return jax.eval_shape(make_state), {"tokens": tokens, "labels": tokens}


def lower_jit(state: Any, batch: Any) -> Any:
    from models.training import train_step

    plain = functools.partial(train_step, value_and_grad=jax.value_and_grad)
    return jax.jit(lambda state, batch: plain(state, batch), donate_argnums=0).lower(state, batch)


def llama_arguments(layers: int) -> tuple[Any, Any]:
    """State and batch of Llama 8B with ``layers`` stacked layers, as shapes."""
    from bench.predicted import llama

    return llama(BATCH, "8b", layers=layers, stacked=True)[1]


def lower_nnx_jit(state: Any, batch: Any) -> Any:
    from models.training import nnx_train_step

    plain = functools.partial(nnx_train_step, value_and_grad=nnx.value_and_grad)
    return nnx.jit(lambda state, batch: plain(state, batch), donate_argnums=0).lower(state, batch)


def lower_planned(devices: int, state: Any, batch: Any) -> Any:
    from models.training import nnx_train_step, train_step

    step = nnx_train_step if isinstance(state, tuple) else train_step
    plan = jscaler.plans.megatron(dp=devices // TENSOR, tp=TENSOR, zero=1)
    return jscaler.parallelize(plan, devices=devices, donate_argnames="state", verify=False)(step).lower(state, batch)


def cpu_seconds(fun: Callable[[], Any]) -> tuple[float, Any]:
    """What a call takes, and its result. Garbage is collected, of what the call itself has made."""
    gc.collect()
    gc.freeze()
    started = time.process_time()
    result = fun()
    seconds = time.process_time() - started
    gc.unfreeze()
    return seconds, result


@dataclass(frozen=True)
class Case:
    """A model whose lowering stands beside ``jax.jit``'s.

    Attributes:
        arguments: of so many layers.
        jit: lowers the undecorated step.
        rounds, quick: at least, of all layers and of ``QUICK`` ones (a second each); it may have no quick form.
        bound: of ``ratio``.
    """

    arguments: Callable[[int], tuple[Any, Any]]
    jit: Callable[[Any, Any], Any]
    layers: int
    rounds: int
    quick: int | None = None
    bound: float | None = None


CASES = {
    "stacked": Case(functools.partial(arguments_of, stacked=True), lower_jit, 48, 9, 6, 3.0),
    "Python loop": Case(functools.partial(arguments_of, stacked=False), lower_jit, 48, 3, 3, 4.0),
    "Llama 8B, stacked": Case(llama_arguments, lower_nnx_jit, 32, 9),
}


def measure(name: str, layers: int, rounds: int) -> Iterator[Row]:
    """One row per number of devices, all from the same rounds."""
    case = CASES[name]
    for one in (case.jit, *(functools.partial(lower_planned, n) for n in DEVICES)):
        one(*case.arguments(2))
    arguments = case.arguments(layers)
    jit: list[float] = []
    planned: dict[int, list[float]] = {n: [] for n in DEVICES}
    explained: dict[int, list[float]] = {n: [] for n in DEVICES}
    while not _settled((jit, *planned.values()), rounds):
        jit.append(cpu_seconds(lambda: case.jit(*arguments))[0])
        for devices in DEVICES:
            seconds, lowered = cpu_seconds(functools.partial(lower_planned, devices, *arguments))
            planned[devices].append(seconds)
            explained[devices].append(cpu_seconds(lowered.plan.explain)[0])
            del lowered
    for devices in DEVICES:
        row = {
            "case": name,
            "layers": layers,
            "devices": devices,
            "seconds": round(min(planned[devices]), 3),
            "jit_seconds": round(min(jit), 3),
            "ratio": round(min(planned[devices]) / min(jit), 2),
            "explain_seconds": round(min(explained[devices]), 3),
            "bounds": {"explain_seconds": 5.0},
        }
        if devices == DEVICES[0]:
            row["bounds"] |= {} if case.bound is None else {"ratio": case.bound}
        else:
            growth = min(planned[devices]) / min(planned[DEVICES[0]])
            row |= {"growth": round(growth, 3), "bounds": {**row["bounds"], "growth": 1.3}}
        yield row


def _settled(every: Iterable[list[float]], rounds: int) -> bool:
    """Whether there are enough rounds, and the last third of ``rounds`` found no less than those before."""
    tail = max(rounds // 3, 1)

    def found(seconds: list[float]) -> bool:
        return len(seconds) >= rounds and min(seconds[-tail:]) >= LESS * min(seconds[:-tail])

    return all(found(seconds) or len(seconds) >= MOST * rounds for seconds in every)


def measure_stages(case: str, rounds: int) -> Iterator[Row]:
    """The plan without stages, with 4, and with 8, in the same rounds."""
    from models.training import train_step

    def lower(plan: str, devices: int, given: tuple[Any, Any]) -> Any:
        return jscaler.parallelize(plan, devices=devices, donate_argnames="state", verify=False)(train_step).lower(*given)

    cases = {
        32: "accumulate(32, megatron(dp=4, tp=8))",
        128: "megatron(dp=4, tp=8, pp=4, microbatches=32)",
        1024: "megatron(dp=16, tp=8, pp=8, microbatches=32)",
    }
    given = arguments_of(48, case == "stacked", 512)
    lower("megatron(dp=2, tp=2, pp=2, microbatches=4)", 8, arguments_of(4, case == "stacked", 512))
    seconds: dict[int, list[float]] = {n: [] for n in cases}
    for _ in range(rounds):
        for devices, plan in cases.items():
            seconds[devices].append(cpu_seconds(functools.partial(lower, plan, devices, given))[0])
    middle = {devices: statistics.median(every) for devices, every in seconds.items()}
    for (devices, plan), before, bound in zip(cases.items(), (32, 32, 128), (None, 1.5, 1.3), strict=True):
        row = {"case": f"{case}, {plan}", "layers": 48, "devices": devices, "seconds": round(middle[devices], 3)}
        growth = statistics.median(b / a for a, b in zip(seconds[before], seconds[devices], strict=True))
        more = {"growth": round(growth, 3), "bounds": {"growth": bound}}
        yield row | more if bound is not None else row


def measure_depth() -> Row:
    """How much more text the blocks of four stages have, of four times as many layers."""
    from models.training import train_step

    plan = "megatron(dp=1, tp=2, pp=4, microbatches=4)"
    sizes = []
    for layers in (8, 32):
        lowered = jscaler.parallelize(plan, devices=8, donate_argnames="state")(train_step).lower(
            *arguments_of(layers, True)
        )
        sizes.append(sum(len(one.as_text()) for one in lowered.segments))
    return {
        "case": f"text of {plan}", "layers": 32, "devices": 8, "growth": round(sizes[1] / sizes[0], 4),
        "bounds": {"growth": 1.01},
    }  # fmt: skip


def rows(quick: bool) -> Iterator[Row]:
    for name, case in CASES.items():
        if not quick:
            yield from measure(name, case.layers, case.rounds)
        elif case.quick:
            yield from measure(name, QUICK, case.quick)
    yield measure_depth()
    if not quick:
        for case, rounds in (("stacked", 15), ("Python loop", 3)):
            yield from measure_stages(case, rounds)


if __name__ == "__main__":
    main("planning", __doc__ or "", COLUMNS, rows)
