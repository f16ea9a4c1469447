"""``jscaler redistribute`` from one device group to another: the crossing, step by step."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from jscaler.clusters import BYTES, CostModel, find_cluster
from jscaler.errors import PlanError
from jscaler.materialize import Adapter, Layout
from jscaler.materialize.crossing import Crossing, find_crossing, hop_price
from jscaler.materialize.transitions import price_of
from jscaler.report.step_text import describe, groups_text, layout_text
from jscaler.text.tables import table
from jscaler.text.units import readable_bytes, readable_seconds

MOST_PAIRS = 8  # of a hop that are written out


class CrossingAnswer(NamedTuple):
    """A crossing and how it was priced; without ``cluster`` costs are bytes."""

    crossing: Crossing
    cluster: str | None
    cost: CostModel
    itemsize: int


class CrossingStep(NamedTuple):
    """``group`` is "producers", "hop" or "consumers"; ``nbytes`` are those that all devices send."""

    group: str
    words: str
    who: str
    after: Layout
    nbytes: float
    cost: float


def crossing_answer(source: Layout, target: Layout, cluster: str | None, itemsize: int) -> CrossingAnswer:
    """Search; raises UnknownNameError for an unknown cluster."""
    cost = BYTES if cluster is None else find_cluster(cluster)
    return CrossingAnswer(find_crossing(source, target, itemsize, cost), cluster, cost, itemsize)


def refuse_drawn(draw: Path | None) -> None:
    """Raises PlanError where a picture is asked for."""
    if draw is not None:
        raise PlanError("a crossing from one device group to another has no picture yet; leave --draw out")


def crossing_steps(answer: CrossingAnswer) -> list[CrossingStep]:
    """Inside of the producers' group, between the groups, inside of the consumers'."""
    crossing = answer.crossing
    price = hop_price(crossing.leave.target, crossing.arrive.source, answer.itemsize, answer.cost)
    pairs = [(crossing.devices[a], crossing.devices[b]) for move in crossing.moves for a, b in move.pairs]
    listed = ", ".join(f"{a} → {b}" for a, b in pairs[:MOST_PAIRS]) + (", …" if len(pairs) > MOST_PAIRS else "")
    rounds = sum(1 for move in crossing.moves if move.pairs)
    words = "send whole blocks" if crossing.is_equal else f"send pieces, {rounds} round{'s' * (rounds != 1)}"
    hop = CrossingStep("hop", words, listed, crossing.arrive.source, crossing.sent * answer.itemsize, price)
    return [*_inside("producers", crossing.leave, answer), hop, *_inside("consumers", crossing.arrive, answer)]


def _inside(group: str, adapter: Adapter, answer: CrossingAnswer) -> list[CrossingStep]:
    return [
        CrossingStep(
            group, describe(before, step), groups_text(before, step), step.apply(before),
            step.bytes(before, answer.itemsize) * len(before.mesh.devices),
            price_of(before, step, answer.itemsize, answer.cost),
        )
        for before, step in adapter.walk
    ]  # fmt: skip


def crossing_record(answer: CrossingAnswer) -> dict[str, Any]:
    """What ``--json`` prints; bytes are those that all devices send, seconds are None without a cluster."""
    crossing = answer.crossing
    return {
        "shape": crossing.source.shape,
        "bytes": math.prod(crossing.source.shape) * answer.itemsize,
        "cluster": answer.cluster,
        "source": str(crossing.source),
        "target": str(crossing.target),
        "steps": [
            {
                "group": step.group, "step": step.words, "layout": str(step.after), "bytes": step.nbytes,
                "seconds": None if answer.cluster is None else step.cost,
            }
            for step in crossing_steps(answer)
        ],
    }  # fmt: skip


def show_crossing(console: Console, answer: CrossingAnswer) -> None:
    """Header and steps."""
    crossing, timed = answer.crossing, answer.cluster is not None
    whole = readable_bytes(math.prod(crossing.source.shape) * answer.itemsize)
    groups = " to ".join(f"{len(layout.mesh.devices)} devices" for layout in (crossing.source, crossing.target))
    console.print(f"{list(crossing.source.shape)}, {whole}, from {groups}", highlight=False, markup=False)
    for layout in (crossing.source, crossing.target):
        console.print(f"  {layout}", highlight=False, markup=False)
    rows = [
        [step.group, step.words, step.who, layout_text(step.after).replace(" on ", "\non "), readable_bytes(step.nbytes)]
        + ([readable_seconds(step.cost)] if timed else [])
        for step in crossing_steps(answer)
    ]
    header = ["where", "step", "devices", "layout after", "bytes", *(["seconds"] if timed else [])]
    console.print(table("the cheapest crossing", header, rows))
    console.print("bytes: what all devices send together")
