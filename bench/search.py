"""Planning by search: how long it takes, how good what it finds is, and whether bounds hold.

Rows of one table, by ``case``:

``paper``
    The models of nnScaler's evaluation on 4 to 32 V100 (batch 512; AlphaFold's 128). ``reference`` are the seconds of the
    best plan that ``docs/benchmarks/paper.jsonl`` has, by today's ``jscaler.cost``; ``value`` is cost / reference.
``stages``
    The same for GPT, in stages with devices and plans of their own.
``layers``
    GPT 1.3B with 8 to 1,024 layers on 8 V100, stacked and as a Python loop. Devices have memory in proportion to the
    layers, so that about the same plans fit; searches may still look at others. ``value`` is seconds by those of 8 layers,
    infinite where the search was stopped before its end; ``each`` the same for each plan that was looked at. Plans that
    are not legal count there, and take little. The model is traced before.
``devices``
    GPT 15B on 1,024 V100; ``value`` is seconds, infinite where no plan was found.
``mist``
    GPT and LLaMA of 7B and 22B on A100-40GB and L4. ``reference`` are the seconds of the plan that Mist's authors tuned
    (`bench.search_mist`), by ``jscaler.cost``, whether it fits or not; ``value`` is cost / reference.
``brute``
    Random spaces over a small model, with stages, ways to save memory and schedules, on 2 to 4 devices: all plans by
    ``jscaler.cost``. ``value`` counts spaces whose best plan is more than `MARGIN` faster than the one that was found, or
    below the bound.
``why``
    Plans that were found in random spaces, some with holes, in random memory: a second search without the constraint, or
    with another decision, for each reason. ``value`` counts reasons by which that would take more than `TRUE` more or less
    than it does; ``gap`` is the worst.

``gap`` is cost / bound - 1; ``seconds`` are those of the search; ``looked`` counts the plans that it looked at, legal or
not.
"""

import functools
import itertools
import json
import math
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jscaler
from bench.harness import Row, main
from bench.paper_models import BATCH, CLUSTERS, GPUS, SIZES, Model
from bench.search_mist import TUNED
from bench.search_reasons import checked
from bench.small_step import arguments, train_step
from jscaler import spaces as s
from jscaler.clusters import find_cluster
from jscaler.errors import JscalerError
from jscaler.plan_search.engine import search_graph
from jscaler.plan_search.found import Found
from jscaler.plans.batch_size import batch_size

COLUMNS = (
    "case", "model", "devices", "space", "seconds", "looked", "plan", "cost", "reference", "value", "each", "bound_s",
    "gap", "peak", "fits",
)  # fmt: skip
RECORDED = Path(__file__).parent.parent / "docs/benchmarks/paper.jsonl"
SPACES = {
    "gpt": ("zero", "megatron", "per_op"),
    "mbart": ("zero", "megatron", "interlaced"),
    "swin": ("zero", "megatron", "co_shard"),
    "evoformer": ("zero", "dap", "three_f_one_b"),
}
BETTER = {("gpt", 4): 0.98, ("gpt", 8): 0.95, ("gpt", 16): 0.96, ("gpt", 32): 0.96}  # of the recorded plan's seconds
SECONDS, QUICK_SECONDS, MARGIN = 60.0, 20.0, 0.005
SCHEDULES = (["1f1b"], ["1f1b", "zb_h1"], ["gpipe", "1f1b"], ["1f1b", "interleaved"])
LAYERS = (8, 32, 128, 1024)
OF_LAYER = 34e9 / 8  # bytes of a device
FLAT = 1.5  # times the seconds of the fewest layers
BRUTE = 200
WHY, TRUE = 30, 0.01


def found_row(case: str, model: str, spaces: tuple[str, ...], found: Found) -> Row:
    """What all rows of a search have."""
    chosen = found.chosen
    return {
        "case": case, "model": model, "devices": found.cluster.num_devices, "space": " ".join(spaces),
        "seconds": found.searched, "looked": len(found.candidates) + len(found.illegal),
        "plan": "" if chosen is None else chosen.text,
        "cost": None if chosen is None else float(chosen.seconds), "bound_s": float(found.bound), "gap": float(found.gap),
        "peak": None if chosen is None else round(chosen.peak), "fits": chosen is not None,
    }  # fmt: skip


