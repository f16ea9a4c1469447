"""``GivenPlans``: plans that are given one by one, as a space."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from jscaler.plans import by_name
from jscaler.spaces.numbers import Setting
from jscaler.spaces.space import Point


@dataclass(frozen=True)
class GivenPlans:
    """Plans in no order, by their texts.

    Raises:
        UnknownNameError, PlanError: a text is no plan's.

    Example:
        >>> [point.text for point in GivenPlans(("zero1", "recompute_layers(zero3())")).points(Setting(4, 4, 32))]
        ['zero1', 'recompute_layers(zero3())']
    """

    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        for text in self.texts:
            by_name(text)

    def __str__(self) -> str:
        return f"[{', '.join(self.texts)}]"

    def points(self, at: Setting) -> Iterator[Point]:
        """A point for each."""
        del at
        for text in self.texts:
            yield Point(text, functools.partial(by_name, text), {"plan": text}, (text,), (), ())

    def unlimited(self) -> Iterator[tuple[str, "GivenPlans"]]:
        """Nothing: no domain has a limit."""
        yield from ()
