"""Does a plan take more memory, or send more, than GSPMD's compilation of the same split? For GPUs that need not be there.

GPT 125M and 1.3B and Llama 1B, layers stacked and computed again in the backward, parameters in float32, sequences of at
most 2,048 tokens, on 8 H100 (bfloat16) and on
4 hosts of 8 V100 (float16, which they multiply). ``peak_bytes`` is what XLA reserves on a device: arguments, results that
take no argument's place, temporaries. ``collective_bytes`` are those that a device sends in a step, by the optimized HLO.
Ratios are to `jscaler.comparison.twin`: the same ops under ``jax.jit`` with a sharding constraint on every result.

Where a dot gives 16 bits that are then cast to a float32 gradient, GSPMD adds them in 16 bits, and a plan adds in float32
unless it is told otherwise (``reduce_dtype``): ``sums`` are the numbers that each side adds in 16 bits, as parts of all
that it sends. Where GSPMD's part is larger, not the bytes are held to the bound, but the numbers sent.

Beside a pipeline stands what it does in each stage, over all devices, and plain data parallelism: it is held to be below
both; ``stages`` are the peaks of its stages, the compiled blocks' over their table.

Nothing runs, and no GPU is needed: ``pip install "jscaler[aot]"``. A row takes minutes; ``--out rows.jsonl`` keeps each
as it is measured, and what the file holds is not compiled again.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Row, main

COLUMNS = (
    "model", "plan", "target", "peak_bytes", "memory_ratio", "collective_bytes", "bytes_ratio", "numbers_ratio", "sums",
    "fits", "stages", "seconds", "gspmd_seconds",
)  # fmt: skip
BOUND = 1.02
H100, V100 = "8xH100-80GB", "4x8xV100-32GB"
DTYPE = {H100: "bf16", V100: "fp16"}
BATCH = {
    ("gpt-125m", H100): 64, ("gpt-125m", V100): 64, ("gpt-1.3b", H100): 16, ("gpt-1.3b", V100): 32, ("gpt-15b", H100): 16,
    ("gpt-15b", V100): 32, ("llama-1b", H100): 16, ("llama-1b", V100): 32,
}  # fmt: skip
SEQUENCE = {"llama-1b": 2048}  # of others their own


@dataclass(frozen=True)
class Case:
    """A model under a plan on a target."""

    model: str
    plan: str
    target: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.plan, self.target


def _cases(model: str, target: str, *plans: str) -> list[Case]:
    return [Case(model, plan, target) for plan in plans]


CASES = [  # 125M has 12 heads, so that tensor parallelism over 8 devices is not for it
    *_cases(
        "gpt-125m", H100, "data_parallel", "vocab_parallel", "zero1", "zero3", "megatron(dp=4, tp=2)",
        "megatron(dp=2, tp=4)", "megatron(dp=2, tp=4, vocab=False, sequence=True)", "megatron(dp=2, tp=4, zero=1)",
        "megatron(dp=2, tp=4, zero=3)",
    ),
    *_cases(
        "gpt-125m", V100, "data_parallel", "zero1", "zero3", "megatron(dp=8, tp=4)",
        "megatron(dp=8, tp=4, vocab=False, sequence=True)", "megatron(dp=8, tp=4, zero=1)", "megatron(dp=8, tp=4, zero=3)",
    ),
    *_cases(
        "gpt-1.3b", H100, "data_parallel", "tensor_parallel", "sequence_parallel", "vocab_parallel", "zero1", "zero3",
        "megatron(dp=2, tp=4)", "megatron(dp=2, tp=4, vocab=False, sequence=True)", "megatron(dp=2, tp=4, zero=1)",
        "megatron(dp=2, tp=4, zero=3)",
    ),
    *_cases(
        "gpt-1.3b", V100, "data_parallel", "tensor_parallel", "zero1", "zero3", "megatron(dp=4, tp=8)",
        "megatron(dp=4, tp=8, vocab=False, sequence=True)", "megatron(dp=4, tp=8, zero=1)", "megatron(dp=4, tp=8, zero=3)",
    ),
    *_cases("llama-1b", H100, "tensor_parallel", "zero3", "megatron(dp=2, tp=4, vocab=False, sequence=True)"),
    Case("llama-1b", "megatron(dp=2, tp=16)", V100),  # two devices have each head of keys and values
    Case("gpt-1.3b", "megatron(dp=1, tp=2, pp=4, microbatches=8)", H100),
    Case("gpt-1.3b", "megatron(dp=2, tp=4, pp=4, microbatches=16)", V100),
    Case("gpt-15b", "megatron(dp=1, tp=2, pp=4, microbatches=8)", H100),
    Case("gpt-15b", "megatron(dp=1, tp=8, pp=4, microbatches=16)", V100),
]  # fmt: skip


def rows(
    quick: bool, model: str | None = None, plan: str | None = None, target: str | None = None, out: str | None = None
) -> Iterator[Row]:
    """A row per case; the options choose those that hold their text."""
    chosen = [
        case
        for case in (CASES[:1] if quick else CASES)
        if all(not asked or asked in said for asked, said in zip((model, plan, target), case.key, strict=True))
    ]
    known = _kept(out)
    for number, case in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {' | '.join(case.key)}", file=sys.stderr, flush=True)
        if case.key not in known:
            known[case.key] = measured(case)
            if out:
                with Path(out).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[case.key]) + "\n")
        yield known[case.key]


def _kept(out: str | None) -> dict[tuple[str, str, str], Row]:
    lines = Path(out).read_text(encoding="utf-8").splitlines() if out and Path(out).exists() else []
    found = [json.loads(line) for line in lines]
    return {(row["model"], row["plan"], row["target"]): row for row in found}


def measured(case: Case) -> Row:
    """Compile both sides; figures of ours and their ratios."""
    from jscaler.clusters import find_cluster
    from jscaler.commands.built_in_job import built_in_job
    from jscaler.comparison import twin
    from jscaler.report.targets import described_devices
    from jscaler.runtime.target import WITHOUT_GPU
    from jscaler.training.planned_job import PlannedJob

    cluster = find_cluster(case.target)
    chosen = built_in_job(
        case.model, None, BATCH[case.model, case.target], seq=SEQUENCE.get(case.model), dtype=DTYPE[case.target],
        stacked=True, remat=True,
    )  # fmt: skip
    job = PlannedJob(chosen, case.plan, described_devices(cluster))
    lowered = job.step.lower(*job.arguments())
    if len(lowered.plan.blocks) > 1:
        return staged(case, cluster, job, lowered)
    started = time.perf_counter()
    ours = figures(lowered.lowered.compile(WITHOUT_GPU))
    between = time.perf_counter()
    theirs = figures(twin(lowered, WITHOUT_GPU))
    return {
        "model": case.model,
        "plan": case.plan,
        "target": case.target,
        "peak_bytes": ours.peak,
        "memory_ratio": _ratio(ours.peak, theirs.peak),
        "collective_bytes": round(ours.sent),
        "bytes_ratio": _ratio(ours.sent, theirs.sent),
        "numbers_ratio": _ratio(ours.numbers, theirs.numbers),
        "sums": f"{ours.narrow:.3f} / {theirs.narrow:.3f}",
        "fits": ours.peak <= cluster.memory,
        "stages": "",
        "seconds": round(between - started, 1),
        "gspmd_seconds": round(time.perf_counter() - between, 1),
        "bounds": {"memory_ratio": BOUND, "numbers_ratio" if theirs.narrow > ours.narrow + 0.01 else "bytes_ratio": BOUND},
    }


def staged(case: Case, cluster: Any, job: Any, lowered: Any) -> Row:
    """A pipeline: the fullest of its stages, against GSPMD without stages, and against data parallelism."""
    from jscaler.comparison import twin
    from jscaler.runtime.target import WITHOUT_GPU

    started = time.perf_counter()
    ours = lowered.compile(target=cluster)
    between = time.perf_counter()
    arguments = job.arguments()
    theirs = figures(twin(job.step.without_stages().lower(*arguments), WITHOUT_GPU))
    plain = figures(job.step.under("data_parallel").lower(*arguments).lowered.compile(WITHOUT_GPU))
    return {
        "model": case.model,
        "plan": case.plan,
        "target": case.target,
        "peak_bytes": ours.memory.peak,
        "memory_ratio": _ratio(ours.memory.peak, min(theirs.peak, plain.peak)),
        "collective_bytes": round(ours.sent),
        "bytes_ratio": _ratio(ours.sent, theirs.sent),
        "numbers_ratio": None,
        "sums": "",
        "fits": ours.fits,
        "stages": " ".join(f"{one.memory.peak / 1e9:.2f}" for one in ours.by_devices) + f" GB; GSPMD without stages "
        f"{theirs.peak / 1e9:.2f}, data parallel {plain.peak / 1e9:.2f}",
        "seconds": round(between - started, 1),
        "gspmd_seconds": round(time.perf_counter() - between, 1),
        "bounds": {"memory_ratio": 1.0},
    }


@dataclass(frozen=True)
class Figures:
    """Of one executable.

    Attributes:
        peak: bytes that XLA reserves on a device.
        sent, numbers: bytes, and numbers of any type, that a device sends in a step.
        narrow: the part of ``numbers`` that is added in 16 bits.
    """

    peak: int
    sent: float
    numbers: float
    narrow: float


def figures(compiled: Any) -> Figures:
    """Read an executable."""
    from jscaler.report.hlo import ITEMSIZE, collectives
    from jscaler.report.target_report import xla_bytes

    sizes = xla_bytes(compiled.memory_analysis())
    peak = sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"]
    found = collectives(compiled.as_text())
    counts = [c.times * c.sent / max(ITEMSIZE[dtype] for dtype in c.dtypes) for c in found]
    sums = [n for n, c in zip(counts, found, strict=True) if "reduce" in c.kind and {*c.dtypes} <= {"bf16", "f16"}]
    return Figures(peak, sum(c.times * c.sent for c in found), sum(counts), sum(sums) / (sum(counts) or 1.0))


def _ratio(ours: float, theirs: float) -> float:
    if theirs:
        return round(ours / theirs, 4)
    return 1.0 if ours == theirs else float("inf")


def _named(what: str) -> dict[str, Sequence[str] | str]:
    return {"metavar": "TEXT", "help": f"only cases whose {what} holds this text"}


if __name__ == "__main__":
    kept = {"metavar": "FILE", "help": "keep each row in this file; rows that it holds are not compiled again"}
    options: dict[str, Any] = {what: _named(what) for what in ("model", "plan", "target")} | {"out": kept}
    main("targets", __doc__ or "", COLUMNS, rows, devices=1, options=options)
