"""Bytes over time as bars of text."""

from collections.abc import Sequence

from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
OVER = "▲"  # in place of a bar that is higher than a device
WIDTH = 28  # bars for a step


def bars(timeline: Sequence[int], capacity: float, width: int = WIDTH) -> Text:
    """Bytes over time as bars, each the most of its stretch of kernels; a full one is ``capacity``, more is a triangle.

    Example:
        >>> bars([1, 4, 8, 9], 8, width=4).plain
        '▁▄█▲'
    """
    text = Text()
    for stretch in stretches(len(timeline), width):
        most = max(timeline[i] for i in stretch)
        if most > capacity:
            text.append(OVER, style="red")
        else:
            text.append(BARS[max(0, int(-(-most * len(BARS) // capacity)) - 1)], style="cyan")
    return text


def stretches(count: int, most: int) -> list[range]:
    """``range(count)`` in at most ``most`` stretches that are about equally long."""
    parts = min(count, most)
    return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]
