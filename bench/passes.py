"""What are the passes worth that exist for XLA alone? Each left out, one by one, of a step that it is for.

``swapped_dots``: seconds of a step on a CPU device, without it and with it, run in turn. ``products_before_loops``,
``stacks_with_carries`` and ``pairs_together``: peak bytes of a device, estimated without XLA, or with ``--target`` as XLA
lays them out on described GPUs (``pip install "jscaler[aot]"``). ``ratio`` is without / with: above 1 the pass is worth its
place.
"""

from collections.abc import Iterator
from typing import Any

import jscaler
from bench import predicted
from bench.harness import Row, main

COLUMNS = ("pass", "case", "measure", "with", "without", "ratio")
ROUNDS = 30


def rows(quick: bool, target: str | None) -> Iterator[Row]:
    if target is not None:
        from jscaler.report.targets import described_devices

        described_devices(f"8x{target}")  # before anything is computed, or JAX finds no plugin for it
    yield swapped("nano", 5 if quick else ROUNDS)
    for name, plan, devices, shape in MEMORY:
        if name == "pairs_together":  # (what XLA's scheduler puts off behind a loop, the estimate does not see)
            yield peak(name, plan, devices, shape, None)
        if target is not None:
            yield peak(name, plan, devices, shape, target)


# Where each pass shows: a tied table whose logits are the largest arrays, over data-parallel devices; scores of attention.
TABLE = {"size": "125m", "layers": 6, "dtype": "bfloat16", "remat": True}
SCORES = {"size": "nano", "sequence": 1024, "hidden": 256, "heads": 8, "dropout": 0.0}
GROUPED = {"model": "llama", "size": "nano", "sequence": 1024, "hidden": 256, "heads": 8, "groups": 2}
MEMORY = (
    ("products_before_loops", "vocab_parallel", 4, {**TABLE, "stacked": True}),
    ("products_before_loops", "data_parallel", 4, TABLE),
    ("stacks_with_carries", "megatron(dp=2, tp=4, zero=1)", 8, {**TABLE, "stacked": True}),
    ("pairs_together", "co_shard(4)", 1, SCORES),
    ("pairs_together", "co_shard(2)", 1, GROUPED),
)


def swapped(size: str, rounds: int) -> Row:
    """Step times of the GPT with and without dots for transposed dots."""
    from bench.steps import gpt
    from jscaler.clusters.timing import median_ratio
    from jscaler.comparison import race

    step, arguments = gpt(size)
    made = [
        jscaler.parallelize("single", devices=1, donate_argnames="state", without_passes=without)(step)
        for without in ((), "swapped_dots")
    ]
    lowered = made[0].lower(*arguments)
    both = [lowered.compile(), made[1].lower(*arguments).compile()]
    times = race(lowered, [one.flat for one in both], made[0].leaves(*arguments), rounds)
    ours, theirs = (sorted(t)[len(t) // 2] for t in times)
    ratio = median_ratio(times[1], times[0])
    return {
        "pass": "swapped_dots", "case": f"gpt-{size}, single", "measure": "seconds of a step",
        "with": round(ours, 6), "without": round(theirs, 6), "ratio": round(ratio, 4),
    }  # fmt: skip


def peak(name: str, plan: str, devices: int, shape: dict[str, Any], target: str | None) -> Row:
    """Peak bytes of a device with and without the pass ``name``; XLA's own on a ``target``."""
    found = [_peak(plan, devices, shape, without, target) for without in ((), (name,))]
    layers = "stacked" if shape.get("stacked") else "layers in a loop"
    measure = "estimated peak" if target is None else f"peak on {target}"
    ratio = round(found[1] / found[0], 4)
    case = f"{shape.get('model', 'gpt')}-{shape['size']}, {layers}, {plan}"
    return {"pass": name, "case": case, "measure": measure, "with": found[0], "without": found[1], "ratio": ratio}


def _peak(plan: str, devices: int, shape: dict[str, Any], without: tuple[str, ...], target: str | None) -> int:
    make = predicted.llama if shape.get("model") == "llama" else predicted.gpt
    fun, arguments = make(8 * devices, **{k: v for k, v in shape.items() if k != "model"})
    step = jscaler.parallelize(plan, devices=devices, donate_argnames="state", without_passes=without)(fun)
    lowered = step.lower(*arguments)
    cluster = f"{devices}xH100-80GB"
    if target is None:
        return jscaler.cost(lowered, None, cluster).memory.peak
    return lowered.compile(target=cluster.replace("H100-80GB", target)).memory.peak


OPTIONS = {"target": {"metavar": "GPU", "default": None, "help": "also compile for described GPUs: H100-80GB"}}

if __name__ == "__main__":
    main("passes", __doc__ or "", COLUMNS, rows, options=OPTIONS)
