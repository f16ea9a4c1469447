"""``explain``: a plan as a table that a person can read."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jscaler.ir import Graph, Op
from jscaler.ir.loop import chain_of
from jscaler.lower.numbering import FlatProgram
from jscaler.lower.program import Adapt, Extend, Program, walk
from jscaler.materialize import Completed, Layout
from jscaler.materialize.placement import Placement
from jscaler.primitives import Plan
from jscaler.report.replicated import replicated_lines

Moved = dict[str, tuple[int, float]]  # kind of collective -> count, bytes that each device sends


@dataclass(frozen=True)
class Move:
    """What stands in front of an op: a tensor on its way from one layout to another.

    Attributes:
        way: the layouts, in R V D text.
        moved: the collectives, over all iterations of a loop.
    """

    tensor: str
    way: str
    moved: Moved


def explain(graph: Graph, plan: Plan, completed: Completed, program: Program, flat: FlatProgram) -> str:
    """One line per group of like ops (layer numbers folded), and below it one per tensor that is moved for it.

    A group's line: its split, who decided and why, the collectives in front of it with the bytes that each device sends,
    how it leaves its (first) result, and the runner-up of what was filled in. Layouts are ``R<replicas> V<value shares>
    D<parts of each dim>``.
    """
    moves = moves_by_reader(program, flat)
    groups: dict[tuple[str, ...], list[Op]] = {}

    def times(op: Op) -> int:
        """How often a loop runs it."""
        return math.prod(graph.loops[name].length for name in chain_of(op.loop, graph.loops))

    for op in graph.ops:
        laid = completed.ops[op.path]
        place, left = laid.placement, layout_text(laid.outputs[0]) if laid.outputs else ""
        key = (op.kind, _folded(op.path), place.describe(completed.mesh), why(place), left, place.runner_up)
        groups.setdefault(key, []).append(op)
    rows = [("kind", "ops", "n", "split", "decided", "collectives in front (bytes per device)", "leaves", "runner-up")]
    details: list[list[str]] = [[]]
    for (kind, path, split, reason, left, runner_up), ops in groups.items():
        mine = [move for op in ops for move in moves.get(op.path, [])]
        moved = _sum([move.moved for move in mine])
        if not moved and reason != "policy" and split == "copy" and not runner_up:
            continue  # copied because all it reads is copied: nothing to tell
        count = str(sum(times(op) for op in ops))
        rows.append((kind, path, count, split, reason, _moves(moved), left, runner_up))
        details.append(_details(mine))
    results = [move for move in moves.get("", []) if _moves(move.moved)]
    hidden = sum(times(op) for op in graph.ops) - sum(int(r[2]) for r in rows[1:])
    axes = " × ".join(f"{n}={s}" for n, s in completed.mesh.axes) or "one device"
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = []
    for row, below in zip(rows, details, strict=True):
        lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip(), *below]
    total = _sum([move.moved for every in moves.values() for move in every])
    return "\n".join([
        f"plan {plan.name} ({plan.digest}) on {plan.num_devices} device(s), mesh {axes}, {len(plan.decisions)} decisions",
        *(lines if len(rows) > 1 else []),
        *([f"{hidden} ops are copied on every device, as all that they read is"] if hidden else []),
        *([f"results: {_moves(_sum([m.moved for m in results]))}", *_details(results)] if results else []),
        *replicated_lines(graph, plan, completed),
        f"total: {_moves(total) or 'no communication'}",
    ])  # fmt: skip


def why(placement: Placement) -> str:
    """Who decided a placement, and for what reason."""
    if placement.origin == "policy":
        return "policy"
    if placement.origin == "mirrored":
        return "mirrored, shares passed on" if placement.shares else "mirrored"
    if placement.shares:
        return "filled: passes value shares on"
    if placement.factors:
        return "filled: the split of its inputs" if placement.runner_up else "filled: the split that its reader wants"
    return "filled: whole values cost least" if placement.runner_up else "filled: no cheaper use"


def layout_text(layout: Layout) -> str:
    """A layout without its devices."""
    return layout.counts


def _details(moves: Sequence[Move]) -> list[str]:
    """One line per tensor and way, layer numbers folded."""
    groups: dict[tuple[str, str], list[Moved]] = {}
    for move in moves:
        if _moves(move.moved):
            groups.setdefault((_folded(move.tensor), move.way), []).append(move.moved)
    return [f"          └ {tensor}: {way}, {_moves(_sum(moved))}" for (tensor, way), moved in groups.items()]


def moves_by_reader(program: Program, flat: FlatProgram) -> dict[str, list[Move]]:
    """Op path -> what is moved in front of it; "" for the results."""
    itemsizes = {t.output: t.tensor.itemsize for t in (*program.adapters, *program.halos)}
    # adapters that moved across a cast carry its narrow side
    itemsizes |= {e.adapt.output: _itemsize(e.input) for e in flat.exchanges}
    kept = {e.adapt.output for e in flat.exchanges}  # equal ones are made once
    table: dict[str, list[Move]] = {}
    waiting: list[Move] = []
    for task, times in walk(program.tasks):
        if isinstance(task, Adapt | Extend):
            waiting += [_move(task, times, itemsizes[task.output])] if task.output in kept else []
        else:
            table.setdefault(task.op.path, []).extend(waiting)
            waiting = []
    table[""] = waiting
    return table


def _move(adapt: Adapt | Extend, times: int, itemsize: int) -> Move:
    moved: Moved = {}
    for kind, nbytes in adapt.sent(itemsize):
        count, sent = moved.get(kind, (0, 0.0))
        moved[kind] = (count + times, sent + times * nbytes)
    if isinstance(adapt, Extend):
        return Move(adapt.tensor.name, f"{layout_text(adapt.layout)} and the rows around each part", moved)
    return Move(adapt.tensor.name, f"{layout_text(adapt.adapter.source)} → {layout_text(adapt.adapter.target)}", moved)


def _sum(parts: Sequence[Moved]) -> Moved:
    total: Moved = {}
    for part in parts:
        for kind, (count, sent) in part.items():
            known = total.get(kind, (0, 0.0))
            total[kind] = (known[0] + count, known[1] + sent)
    return total


def _moves(moved: Moved) -> str:
    """The collectives of a table; what stays on its device is left out."""
    sent = {kind: found for kind, found in moved.items() if kind not in ("slice", "value_mask")}
    return ", ".join(f"{count}× {kind} {readable_bytes(nbytes)}" for kind, (count, nbytes) in sent.items())


def readable_bytes(number: float) -> str:
    """``1.5 MiB`` for 1572864."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def _folded(path: str) -> str:
    """Layer numbers as ``*``: ``block_*/mlp/up/dot``."""
    return re.sub(r"(?<=[_/.])\d+(?=/|@|$|\.)", "*", path)


def _itemsize(atom: Any) -> int:
    return atom.aval.dtype.itemsize
