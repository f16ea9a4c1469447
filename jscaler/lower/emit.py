"""Emit a flat program as one function of whole arrays: ``jax.shard_map`` over a mesh of devices, or of none yet."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jscaler.capture.jaxprs import evaluate, make_jaxpr, shape
from jscaler.lower.emit_collectives import exchange
from jscaler.lower.flat_program import Exchange, FlatLoop, Item
from jscaler.lower.flat_program import results as results_of
from jscaler.lower.halo import extend
from jscaler.lower.program import Extend
from jscaler.lower.scopes import adapter_scope
from jscaler.lower.segment import PlacedBlock
from jscaler.materialize import DeviceMesh, Layout


def physical_mesh(group: DeviceMesh, devices: Sequence[Any]) -> Mesh | AbstractMesh:
    """A group's mesh of real devices: logical device i is ``devices[i]``. Of none, one that can only be lowered for."""
    sizes = tuple(size for _, size in group.axes)
    if not devices:
        names, sizes = (group.names, sizes) if sizes else (("one",), (1,))  # JAX takes an empty mesh for none
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    chosen = np.array([devices[d] for d in group.devices], dtype=object)
    return Mesh(chosen.reshape(sizes), group.names)


def sharding(layout: Layout, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The NamedSharding that a storable layout is."""
    spec = layout.partition_spec()
    assert spec is not None, f"{layout} has no PartitionSpec"
    return NamedSharding(mesh, spec)


def boundary_shardings(ends: Sequence[Layout | None], values: int, mesh: Mesh | AbstractMesh) -> tuple[NamedSharding, ...]:
    """Of a block's inputs, or outputs; the last ``values`` go from block to block: all devices' parts in a row."""
    own = [sharding(layout, mesh) for layout in ends[: len(ends) - values] if layout is not None]
    return (*own, *value_shardings(ends[len(own) :], mesh))


def value_shardings(ends: Sequence[Layout | None], mesh: Mesh | AbstractMesh) -> list[NamedSharding]:
    """Of what goes from block to block: all devices' parts in a row, or a scalar."""
    row, scalar = NamedSharding(mesh, PartitionSpec(mesh.axis_names)), NamedSharding(mesh, PartitionSpec())
    return [row if in_row(layout) else scalar for layout in ends]


def in_row(layout: Layout | None) -> bool:
    """Whether a value between blocks is its devices' parts in a row: all but scalars that go from program to program."""
    return layout is None or bool(layout.sizes)


def value_shape(layout: Layout | None, group: DeviceMesh, local: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a value between blocks of which each device of ``group`` has ``local``."""
    return stacked(len(group.devices), local) if in_row(layout) else ()


def stacked(count: int, local: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of ``count`` parts in a row."""
    return (count * local[0], *local[1:]) if local else (count,)


def emit(block: PlacedBlock, mesh: Mesh | AbstractMesh, gloo: bool = False) -> Callable[..., list[Any]]:
    """A function of the block's inputs (whole arrays, to be jitted) that returns its outputs.

    Args:
        gloo: whether XLA hands collectives to gloo (`lower.emit_collectives`).
    """
    kept_in = _kept_in(block)
    kept_out = [layout is None for layout in block.outputs]

    def local(*args: Any) -> list[Any]:
        given = [x.reshape(()) if kept else x for x, kept in zip(args, kept_in, strict=True)]
        made = run_block(block, given, gloo=gloo)
        return [jnp.reshape(x, (1,)) if kept and not jnp.shape(x) else x for x, kept in zip(made, kept_out, strict=True)]

    if not block.group.axes:
        return local  # one device: nothing to shard
    in_specs = tuple(s.spec for s in boundary_shardings(block.inputs, len(block.imports), mesh))
    out_specs = [s.spec for s in boundary_shardings(block.outputs, len(block.exports), mesh)]
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@dataclass
class ValueWatch:
    """What becomes of a program's values while it runs.

    Attributes:
        look: is asked of every value.
        seen: a variable, the places of its item in the loops around it and in their bodies, outermost first, and what
            ``look`` has said: in a loop one for each iteration, first ones first.
    """

    look: Callable[[Any], Any]
    seen: list[tuple[core.Var, tuple[int, ...], Any]] = field(default_factory=list)


def emit_watched(
    block: PlacedBlock, mesh: Mesh | AbstractMesh, watch: ValueWatch, gloo: bool = False
) -> Callable[..., list[Any]]:
    """A function of the block's inputs that returns what ``watch`` has seen, with a dim of devices in front."""

    def local(*args: Any) -> list[Any]:
        watch.seen = []
        given = [x.reshape(()) if kept else x for x, kept in zip(args, _kept_in(block), strict=True)]
        run_block(block, given, watch, gloo)
        return [jnp.expand_dims(said, 0) for *_, said in watch.seen]

    if not block.group.axes:
        return local
    in_specs = tuple(s.spec for s in boundary_shardings(block.inputs, len(block.imports), mesh))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec(mesh.axis_names), check_vma=False)


def _kept_in(block: PlacedBlock) -> list[bool]:
    """Which inputs are scalars that each device has for itself."""
    return [not shape(v) and layout is None for v, layout in zip(block.flat.inputs, block.inputs, strict=True)]


def run_block(block: PlacedBlock, args: Sequence[Any], watch: ValueWatch | None = None, gloo: bool = False) -> list[Any]:
    """What one device computes, of its parts."""
    flat = block.flat
    env: dict[Any, Any] = dict(zip(flat.inputs, args, strict=True))
    for who, var in flat.part_indices:
        env[var] = who.index()
    _run(flat.items, env, _Place(block.group, flat.source, gloo), watch)
    return [_value(env, v) for v in flat.outputs]


def run_items(block: PlacedBlock, items: Iterable[Item], given: dict[core.Var, Any], left: Sequence[core.Var]) -> list[Any]:
    """What one device computes of some of a block's items, between which nothing is sent."""
    env: dict[Any, Any] = dict(given)
    _run(items, env, _Place(block.group, block.flat.source, gloo=False))
    return [env[v] for v in left]


class _Place(NamedTuple):
    """Where items run: on which mesh, for which step, and whether by gloo."""

    mesh: DeviceMesh
    like: core.Jaxpr
    gloo: bool


def _run(items: Iterable[Item], env: dict[Any, Any], at: _Place, watch: ValueWatch | None = None) -> None:
    if watch is not None:
        for place, item in enumerate(items):
            if isinstance(item, FlatLoop):  # its results are what its iterations leave
                _repeat(item, env, at, watch, place)
            else:
                _run([item], env, at)
                watch.seen += [(v, (place,), watch.look(env[v])) for v in results_of(item)]
        return
    for kind, group in itertools.groupby(items, key=type):
        if issubclass(kind, core.JaxprEqn):
            _evaluate(list(group), env, at.like)  # type: ignore[arg-type]
            continue
        for item in group:
            if isinstance(item, Exchange):
                env[item.output] = _exchanged(item, _value(env, item.input), at)
            else:
                assert isinstance(item, FlatLoop)
                _repeat(item, env, at)


def _evaluate(eqns: Sequence[core.JaxprEqn], env: dict[Any, Any], like: core.Jaxpr) -> None:
    made = [v for eqn in eqns for v in eqn.outvars]
    known = set(made)
    taken = list(dict.fromkeys(v for eqn in eqns for v in eqn.invars if isinstance(v, core.Var) and v not in known))
    env.update(zip(made, evaluate(make_jaxpr(eqns, taken, made, like), [env[v] for v in taken]), strict=True))


def _exchanged(item: Exchange, source: Any, at: _Place) -> Any:
    task = item.adapt
    with jax.named_scope(adapter_scope(task.tensor)):
        if isinstance(task, Extend):
            return extend(task.edges, source, at.mesh, task.layout.mesh)
        return exchange(task.adapter, source, at.mesh, task.reduce_dtype, at.gloo)


def _repeat(step: FlatLoop, env: dict[Any, Any], at: _Place, watch: ValueWatch | None = None, place: int = 0) -> None:
    """A loop is a ``lax.scan``, compiled once for all its iterations; collectives and all."""
    within = ValueWatch(watch.look) if watch is not None else None
    first, step_on = np.uint32(step.loop.length - 1 if step.loop.reverse else 0), lax.sub if step.loop.reverse else lax.add

    def body(state: Any, slices: list[Any]) -> tuple[Any, tuple[list[Any], list[Any]]]:
        carries, number, totals = state
        inner = dict(env)
        inner.update(zip((v for _, v, _, _ in step.carries), carries, strict=True))
        inner.update(zip((v for _, v in step.xs), slices, strict=True))
        if within is not None:
            within.seen = []
        _run(step.items, inner, at, within)
        outs = [_like(_value(inner, out), v) for _, v, out, _ in step.carries]
        seen = [said for *_, said in within.seen] if within is not None else []
        pieces = [_like(_value(inner, piece), total) for _, piece, total in step.sums]
        totals = [_with_added(total, number, piece) for total, piece in zip(totals, pieces, strict=True)]
        number = step_on(number, np.uint32(1)) if step.sums else None
        return (outs, number, totals), ([_like(_value(inner, piece), stack) for piece, stack in step.ys], seen)

    loop = step.loop
    inits = [_like(_value(env, init), v) for init, v, _, _ in step.carries]
    stacks = [_value(env, stack) for stack, _ in step.xs]
    state = inits, first if step.sums else None, [_value(env, total) for total, *_ in step.sums]
    (finals, _, totals), (written, seen) = lax.scan(
        body, state, stacks, length=loop.length, reverse=loop.reverse, unroll=loop.unroll
    )
    env.update(zip(step.outvars, (*finals, *written, *totals), strict=True))
    if watch is not None and within is not None:
        for (var, places, _), said in zip(within.seen, seen, strict=True):
            watch.seen.append((var, (place, *places), jnp.flip(said, 0) if loop.reverse else said))


def _with_added(total: Any, number: Any, piece: Any) -> Any:
    """A stack to whose slice ``number`` something is added, in its own memory."""
    start = (number, *(np.uint32(0) for _ in piece.shape))
    before = lax.dynamic_slice(total, start, (1, *piece.shape))
    more = lax.broadcast_in_dim(lax.convert_element_type(piece, total.dtype), before.shape, range(1, before.ndim))
    return lax.dynamic_update_slice(total, lax.add(before, more), start)


def _like(value: Any, var: core.Var) -> Any:
    """A literal as an array of the variable's type."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value, getattr(var.aval, "dtype"))  # noqa: B009


def _value(env: dict[Any, Any], atom: core.Var | core.Literal) -> Any:
    return atom.val if isinstance(atom, core.Literal) else env[atom]
