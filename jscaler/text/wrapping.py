"""Text in lines of some width: broken between words, and inside of one only where it is wider than a line."""

import re
from collections.abc import Iterable, Sequence

WORD = re.compile(r"\s*(?:[-+]?[\d.,]+ (?:[KMG]iB|B|µs|ms|s)(?![^\s,;:)])|\S+)")  # a number keeps its unit
PIECE = re.compile(r"[^/,_@·({=]*[/,_@·({=]+|[^/,_@·({=]+")  # a path breaks behind a slash


def wrapped(text: str, width: int, hang: int = 0) -> list[str]:
    """One line as several.

    Args:
        hang: columns that all lines but the first are moved to the right.

    Example:
        >>> wrapped("sent 1.5 MiB by blocks/attn/query", 12, hang=2)
        ['sent 1.5 MiB', '  by', '  blocks/', '  attn/query']
    """
    lines, here, room = [], "", width - hang
    for word in WORD.findall(text):
        for part in [word] if len(word.strip()) <= room else _pieces(word, room):
            if here.strip() and len(here) + len(part) > width:
                lines.append(here)
                here, part = " " * hang, part.lstrip()
            here += part
    return [*lines, here]


def _pieces(word: str, most: int) -> list[str]:
    return [part[i : i + most] for part in PIECE.findall(word) for i in range(0, len(part), most)]


def column_widths(columns: Iterable[Sequence[str]], room: int, long: int) -> list[int] | None:
    """As wide as each column's widest text, or so much narrower that all have room; None where words do not fit.

    What is too much is taken from the widest.

    Args:
        long: words wider than that may be broken.
    """

    def least(text: str) -> int:
        return max((min(len(word.strip()), long) for word in WORD.findall(text)), default=0)

    every = [(max(map(least, own)), max(map(len, own))) for own in columns]
    widths = [most for _, most in every]
    while sum(widths) > room:
        shrinking = [i for i, (least, _) in enumerate(every) if widths[i] > least]
        if not shrinking:
            return None
        widths[max(shrinking, key=lambda i: widths[i])] -= 1
    return widths
