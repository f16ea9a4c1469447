"""``explain``: a plan as tables that a person can read."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from jscaler.estimate.traffic import summed
from jscaler.materialize.placement import RunnerUp
from jscaler.report.leaves import LeafRow, together
from jscaler.report.moved_tensors import MovedTensor, moved_text
from jscaler.report.schedule_rows import picture
from jscaler.report.step_report import OpRow, StepReport, grouped_moves
from jscaler.report.step_text import COUNTS, layout_legend
from jscaler.text.device_list import devices_text
from jscaler.text.folding import braced, merged
from jscaler.text.tables import aligned
from jscaler.text.units import counted, readable_bytes

Section = Literal["ops", "leaves", "memory"]
SECTIONS: tuple[Section, ...] = ("ops", "leaves", "memory")
MOST_LISTED = 8  # leaves that are named of those that stay whole


def explain(report: StepReport, sections: Iterable[Section] = SECTIONS) -> str:
    """A report as text.

    ``ops``: one line per group of like ops (layer numbers folded), and below it one per tensor that is moved for it. A
    group's line: where it runs and why, if there are several device groups; its split, what the factors are (the dim of the
    argument that they come from), who decided and why, the collectives in front of it with the bytes that each device
    sends, how it leaves its (first) result, and the runner-up of what was filled in. Behind these stand, if there are
    several groups, what crosses between them, the blocks that they run (how often, their ops, what a device keeps of a
    micro-batch for the backward block of its stage) and the order in which they run them. Of kind ``again`` are clones of
    forward ops that the backward pass computes once more; below the table stands what is kept instead, and what is lost:
    ops that are copied, and tensors that are gathered, though the plan splits what they carry. Layouts are
    ``R<replicas> V<value shares> D<parts of each dim>``; the first is put into words below the first table that has any.

    ``leaves``: how the leaves of the step's arguments lie, who decided, and the runner-up; and what stays whole though
    others are split. ``memory``: bytes by kind of tensor, and what lives at the peak.
    """
    chosen = list(sections)
    lines = [heading(report)]
    if report.idle:
        lines.append(f"devices {devices_text(report.idle)} run nothing and hold nothing")
    lines += _ops(report) if "ops" in chosen else []
    lines += _leaves(report, explained=any(map(COUNTS.search, lines))) if "leaves" in chosen else []
    lines += _memory(report) if "memory" in chosen else []
    return "\n".join([*lines, total(report)])


def heading(report: StepReport) -> str:
    """The plan's name, its devices, and how many decisions it makes."""
    head = f"plan {report.plan} ({report.digest}) on {counted(report.num_devices, 'device')}, {meshes_text(report.groups)}"
    return f"{head}, {counted(report.num_decisions, 'decision')}"


def meshes_text(groups: Iterable[Mapping[str, int]]) -> str:
    """``mesh x0=2 × x1=4``; of several device groups the mesh of each."""
    meshes = (" × ".join(f"{name}={size}" for name, size in mesh.items()) or "one device" for mesh in groups)
    return f"mesh {'; '.join(meshes)}"


def total(report: StepReport) -> str:
    """All that a step sends."""
    said = [moved_text(report.total)] if report.total else []
    if report.crossings:
        crossed = readable_bytes(sum(one.nbytes for one in report.crossings))
        count = sum(one.times for one in report.crossings)
        said.append(f"{count}× crossing {crossed} (of all devices)")
    return f"total: {', '.join(said) or 'no communication'}"


