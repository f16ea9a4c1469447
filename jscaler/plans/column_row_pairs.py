"""Kernels that are cut by columns, found by the dataflow: their columns reach the rows of other kernels unit by unit.

    x ──► kernel [:, units] ──► work of each unit by itself ──► kernel [units, :] ──► Σ

Such is a feed-forward pair by any name, a gate beside it, the heads of attention (scores and softmax are a head's own),
two convolutions with a BatchNorm between, the experts' hidden units. The first kernel in the dataflow is cut by columns,
and those that its columns meet by rows; what follows begins anew.

Where several query heads share a head of keys and values, there may be more devices than heads of these. Query heads are
split over all devices, heads of keys and values over some, and each of these lies on several (Shazeer, 2019; Ainslie et
al., 2023)::

    8 query heads, 2 of keys and values, 4 devices        q 0 1 │ q 2 3 │ q 4 5 │ q 6 7
                                                          k 0   │ k 0   │ k 1   │ k 1
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from jax.extend import core

from jscaler.errors import PlanError, PlanWarning, SplitError, divisors, listing, warn
from jscaler.ir import Op, PTensor
from jscaler.ir.flow import ACYCLIC
from jscaler.ir.kinds import learned
from jscaler.ir.walk import closure
from jscaler.plans.attention import holds_contraction
from jscaler.plans.batch import BATCH, data_inputs
from jscaler.plans.factors import Deals, Dims, Factors, by_dim, column, is_much, reached, required, select
from jscaler.plans.layers import weights_of
from jscaler.primitives import Planner
from jscaler.rules.reached_factors import all_reached_factors

ATTENTION = ("query", "key", "value", "qkv", "q_proj", "k_proj", "v_proj")
FEED_FORWARD = ("up", "gate", "up_proj", "gate_proj", "wi", "wi_*", "fc1", "fc_in", "intermediate")
# Kernels that are cut by columns whatever the dataflow says: of a flat query-key-value kernel it says less than the name.
COLUMNS = tuple(f"*/{name}/kernel" for name in (*ATTENTION, *FEED_FORWARD))


def column_factors(
    graph: Planner, columns: Dims | Sequence[str] | None, parts: int, remedy: str, shared: bool = True
) -> tuple[Factors, Deals]:
    """What the kernels reach that are cut by columns into ``parts``: those that match, or by default are found.

    By default those that are called as Flax models call them, and then all that the dataflow shows to be the first of a
    pair. A `PlanWarning` names those found whose columns do not divide: they are not split.

    Args:
        shared: whether fewer parts than ``parts`` may lie on several devices each.

    Raises:
        UnknownNameError: no kernel matches.
        PlanError: nothing is found.
        SplitError: the columns of a kernel that is named do not divide.
    """
    weights = _read_weights(graph)
    leaves = select(graph, by_dim(COLUMNS)) if columns is None else required(graph, by_dim(columns), remedy)
    if columns is None:
        leaves = [leaf for leaf in leaves if not _sums_activations(graph, graph.factor_of(leaf[0].name, leaf[1]), weights)]
    deals = _deals(graph, leaves, parts, weights) if shared else {}
    for tensor, dim in leaves:
        if _is_left(graph, tensor, dim, parts, deals):
            raise SplitError(
                tensor.name, f"dim {dim}", tensor.shape[dim], parts, _legal(graph, tensor, dim, weights, shared)
            )
    table = reached(graph, leaves, parts, unequal=True)
    if columns is None:
        found = find_columns(graph, table, weights)
        beside = weights | _given_weights(graph)
        teachers = (
            find_columns(graph, reached(graph, found, parts, unequal=True) | table, beside) if beside > weights else []
        )
        for kernels, known in ((found, weights), (teachers, beside)) if shared else ():
            deals = _deals(graph, kernels, parts, known) | deals
        found += teachers
        left = [(t, dim) for t, dim in found if _is_left(graph, t, dim, parts, deals)]
        if is_much(graph, [tensor for tensor, _ in left]):
            told = listing([f"{t.name} ({t.shape[dim]})" for t, dim in left])
            warn(
                f"columns that do not divide into {parts} parts are not split, and what they make is copied: {told}",
                PlanWarning,
            )
        found = [pair for pair in found if pair not in left]
        table = reached(graph, found, parts, unequal=True) | table
        if not leaves and not found:
            kernels = [t.name for t in graph.inputs if len(t.shape) > 1]
            raise PlanError(
                f"no kernel's columns reach the rows of another with each unit by itself between; {remedy}; of two dims "
                f"and more are: {listing(kernels) if kernels else 'none'}"
            )
    return table | {op: next(iter(deal)) for op, deal in deals.items()}, deals


def _is_left(graph: Planner, tensor: PTensor, dim: int, parts: int, deals: Collection[Op]) -> bool:
    """Whether dim ``dim`` of a kernel does not divide into ``parts``, and what it reaches is not dealt out otherwise."""
    return tensor.shape[dim] % parts > 0 and all(op not in deals for op in graph.factor_of(tensor.name, dim))


def _legal(graph: Planner, tensor: PTensor, dim: int, weights: set[PTensor], shared: bool) -> str:
    reach = graph.factor_of(tensor.name, dim)
    sizes = [tensor.shape[dim], *(graph.rule(op).factors[name].size for op, name in reach.items())]
    legal = [n for n in divisors(max(sizes)) if tensor.shape[dim] % n == 0 or (shared and _deal(graph, reach, n, weights))]
    return "legal: " + ", ".join(map(str, legal))


def _deals(graph: Planner, leaves: Sequence[tuple[PTensor, int]], parts: int, weights: set[PTensor]) -> Deals:
    """For ops that no single factor divides into ``parts``, the parts of each: heads, and the queries that share one."""
    found: dict[Op, Mapping[str, int]] = {}
    for tensor, dim in leaves:
        reach = graph.factor_of(tensor.name, dim)
        if found.keys().isdisjoint(reach):
            found |= _deal(graph, reach, parts, weights)
    return found


def _deal(graph: Planner, reach: Mapping[Op, str], parts: int, weights: set[PTensor]) -> Deals:
    """Ops as far as the shortest factor on the way allows, and the rest of the parts on what that leaves of their dims."""
    taken: dict[Op, dict[str, int]] = {}
    rest = parts
    while rest > 1 and reach:
        factors = [(op, graph.rule(op).factors[name]) for op, name in reach.items() if op.kind != "backward"]
        sizes = (f.size // taken.get(op, {}).get(f.name, 1) for op, f in factors if f.splittable)
        share = math.gcd(rest, *sizes)
        if share == 1:
            break
        for op, name in reach.items():
            counts = taken.setdefault(op, {})
            counts[name] = counts.get(name, 1) * share
        rest //= share
        if rest > 1:
            cores = [op for op in reach if _mixes(op, weights)]
            reach = _further(graph, reach, taken, weights)
            if any(op not in reach for op in cores):  # attention itself would run on several devices
                break
    if rest > 1:
        return {}
    return {op: counts for op, counts in taken.items() if op.kind != "backward" and parts not in counts.values()}


def _further(
    graph: Planner, reach: Mapping[Op, str], taken: Mapping[Op, Mapping[str, int]], weights: set[PTensor]
) -> dict[Op, str]:  # fmt: skip
    """What can be split further of the dims that ``reach`` follows, where each unit is by itself up to a kernel's rows.

    Of two that meet in an op the longer: queries that share a head go through scores and mix, the size of a value's head
    through the mix alone.
    """
    ways: list[dict[Op, str]] = []
    seen: set[tuple[Op, str]] = set()
    for op in (op for op in reach if op.kind == "forward"):
        dims = zip((*op.inputs, *op.outputs), (*graph.rule(op).operands, *graph.rule(op).results), strict=True)
        for place in ((tensor, i) for tensor, names in dims for i, own in enumerate(names) if reach[op] in own):
            more = all_reached_factors(graph.graph, [place], taken)
            factors = {(other, name) for other, names in more.items() for name in names}
            if not factors <= seen:
                seen |= factors
                ways.append({other: next(n for n in graph.rule(other).factors if n in own) for other, own in more.items()})
    found: dict[Op, str] = {}
    for way in sorted(ways, key=lambda way: -sum(op.kind == "forward" and holds_contraction(op) for op in way)):
        if found.keys().isdisjoint(way) and meets_rows(graph, way, weights):
            found |= way
    return found


def _read_weights(graph: Planner) -> set[PTensor]:
    """Parameters, kernels of a teacher in the state that a loss reads, or what stands in front of one, and what is made of
    either alone."""

    def found() -> set[PTensor]:
        read = {t for op in graph.ops if _is_in_front(graph, op) for t in op.inputs}
        read = set(closure(read, lambda t: graph.graph.flow.sources(t, *ACYCLIC)))
        return weights_of(graph, [t for t in learned(graph.graph) if t in read])

    return {*graph.graph.once("weights that are read", found)}


def _given_weights(graph: Planner) -> set[PTensor]:
    """A teacher beside the state: arguments that are neither state nor a batch, and have leaves of several lengths."""
    named = set(graph.select_inputs(BATCH))
    rows: dict[str, list[PTensor]] = {}
    for tensor in data_inputs(graph.graph):
        if tensor not in named:
            rows.setdefault(tensor.name.partition("/")[0], []).append(tensor)
    return {t for own in rows.values() if len({t.shape[0] for t in own}) > 1 for t in own}


def _is_in_front(graph: Planner, op: Op) -> bool:
    """Whether ``op`` is of a loss, or of what a loss reads: a teacher's forward pass in front of it."""

    def found() -> set[Op]:
        start = [t for op in graph.ops if op.kind == "forward" for t in op.inputs]
        tensors = closure(start, graph.graph.flow.operands)
        makers = (graph.producer.get(t) for t in tensors)
        return {op for op in makers if op is not None and op.kind != "backward"}

    return op.kind == "forward" or op in graph.graph.once("in front of a loss", found)


