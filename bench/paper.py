"""The paper's evaluation by estimate: for each model, at 4 to 32 V100s, the best configuration of each plan, new and old.

GPT-3, Swin, mBART and AlphaFold2's Evoformer in SuperScaler's sizes on its cluster (4 hosts of 8 V100-32GB, 100 Gb/s each),
a step of 512 rows (Evoformer 128). A sweep goes over (dp, tp, pp, rows of a micro-batch, parts), see `bench.paper_sweep`;
nothing is compiled. ``--workers`` processes (one for each core) make estimates, for all plans at once; ``sweep_seconds``
are those of the CPU, in all of them. ``step_seconds`` and ``peak_bytes`` are those of ``jscaler.cost``, with what programs
have been seen to reach of a V100's peaks (docs/clusters.md), one model of cost for all plans. ``tflops`` counts the model's
own products, nothing twice. ``speedup`` of a new plan is over the best old one, beside the ``paper``'s; ``stepwise`` that
of interlaced over interlaced blocks. ``sensitivity`` is ``speedup`` where devices, or links, are 30 % slower and faster,
both plans as they are. ``decides`` says what one that misses the paper's rests on.

``--vocabulary`` holds the same model of cost against arXiv 2411.05288 (A100s, GPT of 4B), see `bench.paper_vocabulary`.

``memory`` says who counts ``peak_bytes``: the estimate, or XLA, which compiles the best plans' blocks with ``--compiled``.
``--scaling`` moves the tensors of one plan in three ways, see `bench.paper_scaling`.

``--record`` puts the rows of a model and size in place of those in docs/benchmarks/paper.jsonl; ``--draw`` makes pictures
of these, and estimates nothing: a whole evaluation takes hours, and is made in pieces.

Estimates are kept in build/paper.jsonl: an interrupted run goes on, and ``--anew`` forgets them.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.harness import Row, main
from bench.paper_estimates import KEPT, Estimate, Estimates
from bench.paper_models import GPUS, PAPER, SIZES, Model, model_for
from bench.paper_plans import Config, configs
from bench.paper_rivals import OFFLOAD, alpa_like, offload, offloaded
from bench.paper_sweep import Sweep, cluster_for, scaled
from jscaler.report.targets import described_devices

COLUMNS = (
    "model", "gpus", "plan", "new", "fits", "peak_bytes", "memory", "step_seconds", "tflops", "speedup", "paper",
    "stepwise", "sensitivity", "decides", "estimates", "sweep_seconds", "mfu", "published", "of_1f1b",
    "of_interlaced", "gap", "value",
)  # fmt: skip
BLOCKS, OF_BLOCKS, OVER_BLOCKS = "interlaced blocks", 1.9, 1.5  # of mBART: their speed, and what interlaced has of it
CHANGED = {"compute -30 %": (0.7, 1.0), "compute +30 %": (1.3, 1.0), "links -30 %": (1.0, 0.7), "links +30 %": (1.0, 1.3)}
QUICK = ("data_parallel", "megatron", "co_shard")
RECORDED = Path(__file__).parent.parent / "docs" / "benchmarks" / "paper.jsonl"
PASSING = ("estimates", "sweep_seconds")  # say something of a run, and not of a plan
RIVALS = ("alpa_like", OFFLOAD)
Found = tuple[Config, Estimate]


def rows(
    quick: bool,
    model: str,
    gpus: int | None,
    seq: int | None,
    vocabulary: bool,
    anew: bool,
    compiled: bool,
    workers: int,
    scaling: bool,
    record: bool,
    draw: bool,
) -> Iterator[Row]:
    if anew:
        KEPT.unlink(missing_ok=True)
    if vocabulary:
        from bench.paper_vocabulary import searched_rows, vocabulary_rows

        yield from vocabulary_rows(quick)
        yield from searched_rows(quick)
        return
    if scaling:
        from bench.paper_scaling import scaling_rows

        yield from scaling_rows(quick)
        return
    if draw:
        from bench.paper_pictures import draw as draw_rows

        print(*draw_rows(recorded()), sep="\n", file=sys.stderr)
        return
    if compiled:
        described_devices(cluster_for(GPUS[0]))  # before the first computation, behind which CUDA's plugin is not found
    found: list[Row] = []
    for row in _of_models(quick, model, gpus, seq, compiled, workers):
        found.append(row)
        yield row
    if record:
        record_rows(found)


def recorded(path: Path = RECORDED) -> list[Row]:
    """The rows that earlier runs have recorded."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def record_rows(rows: Sequence[Row], path: Path = RECORDED) -> None:
    """Put ``rows`` in place of those of their models and sizes."""
    anew = {(row["model"], row["gpus"]) for row in rows}
    every = [row for row in recorded(path) if (row["model"], row["gpus"]) not in anew] + list(rows)
    places = {f"{name}-{size}": place for place, (name, size) in enumerate((n, s) for n in SIZES for s in SIZES[n])}
    every.sort(key=lambda row: places[row["model"]])
    text = "".join(json.dumps({name: value for name, value in row.items() if name not in PASSING}) + "\n" for row in every)
    path.write_text(text, encoding="utf-8")


