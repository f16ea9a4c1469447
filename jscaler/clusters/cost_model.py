"""``CostModel``: what the search minimises. Bytes by themselves, or the seconds of a ``Cluster``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class Line(NamedTuple):
    """A cost that grows with the bytes that each device sends: ``fixed + per_byte · bytes``."""

    fixed: float
    per_byte: float

    def at(self, nbytes: float) -> float:
        return self.fixed + self.per_byte * nbytes


class CostModel(Protocol):
    """Hashable and equal by value: it is part of the key of every cached path."""

    @property
    def name(self) -> str: ...

    @property
    def local_step(self) -> float:
        """What a step costs that sends nothing; more than 0, so that fewer steps win among equals."""
        ...

    def collective(self, kind: str, groups: np.ndarray) -> Line:
        """The cost of a collective run by all ``groups`` at once: (groups, members) device numbers in order."""
        ...

    def messages(self, pairs: np.ndarray, nbytes: float, num_devices: int) -> float:
        """One round of messages of ``nbytes`` each: (messages, 2) numbers of sender and receiver."""
        ...

    def floor(self, nbytes: float) -> float:
        """No way to bring ``nbytes`` to each device (in the mean) costs less."""
        ...

    def renumbered(self, devices: Sequence[int]) -> tuple[int, ...]:
        """The first devices that stand to one another as ``devices`` do: whatever these do costs the same there."""
        ...


@dataclass(frozen=True)
class Bytes:
    """Mean bytes that each device sends, whatever the links.

    Attributes:
        launch: bytes that a collective, or a round of messages, counts for beside those it sends.
    """

    launch: float = 1e-3

    @property
    def name(self) -> str:
        return "bytes"

    @property
    def local_step(self) -> float:
        return 1e-3

    def collective(self, kind: str, groups: np.ndarray) -> Line:
        return Line(self.launch, 1.0)

    def messages(self, pairs: np.ndarray, nbytes: float, num_devices: int) -> float:
        return (self.launch if len(pairs) else self.local_step) + len(pairs) * nbytes / num_devices

    def floor(self, nbytes: float) -> float:
        return self.launch + nbytes if nbytes > 0 else 0.0

    def renumbered(self, devices: Sequence[int]) -> tuple[int, ...]:
        return tuple(range(len(devices)))


BYTES = Bytes()
# Where no cluster is given. A GPU's link carries more than this while a collective starts: small tensors go in few steps.
FEW_STEPS = Bytes(launch=2.0**16)