def _sums_activations(graph: Planner, reach: Mapping[Op, str], weights: set[PTensor]) -> bool:
    """Whether a product of two activations sums over what ``reach`` follows: the size of a head."""
    return any(graph.rule(op).factors[name].kind == "reduction" and _mixes(op, weights) for op, name in reach.items())


def _mixes(op: Op, weights: set[PTensor]) -> bool:
    return op.kind == "forward" and holds_contraction(op) and weights.isdisjoint(op.inputs)


def find_columns(graph: Planner, taken: Iterable[Op], weights: set[PTensor]) -> list[tuple[PTensor, int]]:
    """Kernels and the dims of theirs that are columns of a pair, in the order of the dataflow.

    Args:
        taken: ops that are split already: kernels that they read have their place.
        weights: parameters and what is made of them alone; those among the inputs may be kernels.
    """
    found: list[tuple[PTensor, int]] = []
    table: Factors = dict.fromkeys(taken, "")
    every = graph.graph.once(
        ("products of kernels", frozenset(weights)),
        lambda: {t: products_of(graph, t, weights) for t in graph.inputs if t in weights},
    )
    products = {kernel: paths for kernel, paths in every.items() if paths}
    for kernel in sorted(products, key=lambda t: min(map(graph.position.__getitem__, products[t]))):
        if any(graph.by_path[path] in table for path in products[kernel]):
            continue
        dim = column(graph, kernel)
        reach = graph.factor_of(kernel.name, dim) if dim is not None else {}
        if meets_rows(graph, reach, weights, products[kernel]):
            assert dim is not None
            found.append((kernel, dim))
            table.update(reach)
    return found


