"""``jscaler redistribute`` from one device group to another: the crossing, step by step."""

import math
from typing import Any, NamedTuple

from rich.console import Console

from jscaler.clusters import BYTES, CostModel, find_cluster
from jscaler.commands.screen import show
from jscaler.materialize import Adapter, Layout
from jscaler.materialize.crossing import Crossing, cheapest_crossings, hop_price
from jscaler.materialize.transitions import price_of
from jscaler.report.step_text import describe, groups_text, layout_text
from jscaler.text.tables import table
from jscaler.text.units import counted, readable_bytes, readable_seconds

MOST_PAIRS = 8  # of a hop that are written out
ALIKE = 8  # crossings are found for each that is told: many differ in the order of devices alone


class CrossingAnswer(NamedTuple):
    """A crossing, the next best ones, and how they were priced; without ``cluster`` costs are bytes."""

    crossing: Crossing
    others: list[Crossing]
    cluster: str | None
    cost: CostModel
    itemsize: int

    @property
    def whole(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.crossing.source.shape) * self.itemsize

    def figures(self, nbytes: float, cost: float) -> list[str]:
        """Bytes, and seconds where there is a cluster."""
        return [readable_bytes(nbytes), *([] if self.cluster is None else [readable_seconds(cost)])]


class ToldStep(NamedTuple):
    """A step of an adapter, or the hop of a crossing.

    Attributes:
        group: of a crossing: "producers", "hop" or "consumers".
        who: the devices that take part, in words.
        nbytes: the mean per device; of a crossing what all devices send.
        cost: in the cost model's unit.
    """

    group: str
    words: str
    who: str
    after: Layout
    nbytes: float
    cost: float


def told_steps(adapter: Adapter, itemsize: int, cost: CostModel, group: str = "", times: int = 1) -> list[ToldStep]:
    """The steps of ``adapter``, and ``times`` what each device sends in them in the mean."""
    return [
        ToldStep(
            group, describe(before, step), groups_text(before, step), step.apply(before),
            step.bytes(before, itemsize) * times, price_of(before, step, itemsize, cost),
        )
        for before, step in adapter.walk
    ]  # fmt: skip


def crossing_answer(source: Layout, target: Layout, cluster: str | None, itemsize: int, count: int) -> CrossingAnswer:
    """Search, for the cheapest and ``count`` more; raises UnknownNameError for an unknown cluster."""
    cost = BYTES if cluster is None else find_cluster(cluster)
    found = cheapest_crossings(source, target, itemsize, cost, ALIKE * (1 + count))
    answers = [CrossingAnswer(one, [], cluster, cost, itemsize) for one in found]
    told = {tuple(step.words for step in crossing_steps(one)): one.crossing for one in reversed(answers)}
    others = sorted((one for one in told.values() if one is not found[0]), key=lambda one: one.cost)
    return answers[0]._replace(others=others[:count])


def crossing_steps(answer: CrossingAnswer) -> list[ToldStep]:
    """Inside of the producers' group, between the groups, inside of the consumers'."""
    crossing = answer.crossing
    price = hop_price(crossing.leave.target, crossing.arrive.source, answer.itemsize, answer.cost)
    pairs = [(crossing.devices[a], crossing.devices[b]) for move in crossing.moves for a, b in move.pairs]
    listed = ", ".join(f"{a} → {b}" for a, b in pairs[:MOST_PAIRS]) + (", …" if len(pairs) > MOST_PAIRS else "")
    rounds = sum(1 for move in crossing.moves if move.pairs)
    words = "send whole blocks" if crossing.is_equal else f"send pieces, {counted(rounds, 'round')}"
    hop = ToldStep("hop", words, listed, crossing.arrive.source, crossing.sent * answer.itemsize, price)
    first = told_steps(crossing.leave, answer.itemsize, answer.cost, "producers", len(crossing.source.mesh.devices))
    last = told_steps(crossing.arrive, answer.itemsize, answer.cost, "consumers", len(crossing.target.mesh.devices))
    return [*first, hop, *last]


def crossing_record(answer: CrossingAnswer) -> dict[str, Any]:
    """What ``--json`` prints; bytes are those that all devices send, seconds are None without a cluster."""
    crossing = answer.crossing
    return {
        "shape": crossing.source.shape,
        "bytes": answer.whole,
        "cluster": answer.cluster,
        "source": str(crossing.source),
        "target": str(crossing.target),
        **_steps_record(answer),
        "runners_up": [_steps_record(other) for other in _beside(answer)],
    }


def _steps_record(answer: CrossingAnswer) -> dict[str, Any]:
    steps = crossing_steps(answer)
    seconds = [None if answer.cluster is None else step.cost for step in steps]
    return {
        "steps": [
            {"group": s.group, "step": s.words, "layout": str(s.after), "bytes": s.nbytes, "seconds": time}
            for s, time in zip(steps, seconds, strict=True)
        ],
        "totals": {
            "bytes": sum(s.nbytes for s in steps),
            "seconds": None if answer.cluster is None else sum(s.cost for s in steps),
        },
    }


def _beside(answer: CrossingAnswer) -> list[CrossingAnswer]:
    """The runners-up."""
    return [answer._replace(crossing=other, others=[]) for other in answer.others]


def crossing_scenes(answer: CrossingAnswer) -> tuple[str, list[Layout], list[str]]:
    """For the picture: its title, the layouts first to last, and what stands between them."""
    steps = crossing_steps(answer)
    labels = [", ".join([f"{s.words} ({s.who})", *answer.figures(s.nbytes, s.cost)]) for s in steps]
    total = answer.figures(sum(s.nbytes for s in steps), sum(s.cost for s in steps))
    return ", ".join([_title(answer), *total]), [answer.crossing.source, *(s.after for s in steps)], labels


def _title(answer: CrossingAnswer) -> str:
    crossing = answer.crossing
    groups = " to ".join(f"{len(layout.mesh.devices)} devices" for layout in (crossing.source, crossing.target))
    return f"{list(crossing.source.shape)}, {readable_bytes(answer.whole)}, from {groups}"


def show_crossing(console: Console, answer: CrossingAnswer) -> None:
    """Header, steps, runners-up."""
    ends = (f"  {layout}" for layout in (answer.crossing.source, answer.crossing.target))
    show(console, "\n".join([_title(answer), *ends]))
    steps = crossing_steps(answer)
    rows = [
        [step.group, step.words, step.who, layout_text(step.after), *answer.figures(step.nbytes, step.cost)]
        for step in steps
    ]
    header = ["where", "step", "devices", "layout after", "bytes", *(["seconds"] if answer.cluster is not None else [])]
    made = table("the cheapest crossing", header, rows)
    made.add_section()
    made.add_row("", "total", "", "", *answer.figures(sum(s.nbytes for s in steps), sum(s.cost for s in steps)))
    console.print(made)
    lines = ["bytes: what all devices send together"]
    lines += ["", "runners-up, beside the best"] if answer.others else []
    for other in _beside(answer):
        ratio = other.crossing.cost / answer.crossing.cost if answer.crossing.cost else math.inf
        path = crossing_steps(other)
        figures = answer.figures(sum(s.nbytes for s in path), sum(s.cost for s in path))
        words = "; ".join(step.words for step in path)
        lines.append("  ".join([f"{ratio:6.2f}×", *(f"{text:>9}" for text in figures), words]))
    show(console, "\n".join(lines))
