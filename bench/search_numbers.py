"""Do found plans give one device's numbers, and do equal searches find equal plans? Drawn models, targets and spaces.

A triple is a small model of `bench.parity_cases` or `bench.foreign_models`, a target of 2 to 8 V100, A100 or H100 on one
host or two, and a space. Half of the targets are `SLOWER`, as if the model were that much larger, so that not latencies
decide. The memory is a part of what data parallelism takes; where nothing fits, it is raised to what has to be held.

``value``: how far the state is off after three steps in float64, as `bench.foreign` measures it. ``of_limit``: the plan's
peak by the limit. ``differs``: whether another process, with other hashes, finds another plan; of searches that did not end
by themselves it is not asked, since they depend on the machine's speed.
"""

import dataclasses
import functools
import math
import multiprocessing
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import optax

import jscaler
from bench import foreign
from bench.foreign_models import MODELS as FOREIGN
from bench.foreign_models.training import Foreign
from bench.harness import Row, compile_fast, main
from bench.parity import start, step_of
from bench.parity_cases import CASES, DTYPES
from bench.search_foreign import peak_of_data_parallel
from jscaler.clusters import Cluster, find_cluster
from jscaler.plan_search.engine import search_graph
from jscaler.plan_search.found import Found, nothing_fits
from jscaler.spaces import as_spaces

COLUMNS = ("triple", "model", "target", "memory", "space", "plan", "seconds", "of_limit", "differs", "value", "why")
TRIPLES, QUICK = 60, (3, 10)
STEPS, SLOWER, MORE, RAISED = 3, 1e5, 1.2, 10
EVERYWHERE = (
    "zero", "megatron", "co_shard", "stages", "memory", "per_op", "alpa", "free", "per_op stages", "zero co_shard", "auto"
)  # fmt: skip
ITS_OWN = {  # spaces of some models
    "linen GPT": ["interlaced"], "mBART": ["interlaced"], "stacked mBART": ["interlaced megatron"], "Evoformer": ["dap"],
    "MoE": ["expert_parallel", "expert_parallel per_op"], "stacked Evoformer that recycles": ["three_f_one_b", "dap"],
}  # fmt: skip
MODELS = (
    "mlp", "linen GPT", "stacked GPT, 4 layers", "stacked GPT, 5 layers with remat", "nnx GPT", "Llama", "mBART",
    "stacked mBART", "Swin", "MoE", "Evoformer", "stacked Evoformer that recycles", "conv + BatchNorm",
    "linen wmt transformer", "linen perceiver", "nnx mlp-mixer", "linen dlrm", "linen vit, scanned",
)  # fmt: skip
TARGETS = {2: ("2x{}", "2x1x{}"), 4: ("4x{}", "2x2x{}"), 8: ("8x{}", "2x4x{}")}
KINDS, SHARES = ("V100-32GB", "A100-80GB", "H100-80GB"), (None, 1.0, 0.6, 0.3)
Triple = tuple[str, bool, str, float, float | None, str]  # model, clipping, target, by what slower, memory's part, space


def triples() -> list[Triple]:
    """Drawn, so that each model, space and number of devices appears about equally often."""
    draws, used = random.Random(0), Counter[Any]()

    def least_used(these: Any) -> Any:
        one = min(these, key=lambda one: (used[one], draws.random()))
        used[one] += 1
        return one

    def triple(model: str) -> Triple:
        clips, target = draws.choice((True, False)), draws.choice(TARGETS[least_used(TARGETS)]).format(draws.choice(KINDS))
        slower, share = draws.choice((1.0, SLOWER)), draws.choice(SHARES)
        return model, clips, target, slower, share, least_used((*EVERYWHERE, *ITS_OWN.get(model, ())))

    return [triple(least_used(MODELS)) for _ in range(TRIPLES)]


