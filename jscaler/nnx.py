"""Gradients of Flax nnx modules that a plan can see into: ``jscaler.nnx.value_and_grad`` and ``jscaler.nnx.grad``.

They are used like ``flax.nnx``'s. The arguments are split into arrays and a static graph, the loss becomes a pure
function of the arrays for ``jscaler.value_and_grad``, and what it changed on the way (running statistics, counts of
random keys) is written back into the caller's objects. A Variable that is shared has one gradient.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import jax

from jscaler.capture import gradient
from jscaler.errors import GradientError, shown
from jscaler.runtime import graph_nodes
from jscaler.runtime.graph_nodes import flax_nnx


def value_and_grad(
    f: Callable[..., Any] | None = None, *, argnums: Any = 0, has_aux: bool = False, holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """``flax.nnx.value_and_grad`` that ``jscaler.parallelize`` can split, place and order.

    Args:
        f: a function of nnx modules and pytrees to a scalar, or to ``(scalar, aux)`` with ``has_aux``. Without it a
            decorator is returned.
        argnums: which positional arguments to differentiate; an ``nnx.DiffState(argnum, filter)`` names the Variables
            of a module, which are ``nnx.Param`` by default.
        has_aux: whether ``f`` returns auxiliary data next to the scalar.
        holomorphic, allow_int: must be False: gradients are taken of real floating-point arrays.

    Returns:
        A function with ``f``'s arguments that returns ``(value, gradients)``, or ``((value, aux), gradients)``. The
        gradients of a module are an ``nnx.State``.

    Raises:
        GradientError: a differentiated leaf is not real floating point, or the value is not a real scalar.
        CaptureError: ``f`` changes more in a module than its arrays.

    Example:
        >>> from flax import nnx
        >>> linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> loss, grads = jscaler.nnx.value_and_grad(lambda m, x: m(x).mean())(linear, jnp.ones((4, 2)))
        >>> grads["kernel"].shape
        (2, 3)
    """
    if holomorphic or allow_int:
        raise GradientError(
            "gradients are taken of real floating-point arrays only: holomorphic and allow_int must be False"
        )
    if f is None:
        return functools.partial(value_and_grad, argnums=argnums, has_aux=has_aux)
    if not callable(f):
        raise GradientError(f"a gradient is taken of a function of nnx modules and arrays, not of {shown(f)}")
    fun, several = f, isinstance(argnums, Sequence)
    filters = _filters(argnums if several else (argnums,))

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(fun).bind(*args, **kwargs)
        return _Loss(fun, bound.args, bound.kwargs, has_aux).differentiate(filters, several)

    return wrapped


def grad(
    f: Callable[..., Any] | None = None, *, argnums: Any = 0, has_aux: bool = False, holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """``flax.nnx.grad`` that a plan can see into.

    Args:
        f, argnums, has_aux, holomorphic, allow_int: as for `value_and_grad`.

    Returns:
        A function with ``f``'s arguments that returns the gradients, or ``(gradients, aux)``.

    Raises:
        GradientError, CaptureError: as `value_and_grad`.

    Example:
        >>> from flax import nnx
        >>> linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> jscaler.nnx.grad(lambda m, x: m(x).mean())(linear, jnp.ones((4, 2)))["bias"].shape
        (3,)
    """
    if f is None:
        return functools.partial(grad, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic, allow_int=allow_int)
    with_value = value_and_grad(f, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic, allow_int=allow_int)

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, gradients = with_value(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return wrapped


def _filters(argnums: Sequence[Any]) -> dict[int, Any]:
    """Position -> which of its Variables are differentiated."""
    nnx = flax_nnx()
    found: dict[int, Any] = {}
    for entry in argnums:
        position, chosen = (entry.argnum, entry.filter) if isinstance(entry, nnx.DiffState) else (entry, nnx.Param)
        if not isinstance(position, Integral):
            raise GradientError(f"argnums are the numbers of arguments, or nnx.DiffState objects, not {shown(position)}")
        if position in found:
            raise GradientError(f"argnum {position} is repeated in argnums")
        found[int(position)] = chosen
    return found


class _Loss:
    """One call of a loss function: its arguments, nnx objects apart from the rest."""

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], has_aux: bool):
        self.fun, self.has_aux = fun, has_aux
        self.num_args = len(args)
        values = {**{str(i): v for i, v in enumerate(args)}, **kwargs}
        self.nodes = {k: v for k, v in values.items() if graph_nodes.holds_nodes(v)}
        self.plain = {k: v for k, v in values.items() if k not in self.nodes}
        self.graphdef, self.state = flax_nnx().split(self.nodes)

    def differentiate(self, filters: dict[int, Any], several: bool) -> Any:
        if bad := [n for n in filters if not -self.num_args <= n < self.num_args]:
            raise GradientError(f"argnums {bad} with {self.num_args} positional arguments; legal: 0 to {self.num_args - 1}")
        chosen = {str(n % self.num_args): f for n, f in filters.items()}
        wanted, rest = {}, {}
        for key, state in dict(self.state).items():
            wanted[key], rest[key] = _part(state, chosen[key]) if key in chosen else (flax_nnx().State({}), state)
        plain = {k: v for k, v in self.plain.items() if k in chosen}
        other = {k: v for k, v in self.plain.items() if k not in chosen}
        with_gradient = gradient.value_and_grad(self._pure, has_aux=True)
        (value, (aux, changes)), gradients = with_gradient((wanted, plain), rest, other)
        graph_nodes.update(self.nodes, dict(zip(self.changed, changes, strict=True)))
        found = {**{k: flax_nnx().State({}) for k in self.nodes}, **gradients[0], **gradients[1]}
        results = tuple(found[k] for k in chosen)
        return ((value, aux) if self.has_aux else value), results if several else results[0]

    def _pure(self, differentiated: Any, rest: Any, other: Any) -> Any:
        """The loss as a function of arrays; the second result is what a caller sees besides: aux, and changed arrays."""
        wanted, plain = differentiated
        state = flax_nnx().State({k: _joined(wanted[k], rest[k]) for k in wanted})
        before = _flat(state)  # merge may take over the Variables of the state: read them first
        nodes = flax_nnx().merge(self.graphdef, state)
        values = {**nodes, **plain, **other}
        args = [values.pop(str(i)) for i in range(self.num_args)]
        out = self.fun(*args, **values)
        if self.has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise GradientError(
                f"with has_aux=True the loss function returns a pair (value, aux); it returned {type(out).__name__}"
            )
        graphdef, state = flax_nnx().split(nodes)
        graph_nodes.check_structure(self.graphdef, graphdef, "the loss function")
        moved = [(path, new) for (path, old), (_, new) in zip(before, _flat(state), strict=True) if new is not old]
        self.changed = [path for path, _ in moved]
        value, aux = out if self.has_aux else (out, None)
        return value, (aux, [new for _, new in moved])


def _part(state: Any, chosen: Any) -> tuple[Any, Any]:
    """The differentiated part of one argument's state, and the rest; a bare Variable is differentiated as it is."""
    nnx = flax_nnx()
    return nnx.split_state(state, chosen, ...) if isinstance(state, nnx.State) else (state, nnx.State({}))


def _joined(first: Any, second: Any) -> Any:
    nnx = flax_nnx()
    if not isinstance(first, nnx.State):
        return first
    return nnx.merge_state(first, second) if isinstance(second, nnx.State) else second


def _flat(state: Any) -> list[tuple[tuple[Any, ...], jax.Array]]:
    """Path and raw array of every leaf."""
    nnx = flax_nnx()
    leaves = nnx.to_flat_state(state)
    return [(path, leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf) for path, leaf in leaves]
