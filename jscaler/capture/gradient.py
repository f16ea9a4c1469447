"""``jscaler.value_and_grad``: like JAX's, but a plan can see the forward program inside it.

It binds a primitive of ours that holds the loss function's jaxpr. Under plain ``jax.jit`` and ``grad`` the primitive
stands for ``jax.value_and_grad`` of that jaxpr, ``jax.vmap`` makes it one gradient of all rows' losses, and
``jscaler.parallelize`` opens it into ops.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jscaler.capture.jaxprs import anonymous_info, open_jaxpr
from jscaler.errors import GradientError, shown

value_and_grad_p = core.Primitive("jscaler_value_and_grad")
value_and_grad_p.multiple_results = True


def value_and_grad(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """``jax.value_and_grad`` that ``jscaler.parallelize`` can split, place and order.

    Args:
        fun: a function of pytrees to a scalar, or to ``(scalar, aux)`` with ``has_aux``. Arguments that are not
            arrays (flags, Python numbers) are passed to it as they are.
        argnums: which positional arguments to differentiate.
        has_aux: whether ``fun`` returns auxiliary data next to the scalar.

    Returns:
        A function with ``fun``'s arguments that returns ``(value, gradients)``, or ``((value, aux), gradients)``.

    Raises:
        GradientError: a differentiated leaf is not real floating point, or the value is not a real scalar.

    Example:
        >>> jscaler.value_and_grad(lambda x: x ** 2)(3.0)
        (Array(9., dtype=float32, weak_type=True), Array(6., dtype=float32, weak_type=True))
    """
    given = tuple(argnums) if isinstance(argnums, Iterable) else (argnums,)
    if not callable(fun) or not all(isinstance(n, (int, np.integer)) for n in given):
        raise GradientError(
            f"value_and_grad takes a function and the numbers of its arguments, not {shown(fun)} and {shown(argnums)}"
        )

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        nums = _positions(args, given)
        wanted = _differentiated(args, nums)
        dynamic = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype") or i in wanted]

        def flat_fun(*values: Any) -> list[Any]:
            nonlocal out_tree
            full = list(leaves)
            for i, value in zip(dynamic, values, strict=True):
                full[i] = value
            call_args, call_kwargs = jax.tree.unflatten(tree, full)
            out = fun(*call_args, **call_kwargs)
            if has_aux and not (isinstance(out, tuple) and len(out) == 2):
                raise GradientError(
                    f"with has_aux=True the loss function returns a pair (value, aux); it returned {type(out).__name__}"
                )
            value, aux = out if has_aux else (out, ())
            _check_scalar(value)
            flat, out_tree = jax.tree.flatten((value, aux))
            return flat

        out_tree: Any = None
        values = [leaves[i] for i in dynamic]
        jaxpr, consts = open_jaxpr(jax.make_jaxpr(flat_fun)(*values))
        # What the loss closes over (arrays, tracers of an outer trace) becomes operands, so that nothing is hidden.
        invars = [*jaxpr.constvars, *jaxpr.invars]
        info = anonymous_info(jaxpr, len(invars), len(jaxpr.outvars))
        hoisted = core.Jaxpr([], invars, jaxpr.outvars, jaxpr.eqns, jaxpr.effects, info)
        wrt = tuple(len(consts) + position for position, i in enumerate(dynamic) if i in wanted)
        results = value_and_grad_p.bind(*consts, *map(jnp.asarray, values), jaxpr=core.ClosedJaxpr(hoisted, []), wrt=wrt)
        num_out = out_tree.num_leaves
        value, aux = jax.tree.unflatten(out_tree, results[:num_out])
        gradients = dict(zip([i for i in dynamic if i in wanted], results[num_out:], strict=True))
        trees = _gradient_trees(args, nums, gradients)
        return (value, aux) if has_aux else value, trees[0] if isinstance(argnums, int) else tuple(trees)

    return wrapped


def grad(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """``jax.grad`` that a plan can see into.

    Args:
        fun, argnums, has_aux: as for `value_and_grad`.

    Returns:
        A function with ``fun``'s arguments that returns the gradients, or ``(gradients, aux)``.

    Raises:
        GradientError: as `value_and_grad`.

    Example:
        >>> jscaler.grad(lambda x: x ** 2)(3.0)
        Array(6., dtype=float32, weak_type=True)
    """
    with_value = value_and_grad(fun, argnums, has_aux)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, gradients = with_value(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return wrapped


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, complex)) or hasattr(leaf, "dtype")


def _positions(args: tuple[Any, ...], nums: tuple[int, ...]) -> tuple[int, ...]:
    """``argnums`` counted from the front."""
    if bad := [n for n in nums if not -len(args) <= n < len(args)]:
        raise GradientError(f"argnums {bad} with {len(args)} positional arguments; legal: 0 to {len(args) - 1}")
    return tuple(n % len(args) for n in nums)


def _differentiated(args: tuple[Any, ...], nums: tuple[int, ...]) -> set[int]:
    """Flat leaf indices of the differentiated arguments; they come first in the flattened ``(args, kwargs)``."""
    found, start = set(), 0
    for position, arg in enumerate(args):
        leaves = jax.tree_util.tree_leaves_with_path(arg)
        if position in nums:
            for path, leaf in leaves:
                if not _is_array(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                    kind = getattr(leaf, "dtype", type(leaf).__name__)
                    where = f"args[{position}]{jax.tree_util.keystr(path)}"
                    keep = "; keep its parts as two real leaves, put together in the loss by jax.lax.complex"
                    keep = keep if _is_array(leaf) and jnp.iscomplexobj(leaf) else ""
                    raise GradientError(f"{where} is {kind}: gradients are taken of real floating-point leaves only{keep}")
            found.update(range(start, start + len(leaves)))
        start += len(leaves)
    return found


def _gradient_trees(args: tuple[Any, ...], nums: tuple[int, ...], gradients: dict[int, Any]) -> list[Any]:
    starts, start = [], 0
    for arg in args:
        starts.append(start)
        start += len(jax.tree.leaves(arg))
    trees = []
    for n in nums:
        tree = jax.tree.structure(args[n])
        trees.append(jax.tree.unflatten(tree, [gradients[starts[n] + i] for i in range(tree.num_leaves)]))
    return trees


def _check_scalar(value: Any) -> None:
    if not _is_array(value):
        hint = "; pass has_aux=True for a pair (value, aux)" if isinstance(value, tuple) else ""
        raise GradientError(
            f"value_and_grad needs a real scalar from the loss function; it returned {type(value).__name__}{hint}"
        )
    aval = jax.typeof(value)
    if aval.shape != () or not jnp.issubdtype(aval.dtype, jnp.floating):
        raise GradientError(f"value_and_grad needs a real scalar from the loss function; it returned {aval}")


def apply(*args: Any, jaxpr: Any, wrt: tuple[int, ...]) -> list[Any]:
    """What the primitive means: loss outputs, then the gradients of the first output."""

    def loss(diff: list[Any]) -> tuple[Any, list[Any]]:
        full = list(args)
        for i, value in zip(wrt, diff, strict=True):
            full[i] = value
        value, *aux = core.jaxpr_as_fun(jaxpr)(*full)
        return value, aux

    (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)([args[i] for i in wrt])
    return [value, *aux, *gradients]


def _abstract(*avals: Any, jaxpr: Any, wrt: tuple[int, ...]) -> tuple[list[Any], Any]:
    inner, _ = open_jaxpr(jaxpr)
    return [v.aval for v in inner.outvars] + [avals[i] for i in wrt], inner.effects


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    dense = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(functools.partial(apply, **params), tuple(primals), dense)


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], jaxpr: Any, wrt: tuple[int, ...]) -> tuple[Any, list[int]]:
    """One gradient of the sum of all rows' losses: with respect to what each row has for itself, it is each row's own."""
    names: dict[str, Any] = {"axis_name": axis.name} if isinstance(axis.name, str) else {}
    operands = list(args)
    for i in wrt:
        operands[i] = jax.vmap(lambda x: x, in_axes=(dims[i],), axis_size=axis.size)(args[i])
    mapped = [0 if i in wrt else dim for i, dim in enumerate(dims)]
    losses = jax.vmap(core.jaxpr_as_fun(jaxpr), in_axes=tuple(mapped), axis_size=axis.size, **names)

    def summed(*values: Any) -> list[Any]:
        each, *aux = losses(*values)
        return [each.sum(), each, *aux]

    program = jax.make_jaxpr(summed)(*operands)
    _, *results = value_and_grad_p.bind(*operands, jaxpr=program, wrt=wrt)
    return results, [0] * len(results)


def _impl(*args: Any, **params: Any) -> Any:
    return jax.jit(functools.partial(apply, **params))(*args)


value_and_grad_p.def_impl(_impl)
value_and_grad_p.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[value_and_grad_p] = _jvp
batching.fancy_primitive_batchers[value_and_grad_p] = _batch
mlir.register_lowering(value_and_grad_p, mlir.lower_fun(apply, multiple_results=True))
