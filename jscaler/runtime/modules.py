"""A Flax module, linen or nnx, whose forward runs in parallel: what `jscaler.parallelize` makes of a module.

The forward is a step like any other: its arguments lie at ``batch/...``, so that ``data_parallel`` splits them all; what
is no array (a flag, a name) is a compile-time constant. Parameters are moved into the plan's layout once. Inside another
trace (a parallelized train step, ``jax.jit``, ``jax.grad``) the module is what it was: the plan around it decides.
"""

import dataclasses
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np

from jscaler.errors import CaptureError
from jscaler.runtime import graph_nodes
from jscaler.runtime.chunked_array import ChunkedArray, is_equivalent
from jscaler.runtime.dispatch import place

ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


@dataclasses.dataclass(frozen=True)
class Constants:
    """What of a call is no array, hashable: per argument its tree, and the leaves that are no arrays."""

    trees: tuple[tuple[str, Any, tuple[tuple[int, type, Any], ...]], ...]
    options: tuple[tuple[str, Any], ...] = ()

    def fill(self, signature: inspect.Signature, batch: Mapping[str, Any]) -> inspect.BoundArguments:
        """The arguments, with the arrays of ``batch`` in place."""
        values = {}
        for name, tree, constants in self.trees:
            arrays = iter(jax.tree.leaves(batch[name]))
            known = {i: value for i, _, value in constants}
            values[name] = tree.unflatten([known[i] if i in known else next(arrays) for i in range(tree.num_leaves)])
        return inspect.BoundArguments(signature, values)  # type: ignore[arg-type]


def divide(arguments: Mapping[str, Any], options: Iterable[tuple[str, Any]] = ()) -> tuple[dict[str, Any], Constants]:
    """A call's arguments as trees of arrays (None where a leaf is no array), and its constants."""
    batch, trees = {}, []
    for name, value in arguments.items():
        leaves, tree = jax.tree.flatten(value)
        constants = tuple((i, type(leaf), leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, ARRAYS))
        for _, kind, leaf in constants:
            _check_constant(name, kind, leaf)
        known = {i for i, _, _ in constants}
        batch[name] = tree.unflatten([None if i in known else leaf for i, leaf in enumerate(leaves)])
        trees.append((name, tree, constants))
    return batch, Constants(tuple(trees), tuple(options))


def _check_constant(name: str, kind: type, leaf: Any) -> None:
    try:
        hash(leaf)
    except TypeError:
        raise CaptureError(
            f"argument '{name}' of the module holds a {kind.__name__}, which is neither an array nor hashable"
        ) from None


