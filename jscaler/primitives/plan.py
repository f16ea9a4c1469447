"""``Plan``: the list of decisions that a policy's primitives append. Everything after it is a pure function."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jscaler.errors import PlanFileError
from jscaler.ir import Place
from jscaler.ir.op import Residuals
from jscaler.ir.overview import FoldingTable, Overview, Shown, count_text
from jscaler.primitives import plan_file
from jscaler.primitives.algorithms import GridAxis
from jscaler.primitives.made_for import MadeFor
from jscaler.tables import Published, Table, schedule_named

Index = tuple[tuple[int, int], ...]  # per grid axis: start, stop


@dataclass(frozen=True)
class Trans:
    """Replace an op by a grid of cells."""

    op: str
    axes: tuple[GridAxis, ...]
    chunks: tuple[GridAxis, ...] = ()  # parts that run one after another in every cell

    def __str__(self) -> str:
        chunks = f" in chunks of {', '.join(map(str, self.chunks))}" if self.chunks else ""
        return f"op_trans  {self.op} -> [{', '.join(map(str, self.axes))}]{chunks}"


@dataclass(frozen=True)
class Fuse:
    """Make one op, at ``path``, of several forward ops, before autodiff."""

    ops: tuple[str, ...]
    path: str

    def __str__(self) -> str:
        return f"fuse      {' + '.join(self.ops)} -> {self.path}"


@dataclass(frozen=True)
class LoopRanges:
    """Make loops over ranges of ``sizes`` of the loop over layers that is called ``loop``, before autodiff."""

    loop: str
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"ranges    {self.loop} -> {', '.join(map(str, self.sizes))}"


@dataclass(frozen=True)
class LeafParts:
    """Store ``leaves``, and state that is made of them, in parts of ``sizes`` along dim 0, each an input of its own."""

    leaves: tuple[str, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"parts     {' '.join(self.leaves)} -> {', '.join(map(str, self.sizes))}"


@dataclass(frozen=True)
class Assign:
    """Put the cells of ``index`` (a box of the grid) on ``places``, listed row-major.

    Attributes:
        any_order: whether the cells may be dealt to these places in any order; the cheapest is taken.
    """

    op: str
    index: Index
    places: tuple[Place, ...]
    any_order: bool = False

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of the places."""
        return tuple(p.device for p in self.places)

    def __str__(self) -> str:
        return self.line(" ".join(map(str, self.places)))

    def line(self, places: str) -> str:
        """The decision as text, given its places as text."""
        box = ", ".join(f"{a}:{b}" for a, b in self.index)
        return f"op_assign {self.op}[{box}] -> {'any order of ' if self.any_order else ''}[{places}]"


@dataclass(frozen=True)
class Order:
    """Run ``before`` before ``after``.

    Attributes:
        before_cells, after_cells: the cells of their grids that are meant, which are in time; None for all.
    """

    before: str
    after: str
    before_cells: Index | None = None
    after_cells: Index | None = None

    def __str__(self) -> str:
        first, second = (_cells_text(cells) for cells in (self.before_cells, self.after_cells))
        return f"op_order  {self.before}{first} < {self.after}{second}"


def _cells_text(cells: Index | None) -> str:
    return "" if cells is None else f"[{', '.join(str(a) if b == a + 1 else f'{a}:{b}' for a, b in cells)}]"


@dataclass(frozen=True)
class ReduceDtype:
    """Add the value shares of gradients between devices in ``dtype``, not in the gradients' own."""

    dtype: str

    def __str__(self) -> str:
        return f"reduce_dtype {self.dtype}"


@dataclass(frozen=True)
class Accumulation:
    """How gradients add up over parts in time: in which dtype, and whether devices add theirs each time or once.

    And whether parameters that lie in parts are put together once for all of these.
    """

    dtype: str | None = None
    each_time: bool = False
    gather_once: bool = False

    def __str__(self) -> str:
        sums = f"accumulate in {self.dtype or 'their own dtype'}, reduced {'each time' if self.each_time else 'once'}"
        return f"{sums}, parameters gathered once" if self.gather_once else sums


