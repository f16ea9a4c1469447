"""What a plan decides for each op and each leaf of a captured step, as text that is equal where two plans do alike."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jscaler.estimate.owners import ADDED, Owners, leaf_name
from jscaler.ir import Op, PTensor
from jscaler.ir.loop import in_time
from jscaler.ir.name import general
from jscaler.ir.walk import grouped
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize.layout import Layout
from jscaler.materialize.mesh import Axes, DeviceMesh
from jscaler.primitives.algorithms import parts_text
from jscaler.primitives.plan import Fuse
from jscaler.text.device_list import devices_text


@dataclass(frozen=True)
class Decided:
    """What is decided for one op, or for one leaf.

    Attributes:
        text: its split, in space and in time, and whether it is computed again; of a leaf how it is stored and updated.
        place: its stages, or devices, where there are several device groups.
        devices: which device has which part.
    """

    text: str
    place: str = ""
    devices: Hashable = ()


def decided_in(step: StepPlan, owners: Owners) -> dict[str, Decided]:
    """What the plan of ``step`` decides for each op and leaf of the captured step."""
    laid, graph = step.completed, step.graph
    by_owner = grouped((owner, graph[path]) for path, owner in owners.of_ops(step).items() if owner != ADDED)
    leaves = grouped((owners.of_leaf(step, leaf), leaf) for leaf in graph.inputs)
    fused = {one.path: f", {len(one.ops)} ops as one" for one in step.plan.decisions if isinstance(one, Fuse)}
    stages: dict[Hashable, set[int]] = {}
    for home in laid.homes.values():
        stages.setdefault(home.group.unordered, set()).update(() if home.stage is None else (home.stage,))
    found: dict[str, Decided] = {}
    for owner in dict.fromkeys((*by_owner, *leaves)):
        own, every = leaves.get(owner, []), by_owner.get(owner, [])
        ops = [op for op in every if op.kind != "backward" or laid.ops[op.path].placement.origin == "policy"] or every
        if own:
            text, lie = _leaf_text(step, owner, own, ops), [(laid.inputs[t].mesh, _cuts(laid.inputs[t])) for t in own]
        else:
            text = _op_text(step, ops) + fused.get(owner, "")
            text += ", again in the backward" if any(op.again is not None for op in every) else ""
            lie = [_uses(step, op) for op in ops]
        place = _place(step, ops, own, stages) if len(laid.groups) > 1 else ""
        found[owner] = Decided(text, place, frozenset(_parts_of(*one) for one in lie))
    return found


def _op_text(step: StepPlan, ops: Iterable[Op]) -> str:
    """``tokens[0]:2 up.kernel[1]:4 microbatch:8``."""
    texts = []
    for op in ops:
        place, names = step.completed.ops[op.path].placement, step.graph.factor_names(op)
        used = sorted(f"{names.get(f, f)}:{parts_text(n, place.sizes.get(f))}" for f, n in place.parts.items())
        used += [f"{names.get(f, f)}:{n} chunks" for f, n in place.chunks.items()]
        used += [f"share:{place.group.size(tuple(place.shares))}"] if place.shares else []
        used += ["each micro-batch alone"] if general(op.path) in step.plan.alone else []
        used += ["residuals saved"] if op.residuals == "saved" else []
        texts.append(" ".join(filter(None, [*used, in_time(op, step.graph.loops)])) or "copy")
    return "; ".join(dict.fromkeys(texts))


def _leaf_text(step: StepPlan, owner: str, leaves: Sequence[PTensor], ops: Iterable[Op]) -> str:
    """``whole, updated dim 0:8, reduced each time``: as a leaf is stored, then as its moments are, and its update."""
    laid, plan = step.completed, step.plan
    itself = [t for t in leaves if leaf_name(step, t) == owner]
    stored = dict.fromkeys(_cuts_text(laid.inputs[t]) for t in itself)
    updates = [(op, laid.ops[op.path].outputs) for op in ops if op.kind == "update"]
    shapes = {t.shape for t in itself}
    results = [layout for op, every in updates for t, layout in zip(op.outputs, every, strict=True) if t.shape in shapes]
    moments = [laid.inputs[t] for t in leaves if t not in itself and t.shape]
    rest = [text for text in dict.fromkeys(map(_cuts_text, (*moments, *results))) if text not in stored]
    said = [" and ".join(stored), *(f"updated {text}" for text in rest)]
    if updates:
        shard = next((one for leaf, one in plan.shards.items() if general(leaf) == owner), None)
        each_time = plan.accumulation.each_time if shard is None or shard.each_time is None else shard.each_time
        said += ["reduced each time"] if each_time and step.has_time_axes else []
        said += ["gathered once"] if plan.accumulation.gather_once and shard is not None and shard.stored else []
        said += [f"sums in {plan.reduce_dtype}"] if plan.reduce_dtype is not None else []
        said += [f"accumulated in {plan.accumulation.dtype}"] if plan.accumulation.dtype is not None else []
    return ", ".join(said)


def _cuts(layout: Layout) -> dict[str, Axes]:
    """By dim the axes that cut it."""
    by_dim = (tuple(axis for axes in own for axis in axes) for own in layout.by_dim)
    return {f"dim {dim}": axes for dim, axes in enumerate(by_dim) if axes}


def _cuts_text(layout: Layout) -> str:
    """``whole``; ``dim 0:8``."""
    return " ".join(f"{dim}:{layout.mesh.size(axes)}" for dim, axes in _cuts(layout).items()) or "whole"


def _uses(step: StepPlan, op: Op) -> tuple[DeviceMesh, Mapping[str, Axes]]:
    place, names = step.completed.ops[op.path].placement, step.graph.factor_names(op)
    return place.group, {names.get(f, f): axes for f, axes in place.factors.items() if axes}


def _parts_of(mesh: DeviceMesh, cuts: Mapping[str, Axes]) -> Hashable:
    """The number of the part of each thing that is cut that each device has."""
    order = mesh.positions
    parts = tuple(sorted((name, mesh.coordinates(axes)[order].tobytes()) for name, axes in cuts.items()))
    return frozenset(mesh.devices), parts


def _place(step: StepPlan, ops: Iterable[Op], leaves: Iterable[PTensor], of_group: Mapping[Hashable, Iterable[int]]) -> str:
    """``stage 1``; of groups whose stages have no numbers the devices."""
    homes = [step.completed.homes[op.path] for op in ops]
    stages = {home.stage for home in homes if home.stage is not None}
    meshes = {home.group for home in homes} or {step.completed.inputs[leaf].mesh for leaf in leaves}
    stages = stages or {stage for mesh in meshes for stage in of_group.get(mesh.unordered, ())}
    if stages:
        return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, sorted(stages)))}"
    return " ".join(sorted({devices_text(sorted(mesh.devices)) for mesh in meshes}))
