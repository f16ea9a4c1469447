"""State that a sharded plan leaves whole on every device that could hold a part of it, and why."""

from jscaler.ir import Graph, PTensor
from jscaler.ir.kinds import tensor_kinds
from jscaler.materialize import Completed
from jscaler.primitives import Plan


def replicated_lines(graph: Graph, plan: Plan, completed: Completed) -> list[str]:
    """One line per leaf of parameters and optimizer state that lies whole along the axes of the plan's shards.

    Parameters that the plan itself keeps whole (ZeRO-1) are not among them; scalars are counted only.
    """
    axes = {a for own in completed.shards.values() for a in own}
    if not axes:
        return []
    parts = completed.mesh.size(tuple(axes))
    whole, scalars = [], 0
    for tensor, kind in tensor_kinds(graph).items():
        layout = completed.inputs.get(tensor)
        if kind not in ("parameter", "optimizer") or layout is None or axes & {a for cut in layout.cuts for a in cut}:
            continue
        if not tensor.shape:
            scalars += 1
        elif tensor.name not in plan.shards or plan.shards[tensor.name].stored:
            aval = tensor.aval.str_short(short_dtypes=True)
            whole.append(f"          └ {tensor.name} {aval}, {tensor.nbytes} bytes: {_why(graph, tensor, parts)}")
    if not whole and not scalars:
        return []
    count = f"{scalars} scalar{'s' * (scalars != 1)}"
    leaves = f"{len(whole)} {'leaf' if len(whole) == 1 else 'leaves'}"
    said = [leaves] * bool(whole) + [count] * bool(scalars)
    return [f"replicated over the {parts} devices that shards are split over: {' and '.join(said)}", *whole]


def _why(graph: Graph, tensor: PTensor, parts: int) -> str:
    if not graph.consumers.get(tensor) and tensor not in graph.linked:
        return "no op reads it"
    return "as its readers want it" if any(size % parts == 0 for size in tensor.shape) else "nothing divides"
