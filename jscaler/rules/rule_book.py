"""``RuleBook``: rules, partial sums and local bodies of a graph's ops; each worked out once per distinct body."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend import core

from jscaler.capture.bodies import BodyTable
from jscaler.capture.jaxprs import CALLS, CUSTOM_VJP, Atom, evaluate, inline, make_jaxpr, trace_flat
from jscaler.capture.residuals import saved_pair
from jscaler.capture.user_op import op_p
from jscaler.ir import Body, Factor, FactorNames, Graph, Op, PTensor, Rule
from jscaler.ir.mask import Combiner
from jscaler.ir.rule import TensorFactors
from jscaler.lax_primitives.reshapes import common_refinement
from jscaler.rules.analysed import Analysis
from jscaler.rules.analysis import analyse
from jscaler.rules.cell import Cell
from jscaler.rules.chunk import Chunks
from jscaler.rules.cut import Piece, cut
from jscaler.rules.derive import derive_rule
from jscaler.rules.expansion import Site, Step
from jscaler.rules.factor_states import INDEPENDENT, SPLIT, Blocked, Leaves, interpret
from jscaler.rules.localize import Localizer
from jscaler.rules.named_factors import named_factors
from jscaler.rules.reached_factors import reached_factors
from jscaler.rules.user_rules import user_names

UNREAD = "the gradients read nothing that it is an index of"


@dataclass(frozen=True)
class _Derived:
    """What is known of one op with a body; ``finer`` is a key of how its analysis is refined."""

    op: Op
    rule: Rule
    groups: dict[str, Leaves]
    analysis: Analysis
    finer: Any


@dataclass
class RuleBook:
    """A memo over bodies. ``rule`` and ``factor_of`` serve policies; the rest serves materialize and lower.

    Attributes:
        bodies: the bodies that it is about.
        memo: what later stages work out of a local body, by keys of their own.
    """

    bodies: BodyTable = field(default_factory=BodyTable)
    memo: dict[Any, Any] = field(default_factory=dict)
    _analyses: dict[Any, Analysis] = field(default_factory=dict)
    _rules: dict[Any, tuple[Rule, dict[str, Leaves], Analysis, Any]] = field(default_factory=dict)
    _locals: dict[Any, tuple[core.Jaxpr, tuple[int, ...]]] = field(default_factory=dict)
    _of_cells: dict[int, Analysis] = field(default_factory=dict)  # of local bodies, by identity of what is kept there
    _cuts: dict[Any, tuple[Piece, ...]] = field(default_factory=dict)
    _expansions: dict[Any, Sequence[Step] | None] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)
    _partials: dict[Any, tuple[Combiner | None, ...] | None] = field(default_factory=dict)
    # by identity of ops, which are asked about often and take longer to compare than to keep
    _of_ops: dict[int, _Derived] = field(default_factory=dict)
    _of_handles: dict[int, tuple[Op, Rule]] = field(default_factory=dict)

    def rule(self, op: Op) -> Rule:
        """The factors of ``op``; a backward op shares the names of its forward through their common dims."""
        if op.body is not None:
            return self._derived(op).rule
        assert op.forward is not None
        if id(op) not in self._of_handles:
            self._of_handles[id(op)] = op, self._of_handle(op, _handle_rule(self.rule(op.forward), op))
        return self._of_handles[id(op)][1]

    def _of_handle(self, op: Op, rule: Rule) -> Rule:
        """``rule``, whose factors a backward handle has of its forward, without those that its body will not split.

        Only these may be lost: a factor of operands alone, which the gradients need not read; and one that an inner
        reduction of the forward blocks, until it is cut there. So few bodies are traced before the policy runs.
        """
        assert op.forward is not None
        ends = {c for _, c in op.cotangents} | set(op.outputs)
        tensors = zip((*op.inputs, *op.outputs), (*rule.operands, *rule.results), strict=True)
        sure = {f for t, dims in tensors if t in ends for dim in dims for f in dim}
        doubtful = [f for f in rule.factors.values() if f.splittable and (f.name not in sure or f.reopens)]
        if not doubtful:
            return rule
        body, kept = self.bodies.backward(op.forward, op)
        ways = [dataclasses.replace(op, body=body, inputs=tuple(op.inputs[i] for i in kept))]
        if op.forward.residuals == "saved":  # as long as the forward can be split as it is wanted
            ways.append(saved_pair(self.rule(op.forward), self.bodies, op.forward, op)[1])
        unread = {f.name: dataclasses.replace(f, kind="blocked", reason=UNREAD, reopens=False) for f in doubtful}
        found = [self.rule(way).factors.get(name, own) for way in ways for name, own in unread.items()]
        return dataclasses.replace(rule, factors=rule.factors | {f.name: f for f in found if not f.splittable})

    def factor_of(self, graph: Graph, tensor: PTensor, dim: int) -> Mapping[Op, str]:
        return reached_factors(graph, tensor, dim)

    def named_factors(self, graph: Graph) -> Mapping[str, Mapping[str, str]]:
        return named_factors(graph)

    def analysis(self, op: Op) -> Analysis:
        """The analysed body of ``op``, its dims refined as the names that they have from elsewhere say."""
        assert op.body is not None
        return self._refined(op.body, self._given(op))[0]

    def analysis_of_body(self, body: Body) -> Analysis:
        """The analysed body, its dims refined no further than it does itself."""
        return self._refined(body, None)[0]

    def _refined(self, body: Body, given: FactorNames | None) -> tuple[Analysis, Any]:
        """An analysis of ``body``, and a key of what was refined in it."""
        if (body, ()) not in self._analyses:
            self._analyses[body, ()] = analyse(inline(body.jaxpr), self._warned)
        finer = _finer(self._analyses[body, ()], given) if given is not None else ()
        if (body, finer) not in self._analyses:
            # heads and head size are one dim of a piece that does not tell them apart; the plan does
            analysis = analyse(inline(body.jaxpr), self._warned)
            atoms = [*analysis.jaxpr.invars, *analysis.jaxpr.outvars]
            for index, dim, sizes in finer:
                fresh = [analysis.atoms.new(size) for size in sizes]
                analysis.atoms.unify(list(analysis.leaves(atoms[index])[dim]), fresh, "")
            self._analyses[body, finer] = analysis
        return self._analyses[body, finer], finer

    def _given(self, op: Op) -> FactorNames | None:
        """The names that the factors of ``op`` have from elsewhere."""
        if op.named is None and op.forward is not None:
            return _names_from_forward(self.rule(op.forward), op)
        return op.named

    def passes(self, op: Op, partial: Sequence[Combiner | None]) -> tuple[Combiner | None, ...] | None:
        """What value shares of inputs (a combiner each, or None) make of the results; None where ``op`` is not linear."""
        assert op.body is not None
        key = (op.body, tuple(partial))
        if key not in self._partials:
            analysis = self.analysis_of_body(op.body)
            given: dict[core.Var, Combiner] = {v: c for v, c in zip(analysis.jaxpr.invars, partial, strict=True) if c}
            try:
                states = interpret(analysis, (), given)
            except Blocked:
                self._partials[key] = None
            else:
                self._partials[key] = tuple(_combiner(states, v) for v in analysis.jaxpr.outvars)
        return self._partials[key]

    def local(
        self,
        op: Op,
        parts: Mapping[str, int],
        sizes: Mapping[str, tuple[int, ...]] | None = None,
        chunks: Mapping[str, int] | None = None,
    ) -> tuple[core.Jaxpr, tuple[str, ...]]:
        """``op``'s body at part shapes, and the factors whose part index it takes as its last operands.

        Args:
            sizes: the sizes of the parts of factors that are split into unequal ones.
            chunks: the factor along which every part is run chunk by chunk, if any, and the number of its chunks.
        """
        assert op.body is not None
        split = {f: n for f, n in parts.items() if n > 1}
        walked = {f: n for f, n in (chunks or {}).items() if n > 1}
        if not split and not walked:
            if (op.body, ()) not in self._locals:
                # Traced again like the backward body and the parts: calls opened, casts of literals folded. Otherwise
                # value numbering would not see that the backward's recomputation is the same arithmetic.
                body = op.body.jaxpr
                if any(e.primitive is op_p for e in body.eqns):
                    retraced = inline(Localizer(self.analysis(op), {}).run())
                else:
                    retraced = trace_flat(lambda *xs: evaluate(body, xs), [v.aval for v in body.invars])
                    retraced = inline(retraced, CALLS | CUSTOM_VJP)  # no autodiff follows
                self._locals[op.body, ()] = (retraced, ())
            return self._locals[op.body, ()][0], ()
        derived, sizes = self._derived(op), sizes or {}
        groups, analysis = derived.groups, derived.analysis
        key = (
            (op.body, derived.finer),
            tuple(sorted((groups[f], n, sizes.get(f, ())) for f, n in split.items())),
            tuple((groups[f], n) for f, n in walked.items()),
        )
        if key not in self._locals:
            uneven = {leaf: own for f, own in sizes.items() for leaf in groups[f]}
            cut = {leaf: n for f, n in split.items() for leaf in groups[f]}
            localizer: Localizer | Chunks = Localizer(analysis, cut, uneven)
            for factor, count in walked.items():
                localizer = Chunks(analysis, cut, uneven, groups[factor], count)
            self._locals[key] = (inline(localizer.run()), localizer.leaves)
        jaxpr, leaves = self._locals[key]
        name = {leaf: f for f in split for leaf in groups[f]}
        return jaxpr, tuple(name[leaf] for leaf in leaves)

    def in_turn(self, op: Op, factor: str, parts: int) -> tuple[core.Jaxpr, bool]:
        """One of ``parts`` parts of ``op`` that run one after another, to be split further: its user ops stay.

        Returns:
            The body at the part's shapes, and whether it takes the part's index as its last operand.
        """
        assert op.body is not None
        derived = self._derived(op)
        key = ("in turn", op.body, derived.finer, derived.groups[factor], parts)
        if key not in self._locals:
            cut = dict.fromkeys(derived.groups[factor], parts)
            localizer = Localizer(derived.analysis, cut, keeps_ops=True)
            made = inline(localizer.run())
            reads = _reads_index(made, len(op.inputs))
            self._locals[key] = _one_index(made, len(op.inputs), None if reads else 0), localizer.leaves if reads else ()
        jaxpr, leaves = self._locals[key]
        return jaxpr, bool(leaves)

    def cell(self, op: Op, factor: str, sizes: tuple[int, ...], number: int) -> core.Jaxpr:
        """Part ``number`` of ``op``, whose parts have these sizes and run one after another, to be split further."""
        assert op.body is not None
        derived = self._derived(op)
        key = ("cell", op.body, derived.finer, derived.groups[factor])
        anywhere, here = (*key, sizes[number]), (*key, sizes, number)
        if anywhere not in self._locals and here not in self._locals:
            part = Cell(derived.analysis, derived.groups[factor], sizes, number)
            made = inline(part.run())
            if part.analysed is not None and part.analysed.jaxpr is made:
                self._of_cells[id(made)] = part.analysed
            placed = bool(part.located) or _reads_index(made, len(op.inputs))
            self._locals[here if placed else anywhere] = _one_index(made, len(op.inputs), number), ()
        return self._locals[here if here in self._locals else anywhere][0]

    def know_cell(self, op: Op, factor: str, size: int, body: Body, names: FactorNames) -> None:
        """Keep the rule of a part of ``op``, ``body`` of this size along ``factor``, where it is that of ``op``."""
        analysis = self._of_cells.get(id(body.jaxpr))
        derived = self._derived(op)
        if analysis is None or derived.finer or (body, names) in self._rules:
            return
        self._analyses.setdefault((body, ()), analysis)
        own = dataclasses.replace(derived.rule.factors[factor], size=size)
        rule = dataclasses.replace(derived.rule, factors=derived.rule.factors | {factor: own})
        self._rules[body, names] = rule, derived.groups, analysis, ()

    def cut(self, op: Op, factors: tuple[str, ...]) -> tuple[Piece, ...]:
        """The pieces of ``op`` that let ``factors`` be split."""
        derived = self._derived(op)
        key = ((op.body, derived.finer), tuple(derived.groups.items()), factors)
        if key not in self._cuts:
            self._cuts[key] = cut(derived.analysis, derived.groups, factors)
        return self._cuts[key]

    def pieces(self, op: Op, factors: tuple[str, ...]) -> tuple[str, ...]:
        """What the pieces of ``op`` do; of a backward handle that is known only after the policy."""
        return tuple(piece.name for piece in self.cut(op, factors)) if op.body is not None else ()

    def expansion(self, op: Op, factor: str, parts: int, algorithm: Any) -> Sequence[Step] | None:
        """The steps that ``algorithm`` (see ``rules.expansion``) puts in ``op``'s place; None where it has none for it."""
        derived = self._derived(op)
        key = (op.body, derived.finer, derived.groups[factor], parts, algorithm)
        if key not in self._expansions:
            self._expansions[key] = algorithm.expand(Site(derived.analysis, derived.groups[factor], parts))
        return self._expansions[key]

    def groups(self, op: Op) -> Mapping[str, Leaves]:
        """The leaf atoms of each factor of an op with a body."""
        return self._derived(op).groups

    def _derived(self, op: Op) -> _Derived:
        """What is known of an op with a body."""
        if id(op) not in self._of_ops:
            assert op.body is not None
            self._of_ops[id(op)] = _Derived(op, *self._rule_of(op.body, self._given(op)))
        return self._of_ops[id(op)]

    def _rule_of(self, body: Body, given: FactorNames | None) -> tuple[Rule, dict[str, Leaves], Analysis, Any]:
        """The rule of a body whose factors have these names from elsewhere, the leaf atoms of its factors, and what
        `_refined` has of it."""
        key = (body, given)
        if key not in self._rules:
            analysis, finer = self._refined(body, given)
            shared = _shared_names(analysis, given) if given is not None else {}
            names = shared or user_names(analysis.jaxpr.eqns, analysis.leaves)
            rule, groups = derive_rule(analysis, names, given.reserved if given else ())
            self._rules[key] = rule, groups, analysis, finer
        return self._rules[key]


