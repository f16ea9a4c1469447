"""Which blocks are one program on several groups, as those of the middle stages of a stack are: they are lowered once."""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from jscaler.capture.jaxprs import Numbering
from jscaler.ir import PTensor
from jscaler.ir.op import without_range
from jscaler.lower.flat_program import Exchange, FlatLoop, Item
from jscaler.lower.program import Adapt
from jscaler.lower.segment import PlacedBlock, made_by
from jscaler.materialize import Adapter, DeviceMesh

_GROUP = re.compile(r"[@~]\d+(-\d+)*(?=$|[@~/:)\]])")  # of a copy for one group: its devices


def program_keys(blocks: Sequence[PlacedBlock]) -> list[Hashable]:
    """For each block a key that only blocks share which are the same program, on the devices of their groups in order.

    What their ops are called counts too, but for ranges of layers and numbers of devices: a profile names them.
    """
    rough = [_rough(block) for block in blocks]
    alike = Counter(rough)
    return [_Key(block).key() if alike[own] > 1 else i for i, (block, own) in enumerate(zip(blocks, rough, strict=True))]


def _rough(block: PlacedBlock) -> Hashable:
    """What blocks of one program have in common at first sight."""
    ends = (*block.flat.inputs, *block.flat.outputs)
    return block.group.axes, len(block.imports), len(block.flat.items), tuple(atom.aval for atom in ends)


class _Key:
    def __init__(self, block: PlacedBlock):
        self._block = block
        self._numbering = Numbering()
        self._position = {d: i for i, d in enumerate(block.group.devices)}
        self._meshes: dict[int, Hashable] = {}

    def key(self) -> Hashable:
        block, flat, define = self._block, self._block.flat, self._numbering.define
        head = tuple(map(define, flat.inputs)), tuple((axes, define(v)) for axes, v in flat.part_indices)
        items = self._items(flat.items)
        return (
            self._placed(block.group), head, items, tuple(map(self._numbering.atom, flat.outputs)),
            self._placed((block.inputs, block.outputs)), len(block.imports), len(block.exports),
        )  # fmt: skip

    def _items(self, items: Iterable[Item]) -> Hashable:
        return tuple(map(self._item, items))

    def _item(self, item: Item) -> Hashable:
        atom, define = self._numbering.atom, self._numbering.define
        if isinstance(item, Exchange):
            adapt, read = item.adapt, atom(item.input)
            rest = (adapt.adapter, adapt.reduce_dtype) if isinstance(adapt, Adapt) else (adapt.layout, adapt.edges)
            return _called(adapt.tensor.name), self._placed(rest), read, define(item.output)
        if not isinstance(item, FlatLoop):
            return _called(str(item.source_info.name_stack)), self._numbering.equation(item)
        begin = tuple(atom(init) for init, *_ in item.carries), tuple(atom(stack) for stack, _ in item.xs)
        inside = tuple(define(v) for _, v, _, _ in item.carries), tuple(define(v) for _, v in item.xs)
        body = self._items(item.items)
        end = tuple(map(atom, item.returned)), tuple(map(define, item.outvars))
        return item.loop.length, item.loop.reverse, item.loop.unroll, begin, inside, body, end

    def _placed(self, value: Any) -> Hashable:
        """``value``, whose meshes are of positions in the group."""
        if isinstance(value, DeviceMesh):
            if id(value) not in self._meshes:
                self._meshes[id(value)] = tuple(self._position[d] for d in value.devices), value.axes
            return self._meshes[id(value)]
        if isinstance(value, Adapter):
            return self._placed((value.source, value.target, value.stages))
        if isinstance(value, tuple):
            return tuple(map(self._placed, value))
        if dataclasses.is_dataclass(value):
            return tuple(self._placed(getattr(value, field.name)) for field in dataclasses.fields(value))
        return value


@functools.lru_cache(maxsize=65536)
def _called(name: str) -> str:
    return _GROUP.sub("", without_range(name))


def own_names(block: PlacedBlock, other: PlacedBlock) -> tuple[Mapping[str, str], Mapping[PTensor, PTensor]]:
    """What the ops of ``other``, and the tensors that it brings to other layouts, are in ``block``, the same program."""
    paths = zip(made_by(other), made_by(block), strict=False)
    moved = zip(other.flat.exchanges, block.flat.exchanges, strict=False)
    return dict(paths), {theirs.adapt.tensor: own.adapt.tensor for theirs, own in moved}