def paper(seconds: float, quick: bool, only: str, case: str = "paper", given: Any = None) -> Iterator[Row]:
    for name, spaces in (given or SPACES).items():
        for number, gpus in enumerate(GPUS):
            if only not in name or (quick and (name, gpus) != ("gpt", 4)):
                continue
            model, cluster = Model(name, SIZES[name][number], BATCH.get(name, 512)), find_cluster(CLUSTERS[gpus])
            best = recorded(model, gpus)
            limit = QUICK_SECONDS if quick else seconds
            found = search_graph(model.graph, cluster, s.as_spaces(list(spaces[:1] if quick else spaces)), seconds=limit)
            row = found_row(case, model.shown, spaces, found)
            if best is None or found.chosen is None:
                yield row
                continue
            reference = jscaler.cost(model.graph, best, cluster).seconds.total
            assert reference is not None
            value = found.chosen.seconds / reference
            yield {**row, "reference": float(reference), "value": float(value), "bound": BETTER.get((name, gpus), 1.0)}


@functools.cache
def rows_of_the_paper() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()]


def recorded(model: Model, gpus: int) -> str | None:
    """The text of the fastest plan that is recorded and fits."""
    own = [r for r in rows_of_the_paper() if r["model"] == model.shown and r["gpus"] == gpus and r["fits"]]
    own = [
        r for r in own if ": " in r["plan"] and "offload" not in r["plan"]
    ]  # that is a stand-in for ZeRO-3 in host memory
    return min(own, key=lambda r: r["step_seconds"])["plan"].partition(": ")[2] if own else None


def layers(seconds: float) -> Iterator[Row]:
    cluster, spaces = find_cluster("8xV100-32GB"), s.as_spaces("megatron")
    for stacked in (True, False):
        first: Row | None = None
        for count in LAYERS:
            model = Model("gpt", "1.3b", 64, (("layers", count), ("stacked", stacked)))
            found = search_graph(model.graph, cluster, spaces, seconds=4 * seconds, memory=OF_LAYER * count)
            row = found_row("layers", model.shown, ("megatron",), found)
            first = first or row
            value, looks = row["seconds"] / first["seconds"], row["looked"] / first["looked"]
            yield {**row, "value": value if found.complete else math.inf, "each": value / looks, "bound": FLAT}


def devices(seconds: float) -> Iterator[Row]:
    model = Model("gpt", "15b", 2048)
    found = search_graph(model.graph, find_cluster("128x8xV100-32GB"), s.as_spaces("megatron"), seconds=seconds)
    row = found_row("devices", model.shown, ("megatron",), found)
    yield {**row, "value": math.inf if found.chosen is None else found.searched, "bound": seconds}


def mist(seconds: float) -> Iterator[Row]:
    for tuned in TUNED:
        spaces, graph = ("zero", "megatron", "stages"), tuned.model.graph
        reference = jscaler.cost(graph, tuned.text, tuned.cluster)
        found = search_graph(graph, tuned.cluster, s.as_spaces(list(spaces)), seconds=seconds)
        row = found_row("mist", f"{tuned.model.shown}, {tuned.cluster.name}", spaces, found)
        assert reference.seconds.total is not None
        value = math.inf if found.chosen is None else found.chosen.seconds / reference.seconds.total
        yield {**row, "reference": float(reference.seconds.total), "value": float(value), "bound": 1.0}


def brute(count: int) -> Iterator[Row]:
    wrong, worst, gaps, started = 0, 1.0, [], time.perf_counter()
    for seed in range(count):
        best, found = brute_force(seed)
        if best is None:
            wrong += found.chosen is not None
            continue
        if found.chosen is None or found.chosen.seconds > best * (1 + MARGIN) or found.bound > best:
            wrong += 1
            print(f"seed {seed}: best {best:.6g}, found {found.chosen and found.chosen.seconds}, bound {found.bound:.6g}")
            continue
        worst = max(worst, found.chosen.seconds / best)
        gaps.append(found.gap)
    yield {
        "case": "brute", "model": "6 layers of 64", "devices": "2 to 4", "space": f"{count} random", "plan": "",
        "seconds": time.perf_counter() - started, "gap": max(gaps, default=0.0), "cost": worst, "value": wrong, "bound": 0,
    }  # fmt: skip