@dataclass(frozen=True)
class PerMicrobatch:
    """Run forward ops that need all of a factor on each of its parts in time alone."""

    ops: tuple[str, ...]

    def __str__(self) -> str:
        return f"alone     {' + '.join(self.ops)}"


@dataclass(frozen=True)
class OnDevices:
    """Forward ops run on these devices, in whatever parts are cheapest there if nothing else says how they are split.

    Attributes:
        axis, turned: of every second part along this time axis, the devices.
        stage: what the plan's schedule calls them. None only in files that were written before stages were: there
            stages stand in their order, and `numbered_stages` gives them their numbers.
    """

    ops: tuple[str, ...]
    devices: tuple[int, ...]
    axis: str = ""
    turned: tuple[int, ...] = ()
    stage: int | None = None

    def __str__(self) -> str:
        turned = f" and, every second part along '{self.axis}', [{' '.join(map(str, self.turned))}]" if self.turned else ""
        stage = "" if self.stage is None else f"stage {self.stage} "
        return f"on        {stage}[{' '.join(map(str, self.devices))}]{turned} {' + '.join(self.ops)}"


def numbered_stages(decisions: Iterable[Any]) -> tuple[Any, ...]:
    """``decisions`` with a stage in each `OnDevices`; one that lacks it is the stage behind the ones before it."""
    found: list[Any] = []
    stage = 0
    for decision in decisions:
        if isinstance(decision, OnDevices):
            own = stage if decision.stage is None else decision.stage
            decision, stage = replace(decision, stage=own), max(stage, own + 1)
        found.append(decision)
    return tuple(found)


@dataclass(frozen=True)
class Schedule:
    """In which order device groups run their blocks: the text of a table, or the name of a published one."""

    table: str

    def __str__(self) -> str:
        return f"schedule  {' / '.join(self.table.splitlines())}"


@dataclass(frozen=True)
class SaveResiduals:
    """The backward of an op reads its ``inputs``, or residuals that its forward has ``saved``."""

    op: str
    mode: Residuals

    def __str__(self) -> str:
        return f"residuals {self.op} {self.mode}"


@dataclass(frozen=True)
class Recompute:
    """Compute forward ops again for the backward pass, as one region.

    Attributes:
        ops: in the order of the program.
        keep: of these the ops whose results are saved, or single results by their names.
        instead: whether regions that hold any of these ops already (the model's own) are dissolved.
    """

    ops: tuple[str, ...]
    keep: tuple[str, ...] = ()
    instead: bool = False

    def __str__(self) -> str:
        kept = f", keeping {' + '.join(self.keep)}" if self.keep else ""
        instead = ", instead of the regions around" if self.instead else ""
        return f"recompute {' + '.join(self.ops)}{kept}{instead}"


@dataclass(frozen=True)
class Shard:
    """Split the update of a parameter along a dim of it, beyond the cuts that its readers make.

    Attributes:
        leaf: the parameter's path among the step's inputs.
        dim: the dim that is cut.
        parts: how many parts.
        devices: row-major: the devices of part 0, of part 1, and so on.
        stored: whether the parameter itself lies in these parts too, and is whole only where it is used.
        each_time: whether its gradient is reduced and scattered for each micro-batch, or once behind the last; None: as the
            plan's `Accumulation` says.
        elsewhere: the devices of each other stage that reads it, in the same order: what a step has there of it, and of its
            gradient, lies in the same parts.
    """

    leaf: str
    dim: int
    parts: int
    devices: tuple[int, ...]
    stored: bool = False
    each_time: bool | None = None
    elsewhere: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        kept = "stored so" if self.stored else "stored whole"
        kept += "" if self.each_time is None else ", reduced each time" if self.each_time else ", reduced once"
        every = " and ".join(f"[{' '.join(map(str, own))}]" for own in (self.devices, *self.elsewhere))
        return f"shard     {self.leaf} dim {self.dim} in {self.parts} over {every}, {kept}"


