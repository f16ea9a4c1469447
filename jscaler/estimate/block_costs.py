"""What each block of a planned step takes: its kernels, what is sent within its group, and what crosses between groups."""

from collections import Counter
from dataclasses import dataclass

from jscaler.clusters import Cluster
from jscaler.collector import no_full_collections
from jscaler.estimate.priced import ByProfile, Priced, priced_by_model
from jscaler.estimate.profile import Profile
from jscaler.estimate.traffic import Traffic, traffic_in
from jscaler.estimate.works import block_work
from jscaler.lower.instructions import Run
from jscaler.lower.segment import PlacedBlock
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize.crossing import hop_price
from jscaler.xla_model.work import Work


@dataclass(frozen=True)
class BlockCost:
    """One block: what a run of it computes and sends, and how many runs there are."""

    block: PlacedBlock
    runs: int
    priced: Priced
    sent: Traffic

    @property
    def work(self) -> Work:
        return self.priced.work

    @property
    def seconds(self) -> float:
        return self.priced.total + self.sent.seconds


def block_costs(step: StepPlan, cluster: Cluster, profile: Profile | None = None) -> list[BlockCost]:
    """Of each block of ``step``, by a profile where one is given."""
    runs = Counter(one.block for one in step.instructions.steps or (Run(0, (), ()),) if isinstance(one, Run))
    device = cluster.device
    by_profile = None if profile is None or device is None else ByProfile(step, profile, device)
    found = []
    for number, block in enumerate(step.blocks):
        work = block_work(step, number, device is None or device.has_row_kernels)
        priced = priced_by_model(work, device) if by_profile is None else by_profile.priced(number, work)
        found.append(BlockCost(block, runs[number], priced, traffic_in(block.flat.items, cluster)))
    return found


@no_full_collections()
def block_seconds(step: StepPlan, cluster: Cluster) -> list[float]:
    """The seconds of one run of each block, with what is moved within its group."""
    return [one.seconds for one in block_costs(step, cluster)]


def hop_seconds(step: StepPlan, cluster: Cluster) -> list[float]:
    """The seconds of each transfer."""
    ends = [(t.crossing.leave.target, t.crossing.arrive.source, t.tensor.itemsize) for t in step.transfers]
    return [hop_price(*end, cluster) for end in ends]
