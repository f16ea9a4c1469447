"""Models that were not written for jscaler, under plans without arguments: right, split, and nothing lost in silence?

A row is a model of `bench.foreign_models` under a plan. Its measures owe nothing to the code that warns: numbers are those
of ``jax.jit`` on one device, parts those of the state's shardings, work and gathers those of the optimized HLO, and of
plans whose own gathers stand there too, those in front of ops that the policy left open.

* ``right``: two steps of momentum SGD give the parameters, moments and statistics of ``jax.jit``; ``off`` is the largest
  difference of a leaf, by what the leaf, or a thousandth of the largest of its kind, has moved. Where that is too much in
  float32 (the gradient of a bias in front of a norm is a sum that cancels, all rounding), both run again in float64, where
  it is held to ``1e-9``. A crash is a wrong row.
* ``refused``: the class of the error that a user gets, and ``why`` its sentence.
* ``split_kernels``: how many of the ``kernels``, parameters of two and more dims but biases and scales (stacked ones have
  two), lie in parts. ``param_bytes_ratio``: what a device holds of the parameters, by (kernels with a dim that divides /
  devices + the rest).
* ``copied_flops``: products on all devices by those of ``jax.jit``, less one. ``gathered``: bytes that a device gathers for
  no one's decision. ``silent``: a row with either, and without a `PlanWarning`.
* ``compile_ratio`` and ``bytes_vs_gspmd`` are measured in the full form; the quick one leaves out most of XLA's passes over
  machine code, and most models. Models that were picked after the code was frozen are summed up apart.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import jscaler
from bench.collectives import sent_by_kind
from bench.dot_flops import dot_flops
from bench.foreign_models import MODELS
from bench.foreign_models.training import PLAIN, Foreign
from bench.harness import Row, compile_fast, main
from jscaler.comparison import twin
from jscaler.report.hlo import collectives
from jscaler.text.folding import folded

COLUMNS = (
    "model", "plan", "right", "off", "refused", "split_kernels", "kernels", "param_bytes_ratio", "copied_flops", "gathered",
    "compile_ratio", "bytes_vs_gspmd", "silent", "value", "bound", "why",
)  # fmt: skip
PLANS = {  # and on how many devices; `single` is what the last ones have on the devices of each stage
    "data_parallel": 4,
    "zero1": 4,
    "zero3": 4,
    "tensor_parallel": 4,
    "megatron(2, 2)": 4,
    "accumulate(4)": 1,
    "recompute_layers": 1,
    "co_shard(2)": 1,
    "pipeline(2, 2)": 2,
    "pipeline(2, 2, 'gpipe')": 2,
}
BATCH_SPLIT = ("data_parallel", "zero1", "zero3")  # every device has its own part of all products
QUICK = ("linen wmt transformer", "nnx gemma", "linen imagenet resnet", "hub gpt2")
STEPS = 2
TOLERANCE, IN_FLOAT64 = 1e-4, 1e-9
OPEN = (("filled", "forward"), ("filled", "backward"))
LATER = "later"  # begins the names of models that were picked after the code was frozen
VECTORS = {"bias", "scale"}
HANDFUL = 256  # bytes of a gather that nobody minds
COPIED = 0.01
SECONDS = 300.0  # of one row
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"default": "", "metavar": "TEXT", "help": "only models whose name holds this, or one of these: 'gpt2|nnx'"},
    "plan": {"default": "", "metavar": "TEXT", "help": "only plans whose name holds this, or one of these"},
    "workers": {"type": int, "default": 1, "help": "processes"},
}


def rows(quick: bool, model: str, plan: str, workers: int) -> Iterator[Row]:
    """A row per model and plan, each model in a process of its own; then what all of them come to."""
    if quick:
        compile_fast()
    chosen = [name for name in MODELS if holds(name, model) and (model or not quick or name in QUICK)]
    plans = [name for name in PLANS if holds(name, plan)]
    found = []
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for model_rows in pool.map(functools.partial(rows_of, plans=plans, quick=quick), chosen):
            yield from model_rows
            found += model_rows
    for late in (False, True):
        chosen_rows = [row for row in found if row["model"].startswith(LATER) == late]
        yield from summary(chosen_rows, LATER if late else "all") if chosen_rows else ()


def holds(name: str, texts: str) -> bool:
    return any(text in name for text in texts.split("|"))


def rows_of(model: str, plans: Sequence[str], quick: bool) -> list[Row]:
    """A model's rows, from a process that is replaced where a row has ended it, or takes too long."""
    found, context, pool = [], multiprocessing.get_context("spawn"), None
    for plan in plans:
        pool = pool or context.Pool(1, start)
        try:
            row = pool.apply_async(measured, (model, plan, quick)).get(SECONDS)
        except multiprocessing.TimeoutError:
            pool.terminate()
            pool, row = None, {"right": False, "why": f"no answer in {SECONDS:.0f} s"}
        found.append({"model": model, "plan": plan, **row})
    if pool is not None:
        pool.terminate()
    return found