@dataclass(frozen=True)
class Store:
    """Input ``leaf`` lies on a grid of ``devices`` (row-major), each dim cut by the grid's axes at ``cuts``, major first.

    Axes that cut nothing replicate it.

    Attributes:
        elsewhere: other grids of devices on which it lies once more, alike.
    """

    leaf: str
    grid: tuple[int, ...]
    devices: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    elsewhere: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        parts = "×".join(map(str, self.grid)) or "1"
        cuts = ", ".join("·".join(f"x{i}" for i in cut) or "whole" for cut in self.cuts)
        every = " and ".join(f"[{' '.join(map(str, own))}]" for own in (self.devices, *self.elsewhere))
        return f"store     {self.leaf}({cuts}) on {parts} {every}"


Decision = (
    Trans
    | Assign
    | Order
    | ReduceDtype
    | SaveResiduals
    | Fuse
    | LoopRanges
    | LeafParts
    | Recompute
    | Shard
    | Store
    | Accumulation
    | PerMicrobatch
    | OnDevices
    | Schedule
)
KINDS: Mapping[str, type] = {  # what each is called in a plan file; a file keeps these names for good
    "op_trans": Trans,
    "op_assign": Assign,
    "op_order": Order,
    "reduce_dtype": ReduceDtype,
    "residuals": SaveResiduals,
    "fuse": Fuse,
    "ranges": LoopRanges,
    "parts": LeafParts,
    "recompute": Recompute,
    "shard": Shard,
    "store": Store,
    "accumulation": Accumulation,
    "per_microbatch": PerMicrobatch,
    "on_devices": OnDevices,
    "schedule": Schedule,
}


