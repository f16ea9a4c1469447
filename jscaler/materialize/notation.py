"""The text form of layouts, read back: ``R2 V1 D(4,1) on [0 1 2 3 4 5 6 7]``; and layouts of open device order.

The devices stand in canonical order: replicas major, then value shares, then the dims, row-major. So the list says
which device holds what, whatever mesh axes the layout was made of. Parts of refined dims are joined by ``·``; value
shares that are not added name their combiner (``V2max``), nested ones are joined by ``·``, the outermost first. More
than 16 devices print as runs (``0-15``). ``@host`` at the end is host memory. Without ``on`` the order is 0, 1, 2, ...;
``on any`` leaves it open. Blocks of sizes of their own are listed in place of their number: ``D(5+3,1)``.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jscaler.errors import PlanError
from jscaler.ir.mask import Combiner, SubDims
from jscaler.ir.place import MemorySpace
from jscaler.materialize.canonical import canonical
from jscaler.materialize.layout import Layout, Uneven, Values, counts_text
from jscaler.materialize.mesh import DeviceMesh

FORM = "R<replicas> V<value shares> D(<parts of each dim>) [on [<devices>] | on <devices> | on any] [@host]"
_LAYOUT = re.compile(
    r"\s*R(?P<r>\d+)\s+V(?P<v>[\w·*]+)\s+D\((?P<d>[\d,·*+\s]*)\)(?:\s+on\s+(?P<on>\[[^\]]*\]|any|\d[\d\s,-]*?))?(?:\s*@(?P<memory>\w+))?\s*"
)
_PARTS = re.compile(r"\d+(\+\d+)*")
_SHARE = re.compile(r"(\d+)(add|max|min)?")


@dataclass(frozen=True)
class OpenLayout:
    """A layout whose device order is left open: the search takes the cheapest.

    Attributes:
        subdims: the tensor's dims, each refined into sub-dims.
        replicas: how many devices hold each part.
        values: (parts, combiner) of the nested value shares, outermost first.
        cuts: the number of parts of each sub-dim.
        memory: the memory space of every device's part.
        uneven: the block sizes of sub-dims that have their own.
    """

    subdims: SubDims
    replicas: int
    values: tuple[tuple[int, Combiner], ...]
    cuts: tuple[int, ...]
    memory: MemorySpace = "device"
    uneven: Uneven = ()

    @property
    def num_devices(self) -> int:
        return self.replicas * math.prod(n for n, _ in self.values) * math.prod(self.cuts)

    def on(self, devices: Sequence[int]) -> Layout:
        """This layout with its canonical device order decided."""
        sizes = [self.replicas, *(n for n, _ in self.values), *self.cuts]
        names = [f"x{i}" for i in range(len(sizes))]
        used = [(n, s) for n, s in zip(names, sizes, strict=True) if s > 1]
        live = {n for n, _ in used}
        split = 1 + len(self.values)
        values: Values = tuple((n, c) for n, (_, c) in zip(names[1:split], self.values, strict=True) if n in live)
        cuts = tuple((n,) if n in live else () for n in names[split:])
        made = canonical(Layout(DeviceMesh(tuple(devices), tuple(used)), self.subdims, cuts, values, self.memory))
        return made.with_sizes(dict(self.uneven))

    def __str__(self) -> str:
        where = "" if self.memory == "device" else f" @{self.memory}"
        parts = [dict(self.uneven).get(i) or n for i, n in enumerate(self.cuts)]
        return f"{counts_text(self.subdims, self.replicas, self.values, parts)} on any{where}"


def opened(layout: Layout) -> OpenLayout:
    """``layout`` without its device order."""
    parts = tuple(layout.mesh.size(axes) for axes in layout.cuts)
    return OpenLayout(layout.subdims, layout.mesh.size(layout.free), layout.shares, parts, layout.memory, layout.uneven)


def parse_layout(text: str, shape: Sequence[int | tuple[int, ...]], num_devices: int | None = None) -> Layout | OpenLayout:
    """Read the text form.

    Args:
        text: see the head of this file.
        shape: the tensor's dims; a refined dim as the tuple of its sub-dims' sizes.
        num_devices: what R · V · D must multiply to, if known.

    Raises:
        PlanError: the text does not parse, or its numbers contradict each other, the shape or the devices.
    """
    match = _LAYOUT.fullmatch(text)
    if match is None:
        raise PlanError(f"layout '{text}' does not parse; write {FORM}, like 'R2 V1 D(4,1) on [0 1 2 3 4 5 6 7]'")
    subdims = tuple(d if isinstance(d, tuple) else (d,) for d in shape)
    cuts, uneven = _parse_cuts(text, match["d"], subdims)
    counts = OpenLayout(subdims, int(match["r"]), _parse_shares(text, match["v"]), cuts, uneven=uneven)
    total = counts.num_devices
    if total == 0 or (num_devices is not None and total != num_devices):
        raise PlanError(f"layout '{text}' is for {total} devices, R · V · D; there are {num_devices or 'more than 0'}")
    if match["memory"] not in (None, "device", "host"):
        raise PlanError(f"layout '{text}': no memory space '@{match['memory']}'; known: device, host")
    counts = dataclasses.replace(counts, memory=match["memory"] or "device")
    return counts if match["on"] == "any" else counts.on(_parse_devices(text, match["on"], total))


def _parse_shares(text: str, shares: str) -> tuple[tuple[int, Combiner], ...]:
    found: list[tuple[int, Combiner]] = []
    for part in re.split(r"[·*]", shares):
        match = _SHARE.fullmatch(part)
        if match is None:
            raise PlanError(f"layout '{text}': value shares 'V{shares}' do not parse; write V4, V2max or V2·2max")
        count, combiner = int(match[1]), match[2] or "add"
        if found and found[-1][1] == combiner:  # a sum of sums is one sum
            count *= found.pop()[0]
        if count != 1:
            found.append((count, combiner))  # type: ignore[arg-type]
    return tuple(found)


def _parse_cuts(text: str, cuts: str, subdims: SubDims) -> tuple[tuple[int, ...], Uneven]:
    dims = [d.strip() for d in cuts.split(",")] if cuts.strip() else []
    if len(dims) != len(subdims):
        raise PlanError(f"layout '{text}' cuts {len(dims)} dims; the tensor has {len(subdims)}")
    found: list[int] = []
    uneven: list[tuple[int, tuple[int, ...]]] = []
    for dim, sizes in zip(dims, subdims, strict=True):
        words = [word.strip() for word in re.split(r"[·*]", dim)]
        if not all(_PARTS.fullmatch(word) for word in words):
            raise PlanError(f"layout '{text}': D '{dim}' does not parse; write the number of parts, like 4, 2·2 or 5+3")
        words += ["1"] * (len(sizes) - 1 if len(words) == 1 else 0)
        if len(words) != len(sizes):
            raise PlanError(f"layout '{text}': D '{dim}' has {len(words)} parts for the sub-dims {sizes}")
        for word, size in zip(words, sizes, strict=True):
            blocks = [int(block) for block in word.split("+")]
            if len(blocks) > 1:
                if sum(blocks) != size or not all(blocks):
                    raise PlanError(f"layout '{text}': the blocks {word} do not make a dim of {size}")
                uneven.append((len(found), tuple(blocks)))
            found.append(len(blocks) if len(blocks) > 1 else blocks[0])
    return tuple(found), tuple(uneven)


def _parse_devices(text: str, listed: str | None, total: int) -> tuple[int, ...]:
    if listed is None:
        return tuple(range(total))
    devices: list[int] = []
    for word in listed.strip("[]").replace(",", " ").split():
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if match is None:
            raise PlanError(f"layout '{text}': '{word}' is no device; write numbers or runs like 0-7")
        devices += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(devices) != total or len(set(devices)) != total:
        raise PlanError(
            f"layout '{text}' needs {total} different devices; it lists {len(devices)}, {len(set(devices))} different ones"
        )
    return tuple(devices)
