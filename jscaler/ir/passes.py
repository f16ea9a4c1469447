"""Passes: functions from a program to a program, run one after another, each of which can be looked at."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from jscaler.errors import UnknownNameError
from jscaler.ir.overview import FoldingTable, Overview, Shown

State = TypeVar("State")
Pass = Callable[[State], State]
MOST_LISTED = 16


@dataclass(frozen=True)
class PassRun(Generic[State]):
    """What one pass made of a program.

    Attributes:
        name: of the function.
        why: the first sentence of what it says of itself.
        before, after: how many ops it was given, and how many it left.
        seconds: how long it took.
        result: what it left.
    """

    name: str
    why: str
    before: int
    after: int
    seconds: float
    result: State = field(repr=False, compare=False)


def run_passes(
    state: State, passes: Sequence[Pass[State]], count: Callable[[State], int]
) -> tuple[State, tuple[PassRun[State], ...]]:
    """Run ``passes`` in their order; ``count`` says how many ops a state has."""
    runs = []
    before = count(state)
    for one in passes:
        started = time.perf_counter()
        state = one(state)
        seconds, after = time.perf_counter() - started, count(state)
        runs.append(PassRun(name_of(one), (one.__doc__ or "").split(".")[0].strip(), before, after, seconds, state))
        before = after
    return state, tuple(runs)


def name_of(one: Callable[..., object]) -> str:
    """The name that a pass goes by."""
    return getattr(one, "__name__", str(one))


@dataclass(frozen=True, repr=False)
class Passes(Shown):
    """The passes that a step went through, in order; prints as a table.

    Example:
        >>> print(lowered.passes.after("time_loops"))  # doctest: +SKIP
    """

    runs: tuple[PassRun[object], ...]

    def after(self, name: str) -> object:
        """The graph, or the flat program, behind the pass ``name``.

        Raises:
            UnknownNameError: no pass is called so.
        """
        known = {run.name: run.result for run in self.runs}
        if name not in known:
            raise UnknownNameError("pass", name, known)
        return known[name]

    def as_json(self) -> list[dict[str, object]]:
        """A record for each pass."""
        return [{"name": r.name, "before": r.before, "after": r.after, "seconds": r.seconds} for r in self.runs]

    def overview(self) -> Overview:
        """How many, and of those that change the count of ops the first; in a notebook all."""
        changing = [f"{run.name}: {run.before} ops to {run.after}" for run in self.runs if run.before != run.after]
        rest, seconds = len(changing) - MOST_LISTED, sum(run.seconds for run in self.runs)
        lines = [
            f"{len(self.runs)} passes in {seconds:.3g} s; {len(changing)} change the count of ops",
            *changing[:MOST_LISTED],
            *([f"and {rest} more of these"] if rest > 0 else []),
            "print(lowered.passes) has a line for every pass, lowered.passes.after(name) is what one has left",
        ]

        def cells(run: PassRun[object]) -> tuple[str, ...]:
            return str(run.before), str(run.after), f"{run.seconds:.4f}", run.why

        header = "ops before", "after", "seconds", "why"
        table = FoldingTable("passes", header, self.runs, lambda run: run.name, cells, "print(lowered.passes)")
        return Overview(lines, lambda: [table])

    def __str__(self) -> str:
        rows = [("pass", "ops before", "after", "seconds", "why")]
        rows += [(r.name, str(r.before), str(r.after), f"{r.seconds:.4f}", r.why) for r in self.runs]
        name, before, after, seconds = (max(len(row[i]) for row in rows) for i in range(4))
        return "\n".join(f"{a:{name}}  {b:>{before}}  {c:>{after}}  {d:>{seconds}}  {e}" for a, b, c, d, e in rows)
