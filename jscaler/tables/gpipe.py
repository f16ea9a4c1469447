"""GPipe: all forwards, then all backwards. (Huang et al., GPipe, 2019, section 2.3.)

A group waits (p - 1)(F + B), and holds the activations of all micro-batches.
"""

from jscaler.tables.published import Published
from jscaler.tables.table import Table, make_cells


def gpipe(groups: int, microbatches: int, chunks: int = 1) -> Table:
    """The table.

    Example:
        >>> print(gpipe(2, 2))
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
    """
    every = range(microbatches)
    return Table(tuple((*make_cells(s, "F", every), *make_cells(s, "B", every)) for s in range(groups)))


GPIPE = Published("gpipe", "Huang et al., GPipe, 2019", gpipe)
