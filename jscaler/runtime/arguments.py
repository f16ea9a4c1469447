"""A step's arguments: which are static, donated, or trees of arrays; and the key that decides about recompilation."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np

from jscaler.capture.names import PathNames, leaf_names
from jscaler.errors import CaptureError, DeletedArgumentError, UnknownNameError, listing, shown
from jscaler.runtime import graph_nodes
from jscaler.runtime.chunked_array import ChunkedArray


class LeafType(NamedTuple):
    """What recompilation depends on, of one leaf. (An array's own aval also knows how it is sharded.)"""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak_type)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + (" (weak)" if self.weak_type else "")


@dataclass(frozen=True)
class BoundCall:
    """One call's arguments: flat dynamic leaves with their owners, and the key that decides about recompilation.

    ``nodes`` are the caller's own nnx objects, by argument; the step changes them in place.
    """

    arguments: "Arguments"
    leaves: tuple[Any, ...]
    types: tuple[LeafType, ...]
    owners: tuple[str, ...]
    static: tuple[tuple[str, Any], ...]
    trees: tuple[tuple[str, Any], ...]
    graphdef: Any = None
    nodes: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def key(self) -> Any:
        """Calls with equal keys run the same executable."""
        return self.static, self.trees, self.types, self.graphdef

    def without_arrays(self) -> "BoundCall":
        """What a cache may keep: no array and no object of the caller stays alive by it."""
        return dataclasses.replace(self, leaves=(), nodes=dict.fromkeys(self.nodes))

    def check_arrays(self) -> None:
        """Raises CaptureError for a shape alone, DeletedArgumentError for an array whose memory was given away."""
        named = list(zip(self.names, self.leaves, strict=True))
        if shapes := [name for name, leaf in named if isinstance(leaf, jax.ShapeDtypeStruct)]:
            raise CaptureError(f"{listing(shapes)}: shapes alone, which can be lowered, not run; give arrays")
        if gone := [name for name, leaf in named if isinstance(leaf, (jax.Array, ChunkedArray)) and leaf.is_deleted()]:
            raise DeletedArgumentError(gone)

    @property
    def node_leaves(self) -> list[tuple[int, tuple[Any, ...]]]:
        """Index and path of every leaf that belongs to an nnx object."""
        found, start = [], 0
        for name, tree in self.trees:
            if name in self.nodes:
                paths = graph_nodes.paths(name, tree.unflatten(range(tree.num_leaves)))
                found += list(enumerate(paths, start))
            start += tree.num_leaves
        return found

    @property
    def names(self) -> list[str]:
        """The path of every leaf: argument name and tree path."""
        paths = [n for name, tree in self.trees for n in leaf_names(name, tree.unflatten(range(tree.num_leaves)))]
        unique = PathNames()
        return [unique.unique(path) for path in paths]


@dataclass(frozen=True)
class Arguments:
    """What a step's signature and the decorator say about its arguments."""

    signature: inspect.Signature
    donated: frozenset[str]
    static: frozenset[str]

    @staticmethod
    def of(
        fun: Callable[..., Any],
        donate_argnums: int | Sequence[int] | None,
        donate_argnames: str | Sequence[str] | None,
        static_argnums: int | Sequence[int] | None,
        static_argnames: str | Sequence[str] | None,
    ) -> "Arguments":
        try:
            signature = inspect.signature(fun)
        except ValueError:  # of a function in C
            raise CaptureError(f"{fun} does not say which arguments it takes: decorate a function that calls it") from None
        donated = _named(signature, "donate", donate_argnums, donate_argnames)
        static = _named(signature, "static", static_argnums, static_argnames)
        if both := donated & static:
            raise CaptureError(f"argument '{min(both)}' cannot be both static and donated")
        return Arguments(signature, donated, static)

    @property
    def of_method(self) -> "Arguments":
        """Those of the method of an object: the same without the first."""
        first, *rest = self.signature.parameters.values()
        return Arguments(self.signature.replace(parameters=rest), self.donated - {first.name}, self.static - {first.name})

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> BoundCall:
        """Flatten a call; raises CaptureError for leaves that are no arrays, and for other arguments than the step's."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            names = ", ".join(self.signature.parameters)
            raise CaptureError(f"the step takes ({names}), and was called otherwise: {error}") from None
        leaves, types, owners, static, trees = [], [], [], [], []
        dynamic = {}
        for name, value in _expanded(self.signature, bound):
            if name in self.static:
                _check_hashable(name, value)
                static.append((name, value))
            else:
                dynamic[name] = value
        nodes = {name: value for name, value in dynamic.items() if graph_nodes.holds_nodes(value)}
        graphdef, pure = graph_nodes.split(nodes) if nodes else (None, {})
        for name, value in (dynamic | pure).items():
            try:
                flat, tree = jax.tree.flatten(value)
            except ValueError as error:  # of a dict
                raise CaptureError(
                    f"argument '{name}' has keys that cannot be sorted: {error.__cause__ or error}; give them one type"
                ) from None
            trees.append((name, tree))
            for i, leaf in enumerate(flat):
                types.append(leaf_type(leaf, name, value, i))
            leaves += flat
            owners += [name] * len(flat)
        return BoundCall(self, tuple(leaves), tuple(types), tuple(owners), tuple(static), tuple(trees), graphdef, nodes)

    def rebuild(self, call: BoundCall, leaves: Iterable[Any]) -> tuple[inspect.BoundArguments, dict[str, Any]]:
        """The arguments of ``call`` with other leaves in place; and those of them that are fresh nnx objects."""
        rest = iter(leaves)
        values = dict(call.static)
        for name, tree in call.trees:
            values[name] = jax.tree.unflatten(tree, [next(rest) for _ in range(tree.num_leaves)])
            if name not in call.nodes:
                graph_nodes.check_no_nodes(name, values[name])
        nodes = graph_nodes.merge(call.graphdef, {name: values[name] for name in call.nodes}) if call.nodes else {}
        values |= nodes
        bound = inspect.BoundArguments(self.signature, {})  # type: ignore[arg-type]
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                found = [n for n in values if n.startswith(f"{parameter.name}[")]
                bound.arguments[parameter.name] = tuple(values[n] for n in found)
            elif parameter.kind is parameter.VAR_KEYWORD:
                named = self.signature.parameters
                rest_names = [n for n in values if n not in named and "[" not in n]
                bound.arguments[parameter.name] = {n: values[n] for n in rest_names}
            elif parameter.name in values:
                bound.arguments[parameter.name] = values[parameter.name]
        return bound, nodes


def _named(signature: inspect.Signature, what: str, nums: Any, names: Any) -> frozenset[str]:
    parameters = list(signature.parameters)
    chosen = set[str]()
    for name in _several(f"{what}_argnames", names, str, "an argument's name"):
        if name not in parameters:
            raise UnknownNameError("argument", name, parameters, f" ({what}_argnames)")
        chosen.add(name)
    for num in _several(f"{what}_argnums", nums, int, "an argument's number"):
        if not -len(parameters) <= num < len(parameters):
            raise CaptureError(f"{what}_argnums={num}, but the step has {len(parameters)} arguments: {parameters}")
        chosen.add(parameters[num])
    return frozenset(chosen)


def _several(option: str, given: Any, kind: type, what: str) -> list[Any]:
    if given is None:
        return []
    found = [given] if isinstance(given, str | int) or not isinstance(given, Iterable) else list(given)
    if wrong := [one for one in found if not isinstance(one, kind) or isinstance(one, bool)]:
        raise CaptureError(f"{option} is {what}, or several of these, and holds {shown(wrong[0])}")
    return found


def _expanded(signature: inspect.Signature, bound: inspect.BoundArguments) -> Iterable[tuple[str, Any]]:
    """Name and value of each argument; ``*args`` and ``**kwargs`` one by one."""
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((f"{name}[{i}]", v) for i, v in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from sorted(value.items())
        else:
            yield name, value


def _check_hashable(name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise CaptureError(f"static argument '{name}' is a {type(value).__name__}, which is not hashable") from None


def leaf_type(leaf: Any, name: str, tree: Any, index: int) -> LeafType:
    """The type of leaf ``index`` of ``tree``, which is argument ``name``; raises CaptureError where it is no array."""
    if isinstance(leaf, jax.core.Tracer):
        raise CaptureError(
            f"argument '{name}' is being traced: a parallelized step cannot run inside jax.jit, grad or vmap; call the "
            "undecorated function (.fun) there"
        )
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, ChunkedArray)):
        return LeafType(leaf.shape, leaf.dtype, bool(getattr(leaf, "weak_type", False)))
    if isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
        try:
            aval = jax.typeof(leaf)
        except (TypeError, OverflowError) as error:
            path = leaf_names(name, tree)[index]
            raise CaptureError(f"argument '{path}' holds what no array of JAX can: {error}") from None
        return LeafType(aval.shape, aval.dtype, aval.weak_type)
    path = leaf_names(name, tree)[index]
    raise CaptureError(
        f"argument '{path}' is a {type(leaf).__name__}, not an array: pass an array, or mark '{name}' in static_argnames"
    )


def difference(expected: BoundCall, given: BoundCall) -> str:
    """What tells two calls apart, for an error message."""
    if expected.static != given.static:
        return f"static {dict(given.static)} instead of {dict(expected.static)}"
    if (expected.trees, expected.graphdef) != (given.trees, given.graphdef):
        lacks, has = (listing([n for n in a.names if n not in b.names]) for a, b in ((expected, given), (given, expected)))
        named = [f"{what} {leaves}" for what, leaves in (("without", lacks), ("with", has)) if leaves]
        return f"the argument trees differ{': ' if named else ''}{', and '.join(named)}"
    for name, want, have in zip(expected.names, expected.types, given.types, strict=True):
        if want != have:
            return f"'{name}' is {have} instead of {want}"
    return "nothing that can be named"
