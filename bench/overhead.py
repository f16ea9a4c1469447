"""What does jscaler cost? The plan ``single`` against ``jax.jit`` of the undecorated step, where it has nothing to do; and
parallel plans against the same split through GSPMD. ``executable_ratio``: trace to executable, XLA included, of 24 stacked
layers, held to 1.2.

``time_ratio``: median step times, run in turn. ``compile_ratio``: tracing and lowering (XLA's own compilation is not
ours), medians of several, held to 4. ``flops_ratio``: FLOPs of the compiled programs, which is exact and held to 1 %
where jscaler has nothing to do. Times are goals (1.03 for mini on one device, 1.0 against GSPMD), not bounds: machines are
noisy, and eight virtual devices share their cores.

Accumulation is held against `bench.by_hand`'s: a ``lax.scan`` over the micro-batches with sums in float32. Its time is to
be 1.05, and its memory, ``memory_ratio``, at most 1.02 of what XLA reserves for a described GPU: ``--target 1xH100-80GB``
compiles these rows alone and runs nothing (``pip install "jscaler[aot]"``).
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jscaler
from bench.compiled import jitted, peak_bytes
from bench.dot_flops import dot_flops
from bench.harness import Row, main
from bench.steps import Step

DEVICES = 8
PARALLEL = [
    ("gpt", "nano", "megatron(dp=2, tp=4)", "dp 2 × tp 4"),
    ("gpt", "nano", "tensor_parallel", "tensor_parallel"),
    ("gpt", "nano", "sequence_parallel", "sequence_parallel"),
    ("gpt", "mini", "tensor_parallel", "tensor_parallel"),
    ("gpt", "mini", "megatron(dp=2, tp=4)", "dp 2 × tp 4"),
    ("llama", "nano", "tensor_parallel", "tensor_parallel"),
]
MICROBATCHES = 8
ACCUMULATED = [(size, f"accumulate({MICROBATCHES})") for size in ("nano", "mini")]
COLUMNS = ("case", "target", "time_ratio", "compile_ratio", "executable_ratio", "flops_ratio", "memory_ratio")


def _made(model: str, size: str, batch: int, **changes: Any) -> Step:
    """The step of ``gpt`` or ``llama`` on ``batch`` rows, and its arguments."""
    from bench import steps
    from models.text import batch_at, load_bytes

    step, (state, rows) = {"gpt": steps.gpt, "llama": steps.llama}[model](size, **changes)
    return step, (state, batch_at(load_bytes(), 0, batch, rows["tokens"].shape[1]))


def measure(model: str, size: str, batch: int, rounds: int, repeats: int = 5) -> Row:
    """The plan ``single`` beside ``jax.jit``, or of a model in nnx, whose state is changed in place, ``nnx.jit``."""
    from jscaler.clusters.timing import interleaved, median_ratio

    step, (first, arrays) = _made(model, size, batch)
    jit, value_and_grad = (nnx.jit, nnx.value_and_grad) if model == "llama" else (jax.jit, jax.value_and_grad)
    plain = functools.partial(step, value_and_grad=value_and_grad)

    def fresh() -> Any:
        return jax.tree.map(jnp.copy, first)

    def lower_jit() -> Any:
        return jit(lambda state, batch: plain(state, batch), donate_argnums=0).lower(first, arrays)

    def lower_ours() -> Any:
        return jscaler.parallelize("single", devices=1, donate_argnames="state")(step).lower(first, arrays)

    seconds: list[list[float]] = [[], []]
    for _ in range(repeats):
        for i, lower in enumerate((lower_jit, lower_ours)):
            started = time.perf_counter()
            lower()
            seconds[i].append(time.perf_counter() - started)
    theirs, ours = lower_jit().compile(), lower_ours().compile()
    flops = ours.cost_analysis()["flops"] / theirs.cost_analysis()["flops"]
    times = interleaved([_Loop(theirs, fresh(), arrays), _Loop(ours, fresh(), arrays)], rounds)
    return {
        "case": f"{model}-{size}, plan single",
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
        found = self.step(self.state, self.batch)
        if isinstance(found, tuple):  # else the state is nnx objects, which are changed in place
            self.state = found[0]
        return self.state, found


def against_gspmd(model: str, size: str, plan: str, shown: str, batch: int, rounds: int) -> Row:
    """A plan beside the same split given to ``jax.jit``."""
    from jscaler.clusters.timing import median_ratio
    from jscaler.comparison import race, twin

    fun, arguments = _made(model, size, batch, heads=8)
    step = jscaler.parallelize(plan, devices=DEVICES, donate_argnames="state")(fun)
    lowered = step.lower(*arguments)
    ours, gspmd = lowered.compile(), twin(lowered)
    times = race(lowered, (ours.flat, gspmd), step.leaves(*arguments), rounds)
    return {
        "case": f"{model}-{size}, {shown} against GSPMD",
        "target": f"{jax.devices()[0].platform}:{DEVICES}",
        "time_ratio": round(median_ratio(*times), 4),
        "flops_ratio": round(ours.cost_analysis()["flops"] / gspmd.cost_analysis()["flops"], 5),
    }


def stacked(layers: int, repeats: int) -> Row:
    """Trace to executable of a stack of equal layers, which stays one loop, against ``jax.jit``'s."""
    from bench.steps import gpt

    step, arguments = gpt("nano", stacked=True, remat=True, layers=layers)
    plain = functools.partial(step, value_and_grad=jax.value_and_grad)
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats):
        jit = jax.jit(lambda state, batch: plain(state, batch), donate_argnums=0)
        ours = jscaler.parallelize("single", devices=1, donate_argnames="state")(step)
        for i, one in enumerate((jit, ours)):
            started = time.perf_counter()
            one.lower(*arguments).compile()
            seconds[i].append(time.perf_counter() - started)
    ratio = statistics.median(seconds[1]) / statistics.median(seconds[0])
    return {
        "case": f"gpt-nano of {layers} stacked layers with remat, plan single",
        "target": jax.devices()[0].platform,
        "executable_ratio": round(ratio, 3),
        "bounds": {"executable_ratio": 1.2},
    }


