"""``jscaler.diff``: which decisions of two plans differ, and what each difference costs."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jscaler.capture.jaxprs import nbytes
from jscaler.clusters import Cluster, find_cluster
from jscaler.errors import DeviceError, PlanError
from jscaler.estimate.cost import Cost
from jscaler.estimate.decided import Decided, decided_in
from jscaler.estimate.memory import MemoryKind, arguments_on
from jscaler.estimate.op_seconds import seconds_by_op
from jscaler.estimate.owners import ADDED, Owners
from jscaler.estimate.profile import Profile
from jscaler.estimate.query import cost
from jscaler.ir.walk import grouped
from jscaler.lower.step_plan import StepPlan, graph_of
from jscaler.primitives.plan import Fuse, Schedule
from jscaler.tables import schedule_named
from jscaler.text.folding import folded, merged
from jscaler.text.tables import FittingTable, printed
from jscaler.text.units import readable_bytes, readable_seconds

MOST_LINES = 16
WAITING = "waiting for other device groups"
HIDDEN = "sends that hide behind arithmetic"
OTHERS = "what exchanges and loops hold besides"
SAME = "the same"
ROUNDING = 1e-13  # of a step: what the order of a sum makes
NOTHING = 1e-7  # of a step: figures below that are not shown


@dataclass(frozen=True)
class DiffLine:
    """Ops or leaves of a module, or of equal layers, for which each plan decides alike; or a part of a step beside these.

    All figures are of the second plan less those of the first.

    Attributes:
        what: their path, layer numbers as ``*``.
        count: how many.
        a, b: what the plans decide; equal where a cost differs only because neighbours do something else.
        computing, sending, waiting: seconds.
        memory: bytes at the worst moment.
    """

    what: str
    count: int
    a: str
    b: str
    computing: float = 0.0
    sending: float = 0.0
    waiting: float = 0.0
    memory: int = 0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.computing + self.sending + self.waiting

    @property
    def decided(self) -> bool:
        """Whether the plans decide differently."""
        return self.a != self.b

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        seconds = {"computing": self.computing, "sending": self.sending, "waiting": self.waiting, "seconds": self.seconds}
        return {"what": self.what, "count": self.count, "a": self.a, "b": self.b, **seconds, "memory": self.memory}


@dataclass(frozen=True)
class Difference:
    """Which decisions of two plans differ, and what each difference costs.

    The seconds are those of the devices that have most to do under each plan, as ``jscaler.cost`` has them: the kernels of
    their blocks op by op, what is sent in front of each op, and what they wait. Under a pipeline they are those of the
    busiest stage: an op of another stage takes none of its time, and that stage's waiting is what the step takes longer.
    The memory is that of the devices that hold most, at their worst moment. So the sums of all lines are exactly the
    differences of the two costs.

    Attributes:
        a, b: what the plans cost.
        lines: the largest effect on the seconds first; then by memory.
        names: of the plans, as they were given.

    Example:
        >>> found = jscaler.diff(train_step.graph(state, batch), "data_parallel", "zero3", "4xH100-80GB")
        >>> [(line.what, line.a, line.b) for line in found.lines if line.decided and "words" in line.what]
        [('state/params/{words,down,out,up}', 'whole', 'dim 0:4')]
        >>> round(sum(line.seconds for line in found.lines) / found.seconds, 9)
        1.0
        >>> sum(line.memory for line in found.lines) == found.memory < 0, sorted(found.memory_by_kind)[:2]  # bytes
        (True, ['activations', 'gradients'])
        >>> sorted(found.as_json())
        ['a', 'b', 'lines', 'memory', 'seconds']
    """

    a: Cost
    b: Cost
    lines: tuple[DiffLine, ...]
    names: tuple[str, str]

    @property
    def seconds(self) -> float:
        """By how much longer a step takes under the second plan."""
        return (self.b.seconds.total or 0.0) - (self.a.seconds.total or 0.0)

    @property
    def memory(self) -> int:
        """How many bytes more a device holds under it, of those that hold most."""
        return self.b.memory.peak - self.a.memory.peak

    @property
    def memory_by_kind(self) -> dict[MemoryKind, tuple[int, int]]:
        """Kind of what is held at the worst moment -> its bytes under both plans."""
        other = self.b.memory.by_kind
        return {kind: (nbytes, other[kind]) for kind, nbytes in self.a.memory.by_kind.items() if nbytes or other[kind]}

    def as_json(self) -> dict[str, Any]:
        """Everything as numbers, strings, lists and dicts."""
        lines = [line.as_json() for line in self.lines]
        a, b = (_totals(*one) for one in zip(self.names, (self.a, self.b), strict=True))
        return {"a": a, "b": b, "seconds": self.seconds, "memory": self.memory, "lines": lines}

    def __str__(self) -> str:
        return printed(shown_parts(self), 180)


def _totals(name: str, one: Cost) -> dict[str, Any]:
    seconds = one.seconds
    parts = {"computing": seconds.compute, "sending": seconds.communication, "waiting": seconds.waiting}
    return {"plan": name, "devices": one.num_devices, "seconds": seconds.total, **parts, "memory": one.memory.as_json()}


def diff(
    graph: Any,
    plan_a: Any,
    plan_b: Any,
    cluster: Cluster | str | os.PathLike[str],
    *,
    devices: int | None = None,
    donated: bool = True,
    profile: Profile | str | os.PathLike[str] | None = None,
) -> Difference:
    """Which decisions of two plans for one step differ, and what each difference costs on ``cluster``.

    Args:
        graph: the step's graph, ``train_step.graph(state, batch)``; or a lowered or compiled step, whatever its plan.
        plan_a, plan_b: as `jscaler.cost` takes them: a policy, a plan's name or text, a file, a `Plan`.
        cluster: a `Cluster`, a name (``"8xH100-80GB"``) or a .toml file.
        devices: how many, where no plan says it; all of the cluster's by default.
        donated: whether the step updates its state in place (``donate_argnames``).
        profile: seconds that were measured (``jscaler profile``), or the file that has them.

    Raises:
        PlanError: there is no graph or no plan; or what `jscaler.parallelize` would raise for a plan.
        PlanFitError: a plan was made for another step.
        DeviceError: the plans are for other numbers of devices, or the cluster does not say what its devices are.
        UnknownNameError: no cluster or plan has the name.

    Example:
        >>> print(str(jscaler.diff(lowered, "data_parallel", "zero3", "4xH100-80GB")).partition(",")[0])
        a: data_parallel
    """
    on = cluster if isinstance(cluster, Cluster) else find_cluster(cluster)
    captured = graph_of("diff", graph)
    plans = plan_a, plan_b
    a, b = (cost(captured, one, on, devices=devices, donated=donated, profile=profile) for one in plans)
    names = [given if isinstance(given, str) else one.plan for given, one in zip(plans, (a, b), strict=True)]
    return difference(a, b, (names[0], names[1]))


def difference(a: Cost, b: Cost, names: tuple[str, str]) -> Difference:
    """What differs between two costs of one captured step; raises as `diff`."""
    for one in (a, b):
        if one.cluster.device is None:
            raise DeviceError(
                f"to say what a decision costs, say how fast devices are: cluster '{one.cluster.name}' has no device kind; "
                "'8xH100-80GB' has"
            )
    if a.num_devices != b.num_devices:
        raise DeviceError(
            f"the plan '{a.plan}' is for {a.num_devices} devices, and '{b.plan}' for {b.num_devices}: two plans are "
            "compared on as many devices; say how many with devices=, or plan one of them again"
        )
    captured = a.step.captured
    if captured is None or captured is not b.step.captured:
        raise PlanError("two plans are compared for one captured step, and these costs are of two")
    fused = [one for step in (a.step, b.step) for one in step.plan.decisions if isinstance(one, Fuse)]
    owners = Owners(captured, fused)
    return Difference(a, b, _lines(a, b, owners), names)


def _lines(a: Cost, b: Cost, owners: Owners) -> tuple[DiffLine, ...]:
    decided = [decided_in(one.step, owners) for one in (a, b)]
    taken, held = [_seconds_of(one, owners) for one in (a, b)], [_memory_of(one, owners) for one in (a, b)]
    several = all(len(one.step.completed.groups) > 1 for one in (a, b))
    rows: list[tuple[bool, DiffLine]] = []
    for owner in dict.fromkeys(path for table in (*decided, *taken, *held) for path in table):
        texts = _texts(decided[0].get(owner), decided[1].get(owner), several)
        before, after = (table.get(owner, (0.0, 0.0)) for table in taken)
        memory = held[1].get(owner, 0) - held[0].get(owner, 0)
        is_leaf, what = owner in owners.leaves, folded(owner)
        if not is_leaf and owner not in (ADDED, OTHERS):
            what = what.rpartition("/")[0] or what
        rows.append((is_leaf, DiffLine(what, 1, *texts, after[0] - before[0], after[1] - before[1], 0.0, memory)))
    rounding = ROUNDING * max(one.seconds.total or 0.0 for one in (a, b))
    told = [row for row in rows if row[1].decided or row[1].memory or _most(row[1]) > rounding]
    groups = grouped(((is_leaf, line.what, line.a, line.b), line) for is_leaf, line in told)
    ops, leaves = ([_sum(key[1], own) for key, own in groups.items() if key[0] == which] for which in (False, True))
    every = [line for own in (ops, leaves) for line in merged(own, _what, _merging, _sum)]
    hidden, waiting = a.busiest.hidden - b.busiest.hidden, b.seconds.waiting - a.seconds.waiting
    runs = _runs(a.step), _runs(b.step)
    every += [DiffLine(HIDDEN, 0, "", "", sending=hidden)] if hidden else []
    every += [DiffLine(WAITING, 0, *runs, waiting=waiting)] if waiting or runs[0] != runs[1] else []
    return tuple(sorted(every, key=lambda line: (-abs(line.seconds), -abs(line.memory), line.what)))


def _most(line: DiffLine) -> float:
    return max(abs(line.computing), abs(line.sending))


def _what(line: DiffLine) -> str:
    return line.what


def _merging(line: DiffLine) -> tuple[str, ...]:
    """What must be equal of lines that are one; parts of the model have lines of their own."""
    return line.a, line.b, "" if "/" in line.what else line.what


def _sum(what: str, lines: Sequence[DiffLine]) -> DiffLine:
    def total(of: Callable[[DiffLine], float]) -> float:
        return math.fsum(map(of, lines))

    seconds = total(lambda one: one.computing), total(lambda one: one.sending), total(lambda one: one.waiting)
    count, memory = sum(one.count for one in lines), sum(one.memory for one in lines)
    texts = (lines[0].a, lines[0].b) if lines else ("", "")
    return DiffLine(what, count, *texts, *seconds, memory)


def _seconds_of(one: Cost, owners: Owners) -> dict[str, tuple[float, float]]:
    """By what is decided about the seconds of computing and of sending."""
    of, found = owners.of_ops(one.step), dict[str, tuple[float, float]]()
    for path, (computing, sending) in seconds_by_op(one).items():
        owner = of.get(path, ADDED)
        before = found.get(owner, (0.0, 0.0))
        found[owner] = before[0] + computing, before[1] + sending
    return found


def _memory_of(one: Cost, owners: Owners) -> dict[str, int]:
    """The same of the bytes that are held at the worst moment."""
    of, by_tensor = owners.of_ops(one.step), owners.of_tensors(one.step)
    held, found = one.held, dict[str, int]()
    here = arguments_on(one.step, held.devices[0]).items()
    sizes = [(owners.of_leaf(one.step, tensor), nbytes(var)) for tensor, var in here]
    live = [(of.get(tensor.op) or by_tensor.get(tensor.name, OTHERS), tensor.nbytes) for tensor in held.live]
    for owner, size in (*sizes, *live):
        found[owner] = found.get(owner, 0) + size
    rest = one.memory.peak - sum(found.values())
    return found | ({OTHERS: found.get(OTHERS, 0) + rest} if rest else {})


def _texts(a: Decided | None, b: Decided | None, several: bool) -> tuple[str, str]:
    """What both plans decide, in words that differ where they do; stages where both have several device groups."""
    first, second = (
        "" if one is None else ", ".join(filter(None, (one.text, one.place if several else ""))) for one in (a, b)
    )
    alike = a is None or b is None or a.devices == b.devices or bool(a.place) != bool(b.place)
    return first, second if alike or first != second else f"{second}, on other devices"


def _runs(step: StepPlan) -> str:
    """How many device groups there are, and in which order they run."""
    groups = len(step.completed.groups)
    if groups == 1:
        return ""
    text = next((one.table for one in reversed(step.plan.decisions) if isinstance(one, Schedule)), "")
    table = text if schedule_named(text) else "a table of its own" if text else ""
    return ", ".join(filter(None, [f"{groups} groups", table]))


def shown_parts(found: Difference, most: int = MOST_LINES) -> list[str | FittingTable]:
    """Both plans with their cost, the ``most`` lines of most effect, and what is held at the worst moment."""
    if not found.lines:
        return [*_heading(found), "both plans decide alike, and cost the same"]
    return [*_heading(found), _table(found, most), _memory_table(found)]


def _heading(found: Difference) -> list[str]:
    lines = []
    for name, plan, one in zip("ab", found.names, (found.a, found.b), strict=True):
        seconds = one.seconds
        parts = ("computing", seconds.compute), ("sending", seconds.communication), ("waiting", seconds.waiting)
        said = ", ".join(f"{what} {readable_seconds(taken)}" for what, taken in parts if taken)
        held = readable_bytes(one.memory.peak)
        lines.append(f"{name}: {plan}, {readable_seconds(seconds.total)} a step ({said}), {held} of a device")
    part = found.seconds / (found.a.seconds.total or 1.0)
    more = f"{_seconds(found.seconds) or '0 s'} a step ({part:+.1%}), {_bytes(found.memory) or '0 B'} of a device"
    return [*lines, f"b less a: {more}"]


def _table(found: Difference, most: int) -> FittingTable:
    made = FittingTable("what differs, and by how much b takes more than a", ("memory", "n"))
    for name in ("what", "n", "in a", "in b"):
        made.add_column(name, justify="right" if name == "n" else "left")
    for name in ("computing", "sending", "waiting", "seconds", "memory"):
        made.add_column(name, justify="right")
    shown = found.lines[: most if len(found.lines) > most + 1 else None]
    rest, every = found.lines[len(shown) :], _sum("all", found.lines)
    nothing = NOTHING * max(one.seconds.total or 0.0 for one in (found.a, found.b))
    sums = [replace(_sum(f"{len(rest)} more", rest), a="", b="")] if rest else []
    for line in [*shown, *sums, replace(every, count=0, a="", b="")]:
        seconds = (line.computing, line.sending, line.waiting, line.seconds)
        figures = *(_seconds(number, nothing) for number in seconds), _bytes(line.memory)
        made.add_row(line.what, str(line.count or ""), line.a, SAME if line.a == line.b != "" else line.b, *figures)
    return made


def _memory_table(found: Difference) -> FittingTable:
    made = FittingTable("memory at the worst moment")
    made.add_column("kind")
    for name in ("in a", "in b", "b less a"):
        made.add_column(name, justify="right")
    for kind, (a, b) in found.memory_by_kind.items():
        made.add_row(kind, readable_bytes(a), readable_bytes(b), _bytes(b - a))
    return made


def _seconds(number: float, nothing: float = 0.0) -> str:
    return "" if abs(number) <= nothing else f"{'+' if number > 0 else '-'}{readable_seconds(abs(number))}"


def _bytes(number: float) -> str:
    return "" if not number else f"{'+' if number > 0 else '-'}{readable_bytes(abs(number))}"
