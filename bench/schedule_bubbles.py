"""Does a pipeline of a real model gain by a schedule what the schedule's bubbles say? Rows of `bench.schedules`.

A step of GPT-3 1.3B on 4 × 8 V100 (Megatron, tp 8, four groups, 16 micro-batches, layers computed again) as it is
estimated, beside what the published order gives for the same work in equal stages without sends: `told`.
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence

from bench.harness import Row
from jscaler import plans
from jscaler.clusters import Cluster, find_cluster
from jscaler.commands.built_in_job import built_in_job
from jscaler.errors import PlanWarning
from jscaler.estimate.block_costs import block_seconds
from jscaler.estimate.query import planned
from jscaler.estimate.simulation import simulate
from jscaler.ir import Graph
from jscaler.lower.instructions import Run
from jscaler.lower.step_plan import StepPlan
from jscaler.tables import BlockKind
from jscaler.tables.simulator import simulate_table
from jscaler.training.planned_job import PlannedJob

PLAN = "megatron(tp=8, pp=4, microbatches=16)"
CLUSTER = "4x8xV100-32GB"
LATER = 1.03  # what a step may take longer beside 1F1B than the bubbles say
SENT = 1.1  # what its sends may show beside 1F1B's, for each chunk
CHUNKS = {"interleaved": 2, "zb_v": 2, "zb_h1": 1}
QUICK = ("interleaved", "zb_v")


def told(step: StepPlan, seconds: Sequence[float]) -> float:
    """Seconds of a step's table if all stages took equally long and nothing was sent.

    Blocks F, B, I and W take what they do in the mean of the stages between the first and the last, which also do what
    stands at the model's ends, and then a factor longer, by which all groups together have the work that they have.

    Args:
        seconds: of a run of each block.
    """
    table = step.instructions.table
    assert table is not None
    last = max(cell.stage for cell in table.cells())
    work = 0.0
    between: dict[BlockKind, float] = {}
    counted = Counter(cell.kind for cell in table.cells())
    for one in step.instructions.steps:
        names = step.instructions.names.get(one.block, ()) if isinstance(one, Run) else ()
        if isinstance(one, Run) and names:
            work += seconds[one.block]
            stage, kind = names[0]
            if 0 < stage < last:
                between[kind] = between.get(kind, 0.0) + seconds[one.block] * (len(names) == 1)
    share = (last + 1) / (last - 1)
    mean: dict[BlockKind, float] = {kind: total * share / counted[kind] for kind, total in between.items()}
    equal = simulate_table(table, mean)
    return equal.makespan * work / sum(one.seconds for one in equal.runs)


def bubble_rows(quick: bool) -> Iterator[Row]:
    """The model with its layers in one loop and in a row, under each schedule, beside 1F1B."""
    cluster = find_cluster(CLUSTER)
    for stacked in (True, False):
        job = built_in_job("gpt", "1.3b", 32, dtype="fp16", stacked=stacked, remat=True)
        planned_job = PlannedJob(job, PLAN, cluster.num_devices)
        graph = planned_job.step.graph(*planned_job.arguments())
        first = _figures(graph, "1f1b", 1, cluster)
        for name in QUICK if quick else CHUNKS:
            chunks = CHUNKS[name]
            found = _figures(graph, name, chunks, cluster)
            of_first, as_told, sends = (one / other for one, other in zip(found, first, strict=True))
            right = of_first <= LATER * as_told and sends <= SENT * chunks
            yield {
                "schedule": name, "model": f"{'stacked ' if stacked else ''}GPT 1.3B", "stages": 4, "microbatches": 16,
                "chunks": chunks, "seconds": "estimated", "of_1f1b": round(of_first, 3), "told": round(as_told, 3),
                "sends": round(sends, 2), "right": right, "wrong": int(not right), "bounds": {"wrong": 0},
            }  # fmt: skip


def _figures(graph: Graph, name: str, chunks: int, cluster: Cluster) -> tuple[float, float, float]:
    """Seconds of a step as it is estimated, as it is told by its bubbles, and by which sends make it longer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        step = planned(graph, plans.with_schedule(PLAN, name, **({"chunks": chunks} if chunks > 1 else {})), cluster)
    timeline = simulate(step, cluster)
    return timeline.makespan, told(step, block_seconds(step, cluster)), timeline.exposed
