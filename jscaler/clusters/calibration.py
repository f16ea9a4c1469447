"""From measured seconds to a ``Link``: α and 1/β by weighted least squares, neither of them negative."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy.optimize import nnls

from jscaler.clusters.cluster import Cluster, Link
from jscaler.clusters.transition_kinds import COLLECTIVES, TransitionKind

LinkClass = Literal["inside", "between"]

MEASURED: dict[str, TransitionKind] = {kind: line for kind, line in COLLECTIVES.items() if line.alone is not None}

# what a fit of 0 becomes: a Link's figures are positive
_LEAST_LATENCY, _LEAST_SECONDS_PER_BYTE = 1e-9, 1e-15
_ROUNDS = 20  # of least squares, each weighted by the fit before


class Sample(NamedTuple):
    """One measurement: a collective of one size, run by groups of equal size over all devices at once.

    Attributes:
        link: the class of links that the groups use.
        kind: the collective.
        members: of each group.
        sharing: how many groups share a link: 1 inside a host, each of its devices between hosts.
        nbytes: what each member sends.
        seconds: what it took.
    """

    link: LinkClass
    kind: str
    members: int
    sharing: int
    nbytes: float
    seconds: float


class Calibration(NamedTuple):
    """The ``Link`` that explains the samples of one class best: of one collective, or of all when ``kind`` is None.

    ``error`` is the mean of \\|fitted / measured - 1\\|.
    """

    link_class: LinkClass
    kind: str | None
    link: Link
    error: float


def fitted_seconds(link: Link, sample: Sample) -> float:
    """What the model says of a sample: ``latency · steps + sharing · nbytes / bandwidth``."""
    steps, shared = _row(sample)
    return link.latency * steps + shared / link.bandwidth


def relative_error(link: Link, sample: Sample) -> float:
    """How far the model is off, as a part of what was measured; positive when it says too much."""
    return fitted_seconds(link, sample) / sample.seconds - 1


def fit_link(samples: Sequence[Sample]) -> Link:
    """The link whose fitted seconds f come closest to the measured m, in the sum of (f - m)² / (f · m).

    This is the same for f = 2m and for f = m/2, whatever the size: plain squares would count large messages only, and
    squares of relative errors would prefer to say too little.

    Args:
        samples: at least one, of positive seconds; for both figures to be told apart, of several sizes.

    Example:
        >>> link = fit_link([Sample("inside", "permute", 2, 1, n, 1e-5 + n / 1e9) for n in (1e3, 1e6)])
        >>> f"{link.latency:.1e} s, {link.bandwidth:.1e} bytes/s"
        '1.0e-05 s, 1.0e+09 bytes/s'
    """
    rows = np.array([_row(s) for s in samples])
    measured = np.array([s.seconds for s in samples])
    weights = 1 / measured
    solution = np.zeros(2)
    for _ in range(_ROUNDS):
        solution = _nonnegative(rows * weights[:, None], measured * weights)
        fitted = rows @ solution
        weights = np.sqrt(1 + fitted / measured) / fitted  # where these no longer change, the sum is least
    latency, seconds_per_byte = solution.tolist()
    return Link(max(latency, _LEAST_LATENCY), 1 / max(seconds_per_byte, _LEAST_SECONDS_PER_BYTE))


def fit_all(samples: Sequence[Sample]) -> list[Calibration]:
    """For each class of links that was measured: the fit of all its samples, then one of each collective."""
    fits = []
    link_classes: dict[LinkClass, None] = dict.fromkeys(s.link for s in samples)
    for link_class in link_classes:
        mine = [s for s in samples if s.link == link_class]
        for kind in (None, *dict.fromkeys(s.kind for s in mine)):
            chosen = [s for s in mine if kind in (None, s.kind)]
            link = fit_link(chosen)
            error = float(np.mean([abs(relative_error(link, s)) for s in chosen]))
            fits.append(Calibration(link_class, kind, link, error))
    return fits


def fitted_cluster(fits: Sequence[Calibration], name: str, hosts: int, devices_per_host: int, memory: int = 0) -> Cluster:
    """The cluster that was measured; a class of links that it does not have is a copy of the other."""
    links = {fit.link_class: fit.link for fit in fits if fit.kind is None}
    inside = links.get("inside") or links["between"]
    return Cluster(name, hosts, devices_per_host, inside, links.get("between", inside), memory)


def _row(sample: Sample) -> tuple[float, float]:
    """Steps, and bytes through the link: what latency and 1/bandwidth are multiplied with."""
    return MEASURED[sample.kind].steps(sample.members), sample.sharing * sample.nbytes


def _nonnegative(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Non-negative least squares, of columns scaled to one norm: bytes are by far more than steps."""
    scale = np.linalg.norm(rows, axis=0)
    return nnls(rows / scale, values)[0] / scale
