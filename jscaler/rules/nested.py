"""Scan, while and cond as one equation each: their inner programs share the factors of the outer one.

The dims of an inner program's variables are those of the operands and results that they stand for, so its own equations
name factors and block them as if they stood outside. What a loop carries goes in as it comes out; what it scans over is
one after another, unless nothing is carried: then the steps are independent, and their index can be split.

For a factor, a loop's carry is in one state, found by trying: a sum that starts at zero and takes a partial sum in every
step (a weight's gradient over time) is a partial sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jax.extend import core

from jscaler.capture.jaxprs import Atom, inline, open_jaxpr, shape, trace_flat
from jscaler.rules.analysed import Analysis
from jscaler.rules.dim_atoms import Atoms
from jscaler.rules.halo_reach import slid_along

TensorDims = tuple[list[int], ...]  # per dim its atoms
State = str
CUT, FREE = "split", "independent"


@dataclass(frozen=True)
class LoopForm:
    """How many operands of a scan or while are what.

    Attributes:
        consts: operands that every step reads whole; of a while, those of its condition come first.
        carry: what one step hands to the next.
        conditions: how many of ``consts`` only the condition of a while reads.
    """

    consts: int
    carry: int
    conditions: int = 0


def loop_of(eqn: core.JaxprEqn) -> LoopForm:
    """Versions of JAX name the parameters of a scan differently; ranks tell what is scanned over."""
    if eqn.primitive.name == "while":
        conditions, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        return LoopForm(conditions + body, len(eqn.outvars), conditions)
    inner = open_jaxpr(eqn.params["jaxpr"])[0]
    scanned = sum(len(shape(v)) != len(shape(w)) for v, w in zip(eqn.invars, inner.invars, strict=True))
    stacked = sum(len(shape(v)) != len(shape(w)) for v, w in zip(eqn.outvars, inner.outvars, strict=True))
    carry = len(eqn.outvars) - stacked
    return LoopForm(len(eqn.invars) - scanned - carry, carry)


def programs(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    """The inner programs, without constants, calls opened."""
    names = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr")}
    closed = eqn.params["branches"] if eqn.primitive.name == "cond" else [eqn.params[n] for n in names[eqn.primitive.name]]
    return [_without_constants(c) for c in closed]


def _without_constants(closed: core.ClosedJaxpr) -> core.Jaxpr:
    jaxpr, consts = open_jaxpr(closed)
    if consts:
        jaxpr = trace_flat(lambda *xs: core.jaxpr_as_fun(closed)(*xs), [v.aval for v in jaxpr.invars])
    return inline(jaxpr)


@dataclass(frozen=True)
class NestDims:
    """What `unify` needs of the analysis around a nested equation.

    Attributes:
        operands, results: their dims.
        zero: which operands are known to be zero.
        inside: analyses an inner program whose inputs have these dims, of which some are zero.
        constant: the dims of an array that is written into an inner program.
    """

    atoms: Atoms
    operands: Sequence[TensorDims]
    results: Sequence[TensorDims]
    zero: Sequence[bool]
    inside: Callable[[core.Jaxpr, Sequence[TensorDims], Sequence[bool]], Analysis]
    constant: Callable[[Sequence[int]], TensorDims]

    def same(self, a: TensorDims, b: TensorDims, where: str) -> None:
        for x, y in zip(a, b, strict=True):
            if x and y:
                self.atoms.unify(x, y, where)

    def out(self, inner: Analysis, atom: Atom) -> TensorDims:
        return inner.dims[atom] if isinstance(atom, core.Var) else self.constant(shape(atom))


def unify(eqn: core.JaxprEqn, nest: NestDims) -> tuple[Analysis, ...]:
    """Make the dims of a nested equation and of its inner programs one; returns the programs' analyses."""
    inner = {"scan": _scan, "while": _while, "cond": _cond}[eqn.primitive.name](eqn, nest)
    for analysis in inner:  # how far beyond its part a window reads is not followed through a loop
        nest.atoms.block(sorted(slid_along(analysis)), f"windows slide along it inside a {eqn.primitive.name}")
    return inner


