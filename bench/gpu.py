"""Do estimates hold on a real GPU? Steps of a GPT, predicted by `jscaler.cost` beside what the device at hand takes.

One command of at most 8 minutes for whoever has a GPU: medians of five steps under each plan, and of ``jax.jit`` where no
plan changes the program; memory as XLA lays it out; each plan's numbers in float64 on a small model beside ``jax.jit``'s.
What does not fit the device, or no longer the time, is left out and said. Without a GPU, ``--stored`` predicts what one
H200 took on 2026-11-24 (JAX 0.11.2, CUDA 13), and ``error`` is held to 15 %; ``left out`` is the error when bandwidth,
launch and half_row are fitted to the other steps. Pairs of one model and length that differ by more than 3 % must be in
order. ``--calibrate FILE`` fits these three, and products by size, to the device at hand and writes a cluster file.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jscaler
from bench.harness import Row, run
from jscaler.clusters import Cluster, cluster_toml, find_cluster
from jscaler.clusters.device import DeviceKind, kind_of
from jscaler.estimate.works import block_work
from jscaler.xla_model.work import Work

COLUMNS = (
    "step",
    "plan",
    "measured",
    "jit",
    "predicted",
    "error",
    "left out",
    "at peaks",
    "memory",
    "predicted memory",
    "numbers",
)
ROUNDS = 5
OFF = 0.15
NUMBERS = 1e-12  # of float64 after two steps, of the largest parameter
APART = 0.03
FULL = 0.92  # of a device's memory
SMALL: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 256, "sequence": 32}


@dataclass(frozen=True)
class Case:
    """A step under a plan.

    Attributes:
        shown: the model, its rows and tokens.
        make: the step, a function that makes its state, and its batch of zeros.
        h200: seconds that one H200 took.
        quick: whether any device runs it in no time.
    """

    shown: str
    plan: str
    make: Callable[[], tuple[Callable[..., Any], Callable[[], Any], Any]]
    h200: float | None = None
    quick: bool = False


def gpt(rows: int, size: str = "125m", **changes: Any) -> tuple[Callable[..., Any], Callable[[], Any], Any]:
    """A stacked GPT in bfloat16 with dropout, clipping and AdamW."""
    from models.gpt import GPT, SIZES
    from models.training import make_optimizer, make_state, train_step

    config = dataclasses.replace(SIZES[size], **{"stacked": True, "dtype": jnp.bfloat16, **changes})
    batch = dict.fromkeys(("tokens", "labels"), jnp.zeros((rows, config.sequence), jnp.int32))
    model, optimizer = GPT(config), make_optimizer()
    return train_step, lambda: make_state(model, config.sequence, optimizer), batch


def master(tokens: int, size: str = "1.3b", **changes: Any) -> tuple[Callable[..., Any], Callable[[], Any], Any]:
    """A stacked GPT in float16 from float32 masters with Adam, one row, without dropout."""
    import optax

    from models.gpt import GPT, SIZES
    from models.master import make_master_state, master_step

    config = dataclasses.replace(SIZES[size], **{"stacked": True, "dropout": 0.0, **changes, "sequence": tokens})
    zeros = jnp.zeros((1, tokens), jnp.int32)
    step = functools.partial(master_step, dtype=jnp.float16, factor=2.0**12)
    model, optimizer = GPT(config), optax.adam(1e-4)
    return step, lambda: make_master_state(model, zeros, optimizer), {"x": zeros, "labels": zeros}


def cases() -> list[Case]:
    small = functools.partial(gpt, 16, sequence=1024)
    large = functools.partial(gpt, 8, "1.3b", sequence=2048, remat=True)
    tiny = functools.partial(gpt, 2, **SMALL)
    table: list[tuple[str, Callable[[], Any], dict[str, float]]] = [
        (
            "125M, 16 × 1,024", small,
            {"single": 0.1007, "accumulate(4)": 0.1215, "recompute_layers": 0.0889, "co_shard(4)": 0.1121},
        ),
        ("125M, 16 × 1,024, flash", functools.partial(small, flash=True), {"single": 0.0429}),
        ("1.3B remat, 8 × 2,048", large, {"single": 0.8963, "accumulate(4)": 0.9570, "co_shard(8)": 0.9346}),
        ("1.3B remat, 8 × 2,048, flash", functools.partial(large, flash=True), {"single": 0.3623}),
        ("1.3B, 1 × 16,384", functools.partial(master, 16384), {"recompute_layers": 3.478, "co_shard(16)": 3.378}),
        ("1.3B, 1 × 40,960", functools.partial(master, 40960), {"co_shard(16)": 16.24}),
    ]  # fmt: skip
    every = [Case(shown, plan, make, seconds) for shown, make, own in table for plan, seconds in own.items()]
    quick = [Case("2 layers, 2 × 32", plan, tiny, quick=True) for plan in ("single", "accumulate(2)", "recompute_layers")]
    return [*every, *quick]


@dataclass
class Estimated:
    """A case, planned for one device."""

    case: Case
    step: Callable[..., Any]
    state: Callable[[], Any]
    batch: Any
    lowered: Any
    cost: jscaler.Cost
    work: Work


def estimated(case: Case, cluster: Cluster) -> Estimated:
    step, state, batch = case.make()
    assert cluster.device is not None
    shapes = jax.eval_shape(state)
    lowered = jscaler.parallelize(case.plan, devices=1, donate_argnums=0)(step).lower(shapes, batch)
    work = block_work(lowered.plan, 0, cluster.device.has_row_kernels)
    return Estimated(case, step, state, batch, lowered, jscaler.cost(lowered, cluster), work)


def fitted(seconds: Mapping[Work, float], kind: DeviceKind) -> DeviceKind:
    """``kind`` with the bandwidth, launch and half_row that explain the steps best, by the logarithms of their ratios."""
    from scipy.optimize import least_squares

    assert kind.reached is not None
    reached = kind.reached
    free = dataclasses.replace(kind, reached=dataclasses.replace(reached, bandwidth=1e30, launch=0.0))
    parts = []
    for work, taken in seconds.items():
        figures = [(k.times, free.kernel_seconds(k.flops, 0), k.read + k.written, k.row) for k in work.kernels]
        parts.append((*(np.array(column, float) for column in zip(*figures, strict=True)), taken))

    def off(logs: np.ndarray) -> list[float]:
        bandwidth, launch, half_row = np.exp(logs)
        return [
            float(np.log((times * (np.maximum(work, nbytes / bandwidth * (1 + rows / half_row)) + launch)).sum() / taken))
            for times, work, nbytes, rows, taken in parts
        ]

    bounds = np.log([[0.5 * kind.bandwidth, 1e-6, 3e3], [kind.bandwidth, 1e-5, 1e6]])
    start = np.clip(np.log([reached.bandwidth, reached.launch, reached.half_row]), bounds[0] + 1e-6, bounds[1] - 1e-6)
    bandwidth, launch, half_row = np.exp(least_squares(off, start, bounds=tuple(bounds)).x).tolist()
    return dataclasses.replace(
        kind, reached=dataclasses.replace(reached, bandwidth=bandwidth, launch=launch, half_row=half_row)
    )


def compared(found: Sequence[tuple[Estimated, float | None, Row]], kind: DeviceKind) -> Iterator[Row]:
    """A row for each case, and one for the order of all pairs of one model and length."""
    measured = {one.work: seconds for one, seconds, _ in found if seconds is not None}
    for one, seconds, more in found:
        row: Row = {"step": one.case.shown, "plan": one.case.plan, "predicted": round(one.work.seconds(kind), 4)}
        row |= {"at peaks": round(one.cost.bound or 0.0, 4), "predicted memory": one.cost.memory.peak, **more}
        row["bounds"] = {"numbers": NUMBERS} if "numbers" in row else {}
        if seconds is not None:
            error = one.work.seconds(kind) / seconds - 1
            row |= {"measured": round(seconds, 4), "error": f"{error:+.1%}", "value": abs(error)}
            row["bounds"]["value"] = OFF
            others = {work: taken for work, taken in measured.items() if work is not one.work}
            if len(others) > 3:
                row["left out"] = f"{one.work.seconds(fitted(others, kind)) / seconds - 1:+.1%}"
        yield row
    wrong = []
    for (one, first, _), (other, second, _) in itertools.combinations(found, 2):
        if one.case.shown != other.case.shown or first is None or second is None:
            continue
        if abs(first / second - 1) > APART and (first < second) != (one.work.seconds(kind) < other.work.seconds(kind)):
            wrong.append(f"{one.case.plan} and {other.case.plan} of {one.case.shown}")
    yield {"step": "pairs out of order", "plan": ", ".join(wrong) or "none", "value": len(wrong), "bounds": {"value": 0}}


def stored(quick: bool) -> Iterator[Row]:
    """Predictions beside what one H200 took."""
    cluster = find_cluster("1xH200")
    assert cluster.device is not None
    chosen = [case for case in cases() if case.h200 is not None and not (quick and "125M" not in case.shown)]
    found = [(estimated(case, cluster), case.h200, Row()) for case in chosen]
    yield from compared(found, cluster.device)


def on_device(quick: bool, cluster: Cluster, limit: float, calibrate: Path | None) -> Iterator[Row]:
    """What the device at hand takes, as long as there is time."""
    start, found = time.perf_counter(), list[tuple[Estimated, float | None, Row]]()
    kind = cluster.device
    assert kind is not None
    if calibrate is not None:
        kind = _with_products(kind, quick)
    chosen = [case for case in cases() if case.quick == quick]
    for case in sorted(chosen, key=lambda case: case.h200 or 0.0):
        one = estimated(case, cluster)
        left = limit - (time.perf_counter() - start)
        if one.cost.memory.peak > FULL * cluster.memory:
            found.append((one, None, {"memory": "does not fit"}))
        elif left < 30 + (ROUNDS + 2) * (one.cost.seconds.total or 0.0):
            found.append((one, None, {"memory": "no time left"}))
        else:
            found.append((one, *measured(one)))
    off = {plan: numbers(plan) for plan in dict.fromkeys(case.plan for case in chosen)}
    found = [(one, seconds, {"numbers": off[one.case.plan], **more}) for one, seconds, more in found]
    if calibrate is not None:
        steps = {one.work: seconds for one, seconds, _ in found if seconds is not None}
        kind = fitted(steps, kind) if len(steps) > 3 else kind
        made = dataclasses.replace(cluster, name=calibrate.stem, device=kind)
        calibrate.write_text(cluster_toml(made, [f"fitted by bench.gpu to {len(steps)} steps (jax {jax.__version__})"]))
    yield from compared(found, kind)


def measured(one: Estimated) -> tuple[float, Row]:
    """The median of a few steps, and what ``jax.jit`` takes where the plan changes nothing."""
    compiled = one.lowered.compile()
    seconds = _median(compiled, one)
    sizes = compiled.memory_analysis()
    held = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    row: Row = {"memory": held}
    if one.case.plan == "single":
        try:
            row["jit"] = round(_median(jax.jit(one.step, donate_argnums=0), one), 4)
        except jax.errors.JaxRuntimeError as error:  # it needs more than the planned step, and does not fit
            row["jit"] = str(error).splitlines()[0][:40]
    return seconds, row


def _median(step: Callable[..., Any], one: Estimated) -> float:
    state, taken = jax.block_until_ready(one.state()), list[float]()
    for _ in range(ROUNDS + 2):
        begin = time.perf_counter()
        state, *_ = jax.block_until_ready(step(state, one.batch))
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[2:])


def numbers(plan: str, steps: int = 2) -> float:
    """How far a plan's parameters are from those of ``jax.jit`` after some steps of a small model in float64."""
    with jax.enable_x64(True):
        step, state, batch = gpt(4, "125m", **SMALL, dtype=jnp.float64, param_dtype=jnp.float64)
        kinds = (jscaler.parallelize(plan.replace("(16)", "(4)").replace("(8)", "(4)"), devices=1)(step), jax.jit(step))
        ends = []
        for run_step in kinds:
            now = state()
            for _ in range(steps):
                now, *_ = run_step(now, batch)
            ends.append(jax.tree.leaves(now.params))
        largest = max(float(jnp.abs(leaf).max()) for leaf in ends[1])
        return max(float(jnp.abs(a - b).max()) for a, b in zip(*ends, strict=True)) / largest