def named_ops(decision: Decision) -> tuple[str, ...]:
    """The ops that a decision names; those that it fuses are no more."""
    if isinstance(decision, Order):
        return decision.before, decision.after
    if isinstance(decision, (Recompute, PerMicrobatch, OnDevices)):
        return decision.ops
    path = decision.path if isinstance(decision, Fuse) else getattr(decision, "op", None)
    return () if path is None else (path,)


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """The decisions of one policy for one graph, in the order they were made.

    Attributes:
        name: the policy's name.
        num_devices: how many logical devices it was given.
        decisions: what the primitives appended.
        made_for: the ops and rules of the graph that it was made for; a plan without it is taken for any graph that has
            the ops it names.
        told: options of the command line that made the model, by name; a file keeps them.

    Example:
        >>> plan = lowered.plan.plan
        >>> plan.save("plan.json")
        >>> again = jscaler.parallelize(Plan.load("plan.json"))(step).lower(state, batch)
        >>> again.plan.plan.digest == plan.digest == Plan.from_json(plan.to_json()).digest
        True
        >>> plan.split_factors["mlp/dot"], plan.shards, plan.residuals, plan.alone
        (['a'], {}, {}, frozenset())
        >>> plan.reduce_dtype is None, plan.table is None, plan.accumulation.each_time  # as it says nothing of these
        (True, True, False)
    """

    name: str
    num_devices: int
    decisions: tuple[Decision, ...] = ()
    made_for: MadeFor | None = field(default=None, compare=False)
    told: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def reduce_dtype(self) -> str | None:
        """The dtype in which gradients are added between devices; None for their own."""
        return next((d.dtype for d in reversed(self.decisions) if isinstance(d, ReduceDtype)), None)

    @cached_property
    def accumulation(self) -> Accumulation:
        """How gradients add up over parts in time."""
        return next((d for d in reversed(self.decisions) if isinstance(d, Accumulation)), Accumulation())

    @property
    def table(self) -> Table | Published | None:
        """In which order device groups run the micro-batches of a loop over groups, or a schedule that has a table for
        so many groups and micro-batches; None where the plan says nothing."""
        text = next((d.table for d in reversed(self.decisions) if isinstance(d, Schedule)), None)
        return None if text is None else schedule_named(text) or Table.parse(text)

    @cached_property
    def alone(self) -> frozenset[str]:
        """The forward ops that run on each part in time alone."""
        return frozenset(path for d in self.decisions if isinstance(d, PerMicrobatch) for path in d.ops)

    @property
    def residuals(self) -> dict[str, Residuals]:
        """By path of the forward op what its backward reads, where the plan says so."""
        return {d.op: d.mode for d in self.decisions if isinstance(d, SaveResiduals)}

    @property
    def split_factors(self) -> dict[str, list[str]]:
        """By path the factors that the plan splits."""
        found: dict[str, list[str]] = {}
        for decision in self.decisions:
            if isinstance(decision, Trans):
                found.setdefault(decision.op, []).extend(a.factor for a in decision.axes if a.factor and a.parts > 1)
        return found

    @property
    def shards(self) -> dict[str, Shard]:
        """By path of the parameter how its update is split."""
        return {d.leaf: d for d in self.decisions if isinstance(d, Shard)}

    @cached_property
    def digest(self) -> str:
        """A short hash, equal in every process that made the same decisions."""
        return plan_file.digest(self.num_devices, self.decisions, KINDS)

    def to_json(self) -> str:
        """The text of a plan file: JSON, one decision per line.

        Raises:
            PlanFileError: an algorithm of one's own could not be made again from it.
        """
        return plan_file.write(self, KINDS)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan in the text of a plan file.

        Algorithms of one's own are imported from the module that defined them.

        Args:
            text: what `to_json` has given.

        Raises:
            PlanFileError: it is malformed, of a newer version, or holds a kind of decision that is not known.
        """
        data = plan_file.read(text, KINDS)
        data["decisions"] = numbered_stages(data["decisions"])
        return cls(**data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Args:
            path: of the file, which ends in ``.json``.

        Raises:
            PlanFileError: an algorithm of one's own could not be made again from it, or the file cannot be written.
        """
        plan_file.save(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """The plan in a file. Whether it fits a graph is seen when a step is planned by it.

        Args:
            path: of the file.

        Raises:
            PlanFileError: there is no such file, or what it holds is no plan.
        """
        text = plan_file.load(path)
        try:
            return cls.from_json(text)
        except PlanFileError as error:
            raise PlanFileError(f"'{os.fspath(path)}': {error}") from error

    def overview(self) -> Overview:
        """The plan in a few lines; in a notebook its decisions by the modules whose ops and leaves they are about."""
        names = {kind: name for name, kind in KINDS.items()}
        lines = [
            f"Plan {self.name} on {self.num_devices} devices: {len(self.decisions)} decisions",
            count_text(Counter(names[type(d)] for d in self.decisions)),
            "print(plan) has a line for every decision, plan.save(path) writes them; lowered.plan says what comes of them",
        ]

        def about(decision: Decision) -> str:
            return getattr(decision, "op", "") or getattr(decision, "leaf", "") or names[type(decision)]

        title = "decisions, by the op or leaf that they are about"
        table = FoldingTable(title, ("",), self.decisions, about, lambda decision: (str(decision),), "print(plan)")
        return Overview(list(filter(None, lines)), lambda: [table])

    def __str__(self) -> str:
        return "\n".join([f"Plan {self.name} on {self.num_devices} devices", *_lines(self.decisions)])


def _lines(decisions: Iterable[Decision]) -> Iterator[str]:
    """The decisions as text; an array of places that many ops lie on is written out once."""
    known: dict[int, str] = {}
    for decision in decisions:
        if isinstance(decision, Assign):
            if id(decision.places) not in known:
                known[id(decision.places)] = " ".join(map(str, decision.places))
            yield decision.line(known[id(decision.places)])
        else:
            yield str(decision)
