"""What the plans of this folder are made of: tables of ``{op: factor}``, one per axis of a device grid.

A plan names dims of inputs (the batch, the columns of a kernel), follows each through the dataflow, and splits what it
reaches. Where two tables reach one op on the same axis, one of them decides, which each plan says: ``low | high``. An op
that no table names is left to be filled in, so an optimizer's state follows its parameters; backward ops mirror their
forward.
"""

import fnmatch
from collections.abc import Mapping, Sequence

import numpy as np

from jscaler.capture.jaxprs import all_equations
from jscaler.errors import (
    LEAST,
    PlanError,
    PlanWarning,
    SplitError,
    UnknownNameError,
    check_count,
    divisors,
    factor_name,
    warn,
)
from jscaler.ir import Op, PTensor, Rule
from jscaler.ir.kinds import read_by_a_loss, tensor_kinds
from jscaler.ir.name import without
from jscaler.lax_primitives import contracts
from jscaler.materialize.layout import ceil_blocks
from jscaler.primitives import Algorithm, Planner, Replicate, Split
from jscaler.primitives.remedies import blocked

Factors = dict[Op, str]
Deals = dict[Op, Mapping[str, int]]  # the parts of each factor of an op, major first; what they leave are copies
Dims = Mapping[str, int | None]  # pattern of input leaves -> dim, from the end if negative; None is `column`


def by_dim(patterns: Dims | Sequence[str]) -> Dims:
    """``patterns`` as a table; those without a dim follow `column`. A string is one pattern."""
    if isinstance(patterns, str):
        patterns = (patterns,)
    return patterns if isinstance(patterns, Mapping) else dict.fromkeys(patterns)


def select(graph: Planner, patterns: Dims) -> list[tuple[PTensor, int]]:
    """The input leaves that match, each once, with the dim to follow; the first pattern that matches a leaf counts.

    An optimizer's state follows its parameter, and may have other dims (the sums of a factored moment): only its full
    name matches it. State that a loss reads (a frozen stack of layers, a target network) is matched like parameters.
    """
    kinds = tensor_kinds(graph.graph) if graph.calls else {}
    found: list[tuple[PTensor, int]] = []
    columns: dict[tuple[str, tuple[int, ...]], int | None] = {}  # of leaves; ranges of layers have that of the first
    for tensor in graph.inputs:
        follows = kinds.get(tensor) == "optimizer" and not read_by_a_loss(graph.graph, tensor)
        for pattern, dim in patterns.items():
            if follows and tensor.name != pattern:
                continue
            if tensor.shape and _matches(tensor.name, pattern):
                leaf = without(tensor.name, "layers"), tensor.shape
                if dim is None and leaf not in columns:
                    columns[leaf] = column(graph, tensor)
                place = columns[leaf] if dim is None else _dim(tensor, dim)
                if place is not None:
                    found.append((tensor, place))
                break
    return found


def _matches(name: str, pattern: str) -> bool:
    name = without(name, "layers").removesuffix("/value")  # the array inside a variable of nnx
    return name == pattern or any(fnmatch.fnmatchcase(n, pattern) for n in (name, "/" + name))


def _dim(tensor: PTensor, dim: int) -> int:
    rank = len(tensor.shape)
    if not -rank <= dim < rank:
        raise PlanError(f"'{tensor.name}' of shape {tensor.shape} has no dim {dim}; give one from {-rank} to {rank - 1}")
    return dim % rank


