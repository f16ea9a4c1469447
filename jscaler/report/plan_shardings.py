"""``PlanShardings``: a plan as shardings, for those who stay with plain ``jax.jit``.

GSPMD gets the mesh, how arguments and results lie, and constraints on values in between, by the module path of the op that
makes them. What these cannot say is listed, each with its reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jscaler.errors import CaptureError, DeviceError, PlanError
from jscaler.ir import Op, PTensor
from jscaler.ir.overview import Overview, Shown
from jscaler.ir.walk import grouped
from jscaler.lower.emit import physical_mesh
from jscaler.lower.gspmd import Constraints, constrained_step, constraints
from jscaler.lower.leaf_shardings import shardings
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize import DeviceMesh, Layout
from jscaler.text.device_list import devices_text
from jscaler.text.folding import folded, merged
from jscaler.text.tables import aligned
from jscaler.text.units import counted

Row = tuple[str, str, str]  # a name, the type of what is called so, its PartitionSpec; empty if it has none
MOST_NAMED = 4  # of what is left out for one reason
BY_HAND = "for the backward pass: a jax.checkpoint by hand; constrained_step has it"


@dataclass(frozen=True)
class CallTrees:
    """The trees of a step's call, and the devices that it was planned for.

    Attributes:
        ins: of each argument that is not static, in order.
        out: of the result.
        changed: the names of leaves of nnx objects that the step changes; they come after those of the result.
        devices: none where as many are not at hand.
    """

    ins: tuple[Any, ...]
    out: Any
    changed: tuple[str, ...]
    devices: tuple[Any, ...]

    def arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Leaves of the arguments as trees."""
        rest = iter(leaves)
        return tuple(tree.unflatten([next(rest) for _ in range(tree.num_leaves)]) for tree in self.ins)

    def result(self, leaves: Sequence[Any]) -> Any:
        """Leaves of the result as its tree; if nnx objects are changed, a pair of that and their leaves by name."""
        count = self.out.num_leaves
        out = self.out.unflatten(leaves[:count])
        return (out, dict(zip(self.changed, leaves[count:], strict=True))) if self.changed else out


@dataclass(frozen=True)
class LeftOut:
    """What of a plan its shardings do not say.

    Attributes:
        names: of results, regions or parameters; none where it is the whole step.
        why: the reason, and what to write by hand, if anything.
    """

    names: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        named = list(dict.fromkeys(map(folded, self.names)))
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        return f"{', '.join(named[:MOST_NAMED])}{more}: {self.why}" if named else self.why


@dataclass(frozen=True, repr=False)
class PlanShardings(Shown):
    """A plan as shardings, for plain ``jax.jit``; ``print`` it for what to write by hand.

    Attributes:
        mesh: of devices; an ``AbstractMesh`` where these are not at hand.
        in_shardings: of each argument that is not static, by position; an nnx object is the dict of its arrays.
        out_shardings: of the result. If the step changes nnx objects, a pair: the result, and their arrays by name.
        constraints: path of a forward op, or of an update -> the spec of each of its results; None where there is none.
        reads: path of such an op -> name of a tensor that it reads otherwise than it lies -> the spec of that.
        gradients: name of a parameter whose gradient the plan shards -> the spec of that.
        left_out: what of the plan these do not say.
        constrained_step: the step with the constraints put in, of the arguments that are not static, by position.
        text: what ``print`` shows.

    Example:
        >>> found = lowered.plan.as_shardings()
        >>> found.in_shardings[1]["tokens"].spec == jax.sharding.PartitionSpec("x0")
        True
        >>> places = {"in_shardings": found.in_shardings, "out_shardings": found.out_shardings}
        >>> plain, constrained = jax.jit(step, **places), jax.jit(found.constrained_step, **places)
        >>> bool(jnp.allclose(plain(state, batch)[1], constrained(state, batch)[1]))
        True
    """

    mesh: Mesh | AbstractMesh
    in_shardings: Any
    out_shardings: Any
    constraints: Mapping[str, tuple[PartitionSpec | None, ...]]
    reads: Mapping[str, Mapping[str, PartitionSpec]]
    gradients: Mapping[str, PartitionSpec]
    left_out: tuple[LeftOut, ...]
    constrained_step: Callable[..., Any]
    text: str = field(compare=False)

    def overview(self) -> Overview:
        leaves = counted(len(jax.tree.leaves(self.in_shardings)), "leaf", "leaves")
        said = f"{leaves} of arguments, {counted(len(self.constraints), 'constrained op')}"
        return Overview(
            [
                f"PlanShardings on mesh {dict(self.mesh.shape)}: {said}, {len(self.left_out)} left out",
                "print(…) lists them; jax.jit(found.constrained_step, in_shardings=found.in_shardings, …) runs them",
            ]
        )

    def __str__(self) -> str:
        """The mesh, and by path the spec of each leaf, result and gradient; layer numbers are ``*``."""
        return self.text


