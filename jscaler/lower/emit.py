"""Emit a flat program as one function of whole arrays: ``jax.shard_map`` over a mesh of real devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding

from jscaler.capture.jaxprs import evaluate
from jscaler.lower.collectives import exchange
from jscaler.lower.halo import extend
from jscaler.lower.members import axis_names
from jscaler.lower.numbering import FlatProgram, Run
from jscaler.lower.program import Extend, Program
from jscaler.materialize import Layout


def physical_mesh(program: Program, devices: Sequence[Any]) -> Mesh:
    """The mesh of real devices: logical device i is ``devices[i]``."""
    chosen = np.array([devices[d] for d in program.mesh.devices], dtype=object)
    return Mesh(chosen.reshape([s for _, s in program.mesh.axes]), program.mesh.names)


def sharding(layout: Layout, mesh: Mesh) -> NamedSharding:
    """The NamedSharding that a storable layout is."""
    spec = layout.partition_spec()
    assert spec is not None, f"{layout} has no PartitionSpec"
    return NamedSharding(mesh, spec)


def emit(program: Program, flat: FlatProgram, mesh: Mesh) -> Callable[..., list[Any]]:
    """A function of the program's inputs (whole arrays, to be jitted) that returns its outputs."""

    def local(*args: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(flat.inputs, args, strict=True))
        for axes, var in flat.part_indices:
            env[var] = lax.axis_index(axis_names(axes))
        for step in flat.steps:
            if isinstance(step, Run):
                results = evaluate(step.jaxpr, [env[v] for v in step.jaxpr.invars])
                env.update(zip(step.jaxpr.outvars, results, strict=True))
            else:
                source, task = _value(env, step.input), step.adapt
                if isinstance(task, Extend):
                    env[step.output] = extend(task.edges, source, program.mesh)
                else:
                    env[step.output] = exchange(task.adapter, source, program.mesh, task.reduce_dtype)
        return [_value(env, v) for v in flat.outputs]

    if not program.mesh.axes:
        return local  # one device: nothing to shard
    in_specs = tuple(layout.partition_spec() for _, layout in program.inputs)
    out_specs = [layout.partition_spec() for _, layout in program.outputs]
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _value(env: dict[Any, Any], atom: core.Var | core.Literal) -> Any:
    return atom.val if isinstance(atom, core.Literal) else env[atom]
