"""The layers of a model, found by its dataflow, never by names.

A stack (``nn.scan``, ``lax.scan`` over parameters) is a loop whose body is one layer. Layers that are written out are what
repeats from neck to neck of the forward pass (`jscaler.plans.necks`), whatever its sizes::

    embed ──► [attention ──► feed-forward] ──► [attention ──► feed-forward] ──► norm ──► logits

Two stretches are alike if they hold the same kinds of contractions; rows of several that follow each other are a layer
(`jscaler.plans.repeats`). What else counts as a layer, a person says by patterns of module paths: ``"stage_*/block_*"``.
"""

import fnmatch
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from jax import lax

from jscaler.errors import PlanError, UnknownNameError
from jscaler.ir import Op, PTensor
from jscaler.ir.kinds import tensor_kinds
from jscaler.ir.loop import Nest, chain_of, made_by, reads_of
from jscaler.ir.walk import between, closure
from jscaler.lax_primitives import contracts
from jscaler.plans.attention import Ops, holds_contraction
from jscaler.plans.necks import Stretch, stretches
from jscaler.plans.repeats import innermost
from jscaler.primitives import Planner


@dataclass(frozen=True)
class Series:
    """Layers that follow each other.

    Attributes:
        name: the loop.
        layers: the ops of each, in order.
    """

    name: str
    layers: tuple[Ops, ...]
    is_loop: bool = False


def find_layers(
    graph: Planner, on: str | Sequence[str] | None = None, every: int = 1, needed: bool = True
) -> tuple[Ops, ...]:
    """The ops of every layer, or of every ``every`` layers in a row.

    Args:
        on: shell patterns of module paths, each of whose modules is a layer; by default stacks, and what repeats.
        needed: whether nothing that looks like layers is an error.

    Raises:
        UnknownNameError: no module matches.
        PlanError: nothing looks like layers; or several layers in a row are asked for, and they are a loop.
    """
    if every < 1:
        raise PlanError(f"every is {every}: one layer or more in a row")
    ops = [op for op in graph.ops if op.kind == "forward"]
    patterns = [on] if isinstance(on, str) else on
    weights = weights_of(graph)
    if patterns is None:
        found = _found(graph, ops, weights)
        taken = {op for op in ops if op.backward is not None and not weights.issuperset(op.outputs)}
    else:
        found = _matching(ops, patterns)
        taken = {op for series in found for layer in series.layers for op in layer}
    if needed and not found:
        raise PlanError(
            "the model has no stack of layers (nn.scan), nor a chain of alike parts that hand one activation on; say which "
            "modules are layers: on='encoder/*'"
        )
    groups: list[Ops] = []
    for series in found:
        if series.is_loop and every > 1:
            raise PlanError(
                f"the layers of loop '{series.name}' are one body, run {graph.loops[series.name].length} times, that keeps "
                "its carry: every=1; to keep fewer, scan over groups of layers, or write layers as a Python loop"
            )
        rows = [series.layers[i : i + every] for i in range(0, len(series.layers), every)]
        groups += [_closed(graph, [op for layer in row for op in layer], taken, weights) for row in rows]
    return tuple(groups)


def _matching(ops: Sequence[Op], patterns: Sequence[str]) -> list[Series]:
    groups: dict[tuple[int | None, str | None], dict[str, list[Op]]] = {}
    for op in ops:
        for path in modules_of(op.path):
            if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
                groups.setdefault((op.call, op.loop), {}).setdefault(path, []).append(op)
                break
    if not groups:
        modules = sorted({module for op in ops for module in modules_of(op.path)})
        raise UnknownNameError("module", " or ".join(patterns), modules, "; layers are those of on=")
    return [
        Series(loop or "", tuple(map(tuple, layers.values())), loop is not None) for (_, loop), layers in groups.items()
    ]


def modules_of(path: str) -> list[str]:
    """The modules that hold an op, the outermost first: of ``a/b/dot`` ``a`` and ``a/b``."""
    return [path[:end] for end, letter in enumerate(path) if letter == "/"]


def _found(graph: Planner, ops: Sequence[Op], weights: set[PTensor]) -> list[Series]:
    """The layers of all stacks, and of what is written out those that the dataflow shows."""
    stacks = stacks_of(graph)
    loops: dict[str, list[Op]] = {}
    for op in ops:
        around = chain_of(op.loop, graph.loops)
        if around and around[0] in stacks:
            loops.setdefault(around[0], []).append(op)
    found = [Series(name, (tuple(members),), True) for name, members in loops.items()]
    for call in dict.fromkeys(op.call for op in ops if op.backward is not None):
        found += _written_out(stretches(graph, call, weights), stacks)
    return found


def _written_out(parts: Sequence[Stretch], stacks: Collection[str]) -> Iterator[Series]:
    """Rows of stretches that hold the same kinds of contractions, and stretches by themselves that hold several."""
    starts = [i for i, part in enumerate(parts) if any(map(holds_contraction, part.ops()))]
    links = [_chain(parts[i:j]) for i, j in itertools.pairwise([*starts, len(parts)])]
    kinds = [_kind(link[0], stacks) for link in links]
    for run in innermost(kinds):
        if run.count == 1 and not kinds[run.start].several:
            continue
        rows = [[part for i in row for part in links[i]] for row in run.rows]
        last = links[run.rows[-1][-1]]
        other = links[run.rows[-2][-1]] if run.count > 1 else last[:1]
        follow = len(last) - 1 - _in_common(last[1:], other[1:])  # what stands behind the layers: a last norm, the loss
        rows[-1] = rows[-1][: len(rows[-1]) - follow]
        yield from _connected(rows)