def _method_signature(method: Callable[..., Any]) -> inspect.Signature:
    """The signature of an unbound method, without the module."""
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _bound(
    module: type, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """The arguments by name; a mistake names the module."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{module.__name__}{signature}: {error}") from None


def _traced(values: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


class Placed:
    """Arrays in a plan's layout, remembered by the array they were made of for as long as that one lives."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, Any], tuple[Any, jax.Array]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def place(self, leaf: Any, sharding: Any) -> Any:
        """``leaf`` under ``sharding``. Only jax arrays are remembered: a numpy array may change in place."""
        if not isinstance(leaf, (jax.Array, ChunkedArray)) or isinstance(leaf, jax.core.Tracer):
            return leaf
        if is_equivalent(leaf.sharding, sharding, leaf.ndim):
            return leaf
        key = (id(leaf), sharding)
        if key not in self._found:
            found = self._found
            forget = weakref.ref(leaf, lambda _: found.pop(key, None))
            self._found[key] = (forget, place(leaf, sharding))
        return self._found[key][1]


class LinenForward:
    """``apply`` of a linen module class under a plan."""

    def __init__(self, module: type, parallelize: Callable[[Callable[..., Any]], Any]):
        self.module = module
        self.placed = Placed()

        def forward(variables: Any, batch: Any, rngs: Any, constants: Constants) -> Any:
            options = dict(constants.options)
            instance = options.pop("module")
            bound = constants.fill(_method_signature(self._method(options["method"])), batch)
            return self.module.apply(instance, variables, *bound.args, rngs=rngs, **options, **bound.kwargs)

        forward.__name__ = self.module.__name__
        self.step = parallelize(forward)

    def apply(self, module: Any, variables: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if _traced((variables, args, kwargs)):
            return self.module.apply(module, variables, *args, **kwargs)
        call = self._call(module, variables, args, kwargs)
        compiled = self.step.compiled(call)
        return compiled.run(self._leaves(call, compiled), call.nodes)

    def lower(self, module: Any, variables: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.step.lower(*self._arguments(module, variables, args, kwargs))

    def place(self, module: Any, variables: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        call = self._call(module, variables, args, kwargs)
        leaves = self._leaves(call, self.step.compiled(call), remember=False)
        return jax.tree.unflatten(dict(call.trees)["variables"], leaves[: call.owners.count("variables")])

    def _leaves(self, call: Any, compiled: Any, remember: bool = True) -> list[Any]:
        """The call's leaves, those of the variables in the plan's layout."""
        placed = self.placed if remember else Placed()
        shardings = compiled.lowered.executable.in_shardings
        leaves = zip(call.leaves, call.owners, shardings, strict=True)
        return [placed.place(leaf, s) if owner == "variables" else leaf for leaf, owner, s in leaves]

    def _call(self, *given: Any) -> Any:
        return self.step.bind(*self._arguments(*given))

    def _arguments(self, module: Any, variables: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        kwargs = dict(kwargs)
        rngs = kwargs.pop("rngs", None)
        mutable = kwargs.pop("mutable", False)
        options = {
            "module": module,
            "method": kwargs.pop("method", None),
            "mutable": tuple(mutable) if isinstance(mutable, list) else mutable,
            "capture_intermediates": kwargs.pop("capture_intermediates", False),
        }
        for name, value in options.items():
            _check_constant(name, type(value), value)
        bound = _bound(self.module, _method_signature(self._method(options["method"])), args, kwargs)
        batch, constants = divide(bound.arguments, options.items())
        return variables, batch, rngs, constants

    def _method(self, method: Any) -> Callable[..., Any]:
        name = "__call__" if method is None else method
        return getattr(self.module, name) if isinstance(name, str) else getattr(name, "__func__", name)


def linen_class(module: type, parallelize: Callable[[Callable[..., Any]], Any]) -> type:
    """A subclass of a linen module class, of the same name, whose ``apply`` runs under a plan."""
    made = type(module.__name__, (module,), {"__module__": module.__module__, "__doc__": module.__doc__})
    made.__qualname__ = module.__qualname__
    forward = LinenForward(module, parallelize)

    def apply(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's method on ``variables``, in parallel; arguments and options as in linen.

        Variables given as whole arrays are moved into the plan's layout once, and remembered while they live.
        """
        return forward.apply(self, variables, args, kwargs)

    def place(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """``variables`` in the layout that ``apply`` with these arguments wants them in."""
        return forward.place(self, variables, args, kwargs)

    def lower(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """``apply`` captured, planned and lowered, not compiled; its ``.plan.explain()`` says what runs where."""
        return forward.lower(self, variables, args, kwargs)

    # set after the class is made: linen wraps what a class body holds as methods of the model
    for function in (apply, place, lower):
        function.__qualname__ = f"{made.__qualname__}.{function.__name__}"
        setattr(made, function.__name__, function)
    return made


def linen_instance(module: Any, parallelize: Callable[[Callable[..., Any]], Any]) -> Any:
    """A module with the fields of ``module``, whose ``apply`` runs under a plan."""
    if module.scope is not None:
        raise CaptureError("a bound linen module holds its variables: parallelize the unbound one, and give them to apply")
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init and f.name != "parent"}
    return linen_class(type(module), parallelize)(**fields)


class NnxForward:
    """``__call__`` of an nnx module class under a plan. Parameters move into its layout at the first call and stay."""

    def __init__(self, module: type, parallelize: Callable[[Callable[..., Any]], Any]):
        self.module = module
        self.signature = _method_signature(module.__call__)

        def forward(model: Any, batch: Any, constants: Constants) -> Any:
            bound = constants.fill(self.signature, batch)
            return module.__call__(model, *bound.args, **bound.kwargs)

        forward.__name__ = module.__name__
        self.step = parallelize(forward)

    def __call__(self, model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if _traced((args, kwargs, graph_nodes.flax_nnx().state(model))):
            return self.module.__call__(model, *args, **kwargs)
        return self.step(*self.arguments(model, args, kwargs))

    def lower(self, model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.step.lower(*self.arguments(model, args, kwargs))

    def arguments(self, model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        return model, *divide(_bound(self.module, self.signature, args, kwargs).arguments)


def nnx_class(module: type, parallelize: Callable[[Callable[..., Any]], Any]) -> type:
    """A subclass of an nnx module class, of the same name, whose ``__call__`` runs under a plan."""
    forward = NnxForward(module, parallelize)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, args, kwargs)

    def lower(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The call captured, planned and lowered, not compiled; its ``.plan.explain()`` says what runs where."""
        return forward.lower(self, args, kwargs)

    body = {"__call__": call, "lower": lower, "__module__": module.__module__, "__doc__": module.__doc__}
    made = type(module)(module.__name__, (module,), body)
    made.__qualname__ = module.__qualname__
    return made


def nnx_instance(module: Any, parallelize: Callable[[Callable[..., Any]], Any]) -> Any:
    """``module`` with a call that runs under a plan: another object with the very same attributes, new ones included."""
    made = object.__new__(nnx_class(type(module), parallelize))
    object.__setattr__(made, "__dict__", module.__dict__)
    return made


def parallel_module(target: Any, parallelize: Callable[[Callable[..., Any]], Any]) -> Any | None:
    """What `jscaler.parallelize` makes of a Flax module class or instance; None for anything else.

    Flax is imported already where there is one of its modules.
    """
    kinds = (("flax.linen", linen_class, linen_instance), ("flax.nnx", nnx_class, nnx_instance))
    for library, of_class, of_instance in kinds:
        base = getattr(sys.modules.get(library), "Module", None)
        if base is not None and isinstance(target, type) and issubclass(target, base):
            return of_class(target, parallelize)
        if base is not None and isinstance(target, base):
            return of_instance(target, parallelize)
    return None
