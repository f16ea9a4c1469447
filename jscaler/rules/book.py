"""``RuleBook``: rules, partial sums and local bodies of a graph's ops; each worked out once per distinct body."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core

from jscaler.capture.jaxprs import inline
from jscaler.ir import Body, Factor, Graph, Op, PTensor, Rule
from jscaler.ir.mask import Combiner
from jscaler.ir.rule import TensorFactors
from jscaler.rules.derive import INDEPENDENT, SPLIT, Analysis, Blocked, analyse, derive_rule, interpret
from jscaler.rules.localize import Localizer
from jscaler.rules.reach import reached_factors


@dataclass
class RuleBook:
    """A memo over bodies. ``rule`` and ``factor_of`` serve policies; the rest serves materialize and lower."""

    _analyses: dict[Body, Analysis] = field(default_factory=dict)
    _rules: dict[Any, Rule] = field(default_factory=dict)
    _locals: dict[Any, tuple[core.Jaxpr, tuple[int, ...]]] = field(default_factory=dict)
    _partials: dict[Any, tuple[Combiner | None, ...] | None] = field(default_factory=dict)

    def rule(self, op: Op) -> Rule:
        """The factors of ``op``; a backward op shares the names of its forward through their common dims."""
        if op.body is None:
            assert op.forward is not None
            return _handle_rule(self.rule(op.forward), op)
        if op.forward is None:
            return self._derive(op.body, op.body, {})
        forward = self.rule(op.forward)
        key = (op.body, tuple(_tensor_factors(forward, op, t) for t in op.inputs))
        return self._rules[key] if key in self._rules else self._derive(key, op.body, self._shared_names(forward, op))

    def factor_of(self, graph: Graph, path: str, dim: int) -> Mapping[Op, str]:
        return reached_factors(graph, graph.input(path), dim)

    def analysis(self, body: Body) -> Analysis:
        if body not in self._analyses:
            self._analyses[body] = analyse(inline(body.jaxpr))
        return self._analyses[body]

    def passes(self, op: Op, partial: Sequence[Combiner | None]) -> tuple[Combiner | None, ...] | None:
        """What value shares of inputs (a combiner each, or None) make of the results; None where ``op`` is not linear."""
        assert op.body is not None
        key = (op.body, tuple(partial))
        if key not in self._partials:
            analysis = self.analysis(op.body)
            given: dict[core.Var, Combiner] = {v: c for v, c in zip(analysis.jaxpr.invars, partial, strict=True) if c}
            try:
                states = interpret(analysis, None, given)
            except Blocked:
                self._partials[key] = None
            else:
                self._partials[key] = tuple(_combiner(states, v) for v in analysis.jaxpr.outvars)
        return self._partials[key]

    def local(self, op: Op, parts: Mapping[str, int]) -> tuple[core.Jaxpr, tuple[str, ...]]:
        """``op``'s body at part shapes, and the factors whose part index it takes as its last operands."""
        assert op.body is not None
        split = {f: n for f, n in parts.items() if n > 1}
        if not split:
            return op.body.jaxpr, ()
        rule = self.rule(op)
        leaf = self._leaves(op.body, rule)
        key = (op.body, tuple(sorted((leaf[f], n) for f, n in split.items())))
        if key not in self._locals:
            localizer = Localizer(self.analysis(op.body), {leaf[f]: n for f, n in split.items()})
            self._locals[key] = (localizer.run(), tuple(localizer.leaves))
        jaxpr, leaves = self._locals[key]
        name = {v: k for k, v in leaf.items()}
        return jaxpr, tuple(name[x] for x in leaves)

    def _derive(self, key: Any, body: Body, names: Mapping[int, str]) -> Rule:
        if key not in self._rules:
            self._rules[key] = derive_rule(self.analysis(body), names)
        return self._rules[key]

    def _leaves(self, body: Body, rule: Rule) -> dict[str, int]:
        """Factor name -> leaf atom."""
        analysis = self.analysis(body)
        table: dict[str, int] = {}
        atoms = [*analysis.jaxpr.invars, *analysis.jaxpr.outvars]
        for atom, factors in zip(atoms, (*rule.operands, *rule.results), strict=True):
            if isinstance(atom, core.Var):
                for dim, leaves in zip(factors, analysis.leaves(atom), strict=True):
                    table.update(zip(dim, leaves, strict=True))
        return table

    def _shared_names(self, forward: Rule, op: Op) -> dict[int, str]:
        """Names for the leaves of a backward body, from the dims it has in common with its forward."""
        assert op.body is not None
        assert op.forward is not None
        analysis = self.analysis(op.body)
        names: dict[int, str] = {}
        tensors = [
            *zip(analysis.jaxpr.invars, op.inputs, strict=True),
            *zip(analysis.jaxpr.outvars, op.outputs, strict=True),
        ]
        for atom, tensor in tensors:
            if not isinstance(atom, core.Var):
                continue
            for leaves, factors in zip(analysis.leaves(atom), _tensor_factors(forward, op, tensor), strict=True):
                sizes = [forward.factors[f].size for f in factors]
                if [analysis.atoms.size[leaf] for leaf in leaves] == sizes:
                    for leaf, name in zip(leaves, factors, strict=True):
                        if leaf not in names and name not in names.values():
                            names[leaf] = name
        return names


def _combiner(states: Mapping[core.Var, str], atom: Any) -> Any:
    state = states[atom] if isinstance(atom, core.Var) else INDEPENDENT
    return None if state in (SPLIT, INDEPENDENT) else state


def _tensor_factors(forward: Rule, op: Op, tensor: PTensor) -> TensorFactors:
    """The forward factors on a tensor of a backward op: an input of the forward, a cotangent, or a gradient."""
    assert op.forward is not None
    if tensor in op.forward.inputs:
        return forward.operands[op.forward.inputs.index(tensor)]
    for index, cotangent in op.cotangents:
        if cotangent == tensor:
            return forward.results[index]
    return forward.operands[op.gradients[op.outputs.index(tensor)]]


def _handle_rule(forward: Rule, op: Op) -> Rule:
    """What is known of a backward handle before it has a body: its forward's factors."""
    factors = {name: f if f.kind == "blocked" else Factor(name, f.size, "parallel") for name, f in forward.factors.items()}
    operands = tuple(_tensor_factors(forward, op, t) for t in op.inputs)
    return Rule(factors, operands, tuple(_tensor_factors(forward, op, t) for t in op.outputs))
