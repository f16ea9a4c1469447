"""GPT-3 of one size on 4 to 32 V100s, by how tensors get from layout to layout: the paper's three variants.

``p2p``: every device is sent all that it needs by those that hold it, within a group of devices and between groups.
``within groups``: transitions within groups are searched (all-reduce, all-gather, …), crossings are point-to-point.
``searched``: crossings are searched too: a tensor is cut before it crosses, and gathered behind, where links are faster.

One lowered plan of tensor parallelism in pipelined stages, the same seconds of computing; only what is moved is priced in
three ways. ``rendezvous``: sends take both ends' time, as those of blocking calls do; else they go beside the computing.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from bench.harness import Row
from bench.paper_models import GPUS, Model
from bench.paper_sweep import Sweep, cluster_for
from jscaler.clusters import Cluster
from jscaler.estimate.block_costs import block_seconds, hop_seconds
from jscaler.estimate.query import planned
from jscaler.estimate.timed_step import Sends, timed_step
from jscaler.estimate.traffic import moved_by_reader, traffic_of
from jscaler.lower.program import Adapt
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize.layout import Layout
from jscaler.materialize.point_to_point import Holding, plan_regions
from jscaler.materialize.transitions import union_of

VARIANTS = ("p2p", "within groups", "searched")
GRIDS = {4: (2, 2), 8: (4, 2), 16: (8, 2), 32: (8, 4)}  # (tp, pp): tensor parallelism up to a host
ROWS = 4  # of a micro-batch
Price = Callable[[Adapt, int], float]


def scaling_rows(quick: bool) -> Iterator[Row]:
    """A row for each number of GPUs and variant; ``speedup`` is over point-to-point."""
    model = Model("gpt", "1.3b", 512)
    for gpus in GPUS[-1:] if quick else GPUS:
        cluster, (tp, pp) = cluster_for(gpus), GRIDS[gpus]
        text = f"megatron(dp=1, tp={tp}, pp={pp}, microbatches={model.batch // ROWS})"
        flops = Sweep(model, cluster).model_flops()
        step = planned(model.graph, text, cluster)
        for sends in ("asynchronous", "rendezvous"):
            seconds = {variant: step_seconds(step, cluster, variant, sends) for variant in VARIANTS}
            for variant, found in seconds.items():
                row: Row = {"model": model.shown, "gpus": gpus, "plan": f"{variant}, {sends}: {text}"}
                row |= {"step_seconds": float(f"{found:.4g}"), "speedup": round(seconds["p2p"] / found, 2)}
                row |= {"tflops": round(flops / found / gpus / 1e12, 1)}
                yield row | {"value": round(seconds["searched"] / found, 4), "bound": 1.0}


def step_seconds(step: StepPlan, cluster: Cluster, variant: str, sends: Sends) -> float:
    """Of a step, its tensors moved as ``variant`` says."""
    blocks, hops = block_seconds(step, cluster), hop_seconds(step, cluster)
    if variant != "searched":
        crossed = _ends(step)

        def changed(task: Adapt, itemsize: int) -> float:
            found = _searched(task, itemsize, cluster)
            if task in crossed.values():
                return 0.0  # the tensor goes from where it is made to where it is read at once
            return (
                fetched(task.adapter.source, task.adapter.target, itemsize, cluster)
                if variant == "p2p" and found
                else found
            )

        before = moved_seconds(step, lambda task, itemsize: _searched(task, itemsize, cluster))
        moved = zip(blocks, before, moved_seconds(step, changed), strict=True)
        blocks = [whole - was + now for whole, was, now in moved]
        hops = []
        for one in step.transfers:
            leave, arrive = (crossed.get((one.tensor.name, end)) for end in (one.crossing.source, one.crossing.target))
            source = leave.adapter.source if leave else one.crossing.source
            target = arrive.adapter.target if arrive else one.crossing.target
            hops.append(fetched(source, target, one.tensor.itemsize, cluster))
    runs, _ = timed_step(step, blocks, hops, sends)
    return max(run.end for run in runs)


def _ends(step: StepPlan) -> dict[tuple[str, Layout], Adapt]:
    """What groups do to a tensor before it crosses and behind it, by its name and its layout on the way."""
    sides = [(t.tensor.name, t.crossing.source, t.crossing.target) for t in step.transfers]
    leaving, arriving = {(name, source) for name, source, _ in sides}, {(name, target) for name, _, target in sides}
    found: dict[tuple[str, Layout], Adapt] = {}
    for task, _, _ in (one for s in step.segments for moved in moved_by_reader([s]).values() for one in moved):
        if isinstance(task, Adapt):
            before, behind = (task.tensor.name, task.adapter.target), (task.tensor.name, task.adapter.source)
            found |= {before: task} if before in leaving else {behind: task} if behind in arriving else {}
    return found


def _searched(task: Adapt, itemsize: int, cluster: Cluster) -> float:
    return traffic_of(task, itemsize, 1, cluster).seconds


@functools.cache
def fetched(source: Layout, target: Layout, itemsize: int, cluster: Cluster) -> float:
    """Seconds where every device of ``target`` is sent all that it needs by those that hold it, replicas in turn."""
    numbers = union_of(source, target)
    place = {device: position for position, device in enumerate(numbers)}
    holders: dict[Any, list[int]] = {}
    for position in range(len(source.mesh.devices)):
        holders.setdefault(source.mask(position), []).append(position)
    load, count = Counter[tuple[str, int]](), Counter[int]()
    for index, device in enumerate(target.mesh.devices):
        taker = place[device]
        held = [Holding(taker if taker in own else own[index % len(own)], mask) for mask, own in holders.items()]
        plan = plan_regions(source.shape, held, [[Holding(taker, target.mask(index))]], len(numbers))
        for sender, size in ((numbers[r.pairs[0][0]], r.size * itemsize) for r in plan.rounds):
            count[device] += 1
            hosts = sender // cluster.devices_per_host, device // cluster.devices_per_host
            load.update({("device sends", sender): size, ("device receives", device): size})
            if hosts[0] != hosts[1]:
                load.update({("host sends", hosts[0]): size, ("host receives", hosts[1]): size})
    slow = any(side.startswith("host") for side, _ in load)
    latency = (cluster.between if slow else cluster.inside).latency * max(count.values(), default=0)
    speed = {"device": cluster.inside.bandwidth, "host": cluster.between.bandwidth}
    return latency + max((nbytes / speed[side.split()[0]] for (side, _), nbytes in load.items()), default=0.0)


def moved_seconds(step: StepPlan, price: Price) -> list[float]:
    """What is moved in front of one run of each executable, which may be several blocks."""
    found: dict[int, float] = {}
    for segment in step.segments:
        owner: dict[Any, Any] = {each.output: block for block in segment.blocks for each in _moves(block)}
        for task, itemsize, times in (one for moved in moved_by_reader([segment]).values() for one in moved):
            if isinstance(task, Adapt):
                block = owner[task.output]
                seconds = price(task, itemsize) * times / segment.program.times
                found[id(block)] = found.get(id(block), 0.0) + seconds
    return [sum(found.get(id(part), 0.0) for part, _ in block.parts or ((block, 0),)) for block in step.blocks]


def _moves(block: Any) -> list[Any]:
    return [one.adapt for one in block.flat.exchanges]
