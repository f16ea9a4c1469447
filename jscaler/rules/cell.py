"""One part of an op whose parts are of unequal sizes, and run one after another: traced at its own size and place."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jscaler.lax_primitives import Spec
from jscaler.rules.analysed import Analysis
from jscaler.rules.localize import Localizer


class Cell(Localizer):
    """The part ``number`` along ``leaves``, which are one factor. Nothing is padded: the other parts run elsewhere.

    Args:
        sizes: of all parts.

    Attributes:
        located: what has been asked for the place of its first row; where nothing has, and its index is not read, all parts
            of its size are the same.
    """

    def __init__(self, analysis: Analysis, leaves: Sequence[int], sizes: tuple[int, ...], number: int):
        self.own = sizes[number]
        self.first = sum(sizes[:number])
        self.all_sizes, self.number, self.cut_leaves = sizes, number, tuple(leaves)
        self.located: list[int] = []
        super().__init__(
            analysis, dict.fromkeys(leaves, len(sizes)), dict.fromkeys(leaves, sizes), keeps_ops=True
        )  # fmt: skip

    def local_size(self, leaf: int) -> int:
        return self.own if leaf in self.sizes else super().local_size(leaf)

    def start(self, leaf: int, dtype: Any) -> Any:
        if leaf not in self.sizes:
            return super().start(leaf, dtype)
        self.located.append(leaf)
        return jnp.asarray(self.first, dtype)

    def extent(self, leaf: int, dtype: Any) -> Any:
        return jnp.asarray(self.local_size(leaf), dtype)

    def inside(self, inner: Analysis) -> Any:
        part = Cell(inner, self.cut_leaves, self.all_sizes, self.number)
        part.index, part.located = self.index, self.located
        return part.evaluate

    def _without_rest(self, eqn: core.JaxprEqn, spec: Spec, values: Sequence[Any]) -> Sequence[Any]:
        return values
