"""Draw the pictures of docs/schedules.md anew: ``python docs/gallery.py``; with ``--check`` see whether they are right."""

import re
import sys
from pathlib import Path

from jscaler.report.draw_timeline import draw_timelines
from jscaler.tables import SCHEDULES, BlockKind, Published, schedule_named
from jscaler.tables.picture import picture
from jscaler.tables.simulator import UNITS, simulate_table
from jscaler.tables.timeline import Timeline

PAGE = Path(__file__).parent / "schedules.md"
IMAGE = Path(__file__).parent / "images" / "schedules.png"
GROUPS, MICROBATCHES = 2, 4  # of the pictures in text
DRAWN = 4, 8  # of the image
_PICTURE = re.compile(r"(<!-- picture of ([\w+]+) -->\n```text\n).*?(```)", re.DOTALL)


def timeline(one: Published, groups: int, microbatches: int, unit: float = 1.0) -> Timeline:
    """A schedule where F, I and W take one ``unit`` each."""
    devices = [range(groups), *([d] for d in range(groups))] if one.everywhere else None
    table = one.table(groups, microbatches)
    seconds: dict[BlockKind, float] = {kind: unit * units for kind, units in UNITS.items()}
    return simulate_table(table, seconds, devices=None if devices is None else [*map(list, devices)], name=one.name)


def page(text: str) -> str:
    """``text`` with the pictures as they are."""

    def drawn(match: re.Match[str]) -> str:
        one = schedule_named(match[2])
        assert one is not None, f"there is no schedule '{match[2]}'"
        units = "F, I and W" if match[2] in SCHEDULES else "F, R, I and W"
        shown = picture(timeline(one, GROUPS, MICROBATCHES), title=f"in time; {units} one unit each")
        return f"{match[1]}{shown}\n{match[3]}"

    return _PICTURE.sub(drawn, text)


if __name__ == "__main__":
    old = PAGE.read_text()
    new = page(old)
    if "--check" in sys.argv:
        sys.exit(f"{PAGE.name} is not what docs/gallery.py draws" if new != old else 0)
    PAGE.write_text(new)
    shares = [1 if one.passes else one.chunks_of(None) for one in SCHEDULES.values()]
    draw_timelines(IMAGE, [timeline(one, *DRAWN, 1 / n) for one, n in zip(SCHEDULES.values(), shares, strict=True)])
