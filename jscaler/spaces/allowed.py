"""``Allowed``: what a policy with holes leaves open, op by op and parameter by parameter."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from jscaler.spaces.ties import Tie

Options = frozenset[str | None]  # the factors that a mesh axis may split, and None for a copy
ZEROS = frozenset({0, 1, 2, 3})


def options_text(options: Iterable[str | None]) -> str:
    """``'a' or 'b' or a copy``."""
    known = set(options)
    return " or ".join([*sorted(f"'{one}'" for one in known if one is not None), *["a copy"] * (None in known)])


@dataclass
class Allowed:
    """What is open. Of what no hole names all is.

    Attributes:
        mesh: the sizes of its axes.
        splits: path of a forward op -> by mesh axis what it may be.
        zeros: path of a parameter -> the ZeRO modes that it may have; of others the usual, none.
        again: paths of forward ops that may run again.
        parts: path of a forward op -> numbers of mesh axes, and into how many parts these may split it together.
        ties: constraints between ops.
        as_one: how it was written -> paths of forward ops that all run again, or none.
        orders: pairs of ops, of which the first runs in front of the second.
    """

    mesh: tuple[int, ...]
    splits: dict[str, tuple[Options, ...]] = field(default_factory=dict)
    zeros: dict[str, frozenset[int]] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)
    parts: dict[str, list[tuple[tuple[int, ...], frozenset[int]]]] = field(default_factory=dict)
    ties: list[Tie] = field(default_factory=list)
    as_one: dict[str, tuple[str, ...]] = field(default_factory=dict)
    orders: list[tuple[Any, Any]] = field(default_factory=list)

    def options(self, paths: Collection[str]) -> tuple[Options, ...] | None:
        """What ops may be that choose alike; None where nobody has said."""
        known = [self.splits[path] for path in paths if path in self.splits]
        return tuple(frozenset.intersection(*own) for own in zip(*known, strict=True)) if known else None

    def splits_so(self, paths: Collection[str], by_axis: tuple[str | None, ...]) -> bool:
        """Whether ops that choose alike may be split into so many parts."""
        wanted = (one for path in paths for one in self.parts.get(path, ()))
        return all(math.prod(self.mesh[i] for i in axes if by_axis[i] is not None) in legal for axes, legal in wanted)

    def modes(self, leaves: Collection[str]) -> frozenset[int]:
        """The ZeRO modes that parameters may have which choose alike."""
        return frozenset.intersection(*(self.zeros.get(leaf, frozenset({0})) for leaf in leaves))

    def may_run_again(self, paths: Collection[str]) -> bool:
        """Whether ops that choose alike may run again."""
        return self.again.issuperset(paths)
