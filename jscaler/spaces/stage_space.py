"""``StageSpace``: stages that have devices and plans of their own. A point of it is cut exactly, over tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jscaler.errors import PlanError, check_count, shown
from jscaler.spaces.numbers import Domain, Setting, as_domain, divisors_of_devices, parts_of_batch
from jscaler.spaces.open_space import opened
from jscaler.spaces.space import Point, Space, StageOpening
from jscaler.tables import Published, find_schedule


@dataclass(frozen=True, eq=False)
class StageSpace:
    """Stages of a pipeline, each with its layers, its number of devices and its plan: of all ways the fastest that fits.

    Ways to cut a model, devices of stages and plans are found together, for each number of micro-batches and each schedule.
    That goes through all of them, by tables of seconds and bytes.

    Attributes:
        inside: spaces for the devices of a stage.
        devices: a domain of how many devices a stage has; a stage is on one host, or on whole hosts.
        stages: a domain of how many there are; from two on, by default.
        microbatches: a domain.
        schedules: names of published ones with one chunk, whose backwards are one block.

    Example:
        >>> from jscaler import spaces as s
        >>> space = s.StageSpace([s.Space("zero1"), s.Space("megatron", tp=s.within_host(2), dp=s.rest_of_devices("tp"))])
        >>> [point.text for point in space.points(s.Setting(devices=4, per_host=4, batch=4))]
        ['stages(microbatches=2)', 'stages(microbatches=4)']
    """

    inside: Sequence[Space] | Space
    devices: Any = field(default_factory=divisors_of_devices)
    stages: Any = None
    microbatches: Any = field(default_factory=lambda: parts_of_batch(least=2))
    schedules: Sequence[str] = ("1f1b",)

    def __post_init__(self) -> None:
        inside = [*self.inside] if isinstance(self.inside, Sequence) else [self.inside]
        if not inside or not all(isinstance(space, Space) for space in inside):
            raise PlanError(f"StageSpace takes spaces for the devices of a stage, one or more, not {shown(self.inside)}")
        object.__setattr__(self, "inside", inside)
        if isinstance(self.schedules, str) or not isinstance(self.schedules, Sequence):
            raise PlanError(f"StageSpace: schedules is a list of names, such as ['1f1b'], not {shown(self.schedules)}")
        for name in self.schedules:
            schedule = find_schedule(name)
            if not isinstance(schedule, Published) or schedule.searched or schedule.everywhere or not _is_cut_for(schedule):
                raise PlanError(
                    f"StageSpace: stages are cut for schedules with one stage on each group and whole backwards ('1f1b', "
                    f"'gpipe'), and not for {shown(name)}; a space of pipeline(stages, ...) has all schedules"
                )

    @property
    def name(self) -> str:
        """What its points are called."""
        return "stages"

    def __str__(self) -> str:
        inside = ", ".join(map(str, self.inside))  # type: ignore[arg-type]
        return f"stages([{inside}], devices={self.devices}, microbatches={self.microbatches})"

    def points(self, at: Setting) -> Iterator[Point]:
        """A point for each number of micro-batches and each schedule."""
        counts = (
            range(2, at.devices + 1) if self.stages is None else [one.value for one in as_domain(self.stages).values(at)]
        )
        for count in counts:
            check_count("StageSpace: stages", count, least=2)
        plans = dict[int, tuple[Point, ...]]()
        for size in as_domain(self.devices).values(at):
            devices = check_count("StageSpace: devices", size.value)
            if devices < at.devices and (devices <= at.per_host or devices % at.per_host == 0):
                inner = replace(at, devices=devices, per_host=min(at.per_host, devices), numbers={})
                plans[devices] = tuple(point for space in self.inside for point in space.points(inner))  # type: ignore[union-attr]
        if not any(plans.values()):
            return
        for schedule in self.schedules:
            for count in as_domain(self.microbatches).values(at):
                if check_count("StageSpace: microbatches", count.value) < 2:
                    continue  # which is no pipeline
                said = f"microbatches={count.value}" + (f", schedule={schedule!r}" if schedule != "1f1b" else "")
                opening = StageOpening(plans, tuple(counts), count.value, schedule)
                numbers = {"space": self.name, "microbatches": count.value, "schedule": schedule}
                family = self, schedule, count.chain
                text = f"{self.name}({said})"
                yield Point(text, opened, numbers, family, (count.rank,), (count.saves,), opening, (self,))

    def unlimited(self) -> "Iterator[tuple[str, StageSpace]]":
        """For each domain that has a limit, its text and the space without that limit."""
        for name in ("devices", "stages", "microbatches"):
            domain = getattr(self, name)
            if isinstance(domain, Domain) and domain.limit is not None:
                yield f"{name}={domain}", replace(self, **{name: domain.limit})


def _is_cut_for(schedule: Published) -> bool:
    """Whether each group has one stage, on which a micro-batch has one forward and one backward."""
    if schedule.chunks != 1 or schedule.passes or schedule.lies_turned is not None:
        return False
    return {cell.kind for cell in schedule.table(2, 4).cells()} == {"F", "B"}
