"""The batch's rows in each variable of a step, and what an equation does with them.

    x [8, 6] ─► y = tanh(x)     "kept": a row is made of the same row
                y.mean(0)       "joined": a reduction over rows
                y[order]        "mixed": a row is made of others
    w [6, 6] ─► w.T             "none": no operand has rows

Ops are grouped by it; no number depends on it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jax.extend import core

from jscaler.capture.inner_jaxprs import inner_jaxpr, scan_parts
from jscaler.capture.trace import Trace
from jscaler.ir.equations import Atom, shape
from jscaler.lax_primitives import known
from jscaler.lax_primitives.spec import Dims, Label

Need = Literal["none", "kept", "joined", "mixed"]
NEEDS: tuple[Need, ...] = ("none", "kept", "joined", "mixed")  # ever more of the batch
Rows = Mapping[int, int]  # dims that hold rows, each with how many are its major digits


@dataclass
class BatchRows:
    """The rows of variables, as far as `add` has followed them.

    Attributes:
        learned: variables that depend on a parameter.
    """

    of: dict[core.Var, Rows] = field(default_factory=dict)
    learned: set[core.Var] = field(default_factory=set)

    def rows(self, atom: Atom) -> Rows:
        return self.of.get(atom, {}) if isinstance(atom, core.Var) else {}

    def is_learned(self, eqn: core.JaxprEqn) -> bool:
        """Whether what ``eqn`` makes depends on a parameter."""
        return any(self._is_learned(atom) for atom in eqn.invars)

    def _is_learned(self, atom: Atom) -> bool:
        return isinstance(atom, core.Var) and atom in self.learned

    def enter(self, eqn: core.JaxprEqn, variables: Sequence[core.Var]) -> None:
        """Follow the rows into a scan, whose carries and slices are ``variables`` of its body; there may be none."""
        first = len(eqn.invars) - len(variables)
        rows = body_rows(eqn, [self.rows(atom) for atom in eqn.invars])[first:]
        self.of.update((var, own) for var, own in zip(variables, rows, strict=True) if own)
        learned = zip(variables, map(self._is_learned, eqn.invars[first:]), strict=True)
        self.learned.update(var for var, is_learned in learned if is_learned)

    def add(self, eqn: core.JaxprEqn) -> Need:
        """Follow the rows through ``eqn``."""
        if self.is_learned(eqn):
            self.learned.update(eqn.outvars)
        rows = [self.rows(atom) for atom in eqn.invars]
        if not any(rows):
            return "none"
        need, results = _through(eqn, rows)
        self.of.update((v, own) for v, own in zip(eqn.outvars, results, strict=True) if own)
        return need


def largest(needs: Sequence[Need]) -> Need:
    """The need of an op that is made of equations with these needs."""
    found: list[Need] = [need for need in NEEDS if need in needs]
    return found[-1] if found else "none"


def data_rows(step: Trace, state: Iterable[int]) -> BatchRows:
    """The rows that data begins with: dims 0 of as many rows as most of it has.

    Args:
        state: numbers of the inputs that have a next version: these are no data.
    """
    trained = {v for call in step.calls for v in call.wrt}
    held = {step.invars[i] for i in state} | trained
    data = [v for v in step.invars if v not in held and shape(v) and shape(v)[0] > 1]
    sizes = Counter(shape(v)[0] for v in data)
    count = max(sizes, key=lambda size: (sizes[size], size), default=0)
    return BatchRows({v: {0: count} for v in data if shape(v)[0] == count}, trained)


def _through(eqn: core.JaxprEqn, rows: Sequence[Rows]) -> tuple[Need, list[Rows]]:
    """What ``eqn`` does with the rows of its operands, and the rows of its results."""
    primitive = known(eqn.primitive)
    if eqn.primitive.name == "scan":
        return _through_scan(eqn, rows)
    if primitive.opened:
        return _through_jaxpr(inner_jaxpr(eqn)[0], rows)
    if primitive.spec is None:
        return "mixed", [{} for _ in eqn.outvars]
    spec = primitive.spec(eqn)
    labels = {label for own, dims in zip(rows, spec.operands, strict=True) for label in _labels(own, dims)}
    results = [_rows(dims, labels) for dims in spec.results]
    if labels & spec.blocked.keys():
        return "mixed", results
    kept = all(labels <= {label for dim in dims for label in dim} for dims in spec.results)
    return "kept" if kept else "joined", results


def _labels(rows: Rows, dims: Dims) -> list[Label]:
    """The labels of an operand's dims that stand for rows."""
    found = []
    for dim, count in rows.items():
        for label in dims[dim] if dim < len(dims) else ():
            if count <= 1:
                break
            found.append(label)
            count //= label[1]
    return found


def _rows(dims: Dims, labels: set[Label]) -> Rows:
    """The rows of a result, given the ``labels`` that stand for rows."""
    found = {}
    for number, dim in enumerate(dims):
        count = 1
        for label in dim:
            if label not in labels:
                break
            count *= label[1]
        if count > 1:
            found[number] = count
    return found


def _through_jaxpr(jaxpr: core.Jaxpr, rows: Sequence[Rows]) -> tuple[Need, list[Rows]]:
    inner = BatchRows({v: own for v, own in zip(jaxpr.invars, rows, strict=True) if own})
    return largest([inner.add(eqn) for eqn in jaxpr.eqns]), [inner.rows(v) for v in jaxpr.outvars]


def _through_scan(eqn: core.JaxprEqn, rows: Sequence[Rows]) -> tuple[Need, list[Rows]]:
    parts = scan_parts(eqn)
    need, results = _through_jaxpr(parts.body, body_rows(eqn, rows))
    finals, stacked = results[: len(parts.finals)], results[len(parts.finals) :]
    return need, [*finals, *({dim + 1: count for dim, count in own.items()} for own in stacked)]


def body_rows(eqn: core.JaxprEqn, rows: Sequence[Rows]) -> list[Rows]:
    """The rows of the arguments of a scan's body. A dim that is scanned over is none of theirs."""
    parts = scan_parts(eqn)
    whole = len(parts.consts) + len(parts.inits)
    slices = [{dim - 1: count for dim, count in own.items() if dim} for own in rows[whole:]]
    return [*rows[:whole], *slices]
