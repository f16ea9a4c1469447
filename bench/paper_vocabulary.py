"""The model of cost of `bench.paper`, unchanged, against published measurements that it was not made for.

Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism, 2024 (arXiv 2411.05288): GPT of 4B on 8
A100-80GB, 8 stages of 4 layers, sequence 2,048, 128 micro-batches of one row, no recompute, attention in one kernel (their
pretrain_gpt.sh says --use-flash-attn, and dropout 0). Plain 1F1B has the embedding in its first stage and the logits in its
last; interlaced lays both on all devices. ``mfu`` counts the products of a model with plain attention, as Megatron-LM does:
a kernel that skips what lies above the diagonal is not said to do less.

Rows of orders that are searched: the blocks of 1F1B, and those of an interlaced plan, in the best order that
`jscaler.find_schedule` finds. ``of_1f1b``: how much faster than 1F1B; ``of_interlaced``: than the interlaced table, at most
1. Memory is no limit there: 1F1B of large vocabularies fits nowhere. T5's rows are an mBART of T5-large's shapes.
"""

import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp

import jscaler
from bench.harness import Row
from bench.paper_models import Model
from bench.paper_sweep import Sweep, scaled
from jscaler.clusters import Cluster, find_cluster

STAGES, MICROBATCHES, LAYERS = 8, 128, [4] * 8
PLANS = {
    "1f1b": f"pipeline({STAGES}, {MICROBATCHES}, layers={LAYERS})",
    "interlaced": f"interlaced({STAGES}, {MICROBATCHES}, layers={LAYERS})",
}
PUBLISHED = {("1f1b", 32): 0.46, ("1f1b", 256): 0.25, ("interlaced", 32): 0.51, ("interlaced", 256): 0.51}
OFF = 0.20
LIMIT = 10.0  # seconds of the solver
T5 = {"hidden": 1024, "layers": 24, "heads": 16, "sequence": 512, "vocabulary": 32_128}
OF_TWO = {
    "1f1b": "pipeline(4, 32, plan=recompute_layers())",
    "interlaced": "interlaced(4, 32, plan=recompute_layers())",
}


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


def searched_rows(quick: bool) -> Iterator[Row]:
    a100, v100 = scaled(find_cluster("8xA100-80GB")), scaled(find_cluster("4xV100-32GB"))
    cases: list[tuple[str, Model, Cluster, Mapping[str, str]]] = [
        ("t5's shapes", Model("mbart", "3.9b", 32, tuple(sorted(T5.items()))), v100, OF_TWO),
        ("mbart-3.9b, vocabulary 500k", Model("mbart", "3.9b", 32), v100, OF_TWO),
        *((f"gpt-4b, vocabulary {n}k", gpt_4b(n, flash=True), a100, PLANS) for n in (32, 256)),
    ]
    for name, model, cluster, texts in cases[:1] if quick else cases:
        found = {
            plan: jscaler.find_schedule(model.graph, text, cluster, memory=math.inf, limit=LIMIT)
            for plan, text in texts.items()
        }
        first, laced = found["1f1b"].before, found["interlaced"].before
        for plan, one in found.items():
            row: Row = {"model": name, "gpus": cluster.num_devices, "plan": f"searched {plan}: {texts[plan]}"}
            row |= {"step_seconds": round(one.seconds, 3), "of_1f1b": round(first / one.seconds, 3)}
            row |= {"of_interlaced": round(laced / one.seconds, 3), "gap": round(one.gap, 3)}
            yield row | {"value": round(one.seconds / one.before, 4), "bound": 1.0}
