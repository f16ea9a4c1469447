"""Collectives inside ``cond``: do the devices that meet in them arrive in the same order, or would they wait forever?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import CALLS, CUSTOM_CALLS, inner_jaxpr, open_jaxpr
from jscaler.errors import VerificationError
from jscaler.verification import collectives


class Entered(Exception):
    """A branch has come to a collective whose other members are in other branches."""

    def __init__(self, eqn: core.JaxprEqn, operands: list[Any]):
        super().__init__(eqn.primitive.name)
        self.eqn = eqn
        self.operands = operands


@dataclass(frozen=True)
class MetCollective:
    """One collective of a branch: which groups meet, for what. ``place`` says where it stands."""

    kind: tuple[Any, ...]
    groups: tuple[tuple[int, ...], ...]
    place: str

    def same(self, other: "MetCollective | None") -> bool:
        return other is not None and (self.kind, self.groups) == (other.kind, other.groups)


def entered(jaxpr: core.Jaxpr, sizes: Mapping[str, int], place: Callable[[Any], str]) -> list[MetCollective]:
    """The collectives of a branch in order; all those of the branches inside it count."""
    found: list[MetCollective] = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in collectives.COLLECTIVES:
            groups = collectives.groups_of(sizes, eqn.params, lambda eqn=eqn: place(eqn))
            how = tuple((k, str(v)) for k, v in sorted(eqn.params.items()) if k not in ("axes", "axis_name"))
            kind = (name, how, tuple(str(a.aval) for a in eqn.invars))
            found.append(MetCollective(kind, tuple(tuple(g) for g in groups.tolist()), place(eqn)))
        elif name in CALLS or name in CUSTOM_CALLS:
            found += entered(inner_jaxpr(eqn)[0], sizes, place)
        elif name == "cond":
            for branch in eqn.params["branches"]:
                found += entered(open_jaxpr(branch)[0], sizes, place)
    return found


@dataclass(frozen=True)
class Branches:
    """Branches that different devices take: the collectives of each, who takes which, and which devices are here at all."""

    sequences: Mapping[int, Sequence[MetCollective]]
    which: np.ndarray
    active: np.ndarray

    def meet(self, where: str) -> bool:
        """Whether devices in different branches meet in collectives.

        Raises:
            VerificationError: they do, but not in the same order.
        """
        for branch, sequence in self.sequences.items():
            for step, collective in enumerate(sequence):
                apart = self._apart(branch, collective)
                if apart is None:
                    continue
                for other, theirs in self.sequences.items():
                    if len(theirs) != len(sequence) or not all(map(MetCollective.same, sequence, theirs)):
                        self._report(branch, other, step, where)
                return True
        return False

    def _apart(self, branch: int, collective: MetCollective) -> tuple[int, ...] | None:
        """A group of which some members are in ``branch`` and some are not."""
        for group in collective.groups:
            members = list(group)
            inside = (self.which[members] == branch) & self.active[members]
            if inside.any() and not inside.all():
                return group
        return None

    def _report(self, branch: int, other: int, step: int, where: str) -> None:
        mine, theirs = self.sequences[branch], self.sequences[other]
        step = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if not a.same(b)), min(len(mine), len(theirs))
        )
        if step >= len(mine):
            branch, other, mine, theirs = other, branch, theirs, mine
        instead = f"are in {theirs[step].place}" if step < len(theirs) else "end their branch without it"
        waiting, missed = self._devices(branch), self._devices(other)
        raise VerificationError(
            f"{where}: devices {waiting} wait in {mine[step].place} for devices {missed}, which {instead}"
        )

    def _devices(self, branch: int) -> list[int]:
        return np.flatnonzero((self.which == branch) & self.active).tolist()