def _of_models(quick: bool, model: str, gpus: int | None, seq: int | None, compiled: bool, workers: int) -> Iterator[Row]:
    chosen = ["gpt"] if quick and not model else [name for name in SIZES if model in name]
    changes = {} if seq is None else {"sequence": seq}
    for name in chosen:
        for count in (n for n in GPUS if gpus in (None, n) and (not quick or n == (gpus or 4))):
            asked = model_for(name, count, **changes)
            estimates = Estimates() if quick else Estimates(KEPT, workers)
            try:
                yield from (compiled_rows if compiled and not quick else rows_of)(asked, count, estimates, quick)
            finally:
                estimates.close()


def compiled_rows(model: Model, gpus: int, estimates: Estimates, quick: bool = False) -> list[Row]:
    """As `rows_of`, where XLA says the memory of the best old plan, of the best new one, and of those within 5 % of them.

    Where one does not fit by XLA's account, the next best takes its place. State on hosts is estimated alone.
    """
    while True:
        found = list(rows_of(model, gpus, estimates, quick))
        due = [row for row in _leading(found) if row["memory"] != "XLA" and not row["plan"].startswith(OFFLOAD)]
        if not due:
            return found
        sweep = Sweep(model, cluster_for(gpus), estimates)
        for text in dict.fromkeys(str(row["plan"]).split(": ", 1)[1] for row in due):
            sweep.compiled(text)


def _leading(found: list[Row]) -> Iterator[Row]:
    for new in (False, True):
        own = [row for row in found if row["fits"] and row["new"] is new]
        fastest = min((row["step_seconds"] for row in own), default=0.0)
        yield from (row for row in own if row["step_seconds"] <= 1.05 * fastest)


def rows_of(model: Model, gpus: int, estimates: Estimates, quick: bool = False) -> Iterator[Row]:
    """A row for each plan, at its best, the new ones last."""
    every = [one for one in configs(model, gpus) if not quick or _is_quick(one)]
    plans = [*dict.fromkeys(one.plan for one in every), *(() if quick else RIVALS)]
    plans.sort(key=lambda plan: any(one.new for one in every if one.plan == plan))
    sweeps = {plan: Sweep(model, cluster_for(gpus), estimates, 3 if quick else None) for plan in plans}
    with ThreadPoolExecutor(len(plans)) as searches:  # which wait for estimates
        searched = {plan: searches.submit(_best, sweep, plan, every) for plan, sweep in sweeps.items()}
        try:
            yield from _rows({plan: found.result for plan, found in searched.items()}, sweeps)
        except BaseException:
            estimates.close()
            raise


