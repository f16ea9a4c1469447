"""State that a sharded plan leaves whole on every device that could hold a part of it, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from jscaler.ir import Graph, PTensor
from jscaler.ir.kinds import tensor_kinds
from jscaler.materialize import Completed
from jscaler.primitives import Plan
from jscaler.text.folding import folded, merged
from jscaler.text.units import counted


@dataclass(frozen=True)
class _Whole:
    """Leaves of one shape that stay whole for one reason, layer numbers as ``*``."""

    name: str
    aval: str
    why: str
    count: int
    nbytes: int

    def __str__(self) -> str:
        times = f" ×{self.count}" if self.count > 1 else ""
        return f"          └ {self.name} {self.aval}{times}, {self.nbytes} bytes: {self.why}"


def replicated_lines(graph: Graph, plan: Plan, completed: Completed) -> list[str]:
    """What of parameters and optimizer state lies whole along the axes of the plan's shards; like leaves together.

    Parameters that the plan itself keeps whole (ZeRO-1) are not among them; scalars are counted only.
    """
    axes = {a for own in completed.shards.values() for a in own}
    if not axes:
        return []
    parts = max(group.size(tuple(a for a in group.names if a in axes)) for group in completed.groups)
    whole: list[_Whole] = []
    scalars = 0
    for tensor, kind in tensor_kinds(graph).items():
        layout = completed.inputs.get(tensor)
        if kind not in ("parameter", "optimizer") or layout is None or axes & {a for cut in layout.cuts for a in cut}:
            continue
        if not tensor.shape:
            scalars += 1
        elif tensor.name not in plan.shards or plan.shards[tensor.name].stored:
            whole.append(_Whole(folded(tensor.name), tensor.type, _why(graph, tensor, parts), 1, tensor.nbytes))
    if not whole and not scalars:
        return []
    said = [counted(len(whole), "leaf", "leaves")] * bool(whole) + [counted(scalars, "scalar")] * bool(scalars)
    rows = merged(whole, lambda row: row.name, lambda row: (row.aval, row.why), _together)
    return [f"replicated over the {parts} devices that shards are split over: {' and '.join(said)}", *map(str, rows)]


def _together(name: str, rows: Sequence[_Whole]) -> _Whole:
    return _Whole(name, rows[0].aval, rows[0].why, sum(row.count for row in rows), sum(row.nbytes for row in rows))


def _why(graph: Graph, tensor: PTensor, parts: int) -> str:
    if not graph.consumers.get(tensor) and tensor not in graph.flow.linked:
        return "no op reads it"
    return "as its readers want it" if any(size % parts == 0 for size in tensor.shape) else "nothing divides"