def _scan(eqn: core.JaxprEqn, nest: NestDims) -> tuple[Analysis, ...]:
    loop = loop_of(eqn)
    start = loop.consts + loop.carry
    scanned, stacked = nest.operands[start:], nest.results[loop.carry :]
    zero = [*nest.zero[: loop.consts], *(False,) * loop.carry, *nest.zero[start:]]
    (body,) = programs(eqn)
    inner = nest.inside(body, [*nest.operands[:start], *(dims[1:] for dims in scanned)], zero)
    outs = [nest.out(inner, v) for v in body.outvars]
    _carried(nest, outs[: loop.carry], loop, "scan")
    for made, result in zip(outs[loop.carry :], stacked, strict=True):
        nest.same(made, result[1:], "scan")
    steps = [dims[0] for dims in (*scanned, *stacked) if dims[0]]
    for other in steps[1:]:
        nest.atoms.unify(steps[0], other, "scan")
    if steps and loop.carry:
        nest.atoms.block(steps[0], "at scan it is walked step by step, and every step needs the one before")
    return (inner,)


def _carried(nest: NestDims, outs: Sequence[TensorDims], loop: LoopForm, where: str) -> None:
    given = nest.operands[loop.consts : loop.consts + loop.carry]
    for before, after, result in zip(given, outs, nest.results[: loop.carry], strict=True):
        nest.same(before, result, where)
        nest.same(after, result, where)


def _while(eqn: core.JaxprEqn, nest: NestDims) -> tuple[Analysis, ...]:
    loop = loop_of(eqn)
    consts, carry = nest.operands[: loop.consts], nest.operands[loop.consts :]
    zero = nest.zero[: loop.consts]
    moving = (False,) * loop.carry
    condition, body = programs(eqn)
    test = nest.inside(condition, [*consts[: loop.conditions], *carry], [*zero[: loop.conditions], *moving])
    inner = nest.inside(body, [*consts[loop.conditions :], *carry], [*zero[loop.conditions :], *moving])
    _carried(nest, [nest.out(inner, v) for v in body.outvars], loop, "while")
    rows = nest.out(test, condition.outvars[0])
    for result in nest.results:  # every row of the carry stops by its own condition, where each has one
        nest.same(rows, result[: len(rows)], "while")
    return test, inner


def stops_by_row(test: Analysis) -> bool:
    """Whether the condition of a ``while`` is one for each row, as ``vmap`` makes it."""
    return bool(shape(test.jaxpr.outvars[0]))


def _cond(eqn: core.JaxprEqn, nest: NestDims) -> tuple[Analysis, ...]:
    branches = []
    for branch in programs(eqn):
        inner = nest.inside(branch, nest.operands[1:], nest.zero[1:])
        for atom, result in zip(branch.outvars, nest.results, strict=True):
            nest.same(nest.out(inner, atom), result, "cond")
        branches.append(inner)
    return tuple(branches)


@dataclass(frozen=True)
class LoopFlow:
    """One factor's states around a nested equation.

    Attributes:
        before: the states of its operands; ``zero`` which of them are known to be zero.
        own: which results carry the factor.
        run: the states of an inner program's results, given those of its inputs and which of these are zero just now.
        touched: whether an inner program has the factor on a dim.
        leads: whether the first dim of one of these tensors carries the factor.
        refuse: raises, with a reason.
    """

    before: Sequence[State]
    zero: Sequence[bool]
    own: Sequence[State]
    run: Callable[[Analysis, Sequence[State], Sequence[bool]], list[State]]
    touched: Callable[[Analysis], bool]
    leads: Callable[[Sequence[Atom]], bool]
    refuse: Callable[[str], Exception]


