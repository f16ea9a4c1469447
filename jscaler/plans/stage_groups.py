"""The groups of devices that stages lie on, of one size or of several, and how fast they are."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jscaler.clusters.device import DeviceKind, find_kind
from jscaler.errors import PlanError, check_count, divisors, shown
from jscaler.xla_model.work import Work

BALANCED_FOR = "H100-80GB"  # whose times balance stages, where no cluster says what its devices are


@dataclass(frozen=True)
class Speed:
    """How fast a group of devices is.

    Attributes:
        device: what each is; of several kinds the slowest.
        share: how many share the work.
    """

    device: DeviceKind
    share: int = 1

    def seconds(self, work: Work) -> float:
        """Of work that is shared evenly; each device starts each kernel."""
        launches = work.launches * self.device.reached.launch if self.device.reached is not None else 0.0
        return (work.seconds(self.device) - launches) / self.share + launches


def count_of(groups: int | Sequence[Any]) -> int:
    """How many groups; raises PlanError where these are none."""
    if isinstance(groups, int | np.integer):
        check_count("pipeline: stages", groups)
        return int(groups)
    each = list(groups)
    sizes = all(_is_number(one) and one > 0 for one in each)
    if not each or not (sizes or all(isinstance(one, Sequence) and one and all(map(_is_number, one)) for one in each)):
        raise PlanError(
            "pipeline: stages are a number of groups, the sizes of all groups ([8, 4]) or the devices of each ([[0, 1], "
            f"[2]]), not {shown(groups)}"
        )
    return len(each)


def _is_number(one: Any) -> bool:
    return isinstance(one, int | np.integer) and not isinstance(one, bool)


def groups_of(groups: int | Sequence[Any], devices: np.ndarray) -> list[np.ndarray]:
    """The devices of each group; raises PlanError where they are not all of ``devices``, each in one group."""
    if isinstance(groups, int | np.integer):
        if devices.size % groups:
            raise PlanError(
                f"pipeline: {devices.size} devices do not divide into {groups} stages; legal: {divisors(devices.size)}, or "
                f"the sizes of groups in a list, such as {_sizes(devices.size, int(groups))}"
            )
        return list(devices.reshape(groups, -1))
    sizes = [int(one) if _is_number(one) else len(one) for one in groups]
    numbers = [*range(sum(sizes))] if _is_number(groups[0]) else [int(d) for own in groups for d in own]
    if sorted(numbers) != [*range(devices.size)]:
        raise PlanError(
            f"pipeline: stages={list(groups)} are {sum(sizes)} devices, and there are {devices.size}: 0 to "
            f"{devices.size - 1}; each is in one group, as with {_sizes(devices.size, len(sizes))}"
        )
    ordered = devices.ravel()[numbers]
    return [ordered[start:stop] for start, stop in itertools.pairwise(itertools.accumulate(sizes, initial=0))]


def _sizes(devices: int, groups: int) -> list[int]:
    least, more = divmod(devices, groups)
    return [least + (group < more) for group in range(groups)]


def check_one_size(groups: Sequence[np.ndarray], why: str) -> None:
    """Raises PlanError if groups have several sizes."""
    sizes = [own.size for own in groups]
    if len(set(sizes)) > 1:
        raise PlanError(f"pipeline: groups have {', '.join(map(str, sizes))} devices, and {why}; give groups of one size")


def speeds_of(groups: Sequence[np.ndarray], cluster: Any, shared: bool) -> list[Speed]:
    """Of each group, if groups are unlike; none if they are alike.

    Args:
        cluster: a `Cluster`, or None.
        shared: whether the devices of a group share its work.
    """
    known = cluster if cluster is not None and cluster.device is not None else None
    kinds = [find_kind(BALANCED_FOR).at_peaks() if known is None else known.of(own.tolist()).device for own in groups]
    found = [Speed(kind, own.size if shared else 1) for kind, own in zip(kinds, groups, strict=True)]
    return found if len(set(found)) > 1 else []
