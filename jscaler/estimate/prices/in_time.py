"""What a plan's time axes make of the ops and tensors of one device's program: how often each runs, and on which part."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jscaler.estimate.prices.candidate import Candidate, TimeCut
from jscaler.estimate.prices.one_device import SOME
from jscaler.ir import Graph, Loop, Op, PTensor
from jscaler.ir.kinds import tensor_kinds
from jscaler.ir.loop import chain_of


@dataclass(frozen=True)
class InTime:
    """How ops and tensors are cut in time.

    Attributes:
        runs: path of an op -> in how many parts it runs, one after another.
        microbatch: the axis that cuts all ops which read the batch; "" where none does.
        cuts: path of an op -> into how many parts each of its factors is cut.
        shares: name of a tensor -> of how many parts a device has one at a time.
        summed: path of an op -> its results that are sums over its parts, and the outermost cut that they are sums over.
    """

    runs: Mapping[str, int]
    microbatch: str
    cuts: Mapping[str, Mapping[str, int]]
    shares: Mapping[str, int]
    summed: Mapping[str, Mapping[str, TimeCut]]

    @staticmethod
    def of(candidate: Candidate, graph: Graph) -> "InTime":
        """For the ops of ``graph``, backward ops and what is computed again among them."""
        runs: dict[str, int] = {}
        cuts: dict[str, dict[str, int]] = {}
        shares: dict[str, int] = {}
        summed: dict[str, dict[str, TimeCut]] = {}
        if not candidate.cuts:
            return InTime(runs, _microbatch(candidate, graph), cuts, shares, summed)
        for op in graph.ops:
            own = candidate.cuts.get(source_of(op).path, ())
            if not own:
                continue
            rule = graph.rules.rule(op)
            cut: dict[str, int] = {}
            for one in own:
                if one.factor in rule.factors:
                    cut[one.factor] = cut.get(one.factor, 1) * one.parts
            runs[op.path], cuts[op.path] = math.prod([one.parts for one in own]), cut
            ends = (*zip(rule.results, op.outputs, strict=True), *zip(rule.operands, op.inputs, strict=True))
            for dims, tensor in ends:
                part = math.prod([cut.get(f, 1) for dim in dims for f in dim])
                if part > 1:
                    shares[tensor.name] = max(part, shares.get(tensor.name, 1))
            for dims, tensor in zip(rule.results, op.outputs, strict=True):
                names = {f for dim in dims for f in dim}
                over = next((one for one in own if one.factor in cut and one.factor not in names), None)
                if over is not None and tensor.shape:
                    summed.setdefault(op.path, {})[tensor.name] = over
        _join_first(graph, runs, cuts, shares, summed)
        _through_loops(graph, shares)
        for op in graph.ops:  # joins of cotangents, of which the plan says nothing
            is_join = op.kind == "backward" and op.forward is None
            ends = (*op.outputs, *op.inputs) if is_join else op.outputs
            part = max((shares.get(t.name, 1) for t in ends), default=1)
            if op.path not in runs and part > 1:
                shares.update((t.name, part) for t in op.outputs if is_join)
                runs[op.path], cuts[op.path] = part, {SOME: part}
        return InTime(runs, _microbatch(candidate, graph), cuts, shares, summed)


def _microbatch(candidate: Candidate, graph: Graph) -> str:
    batch = {t for t, kind in tensor_kinds(graph).items() if kind == "input" and t.shape}
    readers = [op for op in graph.of_kind("forward") if not batch.isdisjoint(op.inputs)]
    cuts = [candidate.cuts.get(op.path, ()) for op in readers]
    every = [{cut.axis for cut in own} for own in cuts]
    return next((cut.axis for own in cuts[:1] for cut in own if all(cut.axis in axes for axes in every)), "")


def _join_first(
    graph: Graph,
    runs: dict[str, int],
    cuts: dict[str, dict[str, int]],
    shares: Mapping[str, int],
    summed: dict[str, dict[str, TimeCut]],
) -> None:
    """Summands of one tensor that are all sums over parts are joined part by part, and what they are joined to is added."""
    for op in graph.ops:
        if op.kind != "backward" or op.forward is not None or op.again is not None or op.path in runs:
            continue
        makers = [graph.producer[t].path if t in graph.producer else "" for t in op.inputs]
        known = [summed.get(path, {}).get(t.name) for path, t in zip(makers, op.inputs, strict=True)]
        over = known[0] if known else None
        if len(op.outputs) != 1 or over is None or {one.axis if one is not None else "" for one in known} != {over.axis}:
            continue
        for path, tensor in zip(makers, op.inputs, strict=True):
            summed[path].pop(tensor.name, None)
        summed[op.path] = {op.outputs[0].name: over}
        runs[op.path], cuts[op.path] = runs[makers[0]], {SOME: shares.get(op.outputs[0].name, 1)}


def source_of(op: Op) -> Op:
    """The forward op whose backward, or whose clone, ``op`` is; else itself."""
    while (before := op.again or op.forward) is not None:
        op = before
    return op


def iterations(op: Op, graph: Graph) -> int:
    """How often the loops around an op run it."""
    return math.prod([graph.loops[name].length for name in chain_of(op.loop, graph.loops)])


def _through_loops(graph: Graph, shares: dict[str, int]) -> None:
    """Stacks are cut as their slices are, and carries as what they become."""
    for _ in range(2):  # out of one loop, into another
        for one, other in (pair for loop in graph.loops.values() for pair in _same(loop)):
            part = max(shares.get(one.name, 1), shares.get(other.name, 1))
            if part > 1:
                shares[one.name] = shares[other.name] = part


def _same(loop: Loop) -> Iterator[tuple[PTensor, PTensor]]:
    yield from ((y.slice, y.stack) for y in loop.ys)
    yield from ((x.slice, x.stack) for x in loop.xs)
    for carry in loop.carries:
        if not carry.is_sum:
            yield from ((carry.init, carry.inside), (carry.inside, carry.out), (carry.out, carry.final))
