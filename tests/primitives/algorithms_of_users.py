"""An algorithm of a user's own, in a module that every process finds; and one whose fields no file can hold."""

from dataclasses import dataclass
from typing import Any

from jscaler import Prefix


@dataclass(frozen=True)
class Own:
    """`Prefix` by another name, with a field of its own."""

    factor: str
    parts: int
    weights: tuple[tuple[str, float], ...] = ()

    def expand(self, site: Any) -> Any:
        return Prefix(self.factor, self.parts).expand(site)


@dataclass(frozen=True)
class Unsavable(Own):
    what: Any = abs


@dataclass(frozen=True)
class Forgetful(Own):
    """Never equal to what its fields make."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", self.parts + 1)


class Plain:
    """No dataclass."""

    factor, parts = "a", 2

    def expand(self, site: Any) -> Any:
        return None