def _with_products(kind: DeviceKind, quick: bool) -> DeviceKind:
    """``kind`` with the rates of products that the device at hand has."""
    from jscaler.clusters.measure_device import device_trials, fit_reached, measure_device

    assert kind.reached is not None
    samples = [measure_device(trial, jax.devices()[0], 3) for trial in device_trials(kind, quick)]
    return dataclasses.replace(kind, reached=fit_reached(samples, kind, kind.reached))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a model that any device runs; with --stored 125M alone")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--stored", action="store_true", help="no device: predictions beside what one H200 took")
    parser.add_argument("--target", default=None, help="cluster whose device this is; by default what the driver says")
    parser.add_argument("--seconds", type=float, default=420.0, help="no step is begun behind it (default 420)")
    parser.add_argument(
        "--calibrate", type=Path, default=None, metavar="FILE", help="write a cluster file of the device at hand"
    )
    chosen = parser.parse_args()
    if chosen.stored:
        every = stored(chosen.quick)
    else:
        described = kind_of(jax.devices()[0].device_kind)
        if chosen.target is None and described is None:
            sys.exit(
                f"bench.gpu: no data sheet of '{jax.devices()[0].device_kind}' is built in; give --target, or --stored"
            )
        every = on_device(chosen.quick, find_cluster(chosen.target or f"1x{described}"), chosen.seconds, chosen.calibrate)
    if not run("gpu", COLUMNS, every, chosen.json):
        sys.exit(1)