def start() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(PLANS.values()))


def measured(model: str, plan: str, quick: bool) -> Row:
    """One row; a model that fails is one, too."""
    try:
        plain = one_device(model, quick)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            row = under_plan(plain, plan, quick)
        return {**row, "silent": silent(row) and not any(issubclass(w.category, jscaler.PlanWarning) for w in warned)}
    except jscaler.JscalerError as error:
        return {"refused": type(error).__name__, "why": str(error)}
    except Exception as error:
        (place,) = traceback.extract_tb(error.__traceback__)[-1:]
        said = (str(error).splitlines() or [""])[0]
        return {
            "right": False,
            "why": f"{type(error).__name__}: {said} ({os.path.basename(place.filename)}:{place.lineno})",
        }


def silent(row: Row) -> bool:
    """Whether a row has lost what a warning should tell."""
    return row.get("copied_flops", 0.0) > COPIED or row["gathered"] > 0


@dataclass(frozen=True)
class Plain:
    """What one device makes of a model: its state and loss after the steps, FLOPs of its products, seconds to compile."""

    model: Foreign
    before: list[np.ndarray]
    after: list[np.ndarray]
    losses: list[float]
    flops: float
    seconds: float


@functools.lru_cache(1)
def one_device(name: str, quick: bool) -> Plain:
    model = MODELS[name]()
    before = leaves(model.state(model.arguments()))
    after, losses = run(model, model.jit(model.step(PLAIN)))
    if not quick:
        jax.clear_caches()
    started = time.perf_counter()
    text = model.jit(model.step(PLAIN)).lower(*model.arguments()).compile().as_text()
    return Plain(model, before, after, losses, dot_flops(text), time.perf_counter() - started)


def run(model: Foreign, step: Callable[..., Any], steps: int = STEPS) -> tuple[list[np.ndarray], list[float]]:
    """The state after some steps, and the losses on the way."""
    arguments, losses = model.arguments(), []
    for _ in range(steps):
        result = step(*arguments)
        arguments = model.following(arguments, result)
        losses += map(float, leaves([x for x in jax.tree.leaves(result) if x.shape == ()][-1:]))
    return leaves(model.state(arguments)), losses


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def under_plan(plain: Plain, plan: str, quick: bool) -> Row:
    """All measures of a model under a plan."""
    model, devices = plain.model, PLANS[plan]
    if not quick:
        jax.clear_caches()
    started = time.perf_counter()
    lowered = jscaler.parallelize(plan, devices=devices)(model.step(jscaler)).lower(*model.arguments())
    compiled = lowered.compile()
    seconds = time.perf_counter() - started
    after, losses = run(model, compiled)
    off = difference(plain, after, losses)
    right = off <= TOLERANCE
    if not right:
        off = off_in_float64(model, plan, devices)
        right = off <= IN_FLOAT64
    row = {"right": right, "off": off, "refused": "", **in_parts(lowered, plan)}
    texts = [one.as_text() for one in compiled.segments]
    if plan in BATCH_SPLIT and plain.flops:
        row["copied_flops"] = sum(map(dot_flops, texts)) * devices / plain.flops - 1
    row["gathered"] = gathered(lowered, plan, texts)
    if not quick:
        row["compile_ratio"] = seconds / plain.seconds
        if len(texts) == 1 and devices > 1:
            row["bytes_vs_gspmd"] = ratio(sent(texts[0]), sent(twin(lowered).as_text()))
    return row


def in_float64(model: Foreign) -> Foreign:
    """The same, whose state and data are float64; for code in which these are enabled."""

    def doubled(leaf: Any) -> Any:
        return leaf.astype(np.float64) if getattr(leaf, "dtype", None) == np.float32 else leaf

    return dataclasses.replace(model, arguments=lambda: jax.tree.map(doubled, model.arguments()))


def exact(model: Foreign, steps: int = STEPS) -> Plain:
    """Its numbers by ``jax.jit``, without FLOPs and seconds."""
    before = leaves(model.state(model.arguments()))
    return Plain(model, before, *run(model, model.jit(model.step(PLAIN)), steps), 0.0, 0.0)


def off_in_float64(model: Foreign, plan: Any, devices: int) -> float:
    """How far a plan is off where all state and data are float64."""
    with jax.enable_x64(True):
        double = in_float64(model)
        return difference(exact(double), *run(double, jscaler.parallelize(plan, devices=devices)(double.step(jscaler))))