def meets_rows(graph: Planner, reach: Mapping[Op, str], weights: set[PTensor], own: Collection[str] = ()) -> bool:
    """Whether what ``reach`` follows meets rows of kernels, and all on the way is each unit's own.

    Args:
        own: paths of products with the kernel that it comes from, whose rows are none.
    """
    rows = False
    for op, name in reach.items():
        if not _is_in_front(graph, op) or all(t in weights for t in op.inputs if t.shape):
            continue
        rule = graph.rule(op)
        if rule.factors[name].kind == "parallel":
            continue
        carried = [t for t, dims in zip(op.inputs, rule.operands, strict=True) if any(name in dim for dim in dims)]
        if rule.factors[name].kind != "reduction" or op.path in own or not holds_contraction(op):
            return False
        if not any(t in weights for t in carried):
            return False
        rows = True
    return rows


def products_of(graph: Planner, kernel: PTensor, weights: set[PTensor]) -> list[str]:
    """The ops of a loss, or in front of one, that contract ``kernel`` with activations.

    That is the kernel itself, its slice in a loop over layers, or a cast of them.
    """

    def onward(tensor: PTensor) -> Iterable[PTensor]:
        yield from graph.graph.flow.neighbours(tensor)
        for op in graph.consumers.get(tensor, ()):
            if _is_in_front(graph, op):
                yield from _dependent_results(op, tensor) if not weights.isdisjoint(op.outputs) else ()

    readers = (op for t in closure([kernel], onward) for op in graph.consumers.get(t, ()))
    return [op.path for op in readers if _is_in_front(graph, op) and _contracts_activations(op, weights)]


def _dependent_results(op: Op, operand: PTensor) -> list[PTensor]:
    """The results of ``op`` that depend on ``operand``."""
    assert op.body is not None
    jaxpr = op.body.jaxpr
    moved = {v for v, t in zip(jaxpr.invars, op.inputs, strict=True) if t is operand}
    for eqn in jaxpr.eqns:
        if any(isinstance(v, core.Var) and v in moved for v in eqn.invars):
            moved.update(eqn.outvars)
    return [t for t, v in zip(op.outputs, jaxpr.outvars, strict=True) if isinstance(v, core.Var) and v in moved]


def _contracts_activations(op: Op, weights: set[PTensor]) -> bool:
    return holds_contraction(op) and not all(t in weights for t in op.inputs if t.shape)
