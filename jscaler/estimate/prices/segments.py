"""What segments of a model cost under a plan for one device group: what any stage costs that is made of such segments.

A stage takes the seconds of its segments, holds their state, and for each micro-batch under way what their forwards leave
for their backwards. Equal layers are one kind of segment, so the work does not grow with their number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jscaler.estimate.prices.candidate import Candidate, TimeCut
from jscaler.estimate.prices.price import Sums, Tables
from jscaler.ir import Graph
from jscaler.plans.accumulate import MICROBATCH

Shares = Mapping[str, Mapping[int, float]]  # path of a forward op -> the part of it that each kind of segment has


@dataclass(frozen=True)
class SegmentPrices:
    """Of each kind of segment, seconds and bytes on a device.

    Attributes:
        forward, backward, weights: seconds for a micro-batch; ``weights`` are those of the backward that gradients of
            weights take.
        once: seconds once a step.
        state: bytes of parameters and optimizer.
        sums: bytes of gradients that add up over micro-batches.
        kept: bytes for each micro-batch that is under way.
        beside: the most bytes that a block has beside these.
        late: the most bytes behind the last backward, beside parameters and optimizer.
    """

    forward: np.ndarray
    backward: np.ndarray
    weights: np.ndarray
    once: np.ndarray
    state: np.ndarray
    sums: np.ndarray
    kept: np.ndarray
    beside: np.ndarray
    late: np.ndarray


def in_microbatches(candidate: Candidate, microbatches: int) -> Candidate:
    """``candidate``, which has two or more micro-batches, with another number of them."""

    def cut(one: TimeCut) -> TimeCut:
        return replace(one, parts=microbatches) if one.axis == MICROBATCH else one

    return replace(candidate, cuts={path: tuple(map(cut, own)) for path, own in candidate.cuts.items()})


def finest(tables: Tables, candidate: Candidate) -> frozenset[tuple[int, int]]:
    """Of what micro-batches cut: its size, and into how many parts devices cut it."""
    graph, parts = tables.captured.graph, tables.skeleton(candidate).parts
    found = set[tuple[int, int]]()
    for path, cuts in candidate.cuts.items():
        factors = graph.rules.rule(graph.by_path[path]).factors
        for one in (one for one in cuts if one.axis == MICROBATCH and one.factor in factors):
            found.add((factors[one.factor].size, parts.get(path, {}).get(one.factor, 1)))
    return frozenset(found)


def segment_prices(tables: Tables, candidate: Candidate, shares: Shares, kinds: int) -> SegmentPrices:
    """Of each kind of segment under a plan for all devices of a group, in micro-batches.

    Args:
        shares: of ops of the folded graph; what has none is where its operands are made, or else of the last kind.
    """
    apart = replace(candidate, groups=tuple((kind,) for kind in range(kinds)), stages=tuple(range(kinds)), shares=shares)
    sums = Sums(tables, apart)
    staged = sums.staged(())
    blocks, once = staged.blocks([*sums.computing(), *sums.sending()], True)
    held = [staged.held(kind, sums.bytes_of(), sums.begins >= 0) for kind in range(kinds)]
    state = np.zeros(kinds)
    for name, nbytes in sums.arguments.items():
        for kind, part in staged.of_leaf.get(name, {0: 1.0}).items():
            state[kind] += nbytes * part
    seconds = {name: np.array([blocks[name].get(kind, 0.0) for kind in range(kinds)]) for name in "FBW"}
    return SegmentPrices(
        seconds["F"], seconds["B"], seconds["W"], np.array(once), state,
        np.array([one.sums for one in held]), np.array([one.saved for one in held]),
        np.array([max(one.forward, one.backward) for one in held]), np.array([one.late for one in held]),
    )  # fmt: skip


def shares_of_segments(graph: Graph, known: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    """``known``, and what is made of parameters or the batch alone: it is where it is read.

    Args:
        known: of other forward ops.
    """
    found = dict(known)
    for op in reversed(graph.of_kind("forward")):
        if op.path in found:
            continue
        own: dict[int, float] = {}
        for tensor in (t for out in op.outputs for t in (out, *graph.flow.neighbours(out))):
            for reader in graph.consumers.get(tensor, ()):
                for kind, part in found.get(reader.path, {}).items():
                    own[kind] = max(own.get(kind, 0.0), part)
        if own:
            found[op.path] = own
    return found
