"""``Place``: a logical device and a memory space. Physical devices appear only when a program runs."""

from dataclasses import dataclass
from typing import Literal

MemorySpace = Literal["device", "host"]


@dataclass(frozen=True, order=True)
class Place:
    """Where a part lives: device ``device`` of the plan's devices, in its own memory or in its host's."""

    device: int
    space: MemorySpace = "device"

    def __str__(self) -> str:
        return f"d{self.device}" + ("" if self.space == "device" else f"@{self.space}")
