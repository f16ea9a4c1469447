"""nnx objects (modules, optimizers, metrics, key streams) as trees of arrays, and what a trace changed in them.

An nnx object is a graph: two attributes may be one object, and methods change what it holds. Here it becomes a static
``graphdef`` and a tree of plain arrays, in which a shared Variable appears once. Flax is imported only once somebody
has imported it: without, nothing is an nnx object.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jscaler.capture.names import tree_path
from jscaler.errors import CaptureError

PLAIN = (dict, list, tuple)


def flax_nnx() -> Any:
    """``flax.nnx``, imported."""
    from flax import nnx

    return nnx


def is_node(value: Any) -> bool:
    """Whether ``value`` is an nnx object. A ``State`` is none: it is a tree like any other."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, (nnx.Pytree, nnx.Variable))


def holds_nodes(value: Any, depth: int = 2) -> bool:
    """Whether ``value`` is an nnx object, or a dict, list or tuple (of at most ``depth`` levels) that holds one."""
    if "flax.nnx" not in sys.modules or not isinstance(value, PLAIN):
        return is_node(value)
    inside = value.values() if isinstance(value, dict) else value
    return depth > 0 and any(holds_nodes(v, depth - 1) for v in inside)


def check_no_nodes(name: str, value: Any) -> None:
    """Raises CaptureError where an nnx object lies too deep in an argument to be found at every call."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    leaves = jax.tree.leaves(value, is_leaf=lambda x: is_node(x) or isinstance(x, nnx.State))
    if found := [type(x).__name__ for x in leaves if is_node(x)]:
        raise CaptureError(
            f"argument '{name}' holds an nnx {found[0]} deep inside a {type(value).__name__}, where its changes would be "
            "lost: pass it as an argument of its own"
        )


def split(nodes: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The static graph of ``nodes``, and a tree of arrays for each of its names (empty where all is shared)."""
    nnx = flax_nnx()
    graphdef, state = nnx.split(dict(nodes))
    pure = nnx.to_pure_dict(state)
    return graphdef, {name: pure.get(name, {}) for name in nodes}


def merge(graphdef: Any, trees: Mapping[str, Any]) -> dict[str, Any]:
    """Fresh objects for the trees that `split` gave, with other leaves in place."""
    return flax_nnx().merge(graphdef, flax_nnx().State(dict(trees)))


def variables(nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Like the trees of `split`: True at the leaves that Variables hold, which a step may change; False elsewhere."""
    nnx = flax_nnx()
    marked = nnx.map_state(lambda _, leaf: isinstance(leaf, nnx.Variable), nnx.split(dict(nodes))[1])
    return {name: nnx.to_pure_dict(marked).get(name, {}) for name in nodes}


def check_structure(before: Any, after: Any, what: str) -> None:
    """Raises CaptureError where ``what`` (a step, a loss) changed more in its nnx objects than their arrays."""
    if before != after:
        raise CaptureError(
            f"{what} changes the structure of an nnx object: it adds, removes or replaces a Variable or a module, or sets "
            "an attribute that is no array (model.train(), model.eval()). Do that before; inside, change arrays only "
            "(sown values stay inside with nnx.capture)"
        )


def update(nodes: Mapping[str, Any], path_values: Mapping[tuple[Any, ...], Any]) -> None:
    """Set the arrays at these paths (a name of ``nodes``, then attributes) in the caller's own objects."""
    nested: dict[Any, Any] = {}
    for path, value in path_values.items():
        place = nested
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    for name, values in nested.items():
        flax_nnx().update(nodes[name], values)


def paths(name: str, tree: Any) -> list[tuple[Any, ...]]:
    """The path of every leaf of one tree of `split`, behind ``name``."""
    return [(name, *(getattr(k, "key", k) for k in path)) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def to_saved_tree(state: Any) -> Any:
    """A state with dicts by attribute in the place of nnx objects and of ``nnx.State``: what a checkpoint holds of it.

    Names are text throughout: an ``nnx.List`` counts its items, and Orbax sorts the names of one tree. Objects that share
    variables have them once. Any other state is itself.
    """
    if "flax.nnx" not in sys.modules:
        return state
    leaves, treedef = jax.tree.flatten(state, is_leaf=_is_graph)
    return treedef.unflatten([_by_text(a) for a in _pure(leaves)[1]])


def module_paths(state: Any) -> list[str]:
    """Where the modules of nnx lie in what `to_saved_tree` makes of a state: ``model``, ``0``; ``.`` where it is one."""
    if "flax.nnx" not in sys.modules:
        return []
    found = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_graph)
    return [tree_path("", path) or "." for path, leaf in found if isinstance(leaf, flax_nnx().Module)]


def from_saved_tree(tree: Any, target: Any) -> Any:
    """A state like ``target`` with what `to_saved_tree` has made of it: fresh objects with the arrays of ``tree``."""
    if "flax.nnx" not in sys.modules:
        return tree
    leaves, treedef = jax.tree.flatten(target, is_leaf=_is_graph)
    graphdef, pure = _pure(leaves)
    given = treedef.flatten_up_to(tree)
    found = [_by_names_of(a, b) if _is_graph(leaf) else b for leaf, a, b in zip(leaves, pure, given, strict=True)]
    nodes = merge(graphdef, {str(i): found[i] for i, leaf in enumerate(leaves) if is_node(leaf)}) if graphdef else {}
    return treedef.unflatten([
        nodes[str(i)] if is_node(leaf) else _as_state(found[i], leaf) if _is_graph(leaf) else found[i]
        for i, leaf in enumerate(leaves)
    ])  # fmt: skip


def _is_graph(value: Any) -> bool:
    return is_node(value) or isinstance(value, flax_nnx().State)


def _pure(leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The static graph of the objects among ``leaves``, if there are any; each leaf, of objects and states a dict."""
    nodes = {str(i): leaf for i, leaf in enumerate(leaves) if is_node(leaf)}
    graphdef, trees = split(nodes) if nodes else (None, {})
    to_dict = flax_nnx().to_pure_dict
    states = {str(i): to_dict(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, flax_nnx().State)}
    return graphdef, [(trees | states).get(str(i), leaf) for i, leaf in enumerate(leaves)]


def _as_state(pure: Any, like: Any) -> Any:
    """A ``State`` like another, with the arrays of a pure dict."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(pure))


def _by_text(tree: Any) -> Any:
    return {str(name): _by_text(one) for name, one in tree.items()} if isinstance(tree, dict) else tree


def _by_names_of(like: Any, tree: Any) -> Any:
    return {name: _by_names_of(one, tree[str(name)]) for name, one in like.items()} if isinstance(like, dict) else tree
