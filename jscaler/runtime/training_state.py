"""A training state that is made in its plan's layout: what ``train_step.init`` and ``train_step.abstract_state`` do.

``make_state`` is traced once. The trace says what the state looks like, which is all that capture and planning need to
lay it out; then the same trace is compiled with the plan's shardings as those of its results, so that every device
draws and stores its own parts only. What of a state is no array (``apply_fn``, ``tx``, the graph of an nnx object) comes
from that one trace, so a step that was planned for the state knows it again.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jscaler.capture.jaxprs import evaluate, open_jaxpr, without_wishes
from jscaler.capture.names import leaf_names
from jscaler.capture.wishes import implicit_axes, no_mesh
from jscaler.errors import CaptureError, UnknownNameError
from jscaler.ir.walk import grouped
from jscaler.runtime import graph_nodes
from jscaler.runtime.absent import absent, is_absent
from jscaler.runtime.arguments import Arguments
from jscaler.runtime.chunked_array import ChunkedArray, ChunkedSharding
from jscaler.runtime.devices import devices_of
from jscaler.runtime.process_messages import wait_on_cpus

ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


@dataclass(frozen=True)
class TracedState:
    """What ``make_state`` does, traced: a program of constants and operands that makes the step's arguments ``names``.

    Attributes:
        names: the arguments of the step that it makes, in their order.
        trees: per argument its tree, of an nnx object that of its arrays.
        graphdef: the static graph of the nnx objects among them.
        nodes: the arguments that are (or hold) nnx objects.
    """

    names: tuple[str, ...]
    jaxpr: Any
    consts: tuple[Any, ...]
    operands: tuple[Any, ...]
    trees: tuple[Any, ...]
    graphdef: Any
    nodes: frozenset[str]

    def structs(self, weak: bool = True) -> list[jax.ShapeDtypeStruct]:
        """The leaves, without a layout; with their weak types (a count that was a Python number), or without."""
        avals = (v.aval for v in self.jaxpr.outvars)
        return [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=weak and getattr(a, "weak_type", False)) for a in avals]

    def assemble(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """The step arguments with these leaves, by name."""
        rest = iter(leaves)
        values = {
            n: t.unflatten([next(rest) for _ in range(t.num_leaves)]) for n, t in zip(self.names, self.trees, strict=True)
        }
        if self.nodes:
            values |= graph_nodes.merge(self.graphdef, {n: values[n] for n in self.names if n in self.nodes})
        return values

    @no_mesh()
    def fill(self, shardings: Sequence[Any]) -> list[Any]:
        """The leaves, each made under its sharding, by a program for each device group of this process."""
        pieces = [piece for number, sharding in enumerate(shardings) for piece in pieces_of(number, sharding)]
        made: dict[int, list[Any]] = {number: [] for number in range(len(shardings))}
        values: dict[int, Any] = {}
        for group in grouped((frozenset(one.sharding.device_set), one) for one in pieces).values():
            own = [one.sharding for one in group]
            if is_absent(own[0]):
                found = absent([one.aval(self.jaxpr.outvars[one.number].aval) for one in group], own)
            else:
                jitted, arguments = self.program(group)
                found = jitted(*arguments)
                if not own[0].is_fully_addressable:  # the next group's may span processes, too
                    wait_on_cpus(found, devices_of(own[0]))
            values.update((id(one), value) for one, value in zip(group, found, strict=True))
        for one in pieces:
            made[one.number].append(values[id(one)])
        return [
            ChunkedArray(made[number], sharding) if isinstance(sharding, ChunkedSharding) else made[number][0]
            for number, sharding in enumerate(shardings)
        ]

    def program(self, pieces: "Sequence[StatePiece]") -> tuple[Any, tuple[Any, ...]]:
        """The jitted program that makes some of the leaves, on devices of one group, and its arguments."""
        target = pieces[0].sharding.device_set if pieces else set()
        consts, operands = ([_within(x, target) for x in xs] for xs in (self.consts, self.operands))

        def make_state(consts: list[Any], operands: list[Any]) -> list[Any]:
            made = evaluate(self.jaxpr, [*consts, *operands])
            return [made[one.number] if one.rows is None else made[one.number][one.rows] for one in pieces]

        return jax.jit(make_state, out_shardings=[one.sharding for one in pieces]), (consts, operands)


@dataclass(frozen=True, eq=False)
class StatePiece:
    """A leaf of a state, or of one that lies in chunks the rows of a chunk."""

    number: int
    sharding: Any
    rows: slice | None = None

    def aval(self, whole: Any) -> Any:
        """Its type, where that of the leaf is ``whole``."""
        return whole if self.rows is None else whole.update(shape=(self.rows.stop - self.rows.start, *whole.shape[1:]))


def pieces_of(number: int, sharding: Any) -> "list[StatePiece]":
    if not isinstance(sharding, ChunkedSharding):
        return [StatePiece(number, sharding)]
    return [StatePiece(number, part, rows) for rows, part in zip(sharding.rows, sharding.parts, strict=True)]


def _within(array: Any, devices: set[Any]) -> Any:
    """``array`` where a program on ``devices`` can read it: what lies elsewhere for good is read from the host."""
    lies_elsewhere = isinstance(array, jax.Array) and array.committed and array.sharding.device_set != devices
    if not lies_elsewhere:
        return array
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jnp.asarray(np.asarray(jax.random.key_data(array))), impl=jax.random.key_impl(array)
        )
    return np.asarray(array)


def _check_takes(make_state: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        signature = inspect.signature(make_state)
    except (TypeError, ValueError):
        return  # not every callable can say
    try:
        signature.bind(*args)
    except TypeError as error:
        raise CaptureError(
            f"make_state takes {signature}, and was given {len(args)} arguments: {error}; they follow it: "
            "init(make_state, key, batch=batch)"
        ) from None


def trace_state(names: Sequence[str], make_state: Callable[..., Any], args: Sequence[Any]) -> TracedState:
    """Trace ``make_state(*args)``, which makes the step arguments ``names``: one value, or a tuple of as many.

    Arrays among ``args`` are operands, all else (a model, an optimizer, sizes) is a compile-time constant.

    Raises:
        CaptureError: it is no function, or does not make what it should.
    """
    if not callable(make_state):
        raise CaptureError(
            f"make_state is a function that makes the state, and not a {type(make_state).__name__}; a state that has been "
            "made is passed to the step itself, which moves it to the plan's layout"
        )
    _check_takes(make_state, args)
    leaves, tree = jax.tree.flatten(tuple(args), is_leaf=graph_nodes.is_node)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, ARRAYS)]
    found: dict[str, Any] = {}

    def flat(*arrays: Any) -> list[Any]:
        given = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            given[i] = array
        values = _by_name(names, make_state(*tree.unflatten(given)))
        nodes = {n: v for n, v in values.items() if graph_nodes.holds_nodes(v)}
        found["nodes"] = frozenset(nodes)
        found["graphdef"], pure = graph_nodes.split(nodes) if nodes else (None, {})
        values |= pure
        found["trees"] = tuple(jax.tree.structure(v) for v in values.values())
        for name, value in values.items():
            graph_nodes.check_no_nodes(name, value)
            _check_leaves(name, value)
        return jax.tree.leaves(list(values.values()))

    operands = [leaves[i] for i in places]
    with implicit_axes():
        jaxpr, consts = open_jaxpr(jax.make_jaxpr(flat)(*operands))
    return TracedState(
        tuple(names),
        without_wishes(jaxpr),
        tuple(consts),
        tuple(operands),
        found["trees"],
        found["graphdef"],
        found["nodes"],
    )


def _check_leaves(name: str, value: Any) -> None:
    for path, leaf in zip(leaf_names(name, value), jax.tree.leaves(value), strict=True):
        if not isinstance(leaf, (*ARRAYS, bool, int, float, complex)):
            raise CaptureError(
                f"make_state makes '{path}' a {type(leaf).__name__}, which is no array: a training state is a tree of "
                "arrays (mark what else it holds as static, as flax.struct.field(pytree_node=False) does)"
            )


def _by_name(names: Sequence[str], made: Any) -> dict[str, Any]:
    if len(names) == 1:
        return {names[0]: made}
    if not isinstance(made, (tuple, list)) or len(made) != len(names):
        what = f"{type(made).__name__}" + (f" of {len(made)}" if isinstance(made, (tuple, list)) else "")
        raise CaptureError(
            f"make_state makes the {len(names)} arguments of the step that are not given, {', '.join(names)}, and returned "
            f"a {what}: return a tuple of {len(names)}, or give the others by name"
        )
    return dict(zip(names, made, strict=True))


def missing_arguments(arguments: Arguments, given: Mapping[str, Any]) -> list[str]:
    """The arguments of a step that ``make_state`` makes: those without a default that are not ``given``.

    Raises:
        UnknownNameError: the step has no argument of a given name.
        CaptureError: nothing is left to be made, or a static argument is.
    """
    parameters = arguments.signature.parameters
    named = [n for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in given:
        if name not in named and not takes_any:
            raise UnknownNameError("argument", name, named, " (of the step)")
    missing = [n for n in named if n not in given and parameters[n].default is inspect.Parameter.empty]
    if static := [n for n in missing if n in arguments.static]:
        raise CaptureError(f"the static argument '{static[0]}' decides about the plan: give it by name")
    if not missing:
        raise CaptureError(
            f"make_state makes the arguments of the step that are not given, and all are: {', '.join(given)}; leave "
            "out the state"
        )
    return missing


def by_position_and_name(arguments: Arguments, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A step's arguments, given by name, as it is called with them."""
    parameters = arguments.signature.parameters
    ordered = {n: values[n] for n in parameters if n in values}
    rest = {n: v for n, v in values.items() if n not in parameters}
    if rest:
        ordered[next(n for n, p in parameters.items() if p.kind is p.VAR_KEYWORD)] = rest
    bound = inspect.BoundArguments(arguments.signature, ordered)  # type: ignore[arg-type]
    return bound.args, bound.kwargs