def _accumulating(size: str, batch: int) -> tuple[Any, Any, Any]:
    """The train step, the same with gradients accumulated by hand, and what makes their arguments; no dropout."""
    from bench.by_hand import accumulated
    from models.gpt import GPT, SIZES
    from models.text import batch_at, load_bytes
    from models.training import make_optimizer, make_state, train_step

    config = dataclasses.replace(SIZES[size], dropout=0.0)

    def by_hand(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any, rows: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, rows["tokens"], train=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, rows["labels"]).mean()

        loss, gradients = accumulated(loss_fn, MICROBATCHES, state.params, batch)
        return state.apply_gradients(grads=gradients), {"loss": loss}

    def arguments() -> Any:
        state = make_state(GPT(config), config.sequence, make_optimizer())
        return state, batch_at(load_bytes(), 0, batch, config.sequence)

    return train_step, by_hand, arguments


def accumulation(size: str, plan: str, batch: int, rounds: int) -> Row:
    """Time of a plan that accumulates beside a scan by hand."""
    from jscaler.clusters.timing import interleaved, median_ratio

    step, by_hand, make = _accumulating(size, batch)
    state, rows = make()
    ours = jscaler.parallelize(plan, devices=1, donate_argnames="state")(step).lower(state, rows).compile()
    theirs = jax.jit(by_hand, donate_argnums=0).lower(state, rows).compile()
    times = interleaved([_Loop(one, jax.tree.map(jnp.copy, state), rows) for one in (theirs, ours)], rounds)
    return {
        "case": f"gpt-{size}, {plan} against a scan by hand",
        "target": jax.devices()[0].platform,
        "time_ratio": round(median_ratio(times[1], times[0]), 4),
        "flops_ratio": round(dot_flops(ours.as_text()) / dot_flops(str(theirs.as_text())), 5),
    }


def accumulation_memory(size: str, plan: str, batch: int, device: Any, shown: str, options: dict[str, Any]) -> Row:
    """Memory of a plan that accumulates beside that of a scan by hand."""
    step, by_hand, make = _accumulating(size, batch)
    arguments = jax.eval_shape(make)
    ours = jscaler.parallelize(plan, devices=[device], donate_argnums=0)(step).lower(*arguments).lowered
    peaks = [peak_bytes(one.compile(options)) for one in (ours, jitted(by_hand, arguments, device, donate_argnums=0))]
    case = f"gpt-{size}, {plan} against a scan by hand, batch {batch}"
    return {"case": case, "target": shown, "memory_ratio": round(peaks[0] / peaks[1], 4), "bounds": {"memory_ratio": 1.02}}


def _compiled_for(target: str) -> Iterator[Row]:
    from jscaler.report.targets import described_devices
    from jscaler.runtime.target import WITHOUT_GPU

    device = described_devices(target)[0]
    for size, plan in ACCUMULATED:
        yield accumulation_memory(size, plan, 8 * MICROBATCHES, device, target, dict(WITHOUT_GPU))


def rows(quick: bool, target: str | None = None) -> Iterator[Row]:
    if target is not None:
        yield from _compiled_for(target)
        return
    for size, plan in ACCUMULATED[: 1 if quick else None]:
        yield accumulation(size, plan, 2 * MICROBATCHES, 10 if quick else 40)
    for model in ("gpt",) if quick else ("gpt", "llama"):
        yield measure(model, "nano", 16, 10 if quick else 60, 2 if quick else 5)
    if not quick:
        yield measure("gpt", "mini", 8, 30)
        yield stacked(24, 5)
    for model, size, plan, shown in PARALLEL[: 1 if quick else None]:
        yield against_gspmd(model, size, plan, shown, 16, 10 if quick else 40)


if __name__ == "__main__":
    known = {"metavar": "CLUSTER", "help": "only the memory of accumulation, compiled for a described device"}
    main("overhead", __doc__ or "", COLUMNS, rows, devices=DEVICES, options={"target": known})
