"""Interlaced: what is large and little used (a table of embeddings, at both ends of the model) lies on all devices, between
the blocks of stages. (Lin et al., SuperScaler, 2023, and nnScaler, OSDI 2024, section 6.)

In each step every stage runs a forward and a backward, and behind it all devices run their blocks: the logits of the
micro-batch that has come through, the embedding's backward of another, the embedding of the next. So all wait for each
other once a step, which takes F + B. Even stages run F first, odd ones and the last B: a forward goes through two stages in
a step, from an even to an odd one, and a backward through one. So stage 0 holds half as many micro-batches again as in
1F1B: (3p + 1) // 2 of p > 1 stages, where m is large enough; the last holds one.

Where stages compute their forward again as a part of the backward (the publication's *interlaced blocks*), nothing else
changes. As a block R of its own it runs while a backward would wait: a backward goes through two stages in a step, too,
which takes F + R + B. Stage 0 holds what enters it of 2((p - 1) // 2) + 2 micro-batches, and all else of one::

    even stage   F1 R0 B0 ──       the odd stage's B is on its way while the even one runs F and R;
    odd stage    B0 ── F1 R1       its own R is for the B of the next step
"""

from jscaler.tables.published import Published
from jscaler.tables.table import BlockKind, Table, TableCell

Times = dict[TableCell, tuple[int, int]]  # the step that a block runs in, and its place there


def interlaced(groups: int, microbatches: int, chunks: int = 1) -> Table:
    """The table. Its first row is that of all devices: the stages 0 and p + 1; those between lie on a group each.

    Example:
        >>> print(interlaced(2, 2))
        0F0 3F0 3B0 0F1 3F1 3B1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2B0 2F1 2B1
    """
    turn = (groups - 1) // 2 + groups  # steps from a forward of stage 0 to the backward of stage 0
    rows = []
    for stage in range(groups):
        places = "BF" if stage % 2 or stage == groups - 1 else "FB"
        rows.append(_row(stage, places, {"F": stage // 2, "B": turn - stage}, microbatches))
    return Table((_everywhere(groups, turn, microbatches), *rows))


def interlaced_again(groups: int, microbatches: int, chunks: int = 1) -> Table:
    """The table with R, for all stages but the last, where nothing but the logits runs between a forward and its backward.

    Example:
        >>> print(interlaced_again(2, 2))
        0F0 3F0 3B0 0F1 3F1 3B1 0B0 0B1
        1F0 1F1 1R0 1B0 1R1 1B1
        2F0 2B0 2F1 2B1
    """
    half = (groups - 1) // 2
    turn = 2 * half + 1
    rows = []
    for stage in range(groups):
        backward = turn - stage // 2
        steps: dict[BlockKind, int] = {"F": stage // 2, "B": backward}
        places = "BFR" if stage % 2 or stage == groups - 1 else "FRB"
        if stage < groups - 1:
            steps["R"] = backward - stage % 2
        rows.append(_row(stage, places, steps, microbatches))
    return Table((_everywhere(groups, turn, microbatches), *rows))


def _row(stage: int, places: str, steps: dict[BlockKind, int], microbatches: int) -> tuple[TableCell, ...]:
    """A stage's blocks: those of micro-batch i run i steps behind the first's, and in a step in the order ``places``."""
    at: Times = {
        TableCell(stage + 1, kind, i): (i + step, places.index(kind))
        for kind, step in steps.items()
        for i in range(microbatches)
    }
    return tuple(sorted(at, key=lambda cell: at[cell]))


def _everywhere(groups: int, turn: int, microbatches: int) -> tuple[TableCell, ...]:
    """The blocks of all devices, each behind the blocks of a step; ``turn`` is that of the first backward of stage 0."""
    at: Times = {}
    for i in range(microbatches):
        through = i + (groups - 1) // 2
        at |= {TableCell(0, "F", i): (i - 1, 2), TableCell(0, "B", i): (i + turn, 3)}
        at |= {TableCell(groups + 1, "F", i): (through, 0), TableCell(groups + 1, "B", i): (through, 1)}
    return tuple(sorted(at, key=lambda cell: at[cell]))


INTERLACED = Published(
    "interlaced", "Lin et al., nnScaler, OSDI 2024", interlaced, everywhere=True, make_again=interlaced_again
)
