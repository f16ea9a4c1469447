"""Ops that run on each part in time alone: their means are the part's, and state is handed from part to part.

whole        x ──► norm ──► y            state s ──► norm ──► s'          one mean over all rows
each alone   x' ─► norm' ─► y'           s ─► part 0 ─► s ─► part 1 ─► s'  a mean per part; s' is the last part's

What else a part has for itself and nobody else reads (an auxiliary loss) leaves as the mean over the parts.
"""

import dataclasses
import math
from collections.abc import Mapping, Set
from typing import Any

import jax.numpy as jnp

from jscaler.capture.bodies import BodyTable
from jscaler.capture.jaxprs import evaluate
from jscaler.errors import PlanError
from jscaler.ir import Body, Graph, Loop, Op, PTensor
from jscaler.ir.walk import closure
from jscaler.primitives import Plan
from jscaler.primitives.recompute_regions import with_ops
from jscaler.rules.part_forms import OpPart, Own
from jscaler.rules.per_microbatch_rules import HiddenCountError, OwnCounts, Place, Undivided, Whole, with_own_counts
from jscaler.rules.rule_book import RuleBook
from jscaler.schedule.state_flow import StateFlow
from jscaler.schedule.time_axes import TimeAxes, time_axes


def with_alone(graph: Graph, plan: Plan, book: RuleBook, bodies: BodyTable) -> Graph:
    """``graph``, before its backward ops have bodies, whose ops that run alone divide their means by a part's count.

    Raises:
        PlanError: such a mean cannot be told from the rest of an op.
    """
    alone = plan.alone
    if not alone:
        return graph
    return with_ops(graph, _Alone(graph, alone & graph.by_path.keys(), time_axes(graph, plan), book, bodies).run())


class _Alone:
    """Gives ops that run alone the bodies that do so."""

    def __init__(self, graph: Graph, alone: Set[str], axes: TimeAxes, book: RuleBook, bodies: BodyTable):
        self.graph = graph
        self.alone = alone & axes.cuts.keys()
        self.axes = axes
        self.book = book
        self.bodies = bodies
        self.wholes: dict[PTensor, list[tuple[Whole, int]]] = {}  # of what each part has for itself, by time axis
        self.maker: dict[PTensor, Op] = {}
        self.undivided: dict[PTensor, dict[int, Undivided]] = {}  # by parts what is still to be divided by a count
        self.state_flow = StateFlow(graph)
        self.next_state = {graph.outputs[output] for output in graph.next_version}

    def run(self) -> dict[str, Op]:
        """The ops by path."""
        found, behind = {}, {}
        for op in self.graph.ops:
            if op.path in self.alone:
                found[op.path] = self._on_its_parts(op)
            elif op.kind == "forward" and (changed := self._behind(op)) is not None:
                behind[op.path] = changed
        states = _states(self.graph, _with_stacks(self.graph, self.maker), self.state_flow)
        of_loops = {piece for stack in states for piece in self.graph.flow.sources(stack, "stack")}
        return behind | {path: self._leaving(op, states.keys() | of_loops) for path, op in found.items()}

    def _on_its_parts(self, op: Op) -> Op:
        for cut in self.axes.cuts[op.path].values():
            factor = self.book.rule(op).factors.get(cut.factor)
            if factor is None or factor.kind != "blocked":
                continue
            owned = {i for i, t in enumerate(op.inputs) if t in self.wholes}
            made = self._with_own_counts(op, _place(op, cut.factor, self.book), cut.parts, owned)
            for index, (tensor, whole) in enumerate(zip(op.outputs, made.wholes, strict=True)):
                if whole:
                    self.wholes.setdefault(tensor, []).append((whole, cut.parts))
                    self.maker[tensor] = op
                if whole == "mean" and index in made.undivided:
                    self._hand_on(tensor, made.undivided[index], cut.parts)
            op = dataclasses.replace(op, body=self.bodies.intern(made.jaxpr))
        return op

    def _behind(self, op: Op) -> Op | None:
        """``op``, which divides what a part has for itself by how many rows that has; None if it does not."""
        changed = None
        for parts in sorted({parts for t in op.inputs for parts in self.undivided.get(t, ())}):
            made = self._with_own_counts(changed or op, None, parts)
            for index, left in made.undivided.items():
                self._hand_on(op.outputs[index], left, parts)
            changed = dataclasses.replace(op, body=self.bodies.intern(made.jaxpr))
        return changed

    def _with_own_counts(self, op: Op, place: Place | None, parts: int, owned: Set[int] = frozenset()) -> OwnCounts:
        assert op.body is not None
        known = [self.undivided.get(t, {}) for t in op.inputs]
        given = {i: one[parts] for i, one in enumerate(known) if parts in one}
        try:
            return with_own_counts(op.body.jaxpr, place, parts, owned, given)
        except HiddenCountError:
            raise PlanError(
                f"'{op.path}' cannot run on each of {parts} parts alone: a mean over their rows is taken inside a function "
                "with a derivative of its own (custom_jvp, custom_vjp) or a checkpoint; take the mean outside"
            ) from None

    def _hand_on(self, tensor: PTensor, undivided: Undivided, parts: int) -> None:
        """Through the carries and stacks of loops, too."""
        for one in closure([tensor], self.graph.flow.targets):
            before = self.undivided.setdefault(one, {}).get(parts, undivided)
            self.undivided[one][parts] = Undivided(before.counts | undivided.counts, undivided.others)

    def _leaving(self, op: Op, states: Set[PTensor]) -> Op:
        """``op``, whose results that leave the parts for good are summands of the whole's, or of the parts' mean."""
        divisors = {
            index: math.prod(parts for whole, parts in self.wholes[tensor] if whole == "mean")
            for index, tensor in enumerate(op.outputs)
            if self._leaves_for_good(tensor, states)
        }
        if not divisors:
            return op
        return dataclasses.replace(op, body=_divided(op, divisors, self.bodies), added=tuple(divisors))

    def _leaves_for_good(self, tensor: PTensor, states: Set[PTensor]) -> bool:
        """Whether what a part has for itself can be joined: no part, no state, and no loop over layers reads it on."""
        wholes = self.wholes.get(tensor, [])
        if not wholes or any(whole == "mixed" for whole, _ in wholes) or not jnp.issubdtype(tensor.dtype, jnp.inexact):
            return False
        made, readers = self.state_flow.onward(tensor)
        is_state = tensor in states or not made.isdisjoint(self.next_state)
        return not is_state and not any(op.path in self.axes.cuts for op in readers)


