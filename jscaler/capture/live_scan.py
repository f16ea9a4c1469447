"""What a scan needs for some of its results: without other carries, slices and equations.

A carry that every iteration hands on as it is (a mask beside the activations, through a checkpoint) is one of its
constants: rows of a constant are cut like those of any tensor, and nothing is carried from layer to layer.
"""

from collections.abc import Iterable, Sequence, Set

from jax.extend import core

from jscaler.capture.inner_jaxprs import ScanParts, handed_on, inner_jaxpr
from jscaler.capture.jaxprs import Atom, like_program, make_jaxpr
from jscaler.lax_primitives import known


def live_scan(parts: ScanParts, results: Set[int]) -> ScanParts:
    """``parts`` with these results alone, and the carries that they are made of.

    Args:
        results: numbers of results; final carries come first.
    """
    first, num_carry = len(parts.consts), len(parts.inits)
    body = parts.body
    unchanged = {i for i, operand in handed_on(body).items() if i < num_carry and operand == first + i} - results
    kept = {i for i in results if i < num_carry}
    written = sorted(i for i in results if i >= num_carry)
    while True:  # a carry that another result reads is kept, too
        outs = [body.outvars[i] for i in (*sorted(kept), *written)]
        eqns = _live(body.eqns, outs)
        reads = _reads(eqns, outs)
        more = {i for i in range(num_carry) if body.invars[first + i] in reads} - kept - unchanged
        if not more:
            break
        kept |= more
    carried = sorted(kept)
    consts = [i for i in (*range(first), *(first + i for i in sorted(unchanged))) if body.invars[i] in reads]
    slices = [i for i in range(len(parts.stacks)) if body.invars[first + num_carry + i] in reads]
    invars = [body.invars[i] for i in (*consts, *(first + i for i in carried), *(first + num_carry + i for i in slices))]
    return ScanParts(
        make_jaxpr(eqns, invars, outs, body),
        parts.body_consts,
        [parts.operands[i] for i in consts],
        [parts.inits[i] for i in carried],
        [parts.stacks[i] for i in slices],
        [parts.finals[i] for i in carried],
        [parts.stacked[i - num_carry] for i in written],
    )


def _live(eqns: Sequence[core.JaxprEqn], outvars: Sequence[Atom]) -> list[core.JaxprEqn]:
    """The equations that ``outvars`` need, and those with side effects; of checkpoints what is needed in them."""
    needed = _reads((), outvars)
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            kept.append(_narrowed(eqn, needed))
            needed |= _reads(kept[-1:], ())
    return kept[::-1]


def _narrowed(eqn: core.JaxprEqn, needed: Set[core.Var]) -> core.JaxprEqn:
    """A checkpoint with the results that are ``needed`` alone; any other equation as it is."""
    results = [i for i, v in enumerate(eqn.outvars) if v in needed]
    if known(eqn.primitive).opened != "remat" or eqn.effects or len(results) == len(eqn.outvars):
        return eqn
    inner, consts = inner_jaxpr(eqn)
    outs = [inner.outvars[i] for i in results]
    eqns = _live(inner.eqns, outs)
    reads = _reads(eqns, outs)
    operands = [i for i, v in enumerate(inner.invars) if v in reads]
    if consts:
        return eqn
    made = make_jaxpr(eqns, [inner.invars[i] for i in operands], outs, inner)
    return eqn.replace(
        invars=[eqn.invars[i] for i in operands],
        outvars=[eqn.outvars[i] for i in results],
        params={**eqn.params, "jaxpr": like_program(eqn.params["jaxpr"], made)},
    )


def _reads(eqns: Iterable[core.JaxprEqn], outvars: Sequence[Atom]) -> set[core.Var]:
    """The variables that these equations, or whoever takes these results, read."""
    return {v for atoms in (*(e.invars for e in eqns), outvars) for v in atoms if isinstance(v, core.Var)}
