"""``Allowed``: what a policy with holes leaves open, op by op and parameter by parameter."""

from collections.abc import Collection
from dataclasses import dataclass, field

Options = frozenset[str | None]  # the factors that a mesh axis may split, and None for a copy
ZEROS = frozenset({0, 1, 2, 3})


@dataclass
class Allowed:
    """What is open. Of what no hole names all is.

    Attributes:
        mesh: the sizes of its axes.
        splits: path of a forward op -> by mesh axis what it may be.
        zeros: path of a parameter -> the ZeRO modes that it may have; of others the usual, none.
        again: paths of forward ops that may run again.
    """

    mesh: tuple[int, ...]
    splits: dict[str, tuple[Options, ...]] = field(default_factory=dict)
    zeros: dict[str, frozenset[int]] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)

    def options(self, paths: Collection[str]) -> tuple[Options, ...] | None:
        """What ops may be that choose alike; None where nobody has said."""
        known = [self.splits[path] for path in paths if path in self.splits]
        return tuple(frozenset.intersection(*own) for own in zip(*known, strict=True)) if known else None

    def modes(self, leaves: Collection[str]) -> frozenset[int]:
        """The ZeRO modes that parameters may have which choose alike."""
        return frozenset.intersection(*(self.zeros.get(leaf, frozenset({0})) for leaf in leaves))

    def may_run_again(self, paths: Collection[str]) -> bool:
        """Whether ops that choose alike may run again."""
        return self.again.issuperset(paths)
