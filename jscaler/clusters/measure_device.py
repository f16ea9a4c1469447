"""What one device reaches: products, memory, the time from kernel to kernel, and products beside copies, measured where it
is at hand.

Two programs that differ in how often they do a thing run in turn, warmed up; the difference of their times is free of
dispatch, as for collectives (`clusters.measure`).
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import SingleDeviceSharding

from jscaler.clusters.device import DeviceKind, Peak, Reached
from jscaler.clusters.timing import interleaved

Device = Any  # jax.Device, which type checkers take for a variable
What = Literal["product", "memory", "chain", "beside"]

CHAIN = 16  # rows and columns of the products of a chain
# Of the time from one small product of a chain to the next, what passes between two kernels: of an H200's 3.9 µs the
# 2.5 that explain twelve steps (docs/clusters.md).
BETWEEN = 2.5 / 3.9
_FIELDS = {  # of Peak: the type of operands, and how exactly they are multiplied
    "float64": ("float64", lax.Precision.HIGHEST),
    "float32": ("float32", lax.Precision.HIGHEST),
    "tensorfloat32": ("float32", lax.Precision.DEFAULT),
    "float16": ("float16", lax.Precision.DEFAULT),
    "bfloat16": ("bfloat16", lax.Precision.DEFAULT),
}


class DeviceTrial(NamedTuple):
    """A measurement to make.

    Attributes:
        what: a product of ``size`` x ``size`` matrices, ``size`` bytes read and written, a chain of small products, or
            products beside copies from the device.
        field: of a product the field of ``Peak`` that it is for; else nothing.
        repeats: how often the longer program does it more than the shorter; beside copies, how many products there are.
    """

    what: What
    field: str
    size: int
    repeats: int


class DeviceSample(NamedTuple):
    """What a trial took.

    Attributes:
        amount: FLOPs of one product, or bytes of one pass; beside copies, how many times as long a product takes.
        seconds: of one product, pass or kernel.
    """

    trial: DeviceTrial
    amount: float
    seconds: float


def device_trials(kind: DeviceKind, quick: bool = False) -> Iterator[DeviceTrial]:
    """Products of each type that the kind has units for, by size; memory by size; a chain; and products beside copies.

    ``quick`` has one size.
    """
    for field in _FIELDS:
        rate = getattr(kind.peak, field)
        for size in (256,) if quick else (1024, 2048, 4096, 8192):
            if rate:  # for 20 ms, or twice
                yield DeviceTrial("product", field, size, 2 if quick else max(2, min(256, round(rate * 0.01 / size**3))))
    for size in (1 << 22,) if quick else (1 << 30, 1 << 28, 1 << 26):
        yield DeviceTrial("memory", "", size, 8 if quick else (8 << 30) // size)
    yield DeviceTrial("chain", "", CHAIN, 8 if quick else 192)
    field, size = "bfloat16" if kind.peak.bfloat16 else "float16", 256 if quick else 8192
    yield DeviceTrial("beside", field, size, 2 if quick else max(2, round(getattr(kind.peak, field) * 0.025 / size**3)))


def measure_device(trial: DeviceTrial, device: Device, rounds: int, other: Device | None = None) -> DeviceSample:
    """Seconds of one product, one pass over memory, or one kernel of a chain: the least of ``rounds``.

    Args:
        other: where copies go beside which products run; by default to the host.
    """
    if trial.what == "beside":
        return _beside(trial, device, rounds, other)
    with jax.enable_x64(trial.field == "float64"), jax.default_device(device):
        made, once, amount = _of(trial)
        operand = jax.block_until_ready(jax.jit(made)())
        repeat = _unrolled if trial.what == "chain" else _looped
        short, long = (jax.jit(repeat(once, count)) for count in (2, 2 + trial.repeats))
        times = interleaved([lambda: short(operand), lambda: long(operand)], rounds)
    seconds = (min(times[1]) - min(times[0])) / trial.repeats
    if seconds <= 0:  # noise: what the long program took in all is an upper bound
        seconds = min(times[1]) / (2 + trial.repeats)
    return DeviceSample(trial, amount, seconds)


def _beside(trial: DeviceTrial, device: Device, rounds: int, other: Device | None) -> DeviceSample:
    """Products alone, and beside copies that take at least as long: the least of ``rounds`` each."""
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    with jax.default_device(device):
        made, once, _ = _of(trial)
        products, operand = jax.jit(_looped(once, trial.repeats)), jax.jit(made)()
        large = jax.jit(lambda: jnp.ones(4 * trial.size**2))()

    def copy() -> Array:
        return jax.device_put(large, host if other is None else other)

    alone, copying = (min(times) for times in interleaved([lambda: products(operand), copy], rounds))
    count = math.ceil(2 * alone / copying)
    beside: list[float] = []
    for _ in range(rounds):
        begin = time.perf_counter()
        result, copies = products(operand), [copy() for _ in range(count)]
        jax.block_until_ready(result)
        beside.append(time.perf_counter() - begin)
        jax.block_until_ready(copies)
    return DeviceSample(trial, max(1.0, min(beside) / alone), min(beside) / trial.repeats)


def _of(trial: DeviceTrial) -> tuple[Callable[[], Array], Callable[[Array], Array], float]:
    """The operand, what is done to it again and again, and the FLOPs or bytes of it."""
    if trial.what == "memory":
        return lambda: jnp.ones(trial.size // 4), lambda x: x * 0.5 + 0.25, 2.0 * trial.size
    dtype, precision = _FIELDS[trial.field or "float32"]
    size = trial.size

    def made() -> Array:
        # its powers neither vanish nor grow: each row adds up to 1
        return (jax.random.uniform(jax.random.key(0), (size, size)) * 2 / size).astype(dtype)

    return made, lambda x: jnp.dot(x, x, precision=precision) * jnp.asarray(1, dtype), 2.0 * size**3


def _looped(once: Callable[[Array], Array], count: int) -> Callable[[Array], Array]:
    """Leaves all of the last result: of a part of it XLA might compute no more."""
    return lambda x: lax.fori_loop(0, count, lambda _, x: once(x), x)


def _unrolled(once: Callable[[Array], Array], count: int) -> Callable[[Array], Array]:
    def run(x: Array) -> Array:
        for _ in range(count):
            x = once(x)
        return x

    return run


def fit_reached(samples: Sequence[DeviceSample], kind: DeviceKind, like: Reached) -> Reached:
    """What the samples say is reached of ``kind``; of what was not measured, the share that ``like`` has of its kind.

    A rate is the best of all sizes: smaller products are slower as their tiles say.
    """
    rates = dict.fromkeys(vars(kind.peak), 0.0)
    for sample in samples:
        if sample.trial.what == "product":
            rates[sample.trial.field] = max(rates[sample.trial.field], sample.amount / sample.seconds)
    measured = [rates[field] / getattr(kind.peak, field) for field in ("bfloat16", "float16") if rates[field]]
    for field, peak in vars(kind.peak).items():
        if peak and not rates[field]:
            usual = getattr(like.products, field) / peak
            rates[field] = peak * (measured[0] if field in ("float8", "int8") and measured else usual)
    passes = [sample.amount / sample.seconds for sample in samples if sample.trial.what == "memory"]
    chains = [sample.seconds for sample in samples if sample.trial.what == "chain"]
    found = replace(like, products=Peak(**rates))
    found = replace(found, bandwidth=passes[0]) if passes else found  # of the largest: others fit into caches
    found = replace(found, launch=BETWEEN * min(chains)) if chains else found
    beside = [sample.amount for sample in samples if sample.trial.what == "beside"]
    return replace(found, interference=max(beside)) if beside else found