def _divided(op: Op, divisors: Mapping[int, int], bodies: BodyTable) -> Body:
    assert op.body is not None
    jaxpr = op.body.jaxpr

    def run(*args: Any) -> list[Any]:
        results = evaluate(jaxpr, args)
        return [x / divisors[i] if divisors.get(i, 1) > 1 else x for i, x in enumerate(results)]

    return bodies.traced(run, [v.aval for v in jaxpr.invars])


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
    """State that goes from part to part: what a part leaves -> the input, or slice of one, that the first part takes.

    Raises:
        PlanError: what a part has for itself is read, and is no state.
    """
    own = _own(graph, parts)
    found = _states(graph, own, StateFlow(graph)) if own else {}
    for tensor, op in own.items():
        readers = [r.path for r in graph.consumers.get(tensor, ()) if not _hands_on(r, parts)]
        if tensor in found:
            readers = [path for path in readers if graph[path].kind != "update"]
        elif tensor in graph.outputs:
            readers = ["the caller of the step", *readers]
        loops = [loop for loop in graph.loops.values() if tensor not in found and _goes_on(tensor, loop)]
        readers += [f"loop '{loop.name}'" for loop in loops]
        if readers:
            error = PlanError(
                f"'{op.path}' runs on each micro-batch alone, and {readers[0]} reads '{tensor.name}', which each "
                "micro-batch has for itself; what leaves such an op is rows of the batch, state that it reads and the step "
                "returns in its place, and what is read for the whole batch alone (an auxiliary loss); compute it from "
                "these; a policy of one's own can also fuse the reader with the op (graph.fuse)"
            )
            error.alone = tuple(path for path in readers[:1] if path in graph.by_path)
            raise error
    return found | _of_layers(graph, found)


def _of_layers(graph: Graph, states: Mapping[PTensor, PTensor]) -> dict[PTensor, PTensor]:
    """The same of layers' slices, for a loop over parts that stands inside the loop over layers."""
    slices: dict[PTensor, PTensor] = {}
    for loop in graph.loops.values():
        taken = {x.stack: x.slice for x in loop.xs}
        slices |= {y.slice: taken[states[y.stack]] for y in loop.ys if y.stack in states and states[y.stack] in taken}
    return slices | _of_layers(graph, slices) if slices else slices


def _states(graph: Graph, own: Mapping[PTensor, Op], flow: StateFlow) -> dict[PTensor, PTensor]:
    """Those of ``own`` that are state: what the step returns in the place of an input -> this input."""
    found: dict[PTensor, PTensor] = {}
    for output, number in graph.next_version.items() if own else ():
        state = graph.inputs[number]
        ends = flow.handed(graph.outputs[output], own.keys())
        ends = [t for t in ends if t.shape == state.shape and t.dtype == state.dtype and state in flow.all_of(t)]
        if len(ends) == 1:
            found.setdefault(ends[0], state)
    return found


def _goes_on(tensor: PTensor, loop: Loop) -> bool:
    """Whether a loop takes ``tensor`` from iteration to iteration."""
    return tensor in [x.stack for x in loop.xs] or tensor in [t for c in loop.carries for t in (c.init, c.out)]


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
    return _with_stacks(graph, found)


def _with_stacks(graph: Graph, own: Mapping[PTensor, Op]) -> dict[PTensor, Op]:
    found = dict(own)
    for loop in graph.loops.values():
        found |= {y.stack: found[y.slice] for y in loop.ys if y.slice in found}
    return found