def difference(plain: Plain, after: list[np.ndarray], losses: list[float]) -> float:
    """The largest of a leaf, by what it has moved, beyond its own rounding; NaNs are infinitely off."""
    moved = [np.abs(new - old).max(initial=0.0) for new, old in zip(plain.after, plain.before, strict=True)]
    floor = 1e-3 * max(moved)
    pairs = zip(after, plain.after, moved, strict=True)
    found = [beyond_rounding(mine, theirs) / max(own, floor) for mine, theirs, own in pairs]
    found += [abs(mine / theirs - 1) for mine, theirs in zip(losses, plain.losses, strict=True)]
    return float(max(found)) if np.isfinite(found).all() else math.inf


def beyond_rounding(mine: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference, without two units in the last place: a scale of 1 moves by few of them."""
    unit = np.finfo(theirs.dtype).eps if np.issubdtype(theirs.dtype, np.floating) else 0.0
    largest = np.abs(theirs).max(initial=0.0)
    return np.maximum(np.abs(mine - theirs) - 2 * unit * largest, 0.0).max(initial=0.0)


def in_parts(lowered: Any, plan: str) -> Row:
    """How the parameters lie."""
    wrt = {t for call in lowered.captured.graph.calls for t in call.wrt}
    laid = zip(lowered.captured.graph.inputs, lowered.executable.in_shardings, strict=True)
    parameters = [(t, t.nbytes * math.prod(s.shard_shape(t.shape)) // math.prod(t.shape)) for t, s in laid if t in wrt]
    kernels = [(t, nbytes) for t, nbytes in parameters if len(t.shape) > 1 and not VECTORS & set(t.name.split("/"))]
    row: Row = {"split_kernels": sum(nbytes < t.nbytes for t, nbytes in kernels), "kernels": len(kernels)}
    if plan == "tensor_parallel":
        devices = PLANS[plan]
        divided = sum(t.nbytes for t, _ in kernels if any(size % devices == 0 for size in t.shape))
        least = divided / devices + sum(t.nbytes for t, _ in parameters) - divided
        row["param_bytes_ratio"] = sum(nbytes for _, nbytes in parameters) / least
    return row


def gathered(lowered: Any, plan: str, texts: Sequence[str]) -> float:
    """Bytes that a device gathers and nobody has asked for.

    Under data parallelism nothing is to be gathered or dealt out anew, whatever the plan's report says; under other plans
    it is what is gathered for ops that the policy has left open, but parameters and what updates them.
    """
    if plan == "data_parallel":
        every = itertools.chain.from_iterable(map(collectives, texts))
        return sum(c.times * c.nbytes for c in every if c.kind in ("all-gather", "all-to-all") and c.nbytes > HANDFUL)
    parameters = {folded(t.name) for call in lowered.graph.calls for t in call.wrt}
    moves = [move for row in lowered.plan.report.ops if (row.origin, row.kind) in OPEN for move in row.moves]
    moved = [move.moved.get("all_gather", (0, 0.0))[1] for move in moves if move.tensor not in parameters]
    return sum(nbytes for nbytes in moved if nbytes > HANDFUL)


def sent(text: str) -> float:
    return sum(sent_by_kind(text).values())


def ratio(mine: float, theirs: float) -> float:
    return mine / theirs if theirs else (math.inf if mine else 1.0)


def summary(found: Sequence[Row], models: str) -> Iterator[Row]:
    """What all rows of ``models`` come to, each held to its bound."""
    ran = [row for row in found if not row.get("refused")]

    def total(what: str, value: float, bound: float) -> Row:
        return {"model": models, "plan": what, "value": value, "bound": bound}

    yield total("wrong rows", sum(not row["right"] for row in ran), 0)
    yield total("refused rows, share", 1 - len(ran) / len(found), 0.05)
    yield total("silent rows", sum(row.get("silent", False) for row in ran), 0)
    for column, plan, least, limit in (
        ("param_bytes_ratio", "tensor_parallel", max, 1.05),
        ("copied_flops", "data_parallel", max, COPIED),
        ("compile_ratio", "", statistics.median, 2.0),
        ("bytes_vs_gspmd", "", statistics.median, 1.02),
    ):
        values = [row[column] for row in ran if column in row and row["plan"].startswith(plan)]
        if values:
            yield total(f"{column}, {least.__name__}", least(values), limit)


if __name__ == "__main__":
    main("foreign", __doc__ or "", COLUMNS, rows, devices=max(PLANS.values()), options=OPTIONS)
