"""Small tools on jaxprs that every stage shares: build, inline, drop dead equations, tell equal programs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding

from jscaler.capture.inner_jaxprs import forwarded
from jscaler.capture.inner_jaxprs import inner_jaxpr as inner_jaxpr
from jscaler.capture.inner_jaxprs import open_jaxpr as open_jaxpr
from jscaler.capture.wishes import MeshesLeftOut, is_wish, mesh_of, without_mesh
from jscaler.ir.equations import Atom, dtype
from jscaler.ir.equations import nbytes as nbytes
from jscaler.ir.equations import shape as shape
from jscaler.lax_primitives import TABLE, may_merge

# Names of call-like primitives whose inner jaxpr may stand in for the call. The first set is always opened; the second only
# where no autodiff follows.
CALLS = frozenset(one.name for one in TABLE.values() if one.opened == "call")
CUSTOM_VJP = frozenset(one.name for one in TABLE.values() if one.opened == "vjp")
CUSTOM_CALLS = frozenset(one.name for one in TABLE.values() if one.opened) - CALLS

Program = core.Jaxpr | core.ClosedJaxpr  # in a parameter of an equation


def make_jaxpr(eqns: Sequence[core.JaxprEqn], invars: Sequence[core.Var], outvars: Sequence[Atom], like: Any) -> core.Jaxpr:
    """A jaxpr without constants; ``like`` is any jaxpr whose debug info it may carry."""
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    return core.Jaxpr([], list(invars), list(outvars), list(eqns), effects, anonymous_info(like, len(invars), len(outvars)))


def anonymous_info(like: Any, num_in: int, num_out: int) -> Any:
    """``like``'s debug info for another number of arguments and results."""
    info = like.debug_info
    return info._replace(arg_names=("",) * num_in, result_paths=("",) * num_out)


def evaluate(jaxpr: core.Jaxpr, args: Iterable[Any]) -> list[Any]:
    """Run a jaxpr without constants on values or tracers."""
    return jax.core.eval_jaxpr(jaxpr, [], *args)


class Inliner:
    """Copies equations of a jaxpr, and of every jaxpr it calls, into one flat list over fresh variables."""

    def __init__(self, calls: frozenset[str] = CALLS):
        self.calls = calls
        self.eqns: list[core.JaxprEqn] = []
        self.constants: list[tuple[core.Var, Any]] = []
        self._meshes = MeshesLeftOut()

    def run(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Atom], stack: Any = None) -> list[Atom]:
        """Inline ``jaxpr`` applied to ``args``; returns the atoms of its results. ``stack`` is the outer name stack."""
        env: dict[core.Var, Atom] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self._constant(var, value)
        for eqn in jaxpr.eqns:
            self._equation(eqn, env, stack)
        return [_read(env, v) for v in jaxpr.outvars]

    def _equation(self, eqn: core.JaxprEqn, env: dict[core.Var, Atom], stack: Any) -> None:
        invars = [_read(env, v) for v in eqn.invars]
        info = eqn.source_info
        if stack is not None:
            info = info.replace(name_stack=stack + info.name_stack)
        called = self.called(eqn)
        if called is not None:
            inner, consts = called
            if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):  # a checkpoint's recomputation
                invars = self._fenced(invars)
            env.update(zip(eqn.outvars, self.run(inner, consts, invars, info.name_stack), strict=True))
            return
        if is_wish(eqn):
            env.update(zip(eqn.outvars, invars, strict=True))
            return
        outvars = [fresh(v) for v in eqn.outvars]
        env.update(zip(eqn.outvars, outvars, strict=True))
        env.update((eqn.outvars[result], invars[operand]) for result, operand in forwarded(eqn).items())
        params = {name: self.parameter(value) for name, value in eqn.params.items()}
        copy = eqn.replace(invars=invars, outvars=outvars, source_info=info, params=params)
        self.eqns.append(self._meshes.of(copy))

    def called(self, eqn: core.JaxprEqn) -> tuple[core.Jaxpr, list[Any]] | None:
        """The program, and its constants, that stands in for ``eqn``; None where it stays as it is."""
        return inner_jaxpr(eqn) if eqn.primitive.name in self.calls else None

    def parameter(self, value: Any) -> Any:
        """A parameter of an equation that stays."""
        return _without_wishes(value)

    def _fenced(self, atoms: list[Atom]) -> list[Atom]:
        """``atoms`` behind an optimization barrier, so that what follows is computed again."""
        both = [a for a in atoms if isinstance(a, core.Var)]
        barrier = jax.make_jaxpr(lambda *xs: lax.optimization_barrier(xs))(*[shape_struct(a.aval) for a in both])
        eqn = open_jaxpr(barrier)[0].eqns[0]
        outvars = [fresh(v) for v in both]
        self.eqns.append(eqn.replace(invars=list[Atom](both), outvars=outvars))
        table = dict(zip(both, outvars, strict=True))
        return [table[a] if isinstance(a, core.Var) else a for a in atoms]

    def _constant(self, var: core.Var, value: Any) -> core.Var:
        for known, held in self.constants:
            if held is value:
                return known
        new = fresh(var)
        self.constants.append((new, value))
        return new