def plan_shardings(step: StepPlan, devices: Sequence[Any], trees: CallTrees | None = None) -> PlanShardings:
    """The shardings of ``step`` on ``devices``, of none on an abstract mesh; without ``trees`` those of flat leaves.

    Raises:
        PlanError: the plan has several device groups.
        DeviceError: there are devices, and not as many as the plan is for.
    """
    group, *others = step.completed.groups
    if others or step.graph.leaf_parts:
        places = ", ".join(devices_text(one.devices) for one in (group, *others))
        raise PlanError(
            f"plan '{step.name}' has stages, on {places}, and shardings are of one mesh that all ops share; take those of "
            "one stage on all devices: step.without_stages().lower(…).plan.as_shardings()"
        )
    if devices and len(devices) != step.plan.num_devices:
        count = counted(step.plan.num_devices, "device")
        raise DeviceError(f"plan '{step.name}' is for {count}, and {len(devices)} are given; give as many as it is for")
    mesh, graph, told = physical_mesh(group, devices), step.source, constraints(step)
    ins, outs = shardings(step, devices)
    flat = constrained_step(graph, told, mesh)
    makers = [op for op in graph.ops if op.kind != "backward"]
    pairs = [pair for call in graph.calls for pair in zip(call.wrt, call.gradients, strict=True)]
    left_out = tuple(_left_out(step, makers, told))
    return PlanShardings(
        mesh,
        trees.arguments(ins) if trees is not None else ins,
        trees.result(outs) if trees is not None else list(outs),
        {op.path: tuple(map(told.lies.get, op.outputs)) for op in makers if any(t in told.lies for t in op.outputs)},
        {path: {t.name: spec for t, spec in found} for path, found in _by_op(told).items()},
        {of.name: told.lies[gradient] for of, gradient in pairs if gradient in told.lies},
        left_out,
        _of_trees(flat, graph.inputs, trees) if trees is not None else flat,
        _text(step, ins, outs, told, left_out),
    )


def _by_op(told: Constraints) -> dict[str, list[tuple[PTensor, PartitionSpec]]]:
    return grouped((path, (tensor, spec)) for (path, tensor), spec in told.read.items())


def _of_trees(flat: Callable[..., list[Any]], inputs: Sequence[PTensor], trees: CallTrees) -> Callable[..., Any]:
    """The step of flat leaves as one of trees."""
    expected = jax.tree.structure(trees.arguments(range(len(inputs))))

    def constrained(*args: Any) -> Any:
        leaves, given = jax.tree.flatten(args)
        if given != expected:
            raise CaptureError(f"the constrained step takes what the step was lowered for, {expected}, not {given}")
        for tensor, leaf in zip(inputs, leaves, strict=True):
            if np.shape(leaf) != tensor.shape:
                raise CaptureError(
                    f"'{tensor.name}' has shape {np.shape(leaf)}, and the step was lowered for {tensor.shape}: lower the "
                    "step for these arguments, and take the shardings of that plan"
                )
        return trees.result(flat(*leaves))

    return constrained


def _left_out(step: StepPlan, makers: Sequence[Op], told: Constraints) -> list[LeftOut]:
    layouts, mesh = step.layouts, step.completed.groups[0]
    found: dict[str, list[str]] = {}
    if step.has_time_axes:
        found["parts in time (micro-batches, chunks): the step runs whole; by hand a lax.scan over parts"] = []
    for tensor in (t for op in makers for t in op.outputs if t not in told.lies):
        found.setdefault(_reason(step, layouts.get(tensor), mesh), []).append(_result(tensor))
    own = {region.name for op in (step.captured or step.source).ops for region in op.remat}
    again = [region.name for op in step.source.ops for region in op.remat if region.name not in own]
    gathered = [t.name for t in step.source.inputs if t in step.refetched]
    found |= {f"computed again {BY_HAND}": again} if again else {}
    found |= {f"gathered again {BY_HAND}": gathered} if gathered else {}
    return [LeftOut(tuple(dict.fromkeys(names)), why) for why, names in found.items()]


