"""What does the proof of a step cost, which runs by itself for plans over several device groups or with time axes?

CPU seconds of ``jscaler.verify`` by those of ``lower`` without it, summed over the cases of `bench.parity_cases`, in one
process: held to 0.5. GPT-3 15B on 4 stages of dp 4 × tp 8, 128 devices, is held to 30 seconds, and with co-shard in stages;
so is Llama 8B.
Nothing is compiled. ``distinct`` of the ``exchanges`` differ; ``smaller`` are proven on smaller tensors, for their size.
A case whose proof fails is a false alarm, and counts as one more second than is allowed.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jscaler
from bench.harness import Row, main
from bench.parity import OPTIMIZERS
from bench.parity_cases import CASES, PIPELINES, Case, Run
from jscaler.verification import Report

COLUMNS = (
    "case", "cases", "devices", "lower_seconds", "verify_seconds", "exchanges", "distinct", "smaller", "left_out", "failed",
    "value", "bound",
)  # fmt: skip
MOST = 0.5  # of lowering
LARGE = [
    ("GPT-3 15B", "megatron(dp=4, tp=8, pp=4, microbatches=32)"),
    ("GPT-3 15B", "pipeline(4, 32, plan=co_shard(5, plan=megatron(dp=4, tp=8)))"),
    ("Llama 8B", "megatron(dp=4, tp=8, pp=4, microbatches=32)"),
]
MOST_SECONDS = 30.0


def cpu_seconds(fun: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = fun()
    return time.process_time() - started, result


def lowered(case: Case, run: Run) -> Callable[[], Any]:
    """The step of a case under a plan, with AdamW and clipping; not proven."""
    optimizer = OPTIMIZERS["clip+adamw"]()
    step = jscaler.parallelize(run.plan, devices=run.devices, verify=False)(case.train_step(optimizer))
    return lambda: step.lower(case.state(optimizer), case.batches[0], jax.random.key(0))


def small(quick: bool) -> Row:
    """All small cases, or the quick ones."""
    seconds = {"lower": 0.0, "verify": 0.0}
    count, failed, reports = 0, list[str](), list[Report]()
    for model, (make, runs) in CASES.items():
        chosen = [run for run in (*runs, *PIPELINES.get(model, ())) if run.quick or not quick]
        case = make(jnp.float32) if chosen else None
        for run in chosen:
            assert case is not None
            took, step = cpu_seconds(lowered(case, run))
            seconds["lower"] += took
            count += 1
            try:
                took, report = cpu_seconds(lambda step=step: jscaler.verify(step))
            except jscaler.VerificationError as error:
                failed.append(f"{model}, {run.name}: {str(error)[:200]}")
                continue
            seconds["verify"] += took
            reports.append(report)
    return {
        "case": "small cases", "cases": count, "devices": max(run.devices for _, runs in CASES.values() for run in runs),
        "lower_seconds": round(seconds["lower"], 2), "verify_seconds": round(seconds["verify"], 2),
        **totals(reports), "failed": "; ".join(failed),
        "value": round(seconds["verify"] / seconds["lower"] + len(failed) * (MOST + 1), 3), "bound": MOST,
    }  # fmt: skip


def large(model: str, plan: str, devices: int = 128) -> Row:
    from bench.planning import arguments_of, llama_arguments
    from models.training import nnx_train_step, train_step

    train, given = (
        (nnx_train_step, llama_arguments(32)) if model == "Llama 8B" else (train_step, arguments_of(48, True, 512))
    )
    step = jscaler.parallelize(plan, devices=devices, donate_argnames="state", verify=False)(train)
    took, found = cpu_seconds(lambda: step.lower(*given))
    proving, report = cpu_seconds(lambda: jscaler.verify(found))
    return {
        "case": f"{model}, {plan}", "cases": 1, "devices": devices, "lower_seconds": round(took, 2),
        "verify_seconds": round(proving, 2), **totals([report]), "value": round(proving, 2), "bound": MOST_SECONDS,
    }  # fmt: skip


def totals(reports: list[Report]) -> Row:
    return {
        "exchanges": sum(r.exchanges for r in reports), "distinct": sum(r.distinct for r in reports),
        "smaller": sum(r.on_smaller for r in reports), "left_out": sum(len(r.left_out) for r in reports),
    }  # fmt: skip


def rows(quick: bool) -> Iterator[Row]:
    warnings.simplefilter("ignore")
    yield small(quick)
    for model, plan in LARGE:
        yield large(model, plan)
        if quick:
            return


if __name__ == "__main__":
    main("proofs", __doc__ or "", COLUMNS, rows)