def _without_wishes(value: Any) -> Any:
    """A parameter of an equation without the model's own wishes: its programs have none, and zeros lie like nothing."""
    return None if isinstance(value, NamedSharding) else map_programs(_program_without_wishes, value)


def _program_without_wishes(program: Program) -> Program:
    inner, consts = open_jaxpr(program)
    if not _holds_wishes(inner):
        return program
    return like_program(program, flatten(inner, consts, Inliner(frozenset())))


def _holds_wishes(jaxpr: core.Jaxpr) -> bool:
    """Whether an equation says how a tensor lies, or in which mesh's context it was traced, or a type does."""
    ends = any(without_mesh(v.aval) is not v.aval for v in (*jaxpr.invars, *jaxpr.outvars))
    return ends or any(is_wish(e) or mesh_of(e) is not None for e in all_equations(jaxpr))


def is_program(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr."""
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


def map_programs(fun: Callable[[Program], Program], value: Any) -> Any:
    """A parameter of an equation with ``fun`` applied to the programs in it; itself, if ``fun`` changes none.

    Programs stand alone, in tuples (the branches of a condition), and in named tuples (those of a linear solve).
    """
    if is_program(value):
        return fun(value)
    if not isinstance(value, tuple):
        return value
    made = [map_programs(fun, one) for one in value]
    if all(new is one for new, one in zip(made, value, strict=True)):
        return value
    return type(value)(*made) if hasattr(value, "_fields") else tuple(made)


def like_program(program: Program, made: core.Jaxpr) -> Program:
    """``made``, which has no constants, closed if ``program`` is."""
    return made if type(program) is core.Jaxpr else core.ClosedJaxpr(made, [])


def _read(env: dict[core.Var, Atom], atom: Atom) -> Atom:
    if not isinstance(atom, core.Literal):
        return env[atom]
    aval = without_mesh(atom.aval)
    if aval is atom.aval:
        return atom
    value = atom.val.copy() if isinstance(atom.val, np.ndarray) else atom.val  # JAX's own array knows its type
    return core.Literal(value, aval)


def fresh(var: core.Var) -> core.Var:
    """A new variable of the same type, without its mesh; unused results stay unused."""
    return core.Var(without_mesh(var.aval))


def inline(jaxpr: core.Jaxpr, calls: frozenset[str] = CALLS | CUSTOM_CALLS) -> core.Jaxpr:
    """``jaxpr`` (without constants) with the given calls opened and dead equations dropped."""
    if not any(e.primitive.name in calls for e in jaxpr.eqns) and not _holds_wishes(jaxpr):
        return jaxpr
    return flatten(jaxpr, [], Inliner(calls))


def without_wishes(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """``jaxpr`` without sharding constraints and the meshes of contexts; its constants are its first arguments."""
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return flatten(make_jaxpr(jaxpr.eqns, invars, jaxpr.outvars, jaxpr), [], Inliner(frozenset()))


def flatten(jaxpr: core.Jaxpr, consts: Sequence[Any], inliner: Inliner) -> core.Jaxpr:
    """``jaxpr`` as a fresh ``inliner`` opens it, with dead equations dropped and constants as literals."""
    invars = [fresh(v) for v in jaxpr.invars]
    outvars = inliner.run(jaxpr, consts, invars)
    literals = {var: core.Literal(value, var.aval) for var, value in inliner.constants}
    eqns = [e.replace(invars=[swapped(literals, v) for v in e.invars]) for e in live_equations(inliner.eqns, outvars)]
    return make_jaxpr(eqns, invars, [swapped(literals, v) for v in outvars], jaxpr)


def swapped(table: Mapping[core.Var, Atom], atom: Atom) -> Atom:
    """What ``table`` has for a variable; else, and of a literal, ``atom`` itself."""
    return atom if isinstance(atom, core.Literal) else table.get(atom, atom)


def live_equations(eqns: Sequence[core.JaxprEqn], outvars: Iterable[Atom]) -> list[core.JaxprEqn]:
    """The equations that ``outvars`` need, and those with side effects."""
    needed = {v for v in outvars if isinstance(v, core.Var)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            needed.update(v for v in eqn.invars if isinstance(v, core.Var))
            kept.append(eqn)
    return kept[::-1]


def all_equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """The equations of ``jaxpr``, and of programs inside them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from all_equations(open_jaxpr(inner)[0])


def equal_results(eqns: Sequence[core.JaxprEqn]) -> dict[core.Var, core.Var]:
    """Results of equations that do what an earlier one has done -> those of the first."""
    first: dict[Any, Sequence[core.Var]] = {}
    same: dict[core.Var, core.Var] = {}
    for eqn in filter(may_merge, eqns):
        reads = tuple(atom_key(swapped(same, a)) for a in eqn.invars)
        key = eqn.primitive, params_key(eqn.params), reads
        if key in first:
            same.update(zip(eqn.outvars, first[key], strict=True))
        else:
            first[key] = eqn.outvars
    return same


def trace_flat(fun: Callable[..., Any], avals: Sequence[Any]) -> core.Jaxpr:
    """Trace ``fun(*avals) -> list`` into a flat jaxpr: plain calls inlined, dead equations dropped, constants literal."""
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(fun)(*map(shape_struct, avals)))
    return flatten(jaxpr, consts, Inliner())


