"""Cut a fragment at its inner reductions, so that a factor which they block can be split.

    softmax over v, cut for v        m = max_v x  |  e = exp(x - m), s = sum_v e  |  e / s
                                     shares: max  |  shares: add                  |  split

Between two pieces the value shares are joined, as between any two ops. What depends on no input (iota, masks) is copied
into every piece that reads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend import core

from jscaler.capture.jaxprs import live_equations, make_jaxpr, shape
from jscaler.capture.names import function_name
from jscaler.ir import FactorNames
from jscaler.ir.rule import NamedDims
from jscaler.rules.analysed import Analysis
from jscaler.rules.factor_states import Leaves, stages


@dataclass(frozen=True)
class Piece:
    """Part of a fragment: a jaxpr over variables of the fragment's analysis.

    Attributes:
        name: what it does, in one word.
        jaxpr: its ``invars`` are what it reads, its ``outvars`` what it hands on.
        named: the fragment's factors on them.
    """

    name: str
    jaxpr: core.Jaxpr
    named: FactorNames


def cut(analysis: Analysis, groups: Mapping[str, Leaves], factors: Sequence[str]) -> tuple[Piece, ...]:
    """The pieces of a fragment, in order, that let ``factors`` be split.

    Args:
        groups: the leaf atoms of all factors of the fragment.
        factors: those to open; they must be free or reopen.
    """
    jaxpr = analysis.jaxpr
    when = stages(analysis, [groups[f] for f in factors])
    assert not isinstance(when, str), f"no cut frees {factors}: {when}"
    generated = _generated(jaxpr)
    members: dict[int, list[core.JaxprEqn]] = {}
    for eqn, stage in zip(jaxpr.eqns, when, strict=True):
        if not eqn.outvars or eqn.outvars[0] not in generated:
            members.setdefault(stage, []).append(eqn)
    runs = [members[stage] for stage in sorted(members)]
    results = list(dict.fromkeys(v for v in jaxpr.outvars if isinstance(v, core.Var)))
    names = {leaf: name for name, group in groups.items() for leaf in group}
    pieces = []
    for i, eqns in enumerate(runs):
        later = {v for run in runs[i + 1 :] for e in run for v in e.invars if isinstance(v, core.Var)} | set(results)
        made = [v for e in eqns for v in e.outvars if v in later]
        pieces.append(_piece(analysis, names, tuple(groups), _with_generated(eqns, made, generated), made))
    made = [v for v in results if v in jaxpr.invars or v in generated]  # results that no piece makes
    if made or not all(isinstance(v, core.Var) for v in jaxpr.outvars):
        literals = [v for v in jaxpr.outvars if not isinstance(v, core.Var)]
        pieces.append(_piece(analysis, names, tuple(groups), _with_generated([], made, generated), [*made, *literals]))
    return tuple(pieces)


def _generated(jaxpr: core.Jaxpr) -> dict[core.Var, core.JaxprEqn]:
    """Variables that depend on no input, by the equation that makes them."""
    found: dict[core.Var, core.JaxprEqn] = {}
    for eqn in jaxpr.eqns:
        if not eqn.effects and all(not isinstance(v, core.Var) or v in found for v in eqn.invars):
            found.update(dict.fromkeys(eqn.outvars, eqn))
    return found


def _with_generated(
    eqns: Sequence[core.JaxprEqn], made: Sequence[core.Var], generated: Mapping[core.Var, core.JaxprEqn]
) -> list[core.JaxprEqn]:
    """``eqns`` behind the input-free equations that they need."""
    copies = list({id(e): e for e in generated.values()}.values())
    wanted = [v for e in eqns for v in e.invars if isinstance(v, core.Var)]
    return [*live_equations(copies, [*wanted, *made]), *eqns]


def _piece(
    analysis: Analysis,
    names: Mapping[int, str],
    reserved: tuple[str, ...],
    eqns: Sequence[core.JaxprEqn],
    outvars: Sequence[core.Var | core.Literal],
) -> Piece:
    defined = {v for e in eqns for v in e.outvars}
    reads = [v for e in eqns for v in (*e.invars,) if isinstance(v, core.Var) and v not in defined]
    reads += [v for v in outvars if isinstance(v, core.Var) and v not in defined]
    invars = list(dict.fromkeys(reads))

    def named(atom: core.Var | core.Literal) -> NamedDims:
        if not isinstance(atom, core.Var):
            return ((),) * len(shape(atom))
        size = analysis.atoms.size
        return tuple(tuple((names.get(leaf, ""), size[leaf]) for leaf in dim) for dim in analysis.leaves(atom))

    jaxpr = make_jaxpr(eqns, invars, outvars, analysis.jaxpr)
    name = function_name(eqns) if eqns else "copy"
    return Piece(name, jaxpr, FactorNames(tuple(named(v) for v in (*invars, *outvars)), reserved))