def _ops(report: StepReport) -> list[str]:
    rows = [row for row in report.ops if not row.idle]
    several = len(report.groups) > 1
    on = ("runs on",) if several else ()
    table = [
        (
            "kind",
            "ops",
            "n",
            *on,
            "split",
            "factors",
            "decided",
            "collectives in front (bytes per device)",
            "leaves",
            "runner-up",
        )
    ]
    below: list[Sequence[str]] = [[]]
    for row in _merged_updates(rows):
        runner_up = _runners_up(row.runners_up, report)
        kind = "again" if row.again else row.kind
        split = f"{row.split} in time {row.in_time}" if row.in_time else row.split
        on = (_runs_on(row),) if several else ()
        what = kind, row.path, str(row.count), *on
        table.append((*what, split, row.factors, row.decided, moved_text(row.moved), row.layout, runner_up))
        below.append(_details(row.moves))
    lines = aligned(table, below) if rows else []
    lines += layout_legend(lines)
    hidden: dict[str, int] = {}
    for row in (row for row in report.ops if row.idle):
        where = f" on {_runs_on(row)}" if several else ""
        hidden[where] = hidden.get(where, 0) + row.count
    lines += [f"{n} ops{where} are copied on every device, as all that they read is" for where, n in hidden.items()]
    lines += _lost(report)
    lines += report.recomputed
    lines += _crossings(report)
    if report.results:
        moved = summed([move.moved for move in report.results])
        lines += [f"results: {moved_text(moved)}", *_details(report.results)]
    return lines


def _lost(report: StepReport) -> list[str]:
    """What is copied or gathered though the plan splits it, and what runs in several loops."""
    lost = [report.lost.summary, *(f"          └ {line}" for line in report.lost.lines)] if report.lost.ops else []
    return [*lost, report.apart] if report.apart else lost


def _runs_on(row: OpRow) -> str:
    """The devices of its group, and why it is on these."""
    return f"{devices_text(row.devices)} {row.home}".rstrip()


def _crossings(report: StepReport) -> list[str]:
    """What goes from group to group, a line for each tensor."""
    if not report.crossings:
        return []
    table = [("crosses", "n", "from", "to", "leaves", "arrives", "bytes of all devices")]
    for one in report.crossings:
        before, after = (text.split(" on ")[0] for text in (one.before, one.after))
        groups = devices_text(one.source), devices_text(one.target)
        table.append((one.tensor, str(one.times), *groups, before, after, readable_bytes(one.nbytes)))
    return [*aligned(table), *_blocks(report), *picture(report.schedule)]


def _blocks(report: StepReport) -> list[str]:
    """What groups run between crossings, each an executable."""
    table = [("block", "n", "on", "ops", "from", "to", "keeps for its backward", "sends")]
    for one in report.blocks:
        kept = readable_bytes(one.kept) if one.kept else ""
        row = one.name, str(one.times), devices_text(one.devices), str(one.num_ops), one.first, one.last, kept
        table.append((*row, " ".join(one.sends)))
    return aligned(table) if report.blocks else []


def _merged_updates(rows: Sequence[OpRow]) -> list[OpRow]:
    """Update ops that do the same for different leaves as one row; forward and backward keep the program's order."""

    def join(path: str, found: Sequence[OpRow]) -> OpRow:
        moves = grouped_moves([move for row in found for move in row.moves])
        factors = found[0].factors + (", …" if len({row.factors for row in found}) > 1 else "")
        count = sum(row.count for row in found)
        return dataclasses.replace(found[0], path=path, count=count, moves=moves, factors=factors)

    def rest(row: OpRow) -> tuple[object, ...]:
        return row.split, row.decided, row.layout, row.runners_up, bool(row.moves), row.devices, row.home

    updates = merged([row for row in rows if row.kind == "update"], lambda row: row.path, rest, join, keep_last=True)
    return [*(row for row in rows if row.kind != "update"), *updates]


def _details(moves: Sequence[MovedTensor]) -> list[str]:
    """One line per tensor and way; tensors that differ in one part of their names together."""

    def join(name: str, found: Sequence[MovedTensor]) -> MovedTensor:
        return MovedTensor(name, found[0].way, summed([move.moved for move in found]))

    alike = merged(moves, lambda move: move.tensor, lambda move: (move.way, tuple(move.moved)), join)
    return [f"          └ {move.tensor}: {move.way}, {moved_text(move.moved)}" for move in alike]


