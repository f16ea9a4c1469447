"""Which axes a permute may put in the place of which: all ways to have the same parts on another assignment of axes."""

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache

from jscaler.ir.mask import Combiner
from jscaler.materialize.layout import Values
from jscaler.materialize.mesh import Axes, DeviceMesh
from jscaler.materialize.transitions import State

MOST_AXES = 4  # up to here all assignments are tried; beyond, those from which gathers lead to the goal
MOST_SUFFIXES = 8


def relabelings(
    mesh: DeviceMesh, parts: tuple[int, ...], shares: tuple[tuple[int, str], ...], goal: State | None
) -> tuple[State, ...]:
    """States on ``mesh`` with these ``parts`` per sub-dim and these nested value shares.

    Args:
        goal: where the path shall end.
    """
    if len(mesh.axes) <= MOST_AXES or goal is None:
        return _all(mesh.axes, parts, shares)
    return _before(mesh.axes, parts, shares, goal)


@lru_cache(maxsize=4096)
def _all(
    axes: tuple[tuple[str, int], ...], parts: tuple[int, ...], shares: tuple[tuple[int, Combiner], ...]
) -> tuple[State, ...]:
    sizes = dict(axes)
    names = tuple(sizes)
    found = []
    for cuts in shared_out(sizes, names, parts):
        rest = tuple(n for n in names if all(n not in c for c in cuts))
        for runs in shared_out(sizes, rest, tuple(n for n, _ in shares), ordered=False):
            values: Values = tuple((a, combiner) for run, (_, combiner) in zip(runs, shares, strict=True) for a in run)
            positions = [names.index(a) for a, _ in values]
            if positions == sorted(positions):
                found.append(State(cuts, values))
    return tuple(found)


def shared_out(
    sizes: dict[str, int], names: Axes, parts: tuple[int, ...], ordered: bool = True
) -> Iterator[tuple[Axes, ...]]:
    """All ways to give each of ``parts`` its own axes whose sizes multiply to it."""
    if not parts:
        yield ()
        return
    for some in _words(sizes, names, parts[0], ordered):
        rest = tuple(n for n in names if n not in some)
        for others in shared_out(sizes, rest, parts[1:], ordered):
            yield (some, *others)


def _words(sizes: dict[str, int], names: Axes, product: int, ordered: bool) -> Iterator[Axes]:
    """All tuples of ``names`` whose sizes multiply to ``product``; unordered ones in the order of ``names``."""
    if product == 1:
        yield ()
        return
    for i, name in enumerate(names):
        if sizes[name] > 1 and product % sizes[name] == 0:
            rest = names[:i] + names[i + 1 :] if ordered else names[i + 1 :]
            for others in _words(sizes, rest, product // sizes[name], ordered):
                yield (name, *others)


@lru_cache(maxsize=4096)
def _before(
    axes: tuple[tuple[str, int], ...], parts: tuple[int, ...], shares: tuple[tuple[int, Combiner], ...], goal: State
) -> tuple[State, ...]:
    """States that gathers and value masks turn into ``goal``: its cuts, with further axes behind them."""
    sizes = dict(axes)
    taken = {a for cut in goal.cuts for a in cut}
    if not shares:
        free = tuple(n for n in sizes if n not in taken)
        values = ()
    else:  # what is still shared stays on the goal's own axes
        values = goal.values
        runs = itertools.groupby(values, key=lambda v: v[1])
        if tuple((math.prod(sizes[a] for a, _ in run), c) for c, run in runs) != shares:
            return ()
        free = tuple(n for n in sizes if n not in taken | {a for a, _ in values})
    more = []
    for cut, count in zip(goal.cuts, parts, strict=True):
        have = math.prod(sizes[a] for a in cut)
        if count % have:
            return ()
        more.append(count // have)
    suffixes = itertools.islice(shared_out(sizes, free, tuple(more)), MOST_SUFFIXES)
    return tuple(State(tuple(c + s for c, s in zip(goal.cuts, some, strict=True)), values) for some in suffixes)
