"""``explain``: a plan as a table that a person can read."""

import math
import re
from collections.abc import Mapping
from typing import Any

from jscaler.ir import Graph, Op
from jscaler.ir.loop import chain_of
from jscaler.lower.numbering import FlatProgram
from jscaler.lower.program import Adapt, Extend, Program, walk
from jscaler.materialize import Completed
from jscaler.primitives import Plan


def explain(graph: Graph, plan: Plan, completed: Completed, program: Program, flat: FlatProgram) -> str:
    """One line per group of like ops (layer numbers folded): split, who decided, collectives and bytes per device."""
    sent = bytes_by_reader(program, flat)
    groups: dict[tuple[str, ...], list[Op]] = {}

    def times(op: Op) -> int:
        """How often a loop runs it."""
        return math.prod(graph.loops[name].length for name in chain_of(op.loop, graph.loops))

    for op in graph.ops:
        place = completed.ops[op.path].placement
        key = (op.kind, _folded(op.path), place.describe(completed.mesh), place.origin, place.runner_up)
        groups.setdefault(key, []).append(op)
    rows = [("kind", "ops", "n", "split", "decided", "collectives in front (bytes per device)", "runner-up")]
    for (kind, path, split, origin, runner_up), ops in groups.items():
        moved = _sum([sent.get(op.path, {}) for op in ops])
        if not moved and origin != "policy" and split == "copy" and not runner_up:
            continue  # copied because all it reads is copied: nothing to tell
        rows.append((kind, path, str(sum(times(op) for op in ops)), split, origin, _moves(moved), runner_up))
    results = _moves(sent.get("", {}))
    hidden = sum(times(op) for op in graph.ops) - sum(int(r[2]) for r in rows[1:])
    axes = " × ".join(f"{n}={s}" for n, s in completed.mesh.axes) or "one device"
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    total = _sum(list(sent.values()))
    return "\n".join([
        f"plan {plan.name} ({plan.digest}) on {plan.num_devices} device(s), mesh {axes}, {len(plan.decisions)} decisions",
        *(lines if len(rows) > 1 else []),
        *([f"{hidden} ops are copied on every device, as all that they read is"] if hidden else []),
        *([f"results: {results}"] if results else []),
        f"total: {_moves(total) or 'no communication'}",
    ])  # fmt: skip


def bytes_by_reader(program: Program, flat: FlatProgram) -> dict[str, dict[str, tuple[int, float]]]:
    """Op path -> collective -> (count, bytes each device sends) of the adapters in front of it; "" for the results."""
    itemsizes = {t.output: t.tensor.itemsize for t in (*program.adapters, *program.halos)}
    # adapters that moved across a cast carry its narrow side
    itemsizes |= {e.adapt.output: _itemsize(e.input) for e in flat.exchanges}
    kept = {e.adapt.output for e in flat.exchanges}  # equal ones are made once
    table: dict[str, dict[str, tuple[int, float]]] = {}
    waiting: list[tuple[Adapt | Extend, int]] = []
    for task, times in walk(program.tasks):
        if isinstance(task, Adapt | Extend):
            waiting += [(task, times)] if task.output in kept else []
        else:
            _charge(table, task.op.path, waiting, itemsizes)
            waiting = []
    _charge(table, "", waiting, itemsizes)
    return table


def _charge(
    table: dict[str, dict[str, tuple[int, float]]],
    path: str,
    adapters: list[tuple[Adapt | Extend, int]],
    itemsizes: Mapping[int, int],
) -> None:
    for adapt, times in adapters:
        for kind, nbytes in adapt.sent(itemsizes[adapt.output]):
            count, sent = table.setdefault(path, {}).get(kind, (0, 0.0))
            table[path][kind] = (count + times, sent + times * nbytes)


def _sum(parts: list[dict[str, tuple[int, float]]]) -> dict[str, tuple[int, float]]:
    total: dict[str, tuple[int, float]] = {}
    for part in parts:
        for kind, (count, sent) in part.items():
            known = total.get(kind, (0, 0.0))
            total[kind] = (known[0] + count, known[1] + sent)
    return total


def _moves(moved: Mapping[str, tuple[int, float]]) -> str:
    return ", ".join(f"{count}× {kind} {readable_bytes(sent)}" for kind, (count, sent) in moved.items())


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