def _reads_index(jaxpr: core.Jaxpr, num_inputs: int) -> bool:
    """Whether a part's body reads its index, which its operands after the first ``num_inputs`` are."""
    return any(v in jaxpr.invars[num_inputs:] for e in jaxpr.eqns for v in e.invars if isinstance(v, core.Var))


def _one_index(jaxpr: core.Jaxpr, num_inputs: int, number: int | None) -> core.Jaxpr:
    """``jaxpr``, whose last operands are the indices of one part along the leaves of one factor, with one operand for all.

    Or with none, where ``number`` says which part it is.
    """
    own, spare = jaxpr.invars[:num_inputs], jaxpr.invars[num_inputs:]
    if not spare:
        return jaxpr
    index = spare[0] if number is None else core.Literal(np.asarray(number, np.int32), spare[0].aval)
    table = dict.fromkeys(spare, index)

    def read(atoms: Sequence[Atom]) -> list[Atom]:
        return [table.get(a, a) if isinstance(a, core.Var) else a for a in atoms]

    eqns = [e.replace(invars=read(e.invars)) for e in jaxpr.eqns]
    return make_jaxpr(eqns, [*own, *([spare[0]] if number is None else [])], read(jaxpr.outvars), jaxpr)


def _shared_names(analysis: Analysis, given: FactorNames) -> dict[int, str]:
    """Names for the leaves of a body, from dims that have names already.

    One forward factor may be several leaves of its backward: of a dot, the contracted dim is the rows of
    ``dx = dy·Kᵀ``'s kernel and, as another index, the columns of x in ``dK = xᵀ·dy``.
    """
    names: dict[int, str] = {}
    for _, _, leaves, factors in _dims(analysis, given):
        if [analysis.atoms.size[leaf] for leaf in leaves] == [size for _, size in factors]:
            for leaf, (name, _) in zip(leaves, factors, strict=True):
                if name:
                    names.setdefault(leaf, name)
    return names


