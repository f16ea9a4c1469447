"""``Occupancy``: bytes that a device holds while each item of a flat program runs, by estimate, and if some wait."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.extend import core

from jscaler.lower.flat_program import FlatProgram, Item, all_items, results
from jscaler.xla_model.block import Value
from jscaler.xla_model.lifetimes import lifetimes
from jscaler.xla_model.to_block import Blocks


@dataclass(frozen=True)
class Late:
    """Products made at ``until`` instead of at ``place``: they do not lie there until then, and what they read does.

    Attributes:
        place, until: of items of one level.
        nbytes: what more is held in between.
    """

    place: int
    until: int
    nbytes: int


@dataclass(frozen=True)
class Occupancy:
    """What a device holds while ``program`` runs in the order in which it is written; its arguments are not counted.

    Fences keep to that order, so what was estimated in front of a pass that puts some up holds behind it.
    """

    program: FlatProgram
    _known: dict[int, tuple[Sequence[Item], np.ndarray]] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def by_result(self) -> Mapping[core.Var, int]:
        """By the results of an item: the most bytes that are held while it runs. Passes keep results, and rewrite items."""
        if self.program.held is not None:
            return self.program.held
        block = Blocks().program(self.program)
        over = dict.fromkeys(block.outputs, Value(0))  # state's next version lies where the last one did
        found: dict[core.Var, int] = {}
        for moment in lifetimes(block, over, as_written=True).timeline:
            for v in results(moment.item) if moment.item is not None else ():
                found[v] = max(found.get(v, 0), moment.nbytes)
        return found

    def kept_in(self, program: FlatProgram) -> FlatProgram:
        """``program`` with the estimate, if anybody has asked for it."""
        return dataclasses.replace(program, held=self.__dict__.get("by_result"))

    @functools.cached_property
    def peak(self) -> int:
        """The most bytes at any moment."""
        return max(self.by_result.values(), default=0)

    def most(self, items: Iterable[Item]) -> int:
        """The most bytes that are held while any of ``items``, or of the loops among them, runs."""
        return max((self.by_result.get(v, 0) for one in all_items(items) for v in results(one)), default=0)

    def fits(self, items: Sequence[Item], late: Sequence[Late]) -> bool:
        """Whether the peak stays although ``late`` products of a level wait, of which the last is in question."""
        here = late[-1]
        held = self._held(items)[here.place : here.until].copy()
        for one in late:
            first, last = (min(max(place - here.place, 0), len(held)) for place in (one.place, one.until))
            held[first:last] += one.nbytes
        return bool(held.max(initial=0) <= self.peak)

    def _held(self, items: Sequence[Item]) -> np.ndarray:
        """As `most`, of each item; worked out once for all loops and fences of a level."""
        if id(items) not in self._known:
            self._known[id(items)] = items, np.array([self.most([item]) for item in items], float)
        return self._known[id(items)][1]
