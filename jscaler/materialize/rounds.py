"""Messages into rounds: in a round each device sends at most once and receives at most once.

Senders and receivers are the two sides of a bipartite multigraph, messages its edges, rounds its colors. König (1916):
as many colors as the largest degree suffice, so no schedule of one port in and one port out has fewer rounds.

    0 -> 1, 0 -> 2, 1 -> 2, 2 -> 0       degree 2, two rounds:  0 -> 1, 1 -> 2, 2 -> 0   |   0 -> 2
"""

from collections.abc import Sequence

Edge = tuple[int, int]  # sender, receiver


def color_rounds(edges: Sequence[Edge]) -> tuple[tuple[int, ...], ...]:
    """Deal messages to the fewest rounds.

    Args:
        edges: (sender, receiver) of each message; a pair may occur several times.

    Returns:
        Per round the indices of its messages, in rising order. Deterministic.

    Example:
        >>> color_rounds([(0, 1), (0, 2), (1, 2), (2, 0)])
        ((0, 2, 3), (1,))
    """
    shifts = _shift_colors(edges)
    colors = shifts if len(set(shifts)) <= max_degree(edges) else _alternating_colors(edges)
    rounds: dict[int, list[int]] = {}
    for index, color in enumerate(colors):
        rounds.setdefault(color, []).append(index)
    return tuple(tuple(rounds[color]) for color in sorted(rounds))


def max_degree(edges: Sequence[Edge]) -> int:
    """The most messages that one device sends or receives: no fewer rounds can do."""
    degree: dict[tuple[int, int], int] = {}
    for edge in edges:
        for end in enumerate(edge):
            degree[end] = degree.get(end, 0) + 1
    return max(degree.values(), default=0)


def _shift_colors(edges: Sequence[Edge]) -> list[int]:
    """Color by receiver minus sender: always valid, and as few as possible for rings, halos and all-to-all."""
    rank = [{end: i for i, end in enumerate(sorted({edge[side] for edge in edges}))} for side in (0, 1)]
    modulus = max(map(len, rank))
    seen: dict[Edge, int] = {}
    colors = []
    for sender, receiver in edges:
        repeat = seen[sender, receiver] = seen.get((sender, receiver), -1) + 1
        colors.append(repeat * modulus + (rank[1][receiver] - rank[0][sender]) % modulus)
    return colors


def _alternating_colors(edges: Sequence[Edge]) -> list[int]:
    """Color edge by edge; where the two ends have no free color in common, swap two colors along a path."""
    every = (1 << max_degree(edges)) - 1
    free: tuple[dict[int, int], dict[int, int]] = ({s: every for s, _ in edges}, {r: every for _, r in edges})
    used: tuple[dict[Edge, int], dict[Edge, int]] = ({}, {})  # per side: (device, color) -> edge
    colors = [-1] * len(edges)

    def paint(index: int, color: int) -> None:
        for side, device in enumerate(edges[index]):
            free[side][device] &= ~(1 << color)
            used[side][device, color] = index
        colors[index] = color

    def wipe(index: int) -> None:
        for side, device in enumerate(edges[index]):
            free[side][device] |= 1 << colors[index]
            del used[side][device, colors[index]]

    for index, (sender, receiver) in enumerate(edges):
        common = free[0][sender] & free[1][receiver]
        if common:
            paint(index, _lowest(common))
            continue
        pair = _lowest(free[0][sender]), _lowest(free[1][receiver])
        path = _path(edges, used, receiver, pair)
        swapped = [pair[0] + pair[1] - colors[i] for i in path]
        for i in path:
            wipe(i)
        for i, color in zip(path, swapped, strict=True):
            paint(i, color)
        paint(index, pair[0])
    return colors


def _path(
    edges: Sequence[Edge], used: tuple[dict[Edge, int], dict[Edge, int]], receiver: int, pair: tuple[int, int]
) -> list[int]:
    """The edges of the path from ``receiver`` whose colors alternate: pair[0], pair[1], pair[0], ..."""
    path: list[int] = []
    side, device = 1, receiver
    while (device, pair[len(path) % 2]) in used[side]:
        path.append(used[side][device, pair[len(path) % 2]])
        side = 1 - side
        device = edges[path[-1]][side]
    return path


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
