"""What the factors of ops are of a model: rows of the batch, positions, heads, hidden units, words, experts.

They are found in the dataflow, by what the plans of `jscaler.plans` find them with.
"""

from collections.abc import Callable, Mapping, Sequence

from jscaler.errors import JscalerError, PlanError
from jscaler.ir import Op
from jscaler.plans.attention import cores_of
from jscaler.plans.batch import BATCH
from jscaler.plans.column_row_pairs import column_factors
from jscaler.plans.data_parallel import batch_factors
from jscaler.plans.factors import Factors, reached
from jscaler.plans.find_experts import find_experts
from jscaler.plans.find_sequence import sequence_of
from jscaler.plans.vocab_parallel import tables_of_words, word_factors
from jscaler.primitives import Planner

REMEDY = "leave the dim out of dims=..."


def _sequence(graph: Planner) -> Factors:
    return reached(graph, sequence_of(graph, None, 1, "any_split"), 1)


def _columns(graph: Planner) -> Factors:
    return column_factors(graph, None, 1, REMEDY, shared=False)[0]


def _heads(graph: Planner) -> Factors:
    """Those of the columns that reach the core of attention."""
    columns, found = _columns(graph), Factors()
    for op in (op for core in cores_of(graph) for op in core if op in columns):
        for tensor, dims in zip(op.inputs, graph.rule(op).operands, strict=True):
            for dim, names in enumerate(dims):
                if columns[op] in names:
                    found |= {o: name for o, name in graph.graph.factor_of(tensor, dim).items() if columns.get(o) == name}
    return found


def _units(graph: Planner) -> Factors:
    heads = _heads(graph)
    return {op: name for op, name in _columns(graph).items() if op not in heads}


def _words(graph: Planner) -> Factors:
    return word_factors(graph, tables_of_words(graph), 1)


def _experts(graph: Planner) -> Factors:
    return reached(graph, [(kernel.tensor, kernel.expert) for kernel in find_experts(graph, REMEDY)], 1)


FINDERS: Mapping[str, Callable[[Planner], Factors]] = {
    "sequence": _sequence, "heads": _heads, "units": _units, "words": _words, "experts": _experts,
}  # fmt: skip


class Dims:
    """The dims of a graph, found when they are asked for.

    Args:
        batch: path or pattern of the batch among the inputs.
    """

    def __init__(self, graph: Planner, batch: str = BATCH):
        self.graph = graph
        self._finders = {"batch": lambda graph: batch_factors(graph, batch, 1), **FINDERS}
        self._tables: dict[str, dict[str, str]] = {}

    def factors(self, op: Op, dims: Sequence[str]) -> set[str]:
        """The factors that ``dims`` are in a forward op, as far as they reach it.

        Raises:
            PlanError: the model has none of them.
        """
        tables = [self._table(dim) for dim in dims]
        if tables and not any(tables):
            named = ", ".join(map(repr, dims))
            raise PlanError(f"dims={named} matches nothing: the model has no {' and no '.join(dims)}; {REMEDY}")
        return {table[op.path] for table in tables if op.path in table}

    def name(self, op: Op, factor: str | None) -> str:
        """What a factor of a forward op is: a dim of the model, or of an input; ``"a copy"`` of None."""
        if factor is None:
            return "a copy"
        known = next((dim for dim in self._finders if self._table(dim).get(op.path) == factor), None)
        return known or self.graph.factor_names(op).get(factor, f"dim {factor}")

    def _table(self, dim: str) -> dict[str, str]:
        """By path of a forward op the factor that a dim is; none where the model has no such dim."""
        if dim not in self._tables:
            try:
                found = self._finders[dim](self.graph)
            except JscalerError:  # of an expert who names it the plans say why; here others may be open
                found = Factors()
            self._tables[dim] = {op.path: name for op, name in found.items() if op.kind == "forward"}
        return self._tables[dim]