def shape_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """What ``jax.make_jaxpr`` takes for an abstract value."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def fingerprint(jaxpr: core.Jaxpr) -> tuple[Any, ...]:
    """A key that two jaxprs share exactly if they are the same program up to the names of variables."""
    numbering = Numbering()
    head = tuple(map(numbering.define, (*jaxpr.constvars, *jaxpr.invars)))
    body = tuple(map(numbering.equation, jaxpr.eqns))
    return head, body, tuple(map(numbering.atom, jaxpr.outvars))


class Numbering:
    """Keys of equations, with numbers in the place of variables."""

    def __init__(self) -> None:
        self._number: dict[core.Var, int] = {}

    def define(self, var: core.Var) -> Any:
        """The type of a variable, which gets the next number."""
        self._number[var] = len(self._number)
        return var.aval

    def atom(self, atom: Atom) -> Any:
        """What is read."""
        return literal_key(atom) if isinstance(atom, core.Literal) else self._number[atom]

    def equation(self, eqn: core.JaxprEqn) -> tuple[Any, ...]:
        """The equation, whose results get the next numbers."""
        reads = tuple(map(self.atom, eqn.invars))
        return eqn.primitive, _equation_key(eqn), reads, tuple(map(self.define, eqn.outvars))


def atom_key(atom: Atom) -> Any:
    """A variable, or the key of a literal."""
    return literal_key(atom) if isinstance(atom, core.Literal) else atom


def literal_key(literal: core.Literal) -> tuple[Any, ...]:
    """Value and type of a literal; an array literal is known by identity."""
    value = np.asarray(literal.val).tobytes() if np.ndim(literal.val) == 0 else id(literal.val)
    return ("literal", value, literal.aval)


CUSTOM_RULES = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"})


def _equation_key(eqn: core.JaxprEqn) -> tuple[Any, ...]:
    """Parameters; a custom derivative (a fresh function object at each use) by the program of its vjp."""
    if not CUSTOM_RULES & eqn.params.keys():
        return params_key(eqn.params)
    rest = params_key({k: v for k, v in eqn.params.items() if k not in CUSTOM_RULES})
    reads = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, core.Var)))
    call = make_jaxpr([eqn], reads, eqn.outvars, inner_jaxpr(eqn)[0])
    wrt = [i for i, v in enumerate(reads) if jax.numpy.issubdtype(dtype(v), jax.numpy.inexact)]

    def vjp(args: Any, cotangents: Any) -> Any:
        def chosen(*diff: Any) -> list[Any]:
            full = dict(enumerate(args)) | dict(zip(wrt, diff, strict=True))
            return evaluate(call, [full[i] for i in range(len(args))])

        return jax.vjp(chosen, *(args[i] for i in wrt))[1](cotangents)

    structs = [[shape_struct(v.aval) for v in vs] for vs in (call.invars, call.outvars)]
    try:
        jaxpr, consts = open_jaxpr(jax.make_jaxpr(vjp)(*structs))
    except Exception as error:  # the rule is the user's, and may refuse: a forward that runs its own function again
        rules = tuple(id(eqn.params[name]) for name in sorted(CUSTOM_RULES & eqn.params.keys()))
        return rest, rules, type(error), fingerprint(flatten(call, (), Inliner(CALLS | CUSTOM_CALLS)))
    return rest, fingerprint(flatten(jaxpr, consts, Inliner(CALLS | CUSTOM_CALLS)))


def params_key(params: dict[str, Any], content: Callable[[Any], Any] = id) -> tuple[Any, ...]:
    """A hashable key of an equation's parameters: inner jaxprs by structure; their constants, and what cannot be hashed, by
    ``content``."""
    return tuple((k, _param_key(params[k], content)) for k in sorted(params))


def _param_key(value: Any, content: Callable[[Any], Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_param_key(v, content) for v in value)
    if is_program(value):
        jaxpr, consts = open_jaxpr(value)
        return fingerprint(jaxpr), tuple(map(content, consts))
    try:
        hash(value)
    except TypeError:
        return content(value)
    return value
