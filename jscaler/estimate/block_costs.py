"""What each block of a planned step takes: its kernels, what is sent within its group, and what crosses between groups."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from jscaler.clusters import Cluster, DeviceKind
from jscaler.collector import no_full_collections
from jscaler.estimate.priced import ByProfile, Priced, priced_by_model
from jscaler.estimate.profile import Profile
from jscaler.estimate.traffic import Traffic, outer_traffic, traffic_in
from jscaler.estimate.works import block_work
from jscaler.lower.flat_program import all_items
from jscaler.lower.instructions import Run
from jscaler.lower.overlapped import chains_of
from jscaler.lower.segment import PlacedBlock
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize.crossing import hop_price
from jscaler.tables.entry_seconds import Part, entry_seconds, hidden_seconds
from jscaler.xla_model.work import Work


@dataclass(frozen=True)
class BlockCost:
    """One block: what a run of it computes and sends, and how many runs there are.

    Attributes:
        parts: what of it waits for nothing else of it: of an overlapped entry its cells, else all of it.
        interference: of the devices.
    """

    block: PlacedBlock
    runs: int
    priced: Priced
    sent: Traffic
    parts: tuple[Part, ...]
    interference: float

    @property
    def work(self) -> Work:
        return self.priced.work

    @property
    def seconds(self) -> float:
        return entry_seconds(self.parts, self.interference)

    @property
    def hidden(self) -> float:
        """Seconds of what it sends that hide behind arithmetic."""
        return hidden_seconds(self.parts, self.interference)

    def on(self, cluster: Cluster) -> "BlockCost":
        """The same by the model, on a cluster that says what its devices are."""
        device = cluster.of(self.block.group.devices).device
        return block_cost(self.block, self.runs, priced_by_model(self.work, device), cluster)


def block_costs(step: StepPlan, cluster: Cluster, profile: Profile | None = None) -> list[BlockCost]:
    """Of each block of ``step``, by a profile where one is given."""
    runs = Counter(one.block for one in step.instructions.steps or (Run(0, (), ()),) if isinstance(one, Run))
    by_profile: dict[DeviceKind, ByProfile] = {}
    found = []
    for number, block in enumerate(step.blocks):
        device = cluster.of(block.group.devices).device
        work = block_work(step, number, device is None or device.has_row_kernels)
        priced = priced_by_model(work, device)
        if profile is not None and device is not None:
            priced = by_profile.setdefault(device, ByProfile(step, profile, device)).priced(number, work)
        found.append(block_cost(block, runs[number], priced, cluster))
    return found


def block_cost(block: PlacedBlock, runs: int, priced: Priced, cluster: Cluster) -> BlockCost:
    """Of a block whose kernels are priced."""
    sent = traffic_in(block.flat.items, cluster)
    parts = tuple(_parts(block, priced, cluster)) or (Part(priced.total, 0.0, sent.seconds),)
    return BlockCost(block, runs, priced, sent, parts, cluster.of(block.group.devices).interference)


def _parts(block: PlacedBlock, priced: Priced, cluster: Cluster) -> Iterator[Part]:
    """Of an executable of several blocks those that do not wait for each other; none where all do."""
    chains = chains_of(block.parts)
    if len(chains) < 2:
        return
    chain_of = {part: number for number, chain in enumerate(chains) for part in chain}
    counts = enumerate(len(part.flat.items) for part, _ in block.parts)  # it has the items of one part behind the other
    items = list(zip((chain_of[part] for part, count in counts for _ in range(count)), block.flat.items, strict=True))
    of_item = {id(item): number for number, outer in items for item in all_items([outer])}
    arithmetic, number = [0.0] * len(chains), 0
    for kernel, seconds in zip(priced.work.kernels, priced.seconds, strict=False):
        number = of_item.get(id(kernel.item), number)  # what is of no item goes with the kernel before
        arithmetic[number] += kernel.times * seconds
    for number, taken in enumerate(arithmetic):
        own = [item for chain, item in items if chain == number]
        outer = outer_traffic(own, cluster).seconds
        yield Part(taken, outer, traffic_in(own, cluster).seconds - outer)


@no_full_collections()
def block_seconds(step: StepPlan, cluster: Cluster) -> list[float]:
    """The seconds of one run of each block, with what is moved within its group."""
    return [one.seconds for one in block_costs(step, cluster)]


def hop_seconds(step: StepPlan, cluster: Cluster) -> list[float]:
    """The seconds of each transfer."""
    ends = [(t.crossing.leave.target, t.crossing.arrive.source, t.tensor.itemsize) for t in step.transfers]
    return [hop_price(*end, cluster) for end in ends]