def _leaves(report: StepReport, explained: bool) -> list[str]:
    several = len(report.groups) > 1
    on = ("on",) if several else ()
    table = [("leaf", "path", "n", *on, "whole", "lies", "per device", "decided", "runner-up")]
    for row in _merged_leaves(report.leaves):
        runner_up = _runners_up([row.runner_up] if row.runner_up else [], report)
        whole, part = readable_bytes(row.nbytes), readable_bytes(row.nbytes_per_device)
        on = (devices_text(row.devices),) if several else ()
        table.append((row.kind, row.name, str(row.count), *on, whole, row.layout, part, row.decided, runner_up))
    lines = aligned(table) if report.leaves else []
    lines += [] if explained else layout_legend(lines)
    return [*lines, *_kernels(report), *(report.not_sharded or _stay_whole(report))]


def _kernels(report: StepReport) -> list[str]:
    """How many kernels and tables lie in parts, and which do not; nothing if none does."""
    kernels = [row for row in report.leaves if row.kind == "parameter" and len(row.shape) > 1]
    whole = _of_all_groups([row for row in kernels if row.replicated])
    count, left = sum(row.count for row in kernels), sum(row.count for row in whole)
    if left == count:
        return []
    names = ", ".join(f"{row.name} {row.shape}" for row in whole[:MOST_LISTED])
    more = f", and {len(whole) - MOST_LISTED} more" if len(whole) > MOST_LISTED else ""
    return [
        f"{count - left} of {count} kernels (two dims and more) lie in parts" + (f"; whole: {names}{more}" if whole else "")
    ]


def _merged_leaves(rows: Sequence[LeafRow]) -> list[LeafRow]:
    return merged(rows, lambda row: row.name, _alike, _leaves_together)


def _of_all_groups(rows: Sequence[LeafRow]) -> list[LeafRow]:
    return _merged_leaves([dataclasses.replace(row, devices=()) for row in rows])


def _alike(row: LeafRow) -> tuple[object, ...]:
    return row.kind, row.shape, row.dtype, row.layout, row.decided.partition(":")[0], row.runner_up, row.devices


def _leaves_together(name: str, rows: Sequence[LeafRow]) -> LeafRow:
    decided = braced([row.decided for row in rows])
    shown = f"{rows[0].decided}, …" if ", " in decided else decided
    return dataclasses.replace(together(name, rows), decided=shown)


def _stay_whole(report: StepReport) -> list[str]:
    rows = sorted(_of_all_groups(report.replicated), key=lambda row: -row.nbytes_per_device)
    if not rows:
        return []
    count, nbytes = sum(row.count for row in rows), sum(row.nbytes_per_device for row in rows)
    names = ", ".join(f"{row.name} ({readable_bytes(row.nbytes_per_device)})" for row in rows[:MOST_LISTED])
    more = f", and {sum(row.count for row in rows[MOST_LISTED:])} smaller" if len(rows) > MOST_LISTED else ""
    leaves = "1 leaf of state stays" if count == 1 else f"{count} leaves of state stay"
    return [f"{leaves} whole on every device, {readable_bytes(nbytes)} in all: {names}{more}"]


def _memory(report: StepReport) -> list[str]:
    table = [("bytes", "n", "whole", "per device")]
    for row in report.memory:
        table.append((row.kind, str(row.count), readable_bytes(row.nbytes), readable_bytes(row.nbytes_per_device)))
    peak = report.estimate
    parts = ("arguments", "gradients", "activations", "temporaries")
    shown = ", ".join(f"{part} {readable_bytes(getattr(peak, part))}" for part in parts)
    where = f" in {peak.at}" if peak.at else ""
    return [*aligned(table), f"peak per device, as estimated: {readable_bytes(peak.peak)}{where}: {shown}"]


def _runners_up(found: Sequence[RunnerUp], report: StepReport) -> str:
    """``copy (+cost 384)``; with its axis where several were decided."""
    named = len(found) > 1 and any(len(mesh) > 1 for mesh in report.groups)

    def one(runner_up: RunnerUp) -> str:
        seconds = report.unit == "seconds"
        exact = round(runner_up.more * 1e6, 1) if seconds else round(runner_up.more)
        more = f"{exact + 0.0:+.1f} µs" if seconds else f"{exact:+d}"  # + 0.0: no minus before a rounded zero
        cost = more if seconds else f"{more[0]}cost {more[1:]}"
        return f"{runner_up.axis + ': ' if named and runner_up.axis else ''}{runner_up.what} ({cost})"

    return ", ".join(map(one, found))
