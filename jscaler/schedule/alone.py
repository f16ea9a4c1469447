"""Ops that run on each part in time alone: their means are the part's, and state is handed from part to part.

whole        x ──► norm ──► y            state s ──► norm ──► s'          one mean over all rows
each alone   x' ─► norm' ─► y'           s ─► part 0 ─► s ─► part 1 ─► s'  a mean per part; s' is the last part's
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set

from jax.extend import core

from jscaler.capture.bodies import BodyTable
from jscaler.errors import PlanError
from jscaler.ir import Body, Graph, Op, PTensor
from jscaler.primitives import Plan
from jscaler.rules.alone import HiddenCountError, Place, with_own_counts
from jscaler.rules.book import RuleBook
from jscaler.schedule.parts import OpPart, Own
from jscaler.schedule.time_axes import TimeCut, time_axes


def with_alone(graph: Graph, plan: Plan, book: RuleBook, bodies: BodyTable) -> Graph:
    """``graph``, before its backward ops have bodies, whose ops that run alone divide their means by a part's count.

    Raises:
        PlanError: such a mean cannot be told from the rest of an op.
    """
    alone = plan.alone
    if not alone:
        return graph
    axes = time_axes(graph, plan)
    changed: dict[str, Op] = {}
    for path in sorted(alone & axes.cuts.keys(), key=graph.position.__getitem__):
        op = graph[path]
        for cut in axes.cuts[path].values():
            factor = book.rule(op).factors.get(cut.factor)
            if factor is not None and factor.kind == "blocked":
                op = dataclasses.replace(op, body=_own_means(op, cut, book, bodies))
        changed[path] = op
    ops = []
    for op in graph.ops:
        forward = changed.get(op.forward.path) if op.forward is not None else None
        ops.append(dataclasses.replace(op, forward=forward) if forward is not None else changed.get(op.path, op))
    return dataclasses.replace(graph, ops=tuple(ops))


def _own_means(op: Op, cut: TimeCut, book: RuleBook, bodies: BodyTable) -> Body:
    assert op.body is not None
    try:
        return bodies.intern(with_own_counts(op.body.jaxpr, _place(op, cut.factor, book), cut.parts))
    except HiddenCountError:
        raise PlanError(
            f"'{op.path}' cannot run on each part of '{cut.factor}' alone: a mean over it is taken inside a function with "
            "a derivative of its own (custom_jvp, custom_vjp); take the mean outside"
        ) from None


def _place(op: Op, name: str, book: RuleBook) -> Place:
    places = [
        (operand, dim, sub)
        for operand, dims in enumerate(book.rule(op).operands)
        for dim, factors in enumerate(dims)
        for sub, factor in enumerate(factors)
        if factor == name
    ]
    if not places:
        raise PlanError(f"'{op.path}' cannot run on each part of '{name}' alone: nothing that it reads has this factor")
    return places[0]


def handed_on(graph: Graph, parts: Mapping[str, OpPart]) -> Mapping[PTensor, PTensor]:
    """State that goes from part to part: what a part leaves -> the input that the first part takes.

    Raises:
        PlanError: what a part has for itself is read, and is no state.
    """
    own = _own(graph, parts)
    if not own:
        return {}
    sources = _Sources(graph)
    found: dict[PTensor, PTensor] = {}
    for output, number in graph.next_version.items():
        state = graph.inputs[number]
        ends = sources.first_of(graph.outputs[output], own.keys())
        ends = [t for t in ends if t.shape == state.shape and t.dtype == state.dtype and state in sources.all_of(t)]
        if len(ends) == 1:
            found.setdefault(ends[0], state)
    for tensor, op in own.items():
        readers = [r.path for r in graph.consumers.get(tensor, ()) if not _hands_on(r, parts)]
        if tensor in found:
            readers = [path for path in readers if graph[path].kind != "update"]
        elif tensor in graph.outputs:
            readers = ["the caller of the step", *readers]
        if readers:
            raise PlanError(
                f"'{op.path}' runs on each micro-batch alone, and {readers[0]} reads '{tensor.name}', which each "
                "micro-batch has for itself: only rows of the batch can leave, and state that the op reads and the step "
                "returns in its place; compute it from what leaves, or fuse the reader with the op (graph.fuse)"
            )
    return found


def _hands_on(op: Op, parts: Mapping[str, OpPart]) -> bool:
    return op.path in parts and any(isinstance(form, Own) for form in parts[op.path].inputs)


def _own(graph: Graph, parts: Mapping[str, OpPart]) -> dict[PTensor, Op]:
    """What each part has for itself, and stacks of it over layers, with the ops that make it."""
    found = {
        tensor: op
        for op in graph.ops
        if op.path in parts and op.again is None
        for tensor, form in zip(op.outputs, parts[op.path].outputs, strict=True)
        if isinstance(form, Own)
    }
    for loop in graph.loops.values():
        found |= {y.stack: found[y.slice] for y in loop.ys if y.slice in found}
    return found


class _Sources:
    """Of what tensors are made, input by input of every body."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.known: dict[Body, list[frozenset[int]]] = {}
        self.beside: dict[PTensor, list[PTensor]] = {}
        for loop in graph.loops.values():
            for x in loop.xs:
                self.beside.setdefault(x.slice, []).append(x.stack)
            for y in loop.ys:
                self.beside.setdefault(y.stack, []).append(y.slice)
            for carry in loop.carries:
                self.beside.setdefault(carry.final, []).append(carry.out)
                self.beside.setdefault(carry.inside, []).append(carry.init)

    def of(self, tensor: PTensor) -> Sequence[PTensor]:
        op = self.graph.producer.get(tensor)
        if op is None:
            return self.beside.get(tensor, ())
        if op.body is None:
            return op.inputs
        return [op.inputs[i] for i in sorted(self._reads(op.body)[op.outputs.index(tensor)])]

    def first_of(self, tensor: PTensor, ends: Set[PTensor]) -> list[PTensor]:
        """The first of ``ends`` on every way back from ``tensor``."""
        return [t for t in self._back(tensor, ends) if t in ends]

    def all_of(self, tensor: PTensor) -> Set[PTensor]:
        return set(self._back(tensor, frozenset()))

    def _back(self, tensor: PTensor, ends: Set[PTensor]) -> Iterable[PTensor]:
        todo, seen = [tensor], {tensor}
        while todo:
            at = todo.pop()
            yield at
            fresh = [t for t in dict.fromkeys(self.of(at)) if t not in seen] if at not in ends else []
            seen.update(fresh)
            todo += fresh

    def _reads(self, body: Body) -> list[frozenset[int]]:
        """By result the operands that it depends on."""
        if body not in self.known:
            reads: dict[core.Var, frozenset[int]] = {v: frozenset({i}) for i, v in enumerate(body.jaxpr.invars)}

            def of(atoms: Iterable[object]) -> frozenset[int]:
                return frozenset[int]().union(*(reads.get(v, frozenset()) for v in atoms if isinstance(v, core.Var)))

            for eqn in body.jaxpr.eqns:
                reads.update(dict.fromkeys(eqn.outvars, of(eqn.invars)))
            self.known[body] = [of([v]) for v in body.jaxpr.outvars]
        return self.known[body]
