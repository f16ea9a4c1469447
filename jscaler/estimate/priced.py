"""What the kernels of a block take: by the model, or as a profile has them measured, with all that is fused around them."""

from collections.abc import Sequence
from dataclasses import dataclass

from jscaler.clusters.device import DeviceKind
from jscaler.estimate.pieces import op_pieces, pieces_of
from jscaler.estimate.profile import Profile
from jscaler.ir.walk import grouped
from jscaler.lower.flat_program import all_items
from jscaler.lower.step_plan import StepPlan
from jscaler.xla_model.work import KernelWork, Work


@dataclass(frozen=True)
class Priced:
    """Kernels, and the seconds of each.

    Attributes:
        work: the kernels of one run of a block.
        seconds: of one run of each kernel; none where nobody knows the device.
        pieces: programs between collectives that a profile has seconds of.
        ops: ops of other pieces that it has seconds of.
        modelled: ops that the model prices.
        by_model: seconds of these, all runs of their kernels together.
    """

    work: Work
    seconds: tuple[float, ...] = ()
    pieces: int = 0
    ops: int = 0
    modelled: int = 0
    by_model: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of one run of the block."""
        return sum(k.times * s for k, s in zip(self.work.kernels, self.seconds, strict=False))


def priced_by_model(work: Work, device: DeviceKind | None) -> Priced:
    """All of them by the model."""
    if device is None:
        return Priced(work)
    seconds = tuple(kernel.seconds(device) for kernel in work.kernels)
    ops = {kernel.op for kernel in work.kernels}
    return Priced(work, seconds, modelled=len(ops), by_model=work.seconds(device))


@dataclass
class ByProfile:
    """Prices the blocks of a step by a profile, on one kind of device."""

    step: StepPlan
    profile: Profile
    device: DeviceKind

    def __post_init__(self) -> None:
        self._ops: dict[str, float | None] | None = None

    def priced(self, number: int, work: Work) -> Priced:
        """Of a block whose kernels are ``work``: a piece that was measured takes what it took, a share for each kernel."""
        pieces = pieces_of(self.step.blocks[number])
        of_item = {id(item): place for place, piece in enumerate(pieces) for item in all_items(piece.items)}
        groups = grouped((of_item.get(id(k.item), -1), place) for place, k in enumerate(work.kernels))
        seconds = [kernel.seconds(self.device) for kernel in work.kernels]
        found, ops, modelled, by_model = 0, 0, set[str](), 0.0
        for at, places in groups.items():
            taken = self.profile.of(pieces[at].key, self.device.description) if at >= 0 else None
            if taken is not None:
                found += 1
                _stretch(seconds, work.kernels, places, taken * pieces[at].times)
                continue
            for op, own in grouped((work.kernels[place].op, place) for place in places).items():
                alone = self._of_op(op) if at >= 0 else None  # what stands between pieces is of no op
                if alone is None:
                    modelled.add(op)
                    by_model += sum(work.kernels[place].times * seconds[place] for place in own)
                else:
                    ops += 1
                    _stretch(seconds, work.kernels, own, alone * max(work.kernels[place].times for place in own))
        return Priced(work, tuple(seconds), found, ops, len(modelled), by_model)

    def _of_op(self, path: str) -> float | None:
        """Seconds of one run of an op by itself."""
        if self._ops is None:
            self._ops = {op.path: self.profile.of(piece.key, self.device.description) for op, piece in op_pieces(self.step)}
        return self._ops.get(path)


def _stretch(seconds: list[float], kernels: Sequence[KernelWork], places: Sequence[int], total: float) -> None:
    """Have the kernels at ``places`` take ``total`` together: each its share of what the model says, or all alike."""
    modelled = sum(kernels[place].times * seconds[place] for place in places)
    runs = sum(kernels[place].times for place in places)
    for place in places:
        seconds[place] = seconds[place] * total / modelled if modelled else total / runs
