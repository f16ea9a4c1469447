"""Names of ops and inputs: Flax module path and function for ops, argument and tree path for inputs."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend import core

from jscaler.capture.jaxprs import inner_jaxpr
from jscaler.capture.user_op import op_p
from jscaler.lax_primitives import known


def function_name(eqns: Sequence[core.JaxprEqn]) -> str:
    """One word for what a group of equations does: its heaviest primitive, or its last one.

    Functions with custom derivatives are named by their inside.
    """
    return _heaviest(eqns)[1]


def _heaviest(eqns: Sequence[core.JaxprEqn]) -> tuple[int, str]:
    found: list[tuple[int, str]] = []
    for eqn in eqns:
        if eqn.primitive is op_p:
            return 0, eqn.params["call"].name
        one = known(eqn.primitive)
        is_open = one.opened and one.opened != "vjp"
        found.append(_heaviest(inner_jaxpr(eqn)[0].eqns) if is_open else (one.weight, one.word or one.name))
    return max(reversed(found), key=lambda pair: pair[0])


def common_root(scopes: Iterable[str]) -> str:
    """The first component that all non-empty scopes share (the top module's class); empty if they do not."""
    roots = {scope.split("/")[0] for scope in scopes if scope}
    return roots.pop() if len(roots) == 1 else ""


class PathNames:
    """Hands out unique paths: the second ``block/dot`` is ``block/dot.1``."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}

    def unique(self, path: str) -> str:
        count = self._used.get(path, 0)
        self._used[path] = count + 1
        if not count:
            return path
        return self.unique(path + f".{count}")


def tree_path(prefix: str, path: Sequence[Any]) -> str:
    """``state/params/kernel`` for a leaf of the argument ``state``."""
    inside = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    return f"{prefix}/{inside}" if prefix and path else prefix or inside


def leaf_names(prefix: str, tree: Any) -> list[str]:
    """The path of every leaf of ``tree``."""
    return [tree_path(prefix, path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
