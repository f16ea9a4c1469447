"""``Level``: where a block stands among those of its phase; ``BlockKey``: which block of a step it is."""

from typing import NamedTuple

from jscaler.tables import BlockKind

StageKind = tuple[int, BlockKind]  # a cell of a table but for its micro-batch
Work = tuple[int | None, BlockKind]  # of an op: a stage, if the plan says which, and what is done: F, R or B
WHOLE, WEIGHTS, AGAIN = 0, 1, 2  # all of a block; what nobody waits for, behind it; what it computes again for another


class Level(NamedTuple):
    """A block runs after the blocks of its phase that it reads; these have lesser levels.

    Attributes:
        number: the blocks of a place have different ones, but for their parts.
        part: whether it is what a block makes for weights alone (W), or what is computed again after it (R).
    """

    number: int = 0
    part: int = WHOLE

    @property
    def whole(self) -> "Level":
        """That of the block of which it is a part."""
        return Level(self.number)

    @property
    def is_weights(self) -> bool:
        return self.part == WEIGHTS

    @property
    def is_again(self) -> bool:
        return self.part == AGAIN


class BlockKey(NamedTuple):
    """A block: the number of its phase, its place (`lower.op_blocks`) and its level."""

    phase: int
    place: int
    level: Level


START = Level()
FRONT = Level(-1)  # of what is there before the first block of a phase, or of an iteration, runs
