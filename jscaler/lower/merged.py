"""Several blocks as one executable: a backward whose halves are blocks of their own, or blocks that overlap.

What the one hands to the other is a value inside; a sum that both add to goes from the first to the second. XLA may then
run communication of the one beside arithmetic of the other.
"""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any

from jax.extend import core, source_info_util

from jscaler.capture.jaxprs import Atom, fresh, swapped
from jscaler.ir import PTensor
from jscaler.lower.flat_program import Exchange, FlatLoop, FlatProgram, Item, Origins, all_items, renamed, results
from jscaler.lower.members import Members
from jscaler.lower.scopes import path_scope
from jscaler.lower.segment import PlacedBlock
from jscaler.materialize import Layout


def merged(
    parts: Sequence[tuple[PlacedBlock, int]],
    sums: Mapping[int, int],
    repeated: Container[int],
    read: Container[tuple[int, int]],
    inputs: Container[PTensor],
) -> PlacedBlock:
    """One block that does what ``parts`` do, one after another.

    Args:
        parts: blocks of one group and phase, each with the place of its micro-batch among those that it runs for.
        sums: what a block leaves of a sum -> what it takes of it.
        repeated: values that each iteration has for itself.
        read: values, each with the place of its micro-batch, that something else reads: one of these blocks too, if for
            another micro-batch.
        inputs: those of the step; what else a block takes are constants, which stand behind them.
    """
    return _Merged(sums, repeated, read).of(parts, inputs)


class _Merged:
    def __init__(self, sums: Mapping[int, int], repeated: Container[int], read: Container[tuple[int, int]]):
        self._sum_of, self._repeated, self._read = sums, repeated, read
        self._takes: dict[PTensor, tuple[core.Var, Layout | None]] = {}
        self._imports: dict[tuple[int, int | None], tuple[core.Var, Layout | None, int]] = {}
        self._indices: dict[Members, core.Var] = {}
        self._made: dict[tuple[int, int | None], Atom] = {}  # values, and sums by what an iteration takes of them
        self._left: dict[tuple[int, int], tuple[Atom, Layout | None]] = {}
        self._items: list[Item] = []
        self._origins = Origins({}, {}, {})

    def of(self, parts: Sequence[tuple[PlacedBlock, int]], inputs: Container[PTensor]) -> PlacedBlock:
        for block, place in parts:
            self._add(block, place)
        last = parts[-1][0]
        takes, imports = dict(sorted(self._takes.items(), key=lambda pair: pair[0] not in inputs)), self._imports
        flat = FlatProgram(
            (*(v for v, _ in takes.values()), *(v for v, *_ in imports.values())),
            tuple(self._indices.items()),
            tuple(self._items),
            tuple(atom for atom, _ in self._left.values()),
            last.flat.source,
            self._origins,
        )
        return PlacedBlock(
            last.group,
            last.phase,
            last.level,
            flat,
            tuple(takes),
            tuple(number for number, _ in imports),
            (),
            tuple(number for number, _ in self._left),
            (*(layout for _, layout in takes.values()), *(layout for _, layout, _ in imports.values())),
            tuple(layout for _, layout in self._left.values()),
            tuple(parts),
            tuple(place for *_, place in imports.values()),
            tuple(place for _, place in self._left),
            all(block.of_layers for block, _ in parts),
        )

    def _key(self, number: int, place: int) -> tuple[int, int | None]:
        return number, place if number in self._repeated else None

    def _add(self, block: PlacedBlock, place: int) -> None:
        flat, own = block.flat, len(block.takes)
        table: dict[core.Var, Atom] = {}
        for tensor, var, layout in zip(block.takes, flat.inputs, block.inputs, strict=False):
            table[var] = self._takes.setdefault(tensor, (fresh(var), layout))[0]
        for number, var, layout in zip(block.imports, flat.inputs[own:], block.inputs[own:], strict=True):
            table[var] = self._value(number, place, var, layout)
        for who, var in flat.part_indices:
            table[var] = self._indices.setdefault(who, fresh(var))
        made = {v: fresh(v) for item in all_items(flat.items) for v in _defined(item)}
        table |= made
        scopes = _own_scopes(block)
        self._items += [_scoped(renamed(item, table, made), scopes) for item in flat.items]
        origins, known = flat.origins, self._origins
        pairs = [(old, new) for old, new in table.items() if isinstance(new, core.Var)]
        op = {new: origins.op[old] for old, new in pairs if old in origins.op}
        tensor = {new: origins.tensor[old] for old, new in pairs if old in origins.tensor}
        self._origins = Origins({**known.op, **op}, {**known.tensor, **tensor}, {**known.done, **origins.done})
        for number, atom, layout in zip(block.exports, flat.outputs[len(block.results) :], block.outputs, strict=True):
            self._leave(number, place, swapped(table, atom), layout)

    def _value(self, number: int, place: int, var: core.Var, layout: Layout | None) -> Atom:
        if (number, None) in self._made:  # a sum
            return self._made[number, None]
        key = self._key(number, place)
        if key in self._made:
            return self._made[key]
        return self._imports.setdefault(key, (fresh(var), layout, place))[0]

    def _leave(self, number: int, place: int, atom: Atom, layout: Layout | None) -> None:
        if number in self._sum_of:
            self._made[self._sum_of[number], None] = atom
            place = next((at for known, at in self._left if known == number), place)
        self._made[number, place] = atom
        if number in self._sum_of or (number, place) in self._read:
            self._left[number, place] = atom, layout


def _own_scopes(block: PlacedBlock) -> Mapping[str, Any]:
    """What the scopes are of equations that a twin has from the first: theirs -> its own."""
    if block.like is None:
        return {}
    theirs, own = block.like.flat.origins.op, block.flat.origins.op
    paths = {theirs[v]: path for v, path in own.items() if v in theirs and theirs[v] != path}
    return {path_scope(old): source_info_util.new_name_stack(path_scope(new)) for old, new in paths.items()}


def _scoped(item: Item, scopes: Mapping[str, Any]) -> Item:
    """``item`` under other scopes; so is what is in a loop."""
    if not scopes or isinstance(item, Exchange):
        return item
    if isinstance(item, FlatLoop):
        return dataclasses.replace(item, items=tuple(_scoped(inner, scopes) for inner in item.items))
    scope = scopes.get(str(item.source_info.name_stack))
    return item if scope is None else item.replace(source_info=item.source_info.replace(name_stack=scope))


def _defined(item: Item) -> list[core.Var]:
    """What an item defines: of a loop, for its body too."""
    return [*results(item), *(item.inner if isinstance(item, FlatLoop) else ())]