def brute_force(seed: int) -> tuple[float | None, Found]:
    """The seconds of the best plan of a random space, and what the search finds."""
    rng = random.Random(seed)
    devices = rng.choice([2, 4])
    cluster = find_cluster(f"{devices}x{rng.choice(['V100-32GB', 'A100-80GB'])}")
    graph = small_graph(rng.choice([8, 16]))
    spaces = random_spaces(rng)
    at = s.Setting(devices, devices, batch_size(graph))
    known: dict[str, tuple[float, float]] = {}
    for point in (point for space in spaces for point in space.points(at)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                cost = jscaler.cost(graph, point.make(), cluster)
            except JscalerError:
                continue
        assert cost.seconds.total is not None
        known[point.text] = cost.seconds.total, cost.memory.peak
    peaks = sorted(peak for _, peak in known.values())
    memory = peaks[rng.randrange(len(peaks))] if peaks else None
    fitting = [seconds for seconds, peak in known.values() if memory is None or peak <= memory]
    found = search_graph(graph, cluster, [[space] for space in spaces], seconds=1000.0, memory=memory)
    return min(fitting, default=None), found


def why(plans: int) -> Iterator[Row]:
    wrong, worst, told, searched, started = 0, 0.0, 0, 0, time.perf_counter()
    for seed in itertools.count():
        if searched == plans:
            break
        rng = random.Random(f"why {seed}")
        devices = rng.choice([2, 4])
        cluster = find_cluster(f"{devices}x{rng.choice(['V100-32GB', 'A100-80GB'])}")
        graph = small_graph(rng.choice([8, 16]))
        open_ = s.OpenSpace(rng.choice([s.per_op, s.free]), microbatches=s.parts_of_batch(most=2))
        spaces = [open_] if rng.random() < 0.5 else random_spaces(rng)
        free = search_graph(graph, cluster, [spaces], seconds=1000.0)
        peaks = sorted(one.peak for one in free.candidates)
        memory = rng.choice([None, *peaks[: len(peaks) // 2], *(0.9 * peak for peak in peaks[len(peaks) // 2 :])])
        found = search_graph(graph, cluster, [spaces], seconds=1000.0, memory=memory)
        searched += bool(found.why)
        for reason, said, seconds in checked(graph, cluster, spaces, memory, found) if found.why else ():
            off = 0.0 if said == seconds else abs(said / seconds - 1)
            told, worst = told + 1, max(worst, off)
            if off > TRUE:
                wrong += 1
                print(f"seed {seed}: {reason}: {said:.6g} s is said, {seconds:.6g} s found")
    yield {
        "case": "why", "model": "6 layers of 64", "devices": "2 to 4", "space": f"{plans} plans, {told} reasons",
        "plan": "", "seconds": time.perf_counter() - started, "gap": worst, "value": wrong, "bound": 0,
    }  # fmt: skip


def random_spaces(rng: random.Random) -> list[s.Space]:
    """One to three spaces, each with some of the ways to spread a step and to save memory."""
    inner = s.Space(
        "megatron", tp=s.divisors_of_devices(), dp=s.rest_of_devices("tp"),
        zero=s.in_order(*rng.choice([(0,), (1,), (1, 3), (1, 2, 3)])),
    )  # fmt: skip
    saving = rng.sample([inner, s.Space("recompute_layers", plan=inner), s.Space("zero1")], rng.randint(1, 3))
    staged = s.Space(
        "pipeline", stages=2, microbatches=s.parts_of_batch(least=2, most=rng.choice([4, 8])),
        schedule=s.in_order(*rng.choice(SCHEDULES), saves=False),
        plan=s.in_each_stage(*rng.sample([s.Space("zero1"), s.Space("data_parallel"), s.Space("recompute_layers")], 2)),
    )  # fmt: skip
    return rng.sample([s.in_microbatches(*saving), *saving, staged], rng.randint(1, 3))


@functools.cache
def small_graph(rows: int) -> Any:
    return jscaler.parallelize("single", devices=1)(train_step).graph(*arguments(rows))


def rows(quick: bool, only: str, seconds: float) -> Iterator[Row]:
    if not only or only in "brute":
        yield from brute(8 if quick else BRUTE)
    if only == "why" or (not only and not quick):
        yield from why(4 if quick else WHY)
    yield from paper(seconds, quick, only if only in SPACES else "" if not only or only == "paper" else "nothing")
    if only == "stages" or (not only and not quick):
        yield from paper(seconds, quick, "", "stages", {"gpt": ("stages",)})
    if not quick and (not only or only == "layers"):
        yield from layers(seconds)
    if not quick and (not only or only == "devices"):
        yield from devices(seconds)
    if not quick and (not only or only == "mist"):
        yield from mist(seconds)


OPTIONS: dict[str, dict[str, Any]] = {
    "only": {"default": "", "help": "one case, or one model of the paper's"},
    "seconds": {"type": float, "default": SECONDS, "help": "of each search"},
}

if __name__ == "__main__":
    main("search", __doc__ or "", COLUMNS, rows, options=OPTIONS)
