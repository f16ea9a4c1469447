"""Put the steps of an algorithm in an op's place: ordinary ops, which share the names of its factors."""

import dataclasses
from collections.abc import Sequence

from jax.extend import core

from jscaler.capture.bodies import BodyTable
from jscaler.errors import PlanError
from jscaler.ir import FactorNames, Op, PTensor, Rule
from jscaler.ir.rule import NamedDims
from jscaler.primitives.algorithms import GridAxis
from jscaler.rules.analysed import Analysis
from jscaler.rules.expansion import Step, Value
from jscaler.rules.rule_book import RuleBook


def expand_op(op: Op, axis: GridAxis, book: RuleBook, bodies: BodyTable) -> tuple[Op, ...] | None:
    """The ops that stand for ``op`` under the algorithm of ``axis``; None where it has none for it.

    Raises:
        PlanError: the algorithm's steps do not make what the op makes.
    """
    assert axis.factor is not None
    rule = book.rule(op)
    steps = book.expansion(op, axis.factor, axis.parts, axis.algorithm) if axis.factor in rule.factors else None
    if steps is None:
        return None
    return _Expander(op, axis, rule, book, bodies).run(steps)


class _Expander:
    def __init__(self, op: Op, axis: GridAxis, rule: Rule, book: RuleBook, bodies: BodyTable):
        self.op = op
        self.axis = axis
        self.rule = rule
        self.book = book
        self.bodies = bodies
        self.values: dict[Value, tuple[PTensor, NamedDims]] = {
            i: (t, rule.named(dims)) for i, (t, dims) in enumerate(zip(op.inputs, rule.operands, strict=True))
        }
        self.made: set[int] = set()

    def run(self, steps: Sequence[Step]) -> tuple[Op, ...]:
        ops = tuple(self._step(step) for step in steps)
        if self.made != set(range(len(self.op.outputs))):
            missing = sorted(set(range(len(self.op.outputs))) - self.made)
            raise self._wrong(f"no step makes its results {missing}")
        if len({op.path for op in ops}) < len(ops):
            raise self._wrong(f"two of its steps have one name: {[step.name for step in steps]}")
        return ops

    def _step(self, step: Step) -> Op:
        path = self.op.path + "/" + step.name
        unknown = [v for v in step.reads if v not in self.values]
        if unknown:
            raise self._wrong(f"step '{step.name}' reads {unknown}, which no step before it makes")
        reads = [self.values[v] for v in step.reads]
        body = self.bodies.traced(step.run, [t.aval for t, _ in reads])
        if len(body.jaxpr.outvars) != len(step.makes):
            raise self._wrong(f"step '{step.name}' returns {len(body.jaxpr.outvars)} arrays for {list(step.makes)}")
        seen = self.book.analysis_of_body(body)
        outputs, named = [], [self._fitted(seen, v, n) for v, (_, n) in zip(seen.jaxpr.invars, reads, strict=True)]
        for i, (value, var) in enumerate(zip(step.makes, seen.jaxpr.outvars, strict=True)):
            if isinstance(value, int):
                outputs.append(self._result(step, value, var))
                named.append(self._fitted(seen, var, self.rule.named(self.rule.results[value])))
            else:
                outputs.append(PTensor(path + f":{i}", body.jaxpr.outvars[i].aval, self.op.outputs[0].role))
                named.append(((),) * len(var.aval.shape))  # type: ignore[attr-defined]
        names = FactorNames(tuple(named), tuple(self.rule.factors))
        inputs = tuple(t for t, _ in reads)
        op = dataclasses.replace(
            self.op, path=path, inputs=inputs, outputs=tuple(outputs), body=body, named=names, backward=None, primal=None
        )
        self._remember(step, op)
        return op

    def _result(self, step: Step, index: int, var: core.Var | core.Literal) -> PTensor:
        if not 0 <= index < len(self.op.outputs) or index in self.made:
            raise self._wrong(f"step '{step.name}' makes result {index}, which is none or is made before")
        result = self.op.outputs[index]
        found = tuple(getattr(var.aval, "shape")), getattr(var.aval, "dtype")  # noqa: B009
        if found != (result.shape, result.dtype):
            raise self._wrong(f"step '{step.name}' makes {found} for result {index}, which is {result.shape, result.dtype}")
        self.made.add(index)
        return result

    def _remember(self, step: Step, op: Op) -> None:
        """What the step hands on, with the factors of the op that its dims are."""
        rule = self.book.rule(op)
        for value, tensor, dims in zip(step.makes, op.outputs, rule.results, strict=True):
            if isinstance(value, str):
                known = tuple(
                    tuple((f if f in self.rule.factors else "", rule.factors[f].size) for f in dim) for dim in dims
                )
                self.values[value] = (tensor, known)

    def _fitted(self, seen: Analysis, atom: core.Var | core.Literal, named: NamedDims) -> NamedDims:
        """``named`` in the sub-dims that the step's body sees: the factor that is cut may be refined into its parts."""
        if not isinstance(atom, core.Var):
            return ((),) * len(named)
        sizes = [[seen.atoms.size[leaf] for leaf in leaves] for leaves in seen.leaves(atom)]
        return tuple(map(self._fitted_dim, sizes, named))

    def _fitted_dim(self, sizes: Sequence[int], dim: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        if [size for _, size in dim] == list(sizes):
            return dim
        if dim and sizes and dim[0][0] == self.axis.factor and sizes[0] % self.axis.parts == 0:
            return ((dim[0][0], sizes[0]), *(("", size) for size in sizes[1:]))
        return ()

    def _wrong(self, what: str) -> PlanError:
        return PlanError(f"'{self.op.path}' under {self.axis.algorithm}: {what}")
