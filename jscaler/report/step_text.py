"""Layouts and the steps of an adapter in words: which collective, over which devices, at which price."""

import re
from collections.abc import Sequence
from typing import Any

from jscaler.clusters.transition_kinds import sends
from jscaler.materialize import Layout, Transition, opened
from jscaler.materialize.transitions import rounds_of
from jscaler.text.device_list import devices_text
from jscaler.text.units import counted


def describe(layout: Layout, step: Transition) -> str:
    """``all_gather over 2 devices, dim 0``, for a step from ``layout``."""
    if step.to is not None:
        return step.kind
    over = f"{step.kind} over {layout.mesh.size(step.axes)} devices"
    dims = " to ".join(_dim(layout, d) for d in (step.source, step.target) if d is not None)
    if step.line.shares == "joined" and dims:
        dims = f"to {dims}"
    joined = step.combiner if step.combiner != "add" else ""
    return ", ".join(part for part in (over, dims, joined) if part)


def _dim(layout: Layout, subdim: int) -> str:
    places = [(dim, part) for dim, sizes in enumerate(layout.subdims) for part in range(len(sizes))]
    dim, part = places[subdim]
    return f"dim {dim}" if len(layout.subdims[dim]) == 1 else f"dim {dim} part {part}"


def groups_of(layout: Layout, step: Transition) -> list[Any]:
    """The groups' device numbers; the (sender, receiver) pairs of a permute; those of each round of an exchange."""
    if step.to is None:
        return layout.mesh.groups(step.axes).tolist()
    rounds = [r.pairs.tolist() for r in rounds_of(layout, step)]
    return rounds[0] if step.kind == "permute" else rounds


def groups_text(layout: Layout, step: Transition) -> str:
    """``[0 1] [2 3] …``; for a permute and an exchange how many messages and rounds."""
    groups = groups_of(layout, step)
    if not sends(step.kind):
        return "no communication"
    if step.kind == "permute":
        return counted(len(groups), "message")
    if step.kind == "point_to_point":
        return f"{counted(sum(map(len, groups)), 'message')} in {counted(len(groups), 'round')}"
    shown = len(groups) if len(groups) * len(groups[0]) <= 16 else max(1, 16 // len(groups[0]))
    return " ".join(map(devices_text, groups[:shown])) + (" …" if len(groups) > shown else "")


def layout_text(layout: Layout) -> str:
    """The text form of a layout: without its devices where they are 0, 1, 2, …, and with few of a long list."""
    counts, _, rest = str(layout).partition(" on [")
    if str(layout) == str(opened(layout).on(range(len(layout.mesh.devices)))):
        return counts
    listed, _, memory = rest.partition("]")
    return f"{counts} on {devices_text(listed.split())}{memory}"


COUNTS = re.compile(r"R(\d+) V(\S+) D\(([^)]*)\)")


def layout_legend(lines: Sequence[str]) -> list[str]:
    """The first layout of a table in words, as a line that stands below it; none where the table has no layout.

    Example:
        >>> layout_legend(["up/dot  R2 V1 D(4,1)"])
        ['R2 V1 D(4,1): 2 replicas of each part, no value shares, dim 0 in 4 parts, dim 1 whole']
    """
    found = next(filter(None, map(COUNTS.search, lines)), None)
    if found is None:
        return []
    replicas = f"{found[1]} replicas of each part" if found[1] != "1" else "no replicas"
    shares = ", each of ".join(map(_shares, found[2].split("·"))) if found[2] != "1" else "no value shares"
    dims = [_parts(dim, parts) for dim, parts in enumerate(filter(None, found[3].split(",")))]
    return [f"{found[0]}: {', '.join([replicas, shares, *(dims or ['no dims'])])}"]


def _shares(text: str) -> str:
    count = text.rstrip("maxin")
    return f"{count} value shares ({text[len(count) :] or 'add'})"


def _parts(dim: int, parts: str) -> str:
    """Of one dim; those of its sub-dims are joined by ``·``, and sizes of unequal ones by ``+``."""
    words = [f"parts of {own}" if "+" in own else f"{own} parts" for own in parts.split("·") if own != "1"]
    within = ", sub-dim by sub-dim" if "·" in parts and words else ""
    return f"dim {dim} in {' × '.join(words)}{within}" if words else f"dim {dim} whole"
