"""Which blocks are one program on several groups, as those of the middle stages of a stack are: they are lowered once."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from jscaler.capture.jaxprs import Numbering
from jscaler.ir import PTensor
from jscaler.ir.name import general
from jscaler.lower.flat_program import Exchange, FlatLoop, Item
from jscaler.lower.positions import Positions
from jscaler.lower.program import Adapt
from jscaler.lower.scopes import path_scope
from jscaler.lower.segment import PlacedBlock, made_by


def program_keys(blocks: Sequence[PlacedBlock]) -> list[Hashable]:
    """For each block a key that only blocks share which are the same program, on the devices of their groups in order.

    What their ops are called counts too, but for ranges of layers and numbers of devices: a profile names them. What they
    are brought, and gather first, is called as other stages call it, and does not count.
    """
    first = [block.like or block for block in blocks]
    distinct = list({id(block): block for block in first}.values())
    rough = [_rough(block) for block in distinct]
    alike = Counter(rough)
    known = {
        id(block): _Key(block).key() if alike[own] > 1 else id(block) for block, own in zip(distinct, rough, strict=True)
    }
    return [known[id(block)] for block in first]


def _rough(block: PlacedBlock) -> Hashable:
    """What blocks of one program have in common at first sight."""
    ends = (*block.flat.inputs, *block.flat.outputs)
    return block.group.axes, len(block.imports), len(block.flat.items), tuple(atom.aval for atom in ends)


class _Key:
    def __init__(self, block: PlacedBlock):
        self._block = block
        self._numbering = Numbering()
        self._positions = Positions(block.group)
        self._brought = set(block.flat.inputs[len(block.takes) :])
        self._scopes = {path_scope(path): general(path) for path in block.flat.origins.op.values()}

    def key(self) -> Hashable:
        block, flat, define = self._block, self._block.flat, self._numbering.define
        head = tuple(map(define, flat.inputs)), tuple((axes, define(v)) for axes, v in flat.part_indices)
        items = self._items(flat.items)
        return (
            self._positions.of(block.group), head, items, tuple(map(self._numbering.atom, flat.outputs)),
            self._positions.of((block.inputs, block.outputs)), len(block.imports), len(block.exports),
        )  # fmt: skip

    def _items(self, items: Iterable[Item]) -> Hashable:
        return tuple(map(self._item, items))

    def _item(self, item: Item) -> Hashable:
        atom, define = self._numbering.atom, self._numbering.define
        if isinstance(item, Exchange):
            adapt, read = item.adapt, atom(item.input)
            rest = (adapt.adapter, adapt.reduce_dtype) if isinstance(adapt, Adapt) else (adapt.layout, adapt.edges)
            name = "" if item.input in self._brought else general(adapt.tensor.name)
            return name, self._positions.of(rest), read, define(item.output)
        if not isinstance(item, FlatLoop):
            scope = str(item.source_info.name_stack)
            return self._scopes.get(scope, scope), self._numbering.equation(item)
        begin = tuple(atom(init) for init, *_ in item.carries), tuple(atom(stack) for stack, _ in item.xs)
        inside = tuple(define(v) for _, v, _, _ in item.carries), tuple(define(v) for _, v in item.xs)
        body = self._items(item.items)
        end = tuple(map(atom, item.returned)), tuple(map(define, item.outvars))
        return item.loop.length, item.loop.reverse, item.loop.unroll, begin, inside, body, end


def own_names(block: PlacedBlock, other: PlacedBlock) -> tuple[Mapping[str, str], Mapping[PTensor, PTensor]]:
    """What the ops of ``other``, and the tensors that it brings to other layouts, are in ``block``, the same program."""
    paths = zip(made_by(other), made_by(block), strict=False)
    moved = zip(other.flat.exchanges, block.flat.exchanges, strict=False)
    return dict(paths), {theirs.adapt.tensor: own.adapt.tensor for theirs, own in moved}
