"""Names that differ in layer numbers, or in one word, as one: ``block_*/attn/{key,query,value}/kernel``."""

import re
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")


def folded(path: str) -> str:
    """Layer numbers as ``*``: ``block_*/mlp/up/dot``."""
    return re.sub(r"(?<=[_/.])\d+(?=[/@.:) ]|$)", "*", path)


def merged(
    rows: Sequence[T],
    name: Callable[[T], str],
    rest: Callable[[T], Hashable],
    join: Callable[[str, Sequence[T]], T],
    keep_last: bool = False,
) -> list[T]:
    """Rows that are alike but for one word of their name as one row, in the order of the first of each.

    Args:
        name, rest: a row's name, and what must be equal for rows to be merged.
        join: the row that stands for some, under a name with ``{…}``.
        keep_last: whether the last words of names must be equal (the function of an op's path).

    Example:
        >>> rows = [("mu/a", 1), ("nu/a", 1), ("nu/b", 2)]
        >>> merged(rows, lambda r: r[0], lambda r: r[1], lambda name, found: (name, found[0][1]))
        [('{mu,nu}/a', 1), ('nu/b', 2)]
    """
    kept = list(rows)
    for position in range(0, max((len(_words(name(row))) for row in rows), default=0), 2):
        groups: dict[Hashable, list[T]] = {}
        for number, row in enumerate(kept):
            words = _words(name(row))
            fixed = position >= len(words) - (1 if keep_last else 0)
            blank = number if fixed else (*words[:position], "", *words[position + 1 :])
            groups.setdefault((blank, rest(row)), []).append(row)
        kept = [join(braced([name(row) for row in found]), found) if found[1:] else found[0] for found in groups.values()]
    return kept


def braced(names: Sequence[str]) -> str:
    """Names that differ in one word as one; others one after another.

    Example:
        >>> braced(["attn/key/dot", "attn/query/dot"]), braced(["up", "down/dot"])
        ('attn/{key,query}/dot', 'up, down/dot')
    """
    names = list(dict.fromkeys(names))
    words = [_words(name) for name in names]
    if len({len(found) for found in words}) == 1:
        differing = [i for i in range(len(words[0])) if len({found[i] for found in words}) > 1]
        if not differing:
            return names[0]
        if len(differing) == 1:
            inside = ",".join(found[differing[0]] for found in words)
            return "".join((*words[0][: differing[0]], "{" + inside + "}", *words[0][differing[0] + 1 :]))
    return ", ".join(names)


def _words(name: str) -> list[str]:
    """Words at even places, what stands between them at odd ones; braces are part of words."""
    return re.split(r"([/()@:\[\] ]+)", name)
