"""``jscaler redistribute``: how a tensor gets from one layout to another, step by step; no devices are needed."""

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from jscaler.clusters import BYTES, Cluster, CostModel, find_cluster
from jscaler.commands.crossing_shown import (
    ToldStep,
    crossing_answer,
    crossing_record,
    crossing_scenes,
    show_crossing,
    told_steps,
)
from jscaler.commands.screen import screen, show
from jscaler.errors import PlanError, UnknownNameError
from jscaler.ir.mask import SubDims
from jscaler.materialize import Adapter, Layout, OpenLayout, find_adapter, parse_layout
from jscaler.materialize.adapter import alternatives
from jscaler.materialize.bounds import bytes_at_least
from jscaler.report.draw_layout import draw_redistribution, refuse_picture
from jscaler.report.layout_text import layout_picture, side_by_side
from jscaler.report.step_text import groups_of, layout_text
from jscaler.text.tables import table
from jscaler.text.units import readable_bytes, readable_seconds

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
    "bfloat16", "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
MOST_DRAWN = 16  # devices of a layout that is drawn in the terminal


def redistribute(
    shape: Annotated[str, typer.Option(help="sizes of the dims, like 1024,1024; sub-dims of a dim: 1024,3·8·64")],
    source: Annotated[str, typer.Option("--from", help="layout before, like 'R1 V4 D(2,1) on 0 1 2 3 4 5 6 7'")],
    target: Annotated[str, typer.Option("--to", help="layout after; 'on any' leaves the device order open")],
    devices: Annotated[int | None, typer.Option(help="what R · V · D must come to", min=1)] = None,
    cluster: Annotated[str | None, typer.Option(help="price in seconds: a name, or a .toml file; bytes without")] = None,
    dtype: Annotated[str, typer.Option(help="of the elements")] = "float32",
    draw: Annotated[Path | None, typer.Option(help="write a picture: .png, .svg or .pdf")] = None,
    runners_up: Annotated[int, typer.Option(help="how many of the next best ways to show", min=0)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> None:
    """Show the cheapest way from one layout to another: steps, bytes, seconds, and a lower bound for any way.

    Layouts on different devices (--from "R4 V1 D(1,1) on 0-3" --to "R1 V1 D(6,1) on 4-9") are crossed from group to group.

    Example: jscaler redistribute --shape 1024,1024 --from "R1 V4 D(2,1)" --to "R8 V1 D(1,1)" --cluster v100-nvlink-ib100
    """
    refuse_picture(draw)
    ends = read_ends(shape, source, target, devices)
    if isinstance(ends[1], Layout) and set(ends[0].mesh.devices) != set(ends[1].mesh.devices):
        crossed = crossing_answer(ends[0], ends[1], cluster, item_size(dtype), runners_up)
        output(draw, as_json, crossing_record(crossed), crossing_scenes(crossed), lambda c: show_crossing(c, crossed))
        return
    answer = find(shape, source, target, devices, cluster, dtype, runners_up)
    output(draw, as_json, record(answer), scenes(answer), lambda console: show_answer(console, answer))


def output(
    draw: Path | None,
    as_json: bool,
    record: dict[str, Any],
    scenes: tuple[str, list[Layout], list[str]],
    show_answer: Callable[[Console], None],
) -> None:
    """The picture, if one is asked for; then the record, or what ``show_answer`` prints."""
    if draw is not None:
        draw_redistribution(draw, *scenes)
    if as_json:
        typer.echo(json.dumps({**record, "picture": None if draw is None else str(draw)}))
        return
    console = screen()
    show_answer(console)
    if draw is not None:
        show(console, f"written: {draw}")


class Answer(NamedTuple):
    """An adapter and what is told about it; without ``cluster`` costs are bytes."""

    dtype: str
    itemsize: int
    cluster: Cluster | None
    adapter: Adapter
    others: list[Adapter]

    @property
    def cost(self) -> CostModel:
        return self.cluster or BYTES

    @property
    def steps(self) -> list[ToldStep]:
        return told_steps(self.adapter, self.itemsize, self.cost)

    @property
    def bound(self) -> float:
        """Bytes that no way to this target can save, on these devices in this order; mean per device."""
        return bytes_at_least(self.adapter.source, self.adapter.target, self.itemsize)

    def seconds(self, cost: float) -> float | None:
        return None if self.cluster is None else cost

    def time(self, cost: float) -> list[str]:
        """A column of seconds, where there is a cluster."""
        return [] if self.cluster is None else [readable_seconds(cost)]


def find(shape: str, source: str, target: str, devices: int | None, cluster: str | None, dtype: str, count: int) -> Answer:
    """Read the options and search.

    Raises:
        PlanError: the shape or a layout does not parse, or they contradict each other or ``devices``.
        UnknownNameError: no such dtype or cluster.
        DeviceError: the cluster file cannot be read.
    """
    itemsize = item_size(dtype)
    priced = None if cluster is None else find_cluster(cluster)
    before, after = read_ends(shape, source, target, devices)
    cost = priced or BYTES
    adapter = find_adapter(before, after, itemsize, cost)
    others = alternatives(before, after, itemsize, cost, count) if count else []
    return Answer(dtype, itemsize, priced, adapter, others)


def item_size(dtype: str) -> int:
    """Bytes of an element; raises UnknownNameError."""
    if dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, DTYPES)
    return np.dtype(dtype).itemsize


def read_ends(shape: str, source: str, target: str, devices: int | None) -> tuple[Layout, Layout | OpenLayout]:
    """The layouts before and after; one that says on which devices it lies may have as many as it likes.

    Raises:
        PlanError: the shape or a layout does not parse, or they contradict each other or ``devices``.
    """
    subdims = parse_shape(shape)
    before = parse_layout(source, subdims, devices)
    if isinstance(before, OpenLayout):
        raise PlanError(f"the layout before, '{source}', must say which device holds what; 'on any' is for the target")
    after = parse_layout(
        target, subdims, devices or (None if re.search(r"on\s+[\[\d]", target) else len(before.mesh.devices))
    )
    _refuse_host(before, after)
    return before, after


def parse_shape(text: str) -> SubDims:
    """``((1024,), (3, 64))`` for ``1024,3·64``; () for the empty text, a scalar.

    Raises:
        PlanError: it does not parse, or a size is 0.
    """
    dims = [re.split(r"[·*]", dim) for dim in text.split(",")] if text.strip() else []
    if not all(re.fullmatch(r"\s*0*[1-9][0-9]*\s*", size) for dim in dims for size in dim):
        raise PlanError(f"shape '{text}' does not parse; write the sizes of the dims, from 1 on, like 1024,1024")
    return tuple(tuple(int(size) for size in dim) for dim in dims)


def _refuse_host(*layouts: Layout | OpenLayout) -> None:
    for layout in layouts:
        if layout.memory != "device":
            raise PlanError(f"layout '{layout}': copies to and from the host have no price yet; leave '@host' out")


# Output


def title(answer: Answer) -> str:
    """Shape, dtype, bytes of the whole tensor, cluster."""
    source, cluster = answer.adapter.source, answer.cluster
    whole = math.prod(source.shape) * answer.itemsize
    sizes = ",".join("·".join(map(str, dim)) for dim in source.subdims)
    words = [f"{answer.dtype}[{sizes}]", readable_bytes(whole), f"{len(source.mesh.devices)} devices"]
    if cluster is not None:
        hosts = 1 + int(cluster.hosts_of(np.array([max(source.mesh.devices)])).max())
        words.append(f"cluster {cluster.name}")
        words += [f"{hosts} such hosts (it has {cluster.hosts})"] if hosts > cluster.hosts else []
    return ", ".join(words)


def scenes(answer: Answer) -> tuple[str, list[Layout], list[str]]:
    """For the picture: its title, the layouts first to last, and what stands between them."""
    steps = answer.steps
    labels = [", ".join([f"{step.words} ({step.who})", *_figures(answer, [step])]) for step in steps]
    between = [step.after for step in steps[:-1]]
    total = ", ".join(_figures(answer, steps)) if steps else "nothing to do"
    return f"{title(answer)}: {total}", [answer.adapter.source, *between, answer.adapter.target], labels


def _figures(answer: Answer, steps: Sequence[ToldStep]) -> list[str]:
    sent = sum(step.nbytes for step in steps)
    return [f"{readable_bytes(sent)} per device", *answer.time(sum(step.cost for step in steps))]


def record(answer: Answer) -> dict[str, Any]:
    """What ``--json`` prints; bytes are the mean per device, seconds are None without a cluster."""
    adapter = answer.adapter
    return {
        "shape": adapter.source.shape,
        "dtype": answer.dtype,
        "bytes": math.prod(adapter.source.shape) * answer.itemsize,
        "devices": len(adapter.source.mesh.devices),
        "cluster": None if answer.cluster is None else answer.cluster.name,
        "source": str(adapter.source),
        "target": str(adapter.target),
        "path": _path(answer),
        "totals": _totals(answer),
        "bound": {"bytes": answer.bound, "seconds": answer.seconds(answer.cost.floor(answer.bound))},
        "runners_up": [
            {**_totals(other), "ratio": _ratio(other, answer), "target": str(other.adapter.target), "path": _path(other)}
            for other in beside(answer)
        ],
    }


def beside(answer: Answer) -> list[Answer]:
    """The runners-up."""
    return [answer._replace(adapter=other, others=[]) for other in answer.others]


def _path(answer: Answer) -> list[dict[str, Any]]:
    return [
        {
            "kind": transition.kind,
            "axes": [before.mesh.size(axis) for axis in transition.axes],
            "groups": groups_of(before, transition),
            "bytes": step.nbytes,
            "seconds": answer.seconds(step.cost),
            "layout": str(step.after),
        }
        for (before, transition), step in zip(answer.adapter.walk, answer.steps, strict=True)
    ]


def _totals(answer: Answer) -> dict[str, Any]:
    steps = answer.steps
    seconds = answer.seconds(sum(step.cost for step in steps))
    return {"steps": len(steps), "bytes": sum(step.nbytes for step in steps), "seconds": seconds}


def _ratio(other: Answer, best: Answer) -> float | None:
    """Seconds by seconds, or bytes by bytes; None where the best sends nothing."""
    ours, theirs = (_totals(a)["bytes" if best.cluster is None else "seconds"] for a in (best, other))
    return theirs / ours if ours else None


def show_answer(console: Console, answer: Answer) -> None:
    """Header, pictures, path, runners-up."""
    show(console, title(answer))
    show(console, "\n".join(_pictures(answer, console.width)))
    if not answer.adapter.steps:
        show(console, "nothing to do: every device holds already what it is to hold")
        return
    console.print(path_table(answer))
    lines = ["bytes: what each device sends, in the mean; lower bound: what any way sends at least"]
    lines += ["", "runners-up, beside the best"] if answer.others else []
    for other in beside(answer):
        sums, ratio = _totals(other), _ratio(other, answer)
        figures = [f"{ratio:6.2f}×" if ratio is not None else "      –", f"{readable_bytes(sums['bytes']):>9}"]
        figures += [f"{text:>8}" for text in other.time(sums["seconds"])]
        path = "; ".join(step.words for step in other.steps)
        lines.append("  ".join([*figures, path]))
    show(console, "\n".join(lines))


def _pictures(answer: Answer, width: int) -> list[str]:
    """The layouts in text form, with pictures where they stay small."""
    layouts = answer.adapter.source, answer.adapter.target
    small = len(layouts[0].mesh.devices) <= MOST_DRAWN
    drawn = [[layout_text(layout), *(layout_picture(layout, width) if small else [])] for layout in layouts]
    lines = side_by_side(drawn[0], drawn[1], width)
    told = small and any(layout.values or layout.mesh.size(layout.free) > 1 for layout in layouts)
    legend = ["a + b: value shares of a sum; a b: replicas"] if told and max(map(len, drawn)) > 1 else []
    return ["", *lines, *legend, ""]


def path_table(answer: Answer) -> Table:
    """The steps, their sum and the lower bound."""
    header = ["step", "transition", "groups of devices", "layout after", "bytes"]
    header += ["seconds"] if answer.cluster is not None else []
    rows = [
        [i, step.words, step.who, layout_text(step.after), readable_bytes(step.nbytes), *answer.time(step.cost)]
        for i, step in enumerate(answer.steps, 1)
    ]
    made = table("the cheapest way", header, rows)
    made.add_section()
    sums, bound = _totals(answer), answer.bound
    made.add_row("", "total", "", "", readable_bytes(sums["bytes"]), *answer.time(sum(s.cost for s in answer.steps)))
    made.add_row("", "lower bound", "", "", readable_bytes(bound), *answer.time(answer.cost.floor(bound)))
    return made
