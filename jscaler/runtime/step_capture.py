"""A step function's call, captured: its result tree, what it changed in nnx objects, and what is a next version of what."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jscaler.capture.names import PathNames, tree_path
from jscaler.errors import CaptureError
from jscaler.runtime import graph_nodes
from jscaler.runtime.arguments import Arguments, BoundCall
from jscaler.stages import Captured, capture


@dataclass(frozen=True)
class NodeChanges:
    """The leaves of nnx objects: which the step changes, and the path of each that a Variable holds."""

    changed: tuple[int, ...]
    paths: Mapping[int, tuple[Any, ...]]

    def arrays(self, given: Sequence[Any], placed: Sequence[Any], new: Sequence[Any]) -> dict[tuple[Any, ...], Any]:
        """Path -> array of all that the caller's objects shall hold now and do not hold yet."""
        values = {i: placed[i] for i in self.paths if placed[i] is not given[i]}
        values |= dict(zip(self.changed, new, strict=True))
        return {self.paths[i]: value for i, value in values.items() if i in self.paths}


@dataclass
class StepResult:
    """The step's result tree, known once it has been traced. Changed leaves of nnx objects follow its leaves."""

    tree: Any = None
    avals: tuple[Any, ...] = ()
    changes: NodeChanges | None = None


def capture_call(
    fun: Callable[..., Any], arguments: Arguments, call: BoundCall, updates: bool = True
) -> tuple[Captured, StepResult]:
    """The graph of ``fun`` for arguments like ``call``'s; ``updates``: whether results may be their next versions."""
    result = StepResult()

    def flat_fun(*leaves: Any) -> list[Any]:
        bound, nodes = arguments.rebuild(call, leaves)
        out = fun(*bound.args, **bound.kwargs)
        flat, result.tree = jax.tree.flatten(out)
        _check_arrays(out)
        if nodes:
            graph_nodes.check_no_nodes("result", out)
            result.changes = _node_changes(arguments, call, nodes, leaves)
            after = dict(zip((i for i, _ in call.node_leaves), _node_arrays(call, nodes), strict=True))
            flat += [after[i] for i in result.changes.changed]
        result.avals = tuple(jax.typeof(x) for x in flat)
        return flat

    flat_fun.__name__ = getattr(fun, "__name__", "step")

    def output_names() -> list[str]:
        tree = jax.tree.unflatten(result.tree, list(range(result.tree.num_leaves)))
        unique = PathNames()
        names = [tree_path("", path) or "result" for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        names += [call.names[i] for i in (result.changes.changed if result.changes else ())]
        return [unique.unique(name) for name in names]

    def next_versions(gradients: frozenset[int]) -> dict[int, int]:
        return _next_versions(arguments, call, result, gradients) if updates else {}

    structs = [t.struct for t in call.types]
    captured = capture(flat_fun, structs, call.names, output_names, next_versions)
    if not (captured.graph.outputs or captured.graph.ops):
        raise CaptureError(f"the step '{flat_fun.__name__}' returns no array and changes nothing: return the next state")
    return captured, result


def _check_arrays(out: Any) -> None:
    """Raises CaptureError where a step returns something other than arrays and numbers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(out):
        if not (
            graph_nodes.is_node(leaf) or isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))
        ):
            raise CaptureError(
                f"the step returns a {type(leaf).__name__} at '{tree_path('', path) or 'result'}': return arrays and "
                "numbers, in a tree"
            )


def _node_arrays(call: BoundCall, nodes: Mapping[str, Any]) -> list[Any]:
    """The arrays that ``nodes`` hold, in the order of the call's leaves."""
    graphdef, trees = graph_nodes.split(nodes)
    graph_nodes.check_structure(call.graphdef, graphdef, "the step")
    return [leaf for name in call.nodes for leaf in jax.tree.leaves(trees[name])]


def _node_changes(arguments: Arguments, call: BoundCall, nodes: Mapping[str, Any], leaves: Sequence[Any]) -> NodeChanges:
    """What the step changed in ``nodes``. Of a donated argument all comes back, since nothing else of it is left."""
    marked = graph_nodes.variables(nodes)
    held = [flag for name in call.nodes for flag in jax.tree.leaves(marked[name])]
    donated = {i for i, owner in enumerate(call.owners) if owner in arguments.donated}
    places = call.node_leaves
    now = _node_arrays(call, nodes)
    changed = [i for (i, _), new in zip(places, now, strict=True) if new is not leaves[i] or i in donated]
    return NodeChanges(tuple(changed), {i: path for (i, path), flag in zip(places, held, strict=True) if flag})


def _next_versions(arguments: Arguments, call: BoundCall, result: StepResult, gradients: frozenset[int]) -> dict[int, int]:
    """Output leaf -> input leaf, for every argument whose tree comes back with the same shapes.

    Without donation, a bare array that comes back is no state: state is a tree.
    """
    members = result.tree.children()
    starts = itertools.accumulate((m.num_leaves for m in members), initial=0)
    parts = [(0, result.tree), *zip(starts, members, strict=False)]  # the whole result, or one of its members
    changed = result.changes.changed if result.changes else ()
    follow = enumerate(changed, result.tree.num_leaves)
    versions = {o: i for o, i in follow if _alike(call.types[i], result.avals[o])}
    in_start = 0
    for name, tree in call.trees:
        if name in call.nodes:
            in_start += tree.num_leaves
            continue
        is_state = name in arguments.donated if arguments.donated else tree.num_nodes > tree.num_leaves
        for out_start, part in parts:
            ins = range(in_start, in_start + tree.num_leaves)
            outs = range(out_start, out_start + part.num_leaves)
            same = part == tree and all(_alike(call.types[i], result.avals[o]) for i, o in zip(ins, outs, strict=True))
            if is_state and same and not (versions.keys() | gradients) & set(outs):
                versions.update(zip(outs, ins, strict=True))
                break
        in_start += tree.num_leaves
    return versions


def _alike(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
