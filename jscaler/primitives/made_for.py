"""``MadeFor``: what a plan remembers of the graph that it was made for, to tell whether another graph is like it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from jscaler.errors import PlanFileError
from jscaler.ir import Factor, Graph, Rule


@dataclass(frozen=True)
class RuleRecord:
    """An op's rule as text, and the size and kind of each of its factors.

    Attributes:
        text: as `Rule` prints it: ``a b, b c -> a c``.
        factors: name, size and kind: ``parallel``, ``reduction``, ``blocked``, or ``reopens`` where the op is cut for it.
    """

    text: str
    factors: tuple[tuple[str, int, str], ...]

    @staticmethod
    def of(rule: Rule) -> "RuleRecord":
        return RuleRecord(str(rule), tuple((f.name, f.size, kind_of(f)) for f in rule.factors.values()))

    @staticmethod
    def parse(text: object, where: str) -> "RuleRecord":
        """The record that ``str`` wrote; raises PlanFileError."""
        rule, _, listed = str(text).partition("; ")
        words = [word.split() for word in listed.split(", ")] if listed else []
        for word in words:
            if len(word) not in (2, 3) or not re.fullmatch(r"\d+", word[1]):
                raise PlanFileError(f"{where} is {text!r}: factors are a list of name, size, and kind if not parallel")
        return RuleRecord(rule, tuple((w[0], int(w[1]), w[2] if len(w) == 3 else "parallel") for w in words))

    @cached_property
    def kinds(self) -> dict[str, str]:
        return {name: kind for name, _, kind in self.factors}

    def __str__(self) -> str:
        """``a b, b c -> a c; a 16, b 8 reduction, c 16``."""
        words = [f"{name} {size}{'' if kind == 'parallel' else f' {kind}'}" for name, size, kind in self.factors]
        return "; ".join([self.text, ", ".join(words)] if words else [self.text])


def kind_of(factor: Factor) -> str:
    """The kind of a factor, where ``reopens`` is one of its own."""
    return "reopens" if factor.reopens else factor.kind


@dataclass(frozen=True)
class OpRecord:
    """An op that was there, and its rule if the plan splits it."""

    path: str
    rule: RuleRecord | None = None


@dataclass(frozen=True)
class MadeFor:
    """The forward ops of a graph, and all other ops that a plan names, in the order of the program.

    What no decision names is filled in, backward and update ops after the forward ones. So a plan serves other optimizers,
    unless it names their ops; and it does not serve a model with other layers.
    """

    ops: tuple[OpRecord, ...] = field(default=())

    @staticmethod
    def of(graph: Graph, named: Iterable[str], split: Iterable[str]) -> "MadeFor":
        """What to remember of ``graph``: the decisions of a plan name the ops ``named`` and split the ops ``split``."""
        known, cut, records = frozenset(named), frozenset(split), dict[int, RuleRecord]()
        rules: list[Rule] = []  # kept, so that no two share an identity

        def rule_of(path: str) -> RuleRecord:
            rule = graph.rule(graph[path])
            if id(rule) not in records:
                rules.append(rule)
                records[id(rule)] = RuleRecord.of(rule)
            return records[id(rule)]

        chosen = [op.path for op in graph.ops if op.kind == "forward" or op.path in known]
        return MadeFor(tuple(OpRecord(path, rule_of(path) if path in cut else None) for path in chosen))

    def __repr__(self) -> str:
        return f"MadeFor({len(self.ops)} ops)"

    @cached_property
    def by_path(self) -> dict[str, OpRecord]:
        return {op.path: op for op in self.ops}
