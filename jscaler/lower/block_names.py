"""Which cells of a table the blocks of a loop over groups are: the stage of each, and what it does for it (F, R or B).

Where the plan gives stages, a block is of those of its ops. Else, and where a stage is in several blocks, stages are
numbered by levels::

    level       0     1     2     3     4
    group 0     0F                      0B        forward stages from the first level on, backward ones back from the last
    group 1           1F          1B
    group 2                 2F 2B

A block that computes again is the R of the stage whose backward reads it first. Where a backward is cut in halves,
`Program.names_at` calls them I and W.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jscaler.lower.level import BlockKey, StageKind, Work


@dataclass
class BlockOps:
    """What the ops of a block say of it.

    Attributes:
        works: their stages and kinds.
        reads: the blocks of the phase that they read.
        takes_activation: whether a forward op of another group, on the level before, makes what they read.
    """

    works: set[Work] = field(default_factory=set)
    reads: set[BlockKey] = field(default_factory=set)
    takes_activation: bool = False


Blocks = Mapping[BlockKey, BlockOps]


@dataclass(frozen=True)
class BlockNames:
    """Names the blocks of a loop over groups.

    Attributes:
        blocks: those that are run as such.
        group_of: place -> the number of its group.
        is_layers: whether a place is the layers of a stack of its group.
    """

    blocks: Blocks
    group_of: Callable[[int], int]
    is_layers: Callable[[int], bool]

    def names(self) -> dict[BlockKey, tuple[StageKind, ...]]:
        """The names of each block, in the order in which it does what they say."""
        whole = {key: ops for key, ops in self.blocks.items() if not key.level.is_again}
        names = self._by_stages(whole) or self._by_levels(whole)
        for key in self.blocks.keys() - whole.keys():
            readers = self._readers(key)
            while readers.isdisjoint(whole):  # one that is computed again may be read by another alone
                assert readers, f"nobody reads what {key} computes again"
                readers = {other for again in readers for other in self._readers(again)}
            reader = min(readers & whole.keys(), key=lambda other: (other.level, other))
            names[key] = [(stage, "R") for stage, kind in names[reader] if kind == "B"]
        return {key: tuple(named) for key, named in names.items()}

    def _readers(self, key: BlockKey) -> set[BlockKey]:
        return {other for other, ops in self.blocks.items() if key in ops.reads}

    def _by_stages(self, blocks: Blocks) -> dict[BlockKey, list[StageKind]] | None:
        """The stages that the plan gives; None where it gives none to a block, or one to several of a phase.

        A stage's layers of a stack are one block, and all else is another.
        """
        names: dict[BlockKey, list[StageKind]] = {}
        for key, ops in blocks.items():
            stages: list[StageKind] = [(stage, kind) for stage, kind in ops.works if stage is not None]
            names[key] = sorted(stages, key=lambda name: (name[0], name[1] == "B"))
        # what reads nothing of other stages (a second pass's embedding) could run early, but does where it is read
        places = Counter((key.phase, self.is_layers(key.place), *name) for key in names for name in names[key])
        for key, named in names.items():
            names[key] = [n for n in named if places[key.phase, self.is_layers(key.place), *n] == 1] or named
        every = [(key.phase, self.is_layers(key.place), *name) for key in names for name in names[key]]
        return names if all(names.values()) and len(set(every)) == len(every) else None

    def _by_levels(self, blocks: Blocks) -> dict[BlockKey, list[StageKind]]:
        """Forward stages are numbered from the first level on. Backward ones go back from the last: first stages whose
        parameters are frozen have none."""
        first: dict[int, BlockKey] = {}
        for key in sorted(blocks, key=lambda key: (key.phase, key.level, self.is_layers(key.place))):
            first.setdefault(self.group_of(key.place), key)
        names: dict[BlockKey, list[StageKind]] = {key: [] for key in blocks}
        for phase in dict.fromkeys(key.phase for key in blocks):
            own = [key for key in blocks if key.phase == phase]
            backward = [key for key in own if any(kind != "F" for _, kind in blocks[key].works)]
            forward = [key for key in own if key not in backward or blocks[key].takes_activation or key in first.values()]
            forward.sort(key=lambda key: (key.level, self.group_of(key.place), key.place))
            backward.sort(key=lambda key: (-key.level.number, self.group_of(key.place), key.place))
            for stage, key in enumerate(forward):
                names[key].append((stage, "F"))
            for stage, key in enumerate(backward, max(len(forward) - len(backward), 0)):
                names[key].append((stage, "B"))
        return names
