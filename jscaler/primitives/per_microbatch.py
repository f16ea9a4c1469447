"""Which ops a plan may run on each micro-batch alone: those that an inner reduction keeps from being split."""

from collections.abc import Iterable, Sequence
from typing import Any

from jscaler.errors import PlanError, UnknownNameError, listing
from jscaler.ir import Graph, Op
from jscaler.ir.op import matches


def under(graph: Graph, selection: Any) -> tuple[str, ...]:
    """The forward ops that a selection means, in the order of the program.

    Args:
        selection: an op, a grid of one, a shell pattern of a path, of its end, or of a module on it; or several of these.

    Raises:
        UnknownNameError: a pattern matches nothing.
    """
    found = {path for one in several(selection) for path in _matches(graph, one)}
    return tuple(op.path for op in graph.ops if op.path in found)


def several(selection: Any) -> list[Any]:
    """The parts of a selection; None for what is none."""
    if isinstance(selection, (str, Op)) or hasattr(selection, "op"):
        return [selection]
    return [*selection] if isinstance(selection, Iterable) else [None]


def _matches(graph: Graph, selection: Any) -> list[str]:
    if isinstance(selection, Op):
        return [selection.path]
    if hasattr(selection, "op"):  # a grid, or a part of one
        return [selection.op.path]
    if not isinstance(selection, str):
        raise PlanError(f"per_microbatch takes ops, grids and patterns, not {selection!r}")
    paths = [op.path for op in graph.ops if op.kind == "forward"]
    found = [path for path in paths if any(_fits(name, selection) for name in _ends(path))]
    if not found:
        raise UnknownNameError("op", selection, paths)
    return found


def _fits(name: str, pattern: str) -> bool:
    return matches(name, pattern) or matches(name, f"{pattern}/*")


def _ends(path: str) -> list[str]:
    """``a/b/c``, ``b/c``, ``c``."""
    words = path.split("/")
    return ["/".join(words[i:]) for i in range(len(words))]


def needing_the_whole(graph: Graph, paths: Sequence[str]) -> tuple[str, ...]:
    """Those of ``paths`` that hold an inner reduction at which a factor is blocked.

    Raises:
        PlanError: none does, or one is no forward op.
    """
    wrong = [path for path in paths if graph[path].kind != "forward"]
    if wrong:
        raise PlanError(f"per_microbatch takes forward ops, which their backward ops follow; {listing(wrong)} are none")
    found = tuple(path for path in paths if reopens(graph, path))
    if not found:
        others = [op.path for op in graph.ops if op.kind == "forward" and reopens(graph, op.path)]
        raise PlanError(
            f"per_microbatch: {listing(paths)} need no factor whole that could be cut, so they run part by part as they "
            f"are; those that do: {listing(others) or 'none'}"
        )
    return found


def reopens(graph: Graph, path: str) -> bool:
    """Whether an op holds an inner reduction at which a factor is blocked."""
    return any(factor.reopens for factor in graph.rule(graph[path]).factors.values())
