"""The jaxpr that an equation calls, of a scan with the roles of its variables, and the operands that it hands on."""

from dataclasses import dataclass
from typing import Any

from jax.extend import core

from jscaler.ir.equations import Atom, shape
from jscaler.lax_primitives import known


def open_jaxpr(jaxpr: Any) -> tuple[core.Jaxpr, list[Any]]:
    """A closed jaxpr as (jaxpr, constants); JAX 0.12 merged the two classes."""
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def inner_jaxpr(eqn: core.JaxprEqn) -> tuple[core.Jaxpr, list[Any]]:
    """The jaxpr that a call equation calls."""
    return open_jaxpr(eqn.params.get("call_jaxpr", eqn.params.get("jaxpr", eqn.params.get("fun_jaxpr"))))


@dataclass(frozen=True)
class ScanParts:
    """A scan equation taken apart: the operands and the body's variables of each role."""

    body: core.Jaxpr
    body_consts: list[Any]
    consts: list[Atom]
    inits: list[Atom]
    stacks: list[Atom]
    finals: list[core.Var]
    stacked: list[core.Var]

    @property
    def operands(self) -> list[Atom]:
        return [*self.consts, *self.inits, *self.stacks]


def scan_parts(eqn: core.JaxprEqn) -> ScanParts:
    """Roles are told by ranks: what is read or written slice by slice has one dim more outside. (How the parameters count
    them differs between versions of JAX.)"""
    body, body_consts = inner_jaxpr(eqn)
    sliced = [len(shape(a)) > len(shape(v)) for a, v in zip(eqn.invars, body.invars, strict=True)]
    written = [len(shape(a)) > len(shape(v)) for a, v in zip(eqn.outvars, body.outvars, strict=True)]
    num_xs, num_carry = sum(sliced), len(written) - sum(written)
    num_consts = len(sliced) - num_xs - num_carry
    atoms = list(eqn.invars)
    return ScanParts(
        body,
        body_consts,
        atoms[:num_consts],
        atoms[num_consts : num_consts + num_carry],
        atoms[num_consts + num_carry :],
        list(eqn.outvars[:num_carry]),
        list(eqn.outvars[num_carry:]),
    )


def forwarded(eqn: core.JaxprEqn) -> dict[int, int]:
    """The results that are operands, as they are: number of a result -> number of the operand.

    ``nnx.scan`` returns the parameters of its layers, and ``nnx.remat`` those of its module. JAX finds that a scan hands
    them on, but not where a checkpoint in its body does. What a custom derivative hands on has a gradient of its own.
    """
    if known(eqn.primitive).opened in ("call", "remat"):
        return handed_on(inner_jaxpr(eqn)[0])
    if eqn.primitive.name != "scan":
        return {}
    parts = scan_parts(eqn)
    first, num_carry = len(parts.consts), len(parts.inits)
    found = {}
    for result, operand in handed_on(parts.body).items():
        same_carry = operand - first == result
        slices = result >= num_carry and operand >= first + num_carry
        if same_carry if result < num_carry else slices:
            found[result] = operand
    return found


def handed_on(jaxpr: core.Jaxpr) -> dict[int, int]:
    """The results of ``jaxpr`` that are its arguments: number of a result -> number of the argument."""
    alias: dict[core.Var, Atom] = {}
    for eqn in jaxpr.eqns:
        for result, operand in forwarded(eqn).items():
            atom = eqn.invars[operand]
            alias[eqn.outvars[result]] = alias.get(atom, atom) if isinstance(atom, core.Var) else atom
    number = {v: n for n, v in enumerate(jaxpr.invars)}
    ends = [alias.get(v, v) if isinstance(v, core.Var) else v for v in jaxpr.outvars]
    return {n: number[v] for n, v in enumerate(ends) if isinstance(v, core.Var) and v in number}
