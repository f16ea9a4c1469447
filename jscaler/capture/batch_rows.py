"""Where a step's variables hold rows of the batch, and whether an equation keeps, joins or mixes these.

    x [8, 6] ─► y = tanh(x)     "kept": a row is made of the same row
                y.mean(0)       "joined": a reduction over rows
                y[order]        "mixed": a row is made of others
    w [6, 6] ─► w.T             "none": no operand has rows

Two views behind one another, ``concatenate([x, y])``, hold the rows as minor digits of a dim: 16 is (2 8).
Ops are grouped by need, and see these sub-dims; no number depends on it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jax.extend import core

from jscaler.capture.inner_jaxprs import ScanParts, inner_jaxpr, scan_parts
from jscaler.capture.trace import Trace
from jscaler.capture.user_op import call_spec
from jscaler.ir import FactorNames
from jscaler.ir.equations import Atom, shape
from jscaler.ir.rule import unnamed
from jscaler.lax_primitives import known
from jscaler.lax_primitives.spec import Dims, Label

Need = Literal["none", "kept", "joined", "mixed"]
NEEDS: tuple[Need, ...] = ("none", "kept", "joined", "mixed")  # ever more of the batch


class Digits(NamedTuple):
    """Where rows are in a dim (or label) that is seen as (outer, count, what is left)."""

    outer: int
    count: int


Rows = Mapping[int, Digits]  # by dim that holds rows


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

    def enter(self, parts: ScanParts, variables: Sequence[core.Var]) -> None:
        """Follow the rows into a scan, whose last operands are ``variables`` of its body; there may be none."""
        operands = parts.operands
        first = len(operands) - len(variables)
        rows = body_rows(parts, [self.rows(atom) for atom in operands])[first:]
        self.of.update((var, own) for var, own in zip(variables, rows, strict=True) if own)
        learned = zip(variables, map(self._is_learned, operands[first:]), strict=True)
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

    def names(self, atoms: Sequence[Atom]) -> FactorNames | None:
        """The sub-dims of an op's tensors, inputs first, if rows are the minor digits of a dim; else None.

        The equations of the op may not tell these apart.
        """
        rows = [self.rows(atom) for atom in atoms]
        if all(digits.outer == 1 for own in rows for digits in own.values()):
            return None
        outer = [{dim: digits.outer for dim, digits in own.items()} for own in rows]
        return FactorNames(tuple(unnamed(shape(atom), own) for atom, own in zip(atoms, outer, strict=True)))


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
    return BatchRows({v: {0: Digits(1, count)} for v in data if shape(v)[0] == count}, trained)


def _through(eqn: core.JaxprEqn, rows: Sequence[Rows]) -> tuple[Need, list[Rows]]:
    """What ``eqn`` does with the rows of its operands, and the rows of its results."""
    primitive = known(eqn.primitive)
    if eqn.primitive.name == "scan":
        return _through_scan(eqn, rows)
    if primitive.opened:
        return _through_jaxpr(inner_jaxpr(eqn)[0], rows)
    spec = call_spec(eqn) or (primitive.spec and primitive.spec(eqn))
    if spec is None:
        return "mixed", [{} for _ in eqn.outvars]
    labels: dict[Label, Digits] = {}
    for own, dims in zip(rows, spec.operands, strict=True):
        labels |= _labels(own, dims)
    results = [_rows(dims, labels) for dims in spec.results]
    paired = max(map(len, results), default=0) > max(map(len, rows))  # each row with each
    if paired or not labels.keys().isdisjoint(spec.blocked):
        return "mixed", results
    kept = all(labels.keys() <= {label for dim in dims for label in dim} for dims in spec.results)
    return "kept" if kept else "joined", results


def _labels(rows: Rows, dims: Dims) -> dict[Label, Digits]:
    """The labels of an operand's dims that hold rows."""
    found: dict[Label, Digits] = {}
    for dim, digits in rows.items():
        outer, count = digits
        for label in dims[dim] if dim < len(dims) else ():
            size = label[1]
            if count <= 1 or max(outer, size) % min(outer, size):
                break
            if outer < size:
                inside = min(count, size // outer)
                found[label] = Digits(outer, inside)
                count //= inside
            outer = max(1, outer // size)
    return found


def _rows(dims: Dims, labels: Mapping[Label, Digits]) -> Rows:
    """The rows of a result, given the ``labels`` that hold rows."""
    found: dict[int, Digits] = {}
    for number, dim in enumerate(dims):
        first = next((i for i, label in enumerate(dim) if label in labels), len(dim))
        outer, count = math.prod(size for _, size in dim[:first]), 1
        for label in dim[first:]:
            own = labels.get(label)
            if own is None or (count > 1 and own.outer > 1):
                break
            outer, count = outer * own.outer, count * own.count
            if own.outer * own.count < label[1]:
                break
        if count > 1:
            found[number] = Digits(outer, count)
    return found


def _through_jaxpr(jaxpr: core.Jaxpr, rows: Sequence[Rows]) -> tuple[Need, list[Rows]]:
    inner = BatchRows({v: own for v, own in zip(jaxpr.invars, rows, strict=True) if own})
    return largest([inner.add(eqn) for eqn in jaxpr.eqns]), [inner.rows(v) for v in jaxpr.outvars]


def _through_scan(eqn: core.JaxprEqn, rows: Sequence[Rows]) -> tuple[Need, list[Rows]]:
    parts = scan_parts(eqn)
    need, results = _through_jaxpr(parts.body, body_rows(parts, rows))
    finals, stacked = results[: len(parts.finals)], results[len(parts.finals) :]
    return need, [*finals, *({dim + 1: digits for dim, digits in own.items()} for own in stacked)]


def body_rows(parts: ScanParts, rows: Sequence[Rows]) -> list[Rows]:
    """The rows of the arguments of a scan's body. A dim that is scanned over is none of theirs."""
    whole = len(parts.consts) + len(parts.inits)
    slices = [{dim - 1: digits for dim, digits in own.items() if dim} for own in rows[whole:]]
    return [*rows[:whole], *slices]