def _chain(parts: Sequence[Stretch]) -> Sequence[Stretch]:
    """Those from the first on that read what the one before hands on."""
    count = 1 + len(list(itertools.takewhile(lambda pair: pair[1].reads(pair[0].neck), itertools.pairwise(parts))))
    return parts[:count]


def _connected(rows: Sequence[Sequence[Stretch]]) -> Iterator[Series]:
    """Rows that hand on to the next are a series."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or not rows[end][0].reads(rows[end - 1][-1].neck):
            layers = (tuple(op for part in row for op in part.ops() if op.kind == "forward") for row in rows[start:end])
            yield Series("", tuple(layers))
            start = end


@dataclass(frozen=True)
class _Kind:
    """What makes two stretches alike, whatever their sizes: the primitives that contract, and what these contract."""

    contracted: frozenset[tuple[Any, ...]]
    several: bool
    alone: str = ""


def _kind(part: Stretch, stacks: Collection[str]) -> _Kind:
    """A stack is like nothing else: it has its layers in it."""
    for item in part.items:
        if isinstance(item, Nest) and item.loop.name in stacks:
            return _Kind(frozenset(), False, item.loop.name)
    bodies = [op.body.jaxpr for op in part.ops() if op.body is not None and holds_contraction(op)]
    products = [eqn for jaxpr in bodies for eqn in jaxpr.eqns if contracts([eqn])]
    kinds = ((eqn.primitive, _batched(eqn)) for eqn in products)
    return _Kind(frozenset(kinds), len(products) > 1)


def _batched(eqn: Any) -> int:
    """How many batch dims a product has: those of attention have some, those with a kernel none."""
    numbers = eqn.params.get("dimension_numbers")
    return len(numbers[1][0]) if eqn.primitive is lax.dot_general_p else 0


def _in_common(one: Sequence[Stretch], other: Sequence[Stretch]) -> int:
    """How many stretches from the first on do the same."""
    same = (a == b for a, b in zip(map(_primitives, one), map(_primitives, other), strict=False))
    return len(list(itertools.takewhile(bool, same)))


def _primitives(part: Stretch) -> list[Any]:
    return [eqn.primitive for op in part.ops() if op.body is not None for eqn in op.body.jaxpr.eqns]


def stacks_of(graph: Planner, given: Iterable[PTensor] = ()) -> set[str]:
    """The outermost loops that take parameters apart; ``given`` are some that no gradient is taken of."""
    made = of_parameters(graph, given)
    return {n for n, loop in graph.loops.items() if loop.parent is None and any(x.stack in made for x in loop.xs)}


def of_parameters(graph: Planner, given: Iterable[PTensor] = ()) -> set[PTensor]:
    """Parameters, and what is made of them alone before a gradient is taken; of an evaluation the state that it follows."""
    given, memo = tuple(given), graph.graph.memo
    key = "of parameters", given, frozenset(graph.stored)
    if key not in memo:
        memo[key] = _of_parameters(graph, given)
    return set(memo[key])


def _of_parameters(graph: Planner, given: Iterable[PTensor]) -> set[PTensor]:
    made = {t for t, kind in tensor_kinds(graph.graph).items() if kind == "parameter"} | set(given)
    made.update(t for t in graph.inputs if not graph.calls and t.name in graph.stored)
    for op in graph.ops:
        large = [t for t in op.inputs if t.shape]
        if op.kind != "backward" and large and all(t in made for t in large):
            made.update(op.outputs)  # a cast, in the loss or before it
    return made


def weights_of(graph: Planner, given: Iterable[PTensor] = ()) -> set[PTensor]:
    """Parameters and what is ``given``, what is made of them alone, and what loops take of either."""
    made = with_slices(graph, of_parameters(graph, given))
    for op in graph.forward():
        large = [t for t in op.inputs if t.shape]
        if large and all(t in made for t in large):
            made |= with_slices(graph, op.outputs)
    return made


def with_slices(graph: Planner, tensors: Iterable[PTensor]) -> set[PTensor]:
    """``tensors``, and what loops take of them, layer by layer."""
    return set(closure(tensors, lambda tensor: graph.graph.flow.targets(tensor, "slice")))


def _closed(graph: Planner, members: Sequence[Op], taken: Set[Op], weights: set[PTensor]) -> Ops:
    """``members``, and what stands between them and has no layer of its own (nnx sets no scopes).

    What only they read joins them where no gradient flows through it (keys, masks), where it is made of weights alone
    (casts), or where it has no module and makes no less than it reads (the statistics of a norm).
    """
    order = [op for op in graph.ops if op.kind == "forward" and op.call == members[0].call]
    own = set(members)
    loose = {op for op in order if op not in taken}
    own |= loose.intersection(between(order, own, reads_of, made_by))
    for op in reversed(order):
        if op in loose and op not in own and op.loop == members[0].loop and _prepares(graph, op, own, weights):
            own.add(op)
    return tuple(op for op in order if op in own)


def _prepares(graph: Planner, op: Op, own: Set[Op], weights: set[PTensor]) -> bool:
    readers = [reader for t in op.outputs for reader in graph.consumers.get(t, ()) if reader.kind == "forward"]
    if not readers or any(reader not in own for reader in readers):
        return False
    if op.backward is None or weights.issuperset(op.outputs):
        return True
    return "/" not in op.path and _nbytes(op.inputs) <= _nbytes(op.outputs)


def _nbytes(tensors: Iterable[PTensor]) -> int:
    return sum(t.nbytes for t in tensors)
