"""What ops have from others: a backward op from its forward op, a second run from the first, a fence from its readers."""

from collections.abc import Mapping
from typing import TypeVar

from jscaler.ir.graph import Graph

T = TypeVar("T")


def inherited(
    graph: Graph, known: Mapping[str, T], pieces: Mapping[str, tuple[str, ...]] = {}, from_makers: bool = False
) -> dict[str, T]:
    """``known``, by op path, and what other ops inherit. A fence inherits what all of its readers agree on.

    Args:
        pieces: path of an op that was cut -> paths of the ops that stand for it.
        from_makers: whether an op that has no such source inherits from the first of its inputs that has something.
    """
    found = {path: value for path, value in known.items() if path in graph.by_path}
    everywhere = {**found, **known}  # an op that was cut is not in the graph
    fences = []
    for op in graph.ops if known else ():
        if op.path in found:
            continue
        sources = [source.path for source in (op.forward, op.again) if source is not None]
        paths = [piece for path in sources for piece in pieces.get(path, (path,))]
        if op.anywhere == "fence":
            fences.append(op)
        elif from_makers:
            paths += [graph.producer[t].path for t in op.inputs if t in graph.producer]
        value = next((everywhere[path] for path in paths if path in everywhere), None)
        if value is not None:
            found[op.path] = everywhere[op.path] = value
    for op in reversed(fences):
        readers = (reader.path for t in op.outputs for reader in graph.consumers.get(t, ()))
        values = {found[path] for path in readers if path in found}
        if len(values) == 1:
            found[op.path] = values.pop()
    return found