def column(graph: Planner, kernel: PTensor) -> int | None:
    """The first dim of ``kernel`` that its contraction leaves in the result: of (d, h, k) the heads, of (d, f) f.

    A dim that is taken apart further on does not count: the 3 of (d, 3, h, k). None where no op contracts the kernel (the
    moments of an optimizer).
    """
    queue, seen = [(kernel, 0)], {kernel}
    while queue:
        tensor, before = queue.pop(0)  # ``before``: dims of the kernel in front of the tensor's, outside a loop over layers
        fresh: list[tuple[PTensor, int]] = [(other, before - shift) for other, shift in graph.linked.get(tensor, ())]
        for op in graph.consumers.get(tensor, ()):
            if op.kind == "backward" or _only_updates(graph, op):
                continue
            if op.ranges:
                fresh += [(t, before) for t in op.outputs]
                continue
            rule = graph.rule(op)
            dims = rule.operands[op.inputs.index(tensor)]
            kept = [i for i, names in enumerate(dims) if names and rule.factors[names[0]].kind == "parallel"]
            found = [i + before for i in kept if i + before >= 0]
            if kept and _selects_layer(op, rule, dims[: kept[0]]):  # a Python loop takes a layer of a stack by its number
                fresh += [(t, before + kept[0]) for t in op.outputs if t.shape == tensor.shape[kept[0] :]]
                continue
            if found and len(kept) < sum(map(bool, dims)):  # the rest is summed over, maybe in a norm before it too
                whole = (i for i in found if len(found) == 1 or not _taken_apart(graph, kernel.name, i))
                return next(whole, found[0])
            if found:  # an elementwise op, such as a cast
                fresh += [(t, before) for t in op.outputs if t.shape == tensor.shape]
            if all(t is tensor or not t.shape for t in op.inputs):  # maybe repeated, for each row of a ``jax.vmap``
                fresh += [(t, before - 1) for t in op.outputs if t.shape[1:] == tensor.shape]
        queue += [(t, n) for t, n in fresh if t not in seen]
        seen.update(t for t, _ in fresh)
    return None


def _selects_layer(op: Op, rule: Rule, front: Sequence[Sequence[str]]) -> bool:
    """Whether ``op`` takes its operand apart along the dims ``front`` alone, and contracts nothing."""
    apart = all(rule.factors[name].kind == "blocked" for names in front for name in names)
    return bool(front) and apart and op.body is not None and not contracts(op.body.jaxpr.eqns)


def _only_updates(graph: Planner, op: Op) -> bool:
    """Whether an op of a train step is neither a product nor in front of one: it may reduce a gradient in any way."""
    product = op.body is not None and contracts(op.body.jaxpr.eqns)
    read = any(read_by_a_loss(graph.graph, t) for t in op.outputs)
    return bool(graph.calls) and op.kind == "update" and not product and not read


def _taken_apart(graph: Planner, path: str, dim: int) -> bool:
    """Whether something that dim ``dim`` of an input reaches cannot be split there."""
    found = graph.factor_of(path, dim).items()
    return any(op.kind == "forward" and not graph.rule(op).factors[name].splittable for op, name in found)


def reached(graph: Planner, leaves: Sequence[tuple[PTensor, int]], parts: int, unequal: bool = False) -> Factors:
    """The factor of every op that one of ``leaves``, or of other tensors, reaches; the first that reaches an op decides.

    Args:
        unequal: whether parts need not be equal.

    Raises:
        SplitError: a leaf's dim does not divide into ``parts``.
    """
    table: Factors = {}
    for tensor, dim in leaves:
        if tensor.shape[dim] % parts and not unequal:
            raise SplitError(tensor.name, f"dim {dim}", tensor.shape[dim], parts)
        readers = graph.consumers.get(tensor, ())
        if not readers or any(op not in table for op in readers):
            table = {**graph.factor_of(tensor, dim), **table}
    return table


def required(graph: Planner, patterns: Dims, remedy: str) -> list[tuple[PTensor, int]]:
    """`select`, where nothing found is a mistake.

    Raises:
        UnknownNameError: no input matches.
    """
    found = select(graph, patterns)
    if not found:
        raise UnknownNameError("input", " | ".join(patterns), [t.name for t in graph.inputs], f"; {remedy}")
    return found


def can_run_in_turn(graph: Planner, op: Op, name: str, parts: int, alone: bool = False) -> bool:
    """Whether parts of ``op`` can run one after another: each needs neither the whole factor nor the others' rows.

    Args:
        alone: whether the op runs on each part alone, where it needs the whole.
    """
    rule = graph.rule(op)
    factor = rule.factors[name]
    whole = factor.kind == "blocked" and not (alone and factor.reopens)
    return not whole and factor.size % parts == 0 and all(slid != name for slid, _, _ in rule.halos)