def flow(eqn: core.JaxprEqn, inner: Sequence[Analysis], at: LoopFlow) -> list[State]:
    """The states of a nested equation's results."""
    return {"scan": _flow_scan, "while": _flow_while, "cond": _flow_cond}[eqn.primitive.name](eqn, inner, at)


def _flow_scan(eqn: core.JaxprEqn, inner: Sequence[Analysis], at: LoopFlow) -> list[State]:
    loop, (body,) = loop_of(eqn), inner
    start = loop.consts + loop.carry
    if at.leads([*eqn.invars[start:], *eqn.outvars[loop.carry :]]):  # the index of independent steps
        if at.touched(body) or any(s != FREE for s in at.before[:start]) or not {*at.before} <= {CUT, FREE}:
            raise at.refuse("the steps of a scan, and what they compute, both carry it")
        return list(at.own)
    scanned = at.before[start:]
    before = at.before[: loop.consts]

    def step(carry: Sequence[State], zero: Sequence[bool]) -> list[State]:
        return at.run(body, [*before, *carry, *scanned], [*(False,) * len(before), *zero, *(False,) * len(scanned)])

    return _steady(loop, at, step)[1]


def _steady(
    loop: LoopForm, at: LoopFlow, step: Callable[[Sequence[State], Sequence[bool]], list[State]]
) -> tuple[list[State], list[State]]:
    """The states that a loop's carry keeps from step to step, and those of a step's results.

    Args:
        step: the states of a step's results, from those of the carry and which of it is zero.
    """
    carry = list(at.before[loop.consts : loop.consts + loop.carry])
    zero = at.zero[loop.consts : loop.consts + loop.carry]
    while True:  # what starts at zero may become a partial sum: look at the first step
        made = step(carry, [z and s == FREE for z, s in zip(zero, carry, strict=True)])
        sums = [old == FREE and z and new == "add" for old, z, new in zip(carry, zero, made[: loop.carry], strict=True)]
        if not any(sums):
            break
        carry = ["add" if add else old for add, old in zip(sums, carry, strict=True)]
    made = step(carry, [False] * loop.carry)
    if made[: loop.carry] != carry:
        raise at.refuse("a loop carries a partial of it, and not from the start on")
    return carry, made


def _flow_while(eqn: core.JaxprEqn, inner: Sequence[Analysis], at: LoopFlow) -> list[State]:
    loop, (test, body) = loop_of(eqn), inner
    consts = at.before[: loop.consts]
    known = (False,) * (loop.consts - loop.conditions)
    carry, made = _steady(loop, at, lambda carry, zero: at.run(body, [*consts[loop.conditions :], *carry], [*known, *zero]))
    (stop,) = at.run(test, [*consts[: loop.conditions], *carry], ())
    if stop != FREE and not (stop == CUT and stops_by_row(test) and set(at.own) == {CUT}):
        raise at.refuse("the condition of a while depends on it")
    return made


def _flow_cond(eqn: core.JaxprEqn, inner: Sequence[Analysis], at: LoopFlow) -> list[State]:
    if at.before[0] != FREE:
        raise at.refuse("the branch of a cond is chosen by it")
    each = [at.run(branch, at.before[1:], ()) for branch in inner]
    return [_agreed(i, inner, [made[i] for made in each], at) for i in range(len(eqn.outvars))]


def _agreed(index: int, inner: Sequence[Analysis], states: Sequence[State], at: LoopFlow) -> State:
    """The one state of a result in all branches; zero is any sum's share, and any value its own maximum."""
    open_ = {s for s, branch in zip(states, inner, strict=True) if not (s == FREE and branch.gives_zero(index))}
    if FREE in states and set(states) - {FREE} in ({"max"}, {"min"}):
        open_ = set(states) - {FREE}
    elif len(open_) > 1 or (open_ - {"add", CUT, FREE} and FREE in states):
        raise at.refuse("the branches of a cond treat it differently")
    return next(iter(open_), FREE) if at.own[index] == FREE else CUT
