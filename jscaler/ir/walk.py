"""Walks through graphs of anything: what is reached, in which order, and what hangs together."""

import heapq
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, in the order of the first of each.

    Example:
        >>> grouped((len(word), word) for word in ("up", "down", "to"))
        {2: ['up', 'to'], 4: ['down']}
    """
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def closure(starts: Iterable[T], beyond: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """``starts`` and all that they lead to, each once, the nearest first.

    Args:
        beyond: where one leads; it is asked once for each, after that one was given.

    Example:
        >>> list(closure([1], lambda n: [2 * n, 3 * n] if n < 4 else []))
        [1, 2, 3, 4, 6, 9]
    """
    waiting = list(dict.fromkeys(starts))
    known = set(waiting)
    for item in waiting:
        yield item
        for other in beyond(item):
            if other not in known:
                known.add(other)
                waiting.append(other)


def in_order(before: Mapping[T, Iterable[T]], key: Callable[[T], Any]) -> Iterator[T]:
    """Each behind those that are ``before`` it, which are keys too; of those that may come next, the least by ``key``.

    Raises:
        graphlib.CycleError: there is no such order; its second argument is a cycle, each before the next.

    Example:
        >>> list(in_order({"a": ["c"], "b": [], "c": []}, key=str))
        ['b', 'c', 'a']
    """
    sorter = sorter_of(before)
    ready: list[tuple[Any, T]] = []
    while sorter.is_active():
        for item in sorter.get_ready():
            heapq.heappush(ready, (key(item), item))
        _, item = heapq.heappop(ready)
        yield item
        sorter.done(item)


def sorter_of(before: Mapping[T, Iterable[T]]) -> TopologicalSorter[T]:
    """The standard library's, prepared; the cycle that it names, where there is one, depends on the order of keys alone."""
    sorter = TopologicalSorter[T](dict.fromkeys(before, ()))
    for item, sources in before.items():
        sorter.add(item, *sources)
    sorter.prepare()
    return sorter


def circle_of(before: Mapping[T, Iterable[T]]) -> list[T] | None:
    """Some that are before each other, if there are any: the first again at the end.

    Example:
        >>> circle_of({"a": ["b"], "b": []}), circle_of({"a": ["a"]})
        (None, ['a', 'a'])
    """
    try:
        sorter_of(before)
    except CycleError as error:
        return list(error.args[1])
    return None


def operands_first(roots: Sequence[T], operands: Callable[[T], Sequence[T]], known: Container[T] = ()) -> Collection[T]:
    """``roots`` and all that they need, depth first, operands before who needs them; what is ``known`` is left out."""
    found: dict[T, None] = {}
    todo = [(root, False) for root in reversed(roots)]
    while todo:
        item, opened = todo.pop()
        if item in found or item in known:
            continue
        if opened:
            found[item] = None
            continue
        todo.append((item, True))
        todo += [(other, False) for other in reversed(operands(item)) if other not in found]
    return found


def dependents(
    items: Iterable[T], own: Container[T], reads: Callable[[T], Iterable[V]], makes: Callable[[T], Iterable[V]]
) -> list[T]:
    """Those of ``items``, which stand in order, that are in ``own`` or read what such have made.

    From behind, with ``reads`` and ``makes`` swapped, it is what ``own`` needs.
    """
    found: list[T] = []
    known: set[V] = set()
    for item in items:
        if item in own or not known.isdisjoint(reads(item)):
            known.update(makes(item))
            found.append(item)
    return found


def between(
    items: Iterable[T], own: Container[T], reads: Callable[[T], Iterable[V]], makes: Callable[[T], Iterable[V]]
) -> list[T]:
    """Those of ``items``, in order, that depend on some of ``own`` and that others of ``own`` depend on."""
    behind = dependents(items, own, reads, makes)
    return [item for item in dependents(behind[::-1], own, makes, reads)[::-1] if item not in own]


class Sets(Generic[T]):
    """Disjoint sets that are joined (union-find); who was never joined is a set of its own."""

    def __init__(self) -> None:
        self._parent: dict[T, T] = {}

    def root(self, item: T) -> T:
        """The one that stands for the set of ``item``."""
        while (parent := self._parent.get(item, item)) != item:
            self._parent[item] = item = self._parent.get(parent, parent)
        return item

    def join(self, a: T, b: T) -> bool:
        """Make the sets of ``a`` and ``b`` one; whether they were two."""
        a, b = self.root(a), self.root(b)
        if a != b:
            self._parent[a] = b
        return a != b

    def among(self, items: Iterable[T]) -> list[list[T]]:
        """``items`` by set, in their order."""
        return list(grouped((self.root(item), item) for item in items).values())
