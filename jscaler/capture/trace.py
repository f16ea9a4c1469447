"""Trace a step once, flat: one list of equations, each tagged with the gradient call it belongs to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import core

from jscaler.capture.gradient import value_and_grad_p
from jscaler.capture.jaxprs import (
    CALLS,
    CUSTOM_CALLS,
    Atom,
    Inliner,
    all_equations,
    fresh,
    inner_jaxpr,
    open_jaxpr,
    swapped,
    trace_flat,
)
from jscaler.capture.nested_gradients import WithPlainGradients, holds_gradients, refuse
from jscaler.capture.opening import hoist_numbers
from jscaler.capture.own_rows import own_rows
from jscaler.capture.split_conditions import split_cond
from jscaler.capture.wishes import implicit_axes, is_wish, mesh_of, no_mesh, wished
from jscaler.errors import CaptureError, CaptureWarning, listing, warn
from jscaler.ir.op import user_line


@dataclass(frozen=True)
class TaggedEquation:
    """An equation, and the index of the gradient call whose forward program it is part of (None outside)."""

    eqn: core.JaxprEqn
    call: int | None


@dataclass(frozen=True)
class TracedCall:
    """A gradient call: the loss, and for each differentiated input the variable that receives its gradient."""

    loss: Atom
    wrt: tuple[core.Var, ...]
    gradients: tuple[core.Var, ...]


@dataclass(frozen=True)
class Trace:
    """A step as flat equations. Gradient variables are produced by no equation: autodiff on the graph fills them in."""

    invars: tuple[core.Var, ...]
    constants: tuple[tuple[core.Var, Any], ...]
    equations: tuple[TaggedEquation, ...]
    calls: tuple[TracedCall, ...]
    outvars: tuple[Atom, ...]
    source: core.Jaxpr


def trace_step(fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> Trace:
    """Trace ``fun(*leaves) -> leaves`` and open its gradient calls.

    Raises:
        CaptureError: the step divides its work itself, by ``jax.shard_map``; or takes a gradient in a loop or a branch.

    Warns:
        CaptureWarning: the model says itself how tensors lie, or in which mesh it works, which is left out.
    """
    with implicit_axes():
        jaxpr, consts = open_jaxpr(jax.make_jaxpr(fun)(*avals))
    _refuse_tracers(consts)
    _refuse_shard_maps(jaxpr)
    _say_wishes(jaxpr)
    with no_mesh():
        return _opened(jaxpr, consts)


def _opened(jaxpr: core.Jaxpr, consts: Sequence[Any]) -> Trace:
    inliner = Inliner()
    invars = list(map(fresh, jaxpr.invars))
    outvars = inliner.run(jaxpr, consts, invars)
    opener = _Opener(inliner.constants)
    for eqn in inliner.eqns:
        opener.add(eqn)
    opener.hoist_numbers()
    opener.look_up_own_rows()
    return Trace(
        tuple(invars),
        tuple(opener.constants),
        tuple(opener.equations),
        tuple(opener.calls),
        tuple(opener.read(v) for v in outvars),
        jaxpr,
    )


def _say_wishes(jaxpr: core.Jaxpr) -> None:
    eqns = list(all_equations(jaxpr))
    meshes = dict.fromkeys(str(dict(mesh.shape)) for mesh in map(mesh_of, eqns) if mesh is not None)
    lines = dict.fromkeys(f"{wished(e)} at {user_line(e.source_info)}" for e in eqns if is_wish(e))
    said = [f"mesh {mesh}" for mesh in meshes] + (["sharding constraints"] if lines else [])
    if said:
        where = f": {listing(list(lines))}" if lines else ""
        verb = "are" if lines or len(meshes) > 1 else "is"
        warn(
            f"the step's own {' and '.join(said)} {verb} left out, as its plan says how tensors lie{where}",
            CaptureWarning,
        )


def _refuse_tracers(consts: Sequence[Any]) -> None:
    for value in consts:
        if isinstance(value, jax.core.Tracer):
            raise CaptureError(
                f"the step reads a value of shape {value.shape} that another trace has made, which has no numbers: it was "
                "kept from an earlier call, or is an argument of a jax.jit around the step; make it an argument of the step"
            )


def _refuse_shard_maps(jaxpr: core.Jaxpr) -> None:
    for eqn in all_equations(jaxpr):
        if eqn.primitive.name == "shard_map" and eqn.params["mesh"].size > 1:
            raise CaptureError(
                f"the step maps a function over the mesh {dict(eqn.params['mesh'].shape)} itself, by jax.shard_map at "
                f"{user_line(eqn.source_info)}; its plan says what runs where: call the function on whole arrays instead, "
                "and decorate it with @jscaler.op(rule) where it shall be called on parts"
            )


class _Opener:
    """Replaces each gradient equation by its forward equations; what read its value now reads the forward's own."""

    def __init__(self, constants: list[tuple[core.Var, Any]]):
        self.constants = list(constants)
        self.equations: list[TaggedEquation] = []
        self.calls: list[TracedCall] = []
        self.alias: dict[core.Var, Atom] = {}

    def hoist_numbers(self) -> None:
        eqns = hoist_numbers([t.eqn for t in self.equations], self.constants)
        self.equations = [TaggedEquation(e, t.call) for e, t in zip(eqns, self.equations, strict=True)]

    def look_up_own_rows(self) -> None:
        found = zip(own_rows([t.eqn for t in self.equations], self.constants), self.equations, strict=True)
        self.equations = [TaggedEquation(eqn, t.call) for eqns, t in found for eqn in eqns]

    def read(self, atom: Atom) -> Atom:
        return swapped(self.alias, atom)

    def add(self, eqn: core.JaxprEqn) -> None:
        eqn = eqn.replace(invars=[self.read(v) for v in eqn.invars])
        if eqn.primitive is value_and_grad_p:
            self._open(eqn)
        elif not holds_gradients(eqn):
            self.equations += [TaggedEquation(e, None) for e in split_cond(eqn, staged=True)]
        elif eqn.primitive.name in CUSTOM_CALLS:  # nobody differentiates it: it is what it calls
            inliner = Inliner(CALLS | CUSTOM_CALLS)
            results = inliner.run(*inner_jaxpr(eqn), eqn.invars, eqn.source_info.name_stack)
            self.constants += inliner.constants
            for inner in inliner.eqns:
                self.add(inner)
            self.alias.update(zip(eqn.outvars, map(self.read, results), strict=True))
        else:
            refuse(eqn)

    def _open(self, eqn: core.JaxprEqn) -> None:
        index = len(self.calls)
        wrt = eqn.params["wrt"]
        args = list(eqn.invars)
        for i in wrt:
            # The loss may also read the same array without differentiating it: keep the two apart.
            if isinstance(args[i], core.Literal) or sum(a is args[i] for a in args) > 1:
                args[i] = self._copy(args[i], index, eqn)
        inner, consts = open_jaxpr(eqn.params["jaxpr"])
        inliner = WithPlainGradients()
        results = inliner.run(inner, consts, args, eqn.source_info.name_stack)
        self.constants += inliner.constants
        self.equations += [TaggedEquation(e, index) for each in inliner.eqns for e in split_cond(each)]
        values, gradients = eqn.outvars[: len(results)], eqn.outvars[len(results) :]
        self.alias.update(zip(values, results, strict=True))
        self.calls.append(TracedCall(results[0], tuple(args[i] for i in wrt), tuple(gradients)))

    def _copy(self, atom: Atom, call: int, like: core.JaxprEqn) -> core.Var:
        copy = trace_flat(lambda x: [jnp.copy(x)], [atom.aval]).eqns[0]
        out = core.Var(atom.aval)
        self.equations.append(
            TaggedEquation(copy.replace(invars=[atom], outvars=[out], source_info=like.source_info), None)
        )
        return out
