"""From a function of local arrays to its jaxpr inside ``jax.shard_map``, on an abstract mesh: no devices are needed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jscaler.capture.jaxprs import make_jaxpr, open_jaxpr


@dataclass(frozen=True)
class Local:
    """What one device runs.

    Attributes:
        jaxpr: of the per-device function.
        inputs: for each of its constants and arguments the caller's argument, or a constant.
        in_specs, out_specs: for each argument of the caller, and each result, what a device gets and leaves of it.
    """

    jaxpr: core.Jaxpr
    inputs: tuple[Any, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]

    def bind(self, args: Sequence[Any], constant: Callable[[Any], Any]) -> list[Any]:
        """The arguments of ``jaxpr``: ``args`` where they belong, else ``constant`` of a constant."""
        return [args[i.index] if isinstance(i, _Argument) else constant(i) for i in self.inputs]


@dataclass(frozen=True)
class _Argument:
    index: int


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh of these axes, without devices."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def trace_local(fun: Callable[..., Any], sizes: Mapping[str, int], structs: Sequence[jax.ShapeDtypeStruct]) -> Local:
    """The jaxpr of ``fun(*local arrays)`` on a mesh of ``sizes``; ``structs`` are local shapes."""
    if not sizes:
        return open_shard_map(fun, structs)
    anywhere = PartitionSpec()
    mapped = jax.shard_map(fun, mesh=abstract_mesh(sizes), in_specs=anywhere, out_specs=anywhere, check_vma=False)
    return open_shard_map(mapped, structs)


def open_shard_map(fun: Callable[..., Any], structs: Sequence[jax.ShapeDtypeStruct]) -> Local:
    """Trace ``fun`` and open the one shard_map that it is; without one, it runs on one device."""
    return local_program(jax.make_jaxpr(fun)(*structs))


def local_program(traced: Any) -> Local:
    """What one device runs of a closed jaxpr that is one shard_map, or that runs on one device."""
    outer, consts = open_jaxpr(traced)
    known: dict[Any, Any] = dict(zip(outer.constvars, consts, strict=True))
    known |= {v: _Argument(i) for i, v in enumerate(outer.invars)}
    whole, count = (PartitionSpec(),), len(outer.invars)
    if not any(e.primitive.name == "shard_map" for e in outer.eqns):
        return Local(outer, (*consts, *map(known.get, outer.invars)), whole * count, whole * len(outer.outvars))
    (eqn,) = outer.eqns
    inputs = tuple(a.val if isinstance(a, core.Literal) else known[a] for a in eqn.invars)
    specs = {i.index: s for i, s in zip(inputs, eqn.params["in_specs"], strict=True) if isinstance(i, _Argument)}
    results: dict[Any, PartitionSpec] = dict(zip(eqn.outvars, eqn.params["out_specs"], strict=True))
    in_specs = tuple(specs.get(i, PartitionSpec()) for i in range(count))
    out_specs = tuple(results[v] for v in outer.outvars)
    inner, inner_consts = open_jaxpr(eqn.params["jaxpr"])
    if list(outer.outvars) != list(eqn.outvars):  # the caller returns some of what it makes
        made = dict(zip(eqn.outvars, inner.outvars, strict=True))
        invars = [*inner.constvars, *inner.invars]
        inner = make_jaxpr(inner.eqns, invars, [made[v] for v in outer.outvars if isinstance(v, core.Var)], inner)
    return Local(inner, (*inner_consts, *inputs), in_specs, out_specs)
