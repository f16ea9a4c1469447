"""What a step or its caller says of where arrays lie, and of the mesh that it works in: wishes, since a plan says all that.

Left out are ``jax.lax.with_sharding_constraint``, ``jax.device_put`` to devices, and the mesh of ``jax.set_mesh(mesh)``.
JAX writes the last into every equation and type that it traces, and refuses programs for another mesh there:

    the caller's mesh     trace of the step               equations without a mesh
                          no mesh                         plan, lower, compile, prove

The step itself is traced where its caller called it, since ``with_sharding_constraint(x, PartitionSpec("data"))`` asks the
context for its mesh. So are functions that autodiff calls (of a ``jax.custom_vjp``): their equations keep their context.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, Sharding

NO_DEVICES = Mesh(np.empty((), object), ())


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """A context without a mesh, for programs that name their own. Decorates functions, too."""
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.set_mesh(NO_DEVICES):
        yield


@contextlib.contextmanager
def implicit_axes() -> Iterator[None]:
    """The mesh of the context, explicit axes as axes of type Auto: whose arrays are split says the plan, and no type.

    What explicit axes alone allow is an error of JAX, which is told why.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        yield
        return
    auto = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    try:
        with jax.sharding.use_abstract_mesh(auto):
            yield
    except Exception as error:
        error.add_note(
            f"jscaler traces a step with the axes {mesh.axis_names} of its mesh of type Auto, since its plan says how "
            "arrays lie: leave out jax.sharding.reshard and out_sharding=; with_sharding_constraint may stay, is ignored"
        )
        raise


def is_wish(eqn: core.JaxprEqn) -> bool:
    """Whether the equation hands its operands on, and says where they shall lie."""
    if eqn.primitive.name == "device_put":
        return all(map(_in_default_memory, eqn.params["devices"]))
    return eqn.primitive.name == "sharding_constraint"


def wished(eqn: core.JaxprEqn) -> str:
    """What a wish says."""
    says = eqn.params["sharding"] if "sharding" in eqn.params else eqn.params["devices"][0]
    return str(getattr(says, "spec", says))


def _in_default_memory(target: Any) -> bool:
    if isinstance(target, Sharding):
        default = next(iter(target.device_set)).default_memory().kind
        return target.memory_kind in (None, default)
    return isinstance(target, jax.Device)


class MeshesLeftOut:
    """Equations as they would have been traced without a mesh. One for each program: it knows contexts that it has seen."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def of(self, eqn: core.JaxprEqn) -> core.JaxprEqn:
        """``eqn`` without the mesh of its context. A custom derivative is traced in it, when it is wanted."""
        if mesh_of(eqn) is None or eqn.primitive.name.startswith("custom_"):
            return eqn
        if eqn.ctx not in self._known:
            self._known[eqn.ctx] = _context(eqn.ctx)
        return eqn.replace(ctx=self._known[eqn.ctx])


def mesh_of(eqn: core.JaxprEqn) -> AbstractMesh | None:
    """The mesh in whose context the equation was traced."""
    mesh = eqn.ctx.cur_abstract_mesh
    return None if mesh.empty else mesh


def without_mesh(aval: Any) -> Any:
    """A type that says nothing of a mesh."""
    sharding = getattr(aval, "sharding", None)
    return aval if sharding is None or sharding.mesh.empty else aval.update(sharding=None)


def _context(context: Any) -> Any:
    """What else ``context`` says, as an equation has it that is traced in it and in no mesh."""
    with context.manager, jax.sharding.use_abstract_mesh(NO_DEVICES.abstract_mesh):
        return jax.make_jaxpr(jax.numpy.sin)(0.0).eqns[0].ctx