def _finer(analysis: Analysis, given: FactorNames) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Tensors and dims that ``given`` tells into more sub-dims than the body does, with their sizes."""
    found = []
    for index, dim, leaves, factors in _dims(analysis, given):
        sizes = [size for _, size in factors]
        mine = [analysis.atoms.size[leaf] for leaf in leaves]
        if mine == sizes or not math.prod(mine) or math.prod(mine) != math.prod(sizes):  # the same, or empty, or others
            continue
        if common_refinement(mine, sizes) == ([size for size in sizes if size != 1], True):
            found.append((index, dim, tuple(sizes)))
    return tuple(found)


def _dims(analysis: Analysis, given: FactorNames) -> Iterator[tuple[int, int, Leaves, tuple[tuple[str, int], ...]]]:
    """Every dim of every input and output that is a variable: its place, its leaves, and the names given to it."""
    for index, (atom, tensor) in enumerate(
        zip((*analysis.jaxpr.invars, *analysis.jaxpr.outvars), given.tensors, strict=True)
    ):
        if isinstance(atom, core.Var):
            for dim, (leaves, factors) in enumerate(zip(analysis.leaves(atom), tensor, strict=True)):
                yield index, dim, leaves, factors


def _combiner(states: Mapping[core.Var, str], atom: Any) -> Any:
    state = states[atom] if isinstance(atom, core.Var) else INDEPENDENT
    return None if state in (SPLIT, INDEPENDENT) else state


def _tensor_factors(forward: Rule, op: Op, tensor: PTensor) -> TensorFactors:
    """The forward factors on a tensor of a backward op: what the forward reads or makes, a cotangent, or a gradient."""
    assert op.forward is not None
    if tensor not in op.outputs:
        tensor = dict(op.saved).get(tensor, tensor)
    if tensor in op.forward.inputs:
        return forward.operands[op.forward.inputs.index(tensor)]
    if tensor in op.forward.outputs:
        return forward.results[op.forward.outputs.index(tensor)]
    for index, cotangent in op.cotangents:
        if tensor in (cotangent, dict(op.saved).get(cotangent)):
            return forward.results[index]
    return forward.operands[op.gradients[op.outputs.index(tensor)]]


def _names_from_forward(forward: Rule, op: Op) -> FactorNames:
    """What the tensors of a backward op are called by its forward's rule."""
    tensors = (forward.named(_tensor_factors(forward, op, t)) for t in (*op.inputs, *op.outputs))
    return FactorNames(tuple(tensors), tuple(forward.factors))


def _handle_rule(forward: Rule, op: Op) -> Rule:
    """What is known of a backward handle before it has a body: its forward's factors."""
    factors = {
        name: f if f.kind == "blocked" else Factor(name, f.size, even_only=f.even_only)
        for name, f in forward.factors.items()
    }
    operands = tuple(_tensor_factors(forward, op, t) for t in op.inputs)
    return Rule(factors, operands, tuple(_tensor_factors(forward, op, t) for t in op.outputs))