@functools.cache
def model_of(name: str, clips: bool) -> Foreign:
    """A model in float64; those of `bench.foreign_models` have their own optimizer."""
    if name in FOREIGN:
        with jax.enable_x64(False):
            return foreign.in_float64(FOREIGN[name]())
    case, momentum = CASES[name][0](DTYPES["float64"]), optax.sgd(1e-2, momentum=0.9)
    tx = optax.chain(optax.clip_by_global_norm(1.0), momentum) if clips else momentum
    return Foreign(
        step=lambda by: lambda *given: step_of(case, tx, by.value_and_grad)(*given)[:2],
        arguments=lambda: (case.state(tx), case.batches[0], jax.random.key(0)),
        following=lambda given, result: (result[0], *given[1:]), jit=jax.jit,
        state=lambda given: [x for x in jax.tree.leaves(given[0]) if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)],
    )  # fmt: skip


def cluster_of(target: str, slower: float) -> Cluster:
    found = find_cluster(target)
    if slower == 1 or found.device is None:
        return found
    peak = type(found.device.peak)(*(rate / slower for rate in dataclasses.astuple(found.device.peak)))
    device = dataclasses.replace(found.device.at_peaks(), bandwidth=found.device.bandwidth / slower, peak=peak)
    inside, between = (link.times(1 / slower) for link in (found.inside, found.between))
    return dataclasses.replace(found, device=device, inside=inside, between=between)


def searched(triple: Triple, seconds: float) -> tuple[Found, float | None]:
    """What is found, and within which memory."""
    name, clips, target, slower, share, space = triple
    model, cluster, spaces = model_of(name, clips), cluster_of(target, slower), None if space == "auto" else space.split()
    graph = jscaler.parallelize("single", devices=1)(model.step(jscaler)).graph(*model.arguments())
    search = functools.partial(search_graph, graph, cluster, as_spaces(spaces), seconds=seconds, reasons=False)
    memory = None if share is None else share * peak_of_data_parallel(graph, cluster)
    found = search(memory=memory)
    for _ in range(0 if memory is None else RAISED):
        if found.chosen is None and memory is not None:
            least = found.smallest.peak if found.smallest is not None else found.least[0] if found.least else 0.0
            memory = MORE * max(memory, least)
            found = search(memory=memory)
    return found, memory


def text_of(triple: Triple, seconds: float) -> str | None:
    """The plan that another process finds; None where time has stopped it."""
    found, _ = searched(triple, seconds)
    return found.plan.to_json() if found.plan is not None and found.complete else None


def measured(triple: Triple, seconds: float, pool: Any) -> Row:
    found, memory = searched(triple, seconds)
    again = pool.apply_async(text_of, (triple, 2 * seconds)) if found.complete else None
    row: Row = {"seconds": found.searched, "ended": found.complete, "bound": foreign.IN_FLOAT64, "memory": memory}
    if found.plan is None or found.chosen is None:
        return {**row, "value": math.inf, "why": nothing_fits(found)[0]}
    row |= {"plan": found.chosen.text, "of_limit": found.chosen.peak / memory if memory else 0.0}
    try:
        model = model_of(*triple[:2])
        step = jscaler.parallelize(found.plan, donate_argnums=())(model.step(jscaler))
        row["value"] = foreign.difference(foreign.exact(model, STEPS), *foreign.run(model, step, STEPS))
    except Exception as error:  # a plan that is found runs
        row |= {"value": math.inf, "why": f"{type(error).__name__}: {error}"[:400]}
    other = None if again is None else again.get()
    differs = "" if other is None else int(other != found.plan.to_json())
    return {**row, "differs": differs, "bounds": {"of_limit": 1, **({"differs": 0} if other is not None else {})}}


def rows(quick: bool, first: int, last: int, seconds: float) -> Iterator[Row]:
    compile_fast()
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore", jscaler.PlanWarning)
    with multiprocessing.get_context("spawn").Pool(1, start) as pool:
        for number in QUICK if quick else range(first, min(last + 1, TRIPLES)):
            triple = triples()[number]
            model, _, target, slower, _, space = triple
            said = f"{target}{', slower' * (slower > 1)}"
            yield {"triple": number, "model": model, "space": space, "target": said, **measured(triple, seconds, pool)}


OPTIONS: dict[str, dict[str, Any]] = {
    "first": {"type": int, "default": 0, "help": "triple"},
    "last": {"type": int, "default": TRIPLES - 1, "help": "triple"},
    "seconds": {"type": float, "default": 30.0, "help": "of each search"},
}

if __name__ == "__main__":
    main("search_numbers", __doc__ or "", COLUMNS, rows, options=OPTIONS)
