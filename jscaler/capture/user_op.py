"""``@jscaler.op``: a function of arrays that stays one op of its own, with the rule that its author wrote.

It binds a primitive of ours that holds the function. Under plain ``jax.jit``, ``vmap``, ``grad`` and ``jvp`` the
primitive is the function; a plan splits it by the rule, and a part is the function traced again at the part's shapes.
That is the only way to split what cannot be looked into: a Pallas kernel, a ``custom_vjp``.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jscaler.capture.jaxprs import open_jaxpr, shape, shape_struct
from jscaler.capture.op_rule import Matched, OpRule, as_rule
from jscaler.errors import CaptureError
from jscaler.ir.mask import Combiner
from jscaler.lax_primitives import Spec

op_p = core.Primitive("jscaler_op")
op_p.multiple_results = True


def call_spec(eqn: core.JaxprEqn) -> Spec | None:
    """The spec of a call of a user's op; None for any other equation."""
    if eqn.primitive is not op_p:
        return None
    return matched_rule(eqn).spec([shape(v) for v in eqn.invars], [shape(v) for v in eqn.outvars])


def matched_rule(eqn: core.JaxprEqn) -> Matched:
    """The rule of a call of a user's op, at its shapes."""
    return eqn.params["call"].matched([shape(v) for v in eqn.invars], [shape(v) for v in eqn.outvars])


