"""The model of cost of `bench.paper`, unchanged, against published measurements that it was not made for.

Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism, 2024 (arXiv 2411.05288): GPT of 4B on 8
A100-80GB, 8 stages of 4 layers, sequence 2,048, 128 micro-batches of one row, no recompute, attention in one kernel (their
pretrain_gpt.sh says --use-flash-attn, and dropout 0). Plain 1F1B has the embedding in its first stage and the logits in its
last; interlaced lays both on all devices. ``mfu`` counts the products of a model with plain attention, as Megatron-LM does:
a kernel that skips what lies above the diagonal is not said to do less.
"""

from collections.abc import Iterator

import jax.numpy as jnp

from bench.harness import Row
from bench.paper_models import Model
from bench.paper_sweep import Sweep, scaled
from jscaler.clusters import find_cluster

STAGES, MICROBATCHES, LAYERS = 8, 128, [4] * 8
PLANS = {
    "1f1b": f"pipeline({STAGES}, {MICROBATCHES}, layers={LAYERS})",
    "interlaced": f"interlaced({STAGES}, {MICROBATCHES}, layers={LAYERS})",
}
PUBLISHED = {("1f1b", 32): 0.46, ("1f1b", 256): 0.25, ("interlaced", 32): 0.51, ("interlaced", 256): 0.51}
OFF = 0.20


def gpt_4b(thousands: int, **changes: bool) -> Model:
    sizes = {"hidden": 3072, "layers": 32, "heads": 24, "sequence": 2048, "vocabulary": thousands * 1024}
    return Model("gpt", "1.3b", MICROBATCHES, tuple(sorted({**sizes, "dtype": jnp.bfloat16, **changes}.items())))


def vocabulary_rows(quick: bool) -> Iterator[Row]:
    cluster = scaled(find_cluster("8xA100-80GB"))
    assert cluster.device is not None
    for (plan, thousands), published in PUBLISHED.items():
        if quick and thousands > 32:
            continue
        found = Sweep(gpt_4b(thousands, flash=True), cluster).estimate(PLANS[plan])
        mfu = (
            Sweep(gpt_4b(thousands), cluster).model_flops()
            / found.seconds
            / cluster.num_devices
            / cluster.device.peak.bfloat16
        )
        row: Row = {"model": f"gpt-4b, vocabulary {thousands}k", "gpus": STAGES, "plan": f"{plan}: {PLANS[plan]}"}
        row |= {"fits": found.fits, "peak_bytes": found.peak, "step_seconds": round(found.seconds, 2), "mfu": round(mfu, 3)}
        yield row | {"published": published, "value": round(abs(mfu / published - 1), 3), "bound": OFF}
