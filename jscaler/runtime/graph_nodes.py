"""nnx objects (modules, optimizers, metrics, key streams) as trees of arrays, and what a trace changed in them.

An nnx object is a graph: two attributes may be one object, and methods change what it holds. Here it becomes a static
``graphdef`` and a tree of plain arrays, in which a shared Variable appears once. Flax is imported only once somebody
has imported it: without, nothing is an nnx object.
"""

import sys
from collections.abc import Mapping
from typing import Any

import jax

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


def stored(state: Any) -> Any:
    """A state as dicts by attribute, if nnx objects or ``nnx.State`` are in it: what a checkpoint holds of it.

    Names are text throughout: an ``nnx.List`` counts its items, and Orbax sorts the names of one tree. Any other state is
    itself.
    """
    if holds_nodes(state):
        return _by_text(split({"": state})[1][""])
    if "flax.nnx" not in sys.modules:
        return state
    to_dict = flax_nnx().to_pure_dict
    return jax.tree.map(lambda x: _by_text(to_dict(x)) if _is_state(x) else x, state, is_leaf=_is_state)


def revived(tree: Any, target: Any) -> Any:
    """What `stored` has made of a state like ``target``, as such a state: fresh objects with the arrays of ``tree``."""
    if holds_nodes(target):
        graphdef, trees = split({"": target})
        return merge(graphdef, {"": _by_names_of(trees[""], tree)})[""]
    if "flax.nnx" not in sys.modules:
        return tree
    leaves, treedef = jax.tree.flatten(target, is_leaf=_is_state)
    found = treedef.flatten_up_to(tree)
    return treedef.unflatten([_as_state(a, b) if _is_state(b) else a for a, b in zip(found, leaves, strict=True)])


def _is_state(value: Any) -> bool:
    return isinstance(value, flax_nnx().State)


def _as_state(tree: Any, like: Any) -> Any:
    """A ``State`` like another, with the arrays of a tree by text."""
    pure = flax_nnx().to_pure_dict(like)
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(_by_names_of(pure, tree)))


def _by_text(tree: Any) -> Any:
    return {str(name): _by_text(one) for name, one in tree.items()} if isinstance(tree, dict) else tree


def _by_names_of(like: Any, tree: Any) -> Any:
    return {name: _by_names_of(one, tree[str(name)]) for name, one in like.items()} if isinstance(like, dict) else tree
