"""A flat program cut into blocks, by the crossings that its items wait for.

An item runs as late as its readers allow: what a crossing waits for runs before it, and all else in the block that reads
it. So what the forward block of a stage does for its backward alone is done there; and what both need, value numbering has
found to be one. What a block hands to a later one of its group stays on each device as it is; `lower.kept_values` chooses
it.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from jax.extend import core

from jscaler.capture.jaxprs import Atom, swapped
from jscaler.lax_primitives import is_fence
from jscaler.lower.flat_program import FlatLoop, FlatProgram, Item, all_items, has_effects, reads, renamed, results
from jscaler.lower.kept_values import Cuttable, saved_or_again
from jscaler.lower.level import START, WEIGHTS, Level
from jscaler.lower.loop_halves import in_halves
from jscaler.lower.program import Program
from jscaler.lower.segment import PlacedBlock
from jscaler.materialize import Layout

End = tuple[int, Atom, Layout | None, Level]  # number, what it is, how it lies, behind which level it leaves
Ending = tuple[int, Atom, Layout | None, Level | None]  # the same, before levels are given


def cut(program: Program, flat: FlatProgram, count: int) -> tuple[tuple[PlacedBlock, ...], int]:
    """The blocks of ``program``, in the order in which they run, and how many numbers of values are taken then.

    Args:
        count: how many are taken.
    """
    arrived = dict(zip(reversed(flat.inputs), reversed(program.import_levels), strict=False))
    ends = _ends(program, flat)
    own = program.block_levels
    if len(own) == 1 and program.times == 1 and not program.import_levels and not program.exports:
        return (uncut(program, flat),), count
    flat = _with_halves(program, flat, ends, own)
    at = _latest(program, flat, ends, own)
    flat = _unfenced(flat, at)
    ends = _ends(program, flat)
    made = {v: at[id(item)] for item in flat.items for v in results(item)}
    places = [(number, atom, layout, _place(atom, level, made, own)) for number, atom, layout, level in ends]
    parts = [[item for item in flat.items if at[id(item)] == level] for level in own]
    left = [[atom for _, atom, _, place in places if place == level] for level in own]
    free = {*(v for v in flat.inputs if arrived.get(v, START) == START), *(v for _, v in flat.part_indices)}
    arrive = {v: bisect.bisect_left(own, level) for v, level in arrived.items() if level != START}
    ends_of = zip(parts, left, own, strict=True)
    whole = [Cuttable(tuple(items), tuple(out), not level.is_weights) for items, out, level in ends_of]
    parts, originals = saved_or_again(whole, arrive, free)
    return _blocks(program, with_origins(flat, originals), own, parts, places, count)


def _with_halves(program: Program, flat: FlatProgram, ends: Sequence[Ending], own: Sequence[Level]) -> FlatProgram:
    """``flat`` with loops in two that make what other stages wait for, and gradients of weights, which none does."""
    if not any(level.is_weights for level in own):
        return flat
    latest = _asked(ends, own[-1])
    items: list[Item] = []
    originals: dict[core.Var, core.Var] = {}
    for item in reversed(flat.items):
        level = min((latest.get(v, own[-1]) for v in results(item)), default=own[-1])
        late = {v for v in results(item) if latest.get(v) == Level(level.number, WEIGHTS)}
        halves: list[Item | None] = [item]
        if isinstance(item, FlatLoop) and late and level == level.whole and not _pins(program, flat, item):
            halves = [*in_halves(item, {v for v in results(item) if v not in late}, originals)]
        for half in (half for half in reversed(halves) if half is not None):
            items.append(half)
            level = min((latest.get(v, own[-1]) for v in results(half)), default=own[-1])
            for v in reads(half):
                latest[v] = min(latest.get(v, own[-1]), level)
    return with_origins(dataclasses.replace(flat, items=tuple(items[::-1])), originals)


def _asked(ends: Sequence[Ending], last: Level) -> dict[core.Var, Level]:
    """The level behind which what leaves a program is wanted."""
    latest: dict[core.Var, Level] = {}
    for _, atom, _, level in ends:
        if isinstance(atom, core.Var) and level is not None:
            latest[atom] = min(latest.get(atom, last), level)
    return latest


def with_origins(flat: FlatProgram, originals: Mapping[core.Var, core.Var]) -> FlatProgram:
    """What is made again has the origins of what it was first."""
    op, tensor = dict(flat.origins.op), dict(flat.origins.tensor)
    for table in (op, tensor):
        table.update((new, table[old]) for new, old in originals.items() if old in table)  # type: ignore[misc]
    return dataclasses.replace(flat, origins=dataclasses.replace(flat.origins, op=op, tensor=tensor))


def uncut(program: Program, flat: FlatProgram) -> PlacedBlock:
    """All of a program that nothing leaves or comes to, such as that of a step on one group."""
    layouts = tuple(layout for _, layout in program.inputs), tuple(layout for _, layout in program.outputs)
    (level,) = program.block_levels
    return PlacedBlock(program.group, program.phase, level, flat, program.tensors, (), program.results, (), *layouts)


def _ends(program: Program, flat: FlatProgram) -> list[Ending]:
    numbers = (*program.results, *program.exports)
    levels = (*itertools.repeat(None, len(program.results)), *program.export_levels)
    layouts = [layout for _, layout in program.outputs]
    return list(zip(numbers, flat.outputs, layouts, levels, strict=True))


def _latest(program: Program, flat: FlatProgram, ends: Sequence[Ending], own: Sequence[Level]) -> dict[int, Level]:
    """The level at which each item runs, by its identity: one of ``own``."""
    last = own[-1]
    latest = _asked(ends, last)
    also = dict(latest)  # the last level that reads a variable
    for _, atom, _, level in ends:
        if isinstance(atom, core.Var):
            also[atom] = max(also.get(atom, START), last if level is None else level)
    arrived = dict(zip(reversed(flat.inputs), reversed(program.import_levels), strict=False))
    first = _first(flat, arrived)
    at: dict[int, Level] = {}
    for item in reversed(flat.items):
        level = min((latest.get(v, last) for v in results(item)), default=last)
        level = min([level, *_pins(program, flat, item)])
        if has_effects(item):
            level = first[id(item)]
        if level.is_weights and any(also.get(v, level) > level for v in results(item)):
            level = level.whole  # what another stage reads, too, does not wait for gradients of weights
        level = max((x for x in own if x <= level), default=own[0])
        assert level >= first[id(item)], "an item would run before what it reads arrives"
        at[id(item)] = level
        for v in reads(item):
            latest[v] = min(latest.get(v, last), level)
            also[v] = max(also.get(v, START), level)
    return at


def _pins(program: Program, flat: FlatProgram, item: Item) -> list[Level]:
    """The levels at which an item must run: that of ops which are in order, and of what is computed again."""
    if not program.pinned:
        return []
    ops = (flat.origins.op.get(v, "") for one in all_items([item]) for v in results(one))
    return [program.pinned[op] for op in ops if op in program.pinned]


def _unfenced(flat: FlatProgram, at: dict[int, Level]) -> FlatProgram:
    """``flat`` without the fences of what is computed again in a block of its own: nothing can be merged with it there."""
    if not any(level.is_again for level in at.values()):
        return flat
    table: dict[core.Var, Atom] = {}
    items: list[Item] = []
    for item in flat.items:
        level, item = at[id(item)], renamed(item, table)
        if level.is_again and is_fence(item) and any(v in flat.origins.op for v in results(item)):
            table.update(zip(item.outvars, item.invars, strict=True))
        else:
            at[id(item)] = level
            items.append(item)
    outputs = tuple(swapped(table, atom) for atom in flat.outputs)
    return dataclasses.replace(flat, items=tuple(items), outputs=outputs)


def _first(flat: FlatProgram, arrived: Mapping[core.Var, Level]) -> dict[int, Level]:
    """The level at which each item could run first, by its identity."""
    known = dict(arrived)
    found = {}
    for item in flat.items:
        level = max((known.get(v, START) for v in reads(item)), default=START)
        found[id(item)] = level
        known.update(dict.fromkeys(results(item), level))
    return found


def _place(atom: Atom, level: Level | None, made: Mapping[core.Var, Level], own: Sequence[Level]) -> Level:
    """The level of the block that leaves ``atom``: the one that is asked for, or the one that makes it."""
    if level is not None:
        return level
    return made.get(atom, own[-1]) if isinstance(atom, core.Var) else own[-1]


def _blocks(
    program: Program,
    flat: FlatProgram,
    own: Sequence[Level],
    parts: Sequence[Sequence[Item]],
    places: Sequence[End],
    count: int,
) -> tuple[tuple[PlacedBlock, ...], int]:
    own_inputs = len(flat.inputs) - len(program.imports)
    takes = dict(zip(flat.inputs[:own_inputs], zip(program.tensors, program.inputs, strict=False), strict=False))
    taken = zip(program.imports, program.inputs[own_inputs:], strict=True)
    values = {v: (number, layout) for v, (number, (_, layout)) in zip(flat.inputs[own_inputs:], taken, strict=True)}
    indices = {v: (axes, v) for axes, v in flat.part_indices}
    numbers = itertools.count(count)
    saved: dict[core.Var, int] = {}
    needed = [set(_needed(items, [e for e in places if e[3] == level])) for level, items in zip(own, parts, strict=True)]
    made: list[PlacedBlock] = []
    for at, (level, items) in enumerate(zip(own, parts, strict=True)):
        ends = sorted((end for end in places if end[3] == level), key=lambda end: end[0] not in program.results)
        if not items and not ends:
            continue
        later = set().union(*needed[at + 1 :])
        left = [number for number, *_ in ends if number in program.results]
        gone = {
            v: number for number, v, layout, _ in ends[len(left) :] if isinstance(v, core.Var) and layout and layout.sizes
        }
        own_values = [v for item in items for v in results(item) if v in later]
        kept = [v for v in own_values if v not in gone]
        given = [v for v in takes if v in needed[at]]
        brought = [v for v in (*values, *saved) if v in needed[at]]
        block = dataclasses.replace(
            flat,
            inputs=(*given, *brought),
            part_indices=tuple(pair for v, pair in indices.items() if v in needed[at]),
            items=tuple(items),
            outputs=(*(atom for _, atom, *_ in ends), *kept),
            held=None,
        )
        handed = {v: next(numbers) for v in kept}
        made.append(
            PlacedBlock(
                program.group,
                program.phase,
                level,
                block,
                tuple(takes[v][0] for v in given),
                tuple(values[v][0] if v in values else saved[v] for v in brought),
                tuple(left),
                (*(number for number, *_ in ends[len(left) :]), *handed.values()),
                (*(takes[v][1][1] for v in given), *(values[v][1] if v in values else None for v in brought)),
                (*(layout for _, _, layout, _ in ends), *(None for _ in kept)),
                of_layers=program.of_layers,
            )
        )
        saved |= handed | {v: gone[v] for v in own_values if v in gone}
    levels = {block.level for block in made}
    named = (dataclasses.replace(block, names=program.names_at(block.level, levels)) for block in made)
    return tuple(named), next(numbers)


def _needed(items: Sequence[Item], ends: Sequence[End]) -> Iterator[core.Var]:
    """What a block reads that it does not make."""
    own = {v for item in items for v in results(item)}
    for item in items:
        yield from (v for v in reads(item) if v not in own)
    yield from (atom for _, atom, *_ in ends if isinstance(atom, core.Var) and atom not in own)
