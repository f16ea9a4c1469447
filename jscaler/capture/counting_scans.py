"""A scan that adds up a loss and counts the data beside it becomes two: the counts are there before the first loss.

    total, count = scan(chunk, (0, 0), (x, labels))        count = scan(…, labels)     total = scan(…, (x, labels))
    loss = total / count

Behind a count in the same scan every loss would wait for the whole batch.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend import core

from jscaler.capture.batch_rows import BatchRows
from jscaler.capture.inner_jaxprs import ScanParts, scan_parts
from jscaler.capture.jaxprs import (
    CALLS,
    CUSTOM_CALLS,
    Atom,
    Inliner,
    evaluate,
    fresh,
    inline,
    trace_flat,
)  # fmt: skip
from jscaler.capture.live_scan import live_scan
from jscaler.capture.trace import TaggedEquation, Trace

REMATS = frozenset({"checkpoint", "remat2"})


def with_counts_apart(step: Trace, rows: BatchRows) -> Trace:
    """``step`` with a scan of its own for what a scan in a loss only counts.

    Args:
        rows: the batch's rows in the inputs of ``step``.
    """
    rows = BatchRows(dict(rows.of), set(rows.learned))
    equations: list[TaggedEquation] = []
    for tagged in step.equations:
        eqns = _split(tagged.eqn, rows) if tagged.call is not None and tagged.eqn.primitive.name == "scan" else [tagged.eqn]
        for eqn in eqns:
            rows.add(eqn)
            equations.append(TaggedEquation(eqn, tagged.call))
    return dataclasses.replace(step, equations=tuple(equations))


def _split(eqn: core.JaxprEqn, rows: BatchRows) -> list[core.JaxprEqn]:
    """Two scans in place of ``eqn``, one of the counts and one of the rest; ``eqn`` where it counts nothing."""
    parts = scan_parts(eqn)
    body = inline(parts.body, CALLS | CUSTOM_CALLS | REMATS)
    if parts.body_consts or eqn.effects:
        return [eqn]
    counts = _counts(parts, body, rows)
    if not counts:
        return [eqn]
    counting = live_scan(dataclasses.replace(parts, body=body), counts)
    finals = [v if eqn.outvars.index(v) in counts else fresh(v) for v in counting.finals]  # others only help to count
    rest = [fresh(v) if i in counts else v for i, v in enumerate(eqn.outvars)]
    return [*_scan_of(eqn, dataclasses.replace(counting, finals=finals)), eqn.replace(outvars=rest)]


def _counts(parts: ScanParts, body: core.Jaxpr, rows: BatchRows) -> set[int]:
    """The results that join rows of the batch and depend on no parameter.

    None where no other result depends on a parameter: the scan is no loss.
    """
    first, num_carry = len(parts.consts), len(parts.inits)
    carries = list(zip(body.invars[first : first + num_carry], body.outvars[:num_carry], strict=True))
    rows.enter(parts, body.invars)
    while True:
        counted: set[Atom] = set()
        for inner in body.eqns:
            need = rows.add(inner)
            if not rows.is_learned(inner) and (need == "joined" or not counted.isdisjoint(_variables(inner.invars))):
                counted.update(inner.outvars)
        learned = {inside for inside, out in carries if out in rows.learned} - rows.learned
        if not learned:
            break
        rows.learned |= learned
    results = _variables(body.outvars)
    if rows.learned.isdisjoint(results):
        return set()
    return {i for i, v in enumerate(body.outvars) if isinstance(v, core.Var) and v in counted - rows.learned}


def _scan_of(eqn: core.JaxprEqn, parts: ScanParts) -> list[core.JaxprEqn]:
    """A scan of these parts of ``eqn``."""
    num_consts, num_carry = len(parts.consts), len(parts.inits)

    def run(*operands: Any) -> list[Any]:
        consts, rest = operands[:num_consts], list(operands[num_consts:])

        def iteration(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = evaluate(parts.body, [*consts, *carry, *xs])
            return results[:num_carry], results[num_carry:]

        finals, ys = lax.scan(
            iteration, rest[:num_carry], rest[num_carry:], eqn.params["length"], eqn.params["reverse"], eqn.params["unroll"]
        )
        return [*finals, *ys]

    operands = parts.operands
    inliner = Inliner()
    results = inliner.run(trace_flat(run, [a.aval for a in operands]), [], operands)
    original = dict(zip(results, (*parts.finals, *parts.stacked), strict=True))
    return [e.replace(outvars=[original.get(v, v) for v in e.outvars], source_info=eqn.source_info) for e in inliner.eqns]


def _variables(atoms: Sequence[Atom]) -> list[core.Var]:
    return [v for v in atoms if isinstance(v, core.Var)]
