"""``TargetReport``: what XLA made of a planned step for a cluster that need not be there."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jscaler.cost import Cluster
from jscaler.estimate.memory import Memory
from jscaler.report.hlo import Collective, collectives
from jscaler.report.memory import Contributor

if TYPE_CHECKING:
    from jscaler.stages import StepPlan


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind, type and grouping.

    Attributes:
        launches: how often one of them runs in a step, loops counted.
        payload: bytes per device, the larger of what goes in and what comes out, over all launches.
        sent: bytes that one device sends in a step.
        members: logical devices per group.
        groups: the logical devices of each group, in order; empty for a permute.
        crosses: whether a group (of a permute: a message) spans hosts.
    """

    kind: str
    dtypes: tuple[str, ...]
    launches: int
    payload: int
    sent: float
    members: int
    groups: tuple[tuple[int, ...], ...]
    crosses: bool


class Inspectable:
    """What an executable says of itself; it stands in ``compiled``."""

    compiled: Any

    def as_text(self) -> str:
        """The optimized HLO."""
        return self.compiled.as_text()

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        return self.compiled.cost_analysis()


@dataclass(frozen=True)
class TargetReport(Inspectable):
    """A step compiled for a described cluster: does it fit, what takes the memory, and what travels.

    Attributes:
        plan: the plan that was compiled, for as many devices as the cluster has.
        memory: of one device, by kind. All devices run the same program.
        contributors: what is held at the peak, the largest first; they add up to it.
        collectives: one row for each kind, type and grouping.
        xla: ``memory_analysis()``, in bytes.
        flops: that one device executes in a step, as XLA counts them; a loop's body counts once.
        seconds: what lowering and compiling took.
        compiled: JAX's executable. It has text and figures and cannot run.
    """

    plan: "StepPlan"
    cluster: Cluster
    memory: Memory
    contributors: tuple[Contributor, ...]
    collectives: tuple[CollectiveRow, ...]
    xla: dict[str, int]
    flops: float
    seconds: dict[str, float]
    compiled: Any = field(repr=False)

    @property
    def fits(self) -> bool:
        return self.memory.headroom >= 0

    def as_json(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        device = self.cluster.device
        return {
            "plan": self.plan.name,
            "target": self.cluster.name,
            "device": device.name if device else None,
            "devices": self.cluster.num_devices,
            "memory": self.memory.as_json(),
            "contributors": [dataclasses.asdict(c) for c in self.contributors],
            "collectives": [dataclasses.asdict(c) for c in self.collectives],
            "xla": self.xla,
            "flops": self.flops,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        from jscaler.report.target_tables import as_text

        return as_text(self)


def xla_bytes(stats: Any) -> dict[str, int]:
    """What JAX's ``memory_analysis()`` says, by name."""
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in names}


def collective_rows(text: str, devices: Sequence[int], devices_per_host: int) -> tuple[CollectiveRow, ...]:
    """The collectives in a compiled module, like ones together, the most bytes first.

    Args:
        devices: the logical device at each position of the program's device list.
        devices_per_host: device d sits on host ``d // devices_per_host``.
    """
    found: dict[Any, list[Collective]] = {}
    for one in collectives(text):
        groups = tuple(tuple(devices[i] for i in group) for group in one.groups)
        pairs = tuple((devices[a], devices[b]) for a, b in one.pairs)
        crosses = any(len({d // devices_per_host for d in group}) > 1 for group in (*groups, *pairs))
        found.setdefault((one.kind, one.dtypes, one.members, groups, crosses), []).append(one)
    rows = [
        CollectiveRow(
            kind,
            dtypes,
            sum(c.times for c in ones),
            sum(c.times * c.nbytes for c in ones),
            sum(c.times * c.sent for c in ones),
            members,
            groups,
            crosses,
        )
        for (kind, dtypes, members, groups, crosses), ones in found.items()
    ]
    return tuple(sorted(rows, key=lambda r: -r.sent))
