"""The two ends of a model of words, found by its dataflow: what is made of the rows of a table of words, and what ends in
its logits.

::

    tokens ──► look-up ──┐                               first end: look-ups, also those of a decoder further down
    tokens ──► look-up ──┼───────────┐                   (they need nothing of the layers)
                         ▼           ▼
                    [ encoder ] ─► [ decoder ] ─┐        between: all else, each close in front of who reads it
                                                ▼
                                             logits ──► softmax ──► loss        last end: logits, and all behind them

What carries words is what a dim of a table of words reaches (`jscaler.plans.vocab_parallel.tables_of_words`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jscaler.ir import PTensor
from jscaler.ir.loop import Item, flat, made_by, reads_of
from jscaler.plans.necks import as_late_as_possible
from jscaler.primitives import Planner


@dataclass(frozen=True)
class Ends:
    """The ops and loops of a forward pass, in order: those of the first end, of what lies between, and of the last end."""

    first: tuple[Item, ...]
    between: tuple[Item, ...]
    last: tuple[Item, ...]


def find_ends(graph: Planner, items: Iterable[Item], words: Sequence[tuple[PTensor, int]]) -> Ends | None:
    """The ends among ``items``, which stand in order; None where one of them is missing.

    Args:
        words: tables of words, and which dims of theirs are words.
    """
    carry = {op for table, dim in words for op in graph.factor_of(table.name, dim)}
    first, between, last = list[Item](), list[Item](), list[Item]()
    made_between, made_last = set[PTensor](), set[PTensor]()
    for item in items:
        reads, made = set(reads_of(item)), made_by(item)
        has_words = not carry.isdisjoint(flat([item]))
        if has_words and reads.isdisjoint(made_between | made_last):
            first.append(item)
        elif has_words or not reads.isdisjoint(made_last):
            last.append(item)
            made_last.update(made)
        else:
            between.append(item)
            made_between.update(made)
    return Ends(tuple(first), tuple(as_late_as_possible(between)), tuple(last)) if first and between and last else None
