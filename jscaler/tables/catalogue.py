"""The schedules of the literature by name."""

from jscaler.tables.breadth_first import BREADTH_FIRST
from jscaler.tables.chimera import CHIMERA
from jscaler.tables.dualpipe_v import DUALPIPE_V
from jscaler.tables.forward_only import FORWARD_ONLY
from jscaler.tables.gpipe import GPIPE
from jscaler.tables.interlaced import INTERLACED
from jscaler.tables.interleaved import INTERLEAVED
from jscaler.tables.n_f_one_b import THREE_F_ONE_B
from jscaler.tables.one_f_one_b import EAGER_1F1B, ONE_F_ONE_B
from jscaler.tables.published import Published
from jscaler.tables.recomputing import MARKS, recomputing
from jscaler.tables.searched import SEARCHED
from jscaler.tables.zb_v import ZB_V
from jscaler.tables.zero_bubble import ZB_H1, ZB_H2

_ALL = (GPIPE, ONE_F_ONE_B, EAGER_1F1B, INTERLEAVED, BREADTH_FIRST, ZB_H1, ZB_H2, ZB_V, DUALPIPE_V, CHIMERA, INTERLACED,
        THREE_F_ONE_B, FORWARD_ONLY)  # fmt: skip
SCHEDULES = {one.name: one for one in _ALL}


def schedule_named(name: str) -> Published | None:
    """The schedule of that name; with ``+R`` or ``+R early`` behind it the one with recompute as blocks of their own."""
    known = SCHEDULES | {SEARCHED.name: SEARCHED}
    for when, mark in MARKS.items():
        if name.endswith(mark) and name.removesuffix(mark) in known:
            return recomputing(known[name.removesuffix(mark)], when)
    return known.get(name)