def _rows(searched: dict[str, Callable[[], Found | None]], sweeps: dict[str, Sweep]) -> Iterator[Row]:
    """A row for each plan, once its search has ended."""
    old: Found | None = None
    blocks: Found | None = None
    for plan, result in searched.items():
        sweep, best = sweeps[plan], result()
        model, gpus = sweep.model, sweep.cluster.num_devices
        row: Row = {"model": model.shown, "gpus": gpus, "plan": plan, "fits": best is not None}
        row |= {"estimates": sweep.estimated, "sweep_seconds": round(sweep.seconds, 1)}
        if best is None:
            yield row | {"decides": "memory: no configuration fits, by its bound or its estimate"}
            continue
        config, found = best
        blocks = best if plan == BLOCKS else blocks
        row |= {"plan": f"{plan}: {config.text}", "new": config.new, "peak_bytes": found.peak, "memory": found.memory}
        tflops = sweep.model_flops() / found.seconds / gpus / 1e12
        row |= {"step_seconds": float(f"{found.seconds:.4g}"), "tflops": round(tflops, 1)}
        if config.new:
            paper = OF_BLOCKS if plan == BLOCKS else PAPER[model.name]
            row |= compared(sweep, best, old, paper) if old is not None else {"decides": "memory: no old plan fits"}
            if plan == "interlaced" and blocks is not None:
                row["stepwise"] = f"{blocks[1].seconds / found.seconds:.2f} (the paper's {OVER_BLOCKS})"
        elif old is None or found.seconds < old[1].seconds:
            old = best
        yield row


def _best(sweep: Sweep, plan: str, every: list[Config]) -> Found | None:
    if plan == OFFLOAD:
        return offloaded(sweep, every)
    return sweep.best(alpa_like(sweep) if plan == "alpa_like" else [one for one in every if one.plan == plan])


def _is_quick(one: Config) -> bool:
    return one.plan in QUICK and one.rows == 4 and one.zero < 2 and (one.saved == "recompute" or one.parts == 4)


def compared(sweep: Sweep, new: Found, old: Found, paper: float) -> Row:
    """A new plan against the best old one, and what the ratio rests on."""
    ratio = old[1].seconds / new[1].seconds
    cluster = sweep.cluster
    others = [cluster, *(scaled(cluster, compute, links) for compute, links in CHANGED.values())]
    with ThreadPoolExecutor(2) as both:
        slower, faster = both.map(
            lambda one: [offload(sweep, one, e) for e in sweep.on(one.text, others)[1:]], (old[0], new[0])
        )
    changed = {said: round(a.seconds / b.seconds, 2) for said, a, b in zip(CHANGED, slower, faster, strict=True)}
    row: Row = {"speedup": round(ratio, 2), "paper": paper}
    row["sensitivity"] = ", ".join(f"{said} {value}" for said, value in changed.items())
    if ratio < paper:
        row["decides"] = decides(ratio, changed, old, cluster.memory)
    return row


def decides(ratio: float, changed: dict[str, float], old: Found, memory: int) -> str:
    """What of the model of cost moves a ratio most."""
    most = max(changed, key=lambda said: abs(changed[said] - ratio))
    moved = abs(changed[most] - ratio) / ratio
    rates = f"{most} makes it {changed[most]}" if moved > 0.05 else "no rate moves it by more than 5 %"
    full = old[1].peak / memory
    return f"{rates}; the old plan's estimate fills {full:.0%} of a device, and is free of fragmentation and workspaces"


if __name__ == "__main__":
    options: dict[str, Any] = {
        "model": {"default": "", "metavar": "TEXT", "help": "only models whose name holds this text"},
        "gpus": {"type": int, "choices": GPUS, "help": "only the size for so many"},
        "seq": {"type": int, "metavar": "TOKENS", "help": "another sequence than the model's own"},
        "vocabulary": {"action": "store_true", "help": "hold the model of cost against arXiv 2411.05288"},
        "compiled": {"action": "store_true", "help": "memory of the best plans as XLA compiles them; needs the extra aot"},
        "workers": {
            "type": int,
            "default": os.cpu_count(),
            "metavar": "N",
            "help": "processes that estimate; one per core",
        },
        "scaling": {"action": "store_true", "help": "GPT-3 on 4 to 32 GPUs, its tensors moved in three ways"},
        "record": {"action": "store_true", "help": "put the rows in place of those in docs/benchmarks/paper.jsonl"},
        "draw": {"action": "store_true", "help": "write pictures of the recorded rows into docs/images"},
        "anew": {"action": "store_true", "help": "forget kept estimates"},
    }
    main("paper", __doc__ or "", COLUMNS, rows, devices=1, options=options)