def _reason(step: StepPlan, layout: Layout | None, mesh: DeviceMesh) -> str:
    """Why a result in ``layout`` has no spec; of None the plan makes it in another way."""
    if layout is None:
        return "made in parts, in time" if step.has_time_axes else "made by other ops, which the plan puts in its place"
    if layout.values:
        return "partial sums (value shares), constrained only where they are read as a whole"
    if layout.mesh != mesh:
        return "on the devices in another order"
    return "blocks of unequal sizes" if layout.uneven else "cut inside a dim"


def _text(step: StepPlan, ins: Sequence[Any], outs: Sequence[Any], told: Constraints, left_out: Sequence[LeftOut]) -> str:
    """What to write by hand. Updates are not listed: they lie as the leaves that they make."""
    graph = step.source
    forward = [op for op in graph.ops if op.kind == "forward"]
    results = [t for op in forward for t in op.outputs if t.shape]
    reads = [(op, t) for op in forward for t in op.inputs if t.shape]
    pairs = [pair for call in graph.calls for pair in zip(call.wrt, call.gradients, strict=True)]
    new = [i for i, out in enumerate(outs) if i not in graph.next_version or out != ins[graph.next_version[i]]]
    sections = {
        "in_shardings": [_row(t.name, t, _spec(s)) for t, s in zip(graph.inputs, ins, strict=True)],
        "out_shardings, but for state that lies as it came": [
            _row(graph.output_names[i], graph.outputs[i], _spec(outs[i])) for i in new
        ],
        "with_sharding_constraint of results of": [_row(_result(t), t, told.lies.get(t)) for t in results],
        "with_sharding_constraint of what is read": [
            _row(f"{_result(t)} by {op.path}", t, told.read.get((op.path, t))) for op, t in reads
        ],
        "with_sharding_constraint of gradients of": [_row(of.name, of, told.lies.get(t)) for of, t in pairs],
    }
    lines = [f"plan {step.name}", _mesh_text(step.completed.groups[0])]
    for title, rows in sections.items():
        lines += ["", title, *aligned([("", "", ""), *found])[1:]] if (found := _folded(rows)) else []
    return "\n".join([*lines, *(["", "left out", *map(str, left_out)] if left_out else [])])


def _row(name: str, tensor: PTensor, spec: PartitionSpec | None) -> Row:
    return name, tensor.type, f"P({', '.join(map(repr, spec))})" if spec is not None else ""


def _spec(sharding: Any) -> PartitionSpec:
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _result(tensor: PTensor) -> str:
    """A result by the path of its op, with its number unless it is the first."""
    return tensor.name.removesuffix(":0")


def _folded(rows: Sequence[Row]) -> list[Row]:
    """Rows that differ in a layer's number, or in one word, as one; layers whose specs differ keep their numbers."""
    specs: dict[tuple[str, str], set[str]] = {}
    for name, kind, spec in rows:
        specs.setdefault((folded(name), kind), set()).add(spec)
    told = [row for row in rows if row[2]]
    short = [(folded(name) if len(specs[folded(name), kind]) == 1 else name, kind, spec) for name, kind, spec in told]
    alike = list(dict.fromkeys(short))
    return merged(alike, lambda row: row[0], lambda row: row[1:], lambda name, found: (name, *found[0][1:]))


def _mesh_text(group: DeviceMesh) -> str:
    """The line that makes the mesh."""
    count, sizes = len(group.devices), tuple(size for _, size in group.axes)
    first = group.devices == tuple(range(count))
    chosen = f"jax.devices()[:{count}]" if first else f"[jax.devices()[i] for i in {list(group.devices)}]"
    return f"mesh = Mesh(np.array({chosen}).reshape({', '.join(map(str, sizes)) or '()'}), {group.names})"