class OpCall(Protocol):
    """What the primitive's equation holds: a hashable function of arrays that knows its rule, and itself at part shapes."""

    def __call__(self, *arrays: Any) -> list[Any]: ...

    def at(self, parts: Mapping[str, int]) -> "OpCall":
        """The function of one part, where each factor of ``parts`` is cut in so many."""
        ...

    def matched(self, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> Matched:
        """The rule at these shapes; raises RuleError where it does not fit."""
        ...


@dataclass(frozen=True)
class UserCall:
    """A user's function with its static keyword arguments.

    A keyword argument with the name of a factor is that factor's size (``num_heads`` in ``b s (num_heads d)``): a part
    gets its own.
    """

    fun: Callable[..., Any]
    static: tuple[tuple[str, Any], ...]
    rule: OpRule

    @property
    def name(self) -> str:
        return getattr(self.fun, "__name__", type(self.fun).__name__)

    def __call__(self, *arrays: Any) -> list[Any]:
        out = self.fun(*arrays, **dict(self.static))
        results = out if isinstance(out, (tuple, list)) else [out]
        return [_array(x, f"'{self.name}': result {i}") for i, x in enumerate(results)]

    def at(self, parts: Mapping[str, int]) -> "UserCall":
        static = tuple((k, v // parts[k] if self._is_size(k, v) and k in parts else v) for k, v in self.static)
        return dataclasses.replace(self, static=static)

    def matched(self, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]] | None = None) -> Matched:
        sizes = {k: v for k, v in self.static if self._is_size(k, v)} | dict(self.rule.sizes)
        rule = dataclasses.replace(self.rule, sizes=sizes) if sizes else self.rule
        return rule.match(operands, results, f"'{self.name}'")

    def _is_size(self, name: str, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and name in self.rule.names


def op(
    rule: str | OpRule,
    *,
    blocked: str = "",
    reduce: Mapping[str, Combiner] | None = None,
    sizes: Mapping[str, int] | None = None,
    linear: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function of arrays one op, to be split as ``rule`` says.

    Args:
        rule: words for the dims of its operands and results, like an einsum; see `OpRule`. A factor that no result
            carries is a reduction: the parts give summands.
        blocked: factors that the function does not treat index by index, such as the keys of an attention;
            `jscaler.verify_rule` finds what was forgotten.
        reduce, sizes, linear: as for `OpRule`.

    The function takes arrays by position, and hashable static values by keyword; it returns an array or a tuple of
    arrays, reads no other traced value, and must work at part shapes. Its backward, ``jax.vjp`` at part shapes (custom
    rules intact), is split by the same words: the gradient of an operand that lacks a factor is a summand of it.

    Raises:
        RuleError: the rule cannot be read; at a call, it does not fit the shapes.
        CaptureError: at a call, the function reads a traced value that is not an argument.

    Example:
        >>> @jscaler.op("b s h, h o -> b s o")
        ... def project(x, kernel):
        ...     return x @ kernel
        >>> project(jnp.ones((2, 3, 4)), jnp.ones((4, 5))).shape
        (2, 3, 5)
    """
    read = as_rule(rule, blocked, reduce, sizes, linear)

    def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
        name = getattr(fun, "__name__", type(fun).__name__)

        @functools.wraps(fun)
        def wrapped(*arrays: Any, **static: Any) -> Any:
            call = UserCall(fun, tuple(sorted(static.items())), read)
            try:
                hash(call)
            except TypeError as error:
                raise TypeError(f"'{name}': arrays go by position; keyword arguments are static and hashable") from error
            values = [_array(x, f"'{name}': argument {i}") for i, x in enumerate(arrays)]
            call.matched([x.shape for x in values])
            results = op_p.bind(*values, call=call)
            return results[0] if len(results) == 1 else tuple(results)

        return wrapped

    return decorate


def _array(value: Any, what: str) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{what} is a {type(value).__name__}, and no array: an op takes arrays by position, static values by keyword, "
            "and returns an array or a tuple of arrays"
        ) from error


def traced(call: Callable[..., Any], avals: Sequence[Any]) -> tuple[core.Jaxpr, list[Any]]:
    """The jaxpr of a call and its constants; raises CaptureError where it reads a traced value."""
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(call)(*map(shape_struct, avals)))
    for value in consts:
        if isinstance(value, jax.core.Tracer):
            raise CaptureError(
                f"'{getattr(call, 'name', call)}' reads a traced value {jax.typeof(value)} that is not an argument, so its "
                "rule says nothing of it: pass it as one, with words of its own"
            )
    return jaxpr, consts


def _abstract(*avals: Any, call: OpCall) -> tuple[list[Any], Any]:
    jaxpr, _ = traced(call, avals)
    call.matched([a.shape for a in avals], [shape(v) for v in jaxpr.outvars])
    return [v.aval for v in jaxpr.outvars], jaxpr.effects


def _run(*args: Any, call: OpCall) -> list[Any]:
    return call(*args)


def _run_eagerly(*args: Any, call: OpCall) -> list[Any]:
    results = call(*args)
    call.matched([x.shape for x in args], [x.shape for x in results])  # as the abstract evaluation does
    return results


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: OpCall) -> Any:
    dense = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(lambda *xs: call(*xs), tuple(primals), dense)


def _transpose(cotangents: Sequence[Any], *args: Any, call: OpCall) -> list[Any]:
    linear = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]

    def of_linear(*values: Any) -> list[Any]:
        full = list(args)
        for i, value in zip(linear, values, strict=True):
            full[i] = value
        return call(*full)

    transposed = jax.linear_transpose(of_linear, *(shape_struct(args[i].aval) for i in linear))
    dense = [ad.instantiate_zeros(c) for c in cotangents]
    found = dict(zip(linear, transposed(dense), strict=True))
    return [found.get(i) for i in range(len(args))]


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, call: OpCall) -> tuple[Any, list[int]]:
    names: dict[str, Any] = {"axis_name": axis.name} if isinstance(axis.name, str) else {}
    results = jax.vmap(lambda *xs: call(*xs), in_axes=tuple(dims), axis_size=axis.size, **names)(*args)
    return results, [0] * len(results)


op_p.def_impl(_run_eagerly)
op_p.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[op_p] = _jvp
ad.primitive_transposes[op_p] = _transpose
batching.fancy_primitive_batchers[op_p] = _batch
mlir.register_lowering(op_p, mlir.lower_fun(_run, multiple_results=True))