def split(
    graph: Planner, grid: np.ndarray, *tables: Factors, unequal: Factors | None = None, deals: Deals | None = None
) -> None:  # fmt: skip
    """Split and place every op that a table names: axis i of ``grid`` by table i, or copied where that names none.

    A factor that the op cannot split (blocked: it needs the whole; or of another size) is not split on that axis.

    Args:
        unequal: the factors whose last part may be shorter.
        deals: of ops that the last table names, how the last axis is dealt out to several factors.

    Warns:
        PlanWarning: no op at all is split on an axis, though products are among them.
    """
    axes = [(size, table) for size, table in zip(grid.shape, tables, strict=True) if size > 1]
    whole = {i: table for i, (_, table) in enumerate(axes)}
    for op in graph.ops:
        if op.kind == "backward":
            continue
        algorithms: list[Algorithm] = []
        parts: dict[str, int] = {}
        cells: list[int] = []
        for axis, (size, table) in enumerate(axes):
            dealt = (deals or {}).get(op) if table is tables[-1] and op in table else None
            left = size
            for name, share in (dealt or {table.get(op, ""): size}).items():
                count = share * parts.get(name, 1)
                shorter = name not in parts and (unequal or {}).get(op) == name
                if can_be_split(graph, op, name, count, shorter):
                    length = graph.rule(op).factors[name].size
                    parts[name] = count
                    whole.pop(axis, None)
                    algorithms.append(
                        Split(name, sizes=ceil_blocks(length, share)) if length % count else Split(name, share)
                    )
                    cells.append(share)
                    left //= share
            if left > 1:
                algorithms.append(Replicate(left))
                cells.append(left)
        if parts:
            graph.op_assign(graph.op_trans(op, *algorithms), grid.reshape(cells))
    for axis, table in whole.items():
        _warn_of_whole(graph, axes[axis][0], table)


def _warn_of_whole(graph: Planner, parts: int, table: Factors) -> None:
    """Say that no product that a plan would split is, and why of the first: in a loop, say, that trains by itself."""
    ops = [op for op in graph.ops if op in table and op.body is not None and contracts(list(all_equations(op.body.jaxpr)))]
    if not ops:
        return
    op, factor = ops[0], graph.rule(ops[0]).factors[table[ops[0]]]
    named = factor_name(factor.name, graph.factor_names(op).get(factor.name, ""))
    why = f"it has size {factor.size}" if factor.splittable else blocked(factor, graph.rule(op), parts)
    warn(
        f"nothing is split over {parts} devices, not '{op.path}' ({op.source}), which carries what the plan splits as its "
        f"factor {named}: {why}",
        PlanWarning,
    )


def is_much(graph: Planner, leaves: Sequence[PTensor]) -> bool:
    """Whether parameters are worth a warning: at least a thousandth of the bytes of all."""
    whole = sum(tensor.nbytes for tensor, kind in tensor_kinds(graph.graph).items() if kind == "parameter")
    return bool(leaves) and sum(tensor.nbytes for tensor in leaves) >= LEAST * whole


def can_be_split(graph: Planner, op: Op, name: str, parts: int, unequal: bool = False) -> bool:
    """Whether factor ``name`` is one of ``op``, and it need not be whole, and divides.

    Args:
        unequal: whether the last part may be shorter.
    """
    factor = graph.rule(op).factors.get(name) if name else None
    if factor is None or not factor.splittable:
        return False
    return factor.size % parts == 0 or (unequal and not factor.even_only and ceil_blocks(factor.size, parts)[-1] > 0)


def device_grid(devices: np.ndarray, plan: str, **sizes: int | None) -> np.ndarray:
    """``devices`` as a grid with the axes ``sizes``; the last that is None gets what the others leave.

    Raises:
        PlanError: the sizes do not multiply to the number of devices.
    """
    given = {n: s for n, s in sizes.items() if s is not None}
    for name, size in given.items():
        check_count(f"{plan}: {name}", size)
    count = int(np.prod(list(given.values()), dtype=int))
    rest, left = divmod(devices.size, count)
    if left or (rest != 1 and len(given) == len(sizes)):
        shown = " × ".join(f"{n}={s}" for n, s in given.items())
        legal = f"; legal: {', '.join(map(str, divisors(devices.size)))}" if len(given) == 1 else ""
        raise PlanError(f"{plan}: {shown} is a grid of {count} devices, and {devices.size} are given{legal}")
    free = [n for n in sizes if n not in given][-1:]
    return devices.reshape([rest if [n] == free else given.get(n, 1) for n in sizes])
