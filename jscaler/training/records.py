"""What a run says of each of its steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from jscaler.clusters.device import kind_of
from jscaler.estimate.works import model_flops
from jscaler.ir import Graph
from jscaler.runtime.devices import Device


@dataclass(frozen=True)
class StepRecord:
    """A step that was taken.

    Attributes:
        step: its number, from 0.
        loss: of its batch.
        seconds: from the call of the step until its loss was there.
        speed: of the data.
        waited: seconds that the batch had to be waited for.
        saving: seconds that the run stood still for a checkpoint behind it.
        metrics: the other numbers that the step returns.
        evaluation: the numbers of an evaluation behind it, where there was one.
        peak_bytes: the most that the fullest device of all processes has held so far, in whole MiB; None where none says.
        utilisation: model FLOPs utilisation, the part of what the devices compute at their peak that the products of the
            step take, each counted once (PaLM, appendix B); None where the peak is not known.

    Example:
        >>> record = jscaler.StepRecord(3, 0.5, 0.1, jscaler.Speed("rows", 320.0))
        >>> record.as_json()["rows_per_second"]
        320.0
    """

    step: int
    loss: float
    seconds: float
    speed: "Speed"
    waited: float = 0.0
    saving: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    utilisation: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data: the speed is ``tokens_per_second`` of text, ``rows_per_second`` of other data. JSON has no NaN."""
        row: dict[str, Any] = dict(self.metrics)  # of equal names the record's own stand
        row |= {f"evaluation/{name}": value for name, value in self.evaluation.items()}
        row |= {"step": self.step, "loss": self.loss, "seconds": self.seconds, self.speed.name: self.speed.rate}
        row |= {"waited": self.waited, "saving": self.saving}
        known = {"peak_bytes": self.peak_bytes, "utilisation": self.utilisation}
        row |= {name: value for name, value in known.items() if value is not None}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
        }


class Speed(NamedTuple):
    """How much of the data a second takes: tokens, where a batch has ``"tokens"``, and else rows.

    Attributes:
        what: "tokens" or "rows".
        rate: so many a second.

    Example:
        >>> jscaler.Speed("rows", 320.0).name
        'rows_per_second'
    """

    what: str
    rate: float

    @property
    def name(self) -> str:
        """As logs call it.

        Example:
            >>> jscaler.Speed("tokens", 1.0).name
            'tokens_per_second'
        """
        return f"{self.what}_per_second"

    @staticmethod
    def of(batch: Any, seconds: float) -> "Speed":
        """Of a step that took ``seconds`` for ``batch``.

        Args:
            batch: a tree of arrays.
            seconds: above 0.

        Example:
            >>> jscaler.Speed.of({"tokens": np.zeros((2, 8), int)}, 0.5)
            Speed(what='tokens', rate=32.0)
        """
        if isinstance(batch, Mapping) and "tokens" in batch:
            return Speed("tokens", sum(map(jax.numpy.size, jax.tree.leaves(batch["tokens"]))) / seconds)
        shapes = filter(None, map(jax.numpy.shape, jax.tree.leaves(batch)))
        return Speed("rows", next(shapes, (1,))[0] / seconds)


def seconds_at_peak(graph: Graph, devices: Sequence[Device]) -> float | None:
    """How long devices would take for the products of a captured step at their peak; None where that is not known."""
    kinds = {kind_of(device.device_kind) for device in devices}
    if len(kinds) != 1 or (kind := kinds.pop()) is None:
        return None
    return sum(count / kind.peak.of(dtype) for dtype, count in model_flops(graph).items()) / len(devices)


def peak_bytes() -> int | None:
    """The most that the fullest device of this process has held so far; CPUs do not say."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one), default=None)
