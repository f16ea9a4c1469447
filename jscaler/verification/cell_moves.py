"""Equations that only move cells, on stacked local arrays (axis 0 is the device): one rule serves numbers and symbols.

A rule takes the equation, its data operands, and its index operands (concrete, stacked as well).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import evaluate, make_jaxpr, shape
from jscaler.errors import VerificationError
from jscaler.lax_primitives import known
from jscaler.verification.symbols import spread

Arrays = Sequence[np.ndarray]


def _reshape(eqn: Any, data: Arrays, index: Arrays) -> Arrays:
    assert eqn.params.get("dimensions") is None
    return [_seen_as(data[0], eqn.params["new_sizes"])]


def _seen_as(x: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """``x`` with dims of ``sizes``; those that are broadcast stay so, where they become dims of their own."""
    if not x.size:
        return x.reshape(len(x), *sizes)
    small: list[int] = []
    cut: list[slice] = [slice(None)]
    dims, new = list(range(1, x.ndim)), list(sizes)
    while dims or new:  # the fewest dims that become as many elements as the fewest new ones
        mine, its = [dims.pop(0)] if dims else [], [new.pop(0)] if new else []
        while (a := math.prod(x.shape[d] for d in mine)) != (b := math.prod(its)):
            if a < b:
                mine.append(dims.pop(0))
            else:
                its.append(new.pop(0))
        flat = all(x.strides[d] == 0 for d in mine)
        cut += [slice(0, 1) if flat else slice(None)] * len(mine)
        small += [1] * len(its) if flat else its
    return np.broadcast_to(x[tuple(cut)].reshape(len(x), *small), (len(x), *sizes))


def _transpose(eqn: Any, data: Arrays, index: Arrays) -> Arrays:
    return [data[0].transpose(0, *(p + 1 for p in eqn.params["permutation"]))]


def _squeeze(eqn: Any, data: Arrays, index: Arrays) -> Arrays:
    return [data[0].reshape(len(data[0]), *shape(eqn.outvars[0]))]


def _broadcast(eqn: Any, data: Arrays, index: Arrays) -> Arrays:
    sizes = eqn.params["shape"]
    dims = dict(zip(eqn.params["broadcast_dimensions"], data[0].shape[1:], strict=True))
    spaced = data[0].reshape(len(data[0]), *(dims.get(d, 1) for d in range(len(sizes))))
    return [np.broadcast_to(spaced, (len(data[0]), *sizes))]


def _slice(eqn: Any, data: Arrays, index: Arrays) -> Arrays:
    start, stop = eqn.params["start_indices"], eqn.params["limit_indices"]
    step = eqn.params["strides"] or (1,) * len(start)
    return [data[0][(slice(None), *map(slice, start, stop, step))]]


def _concatenate(eqn: Any, data: Arrays, index: Arrays) -> Arrays:
    return [np.concatenate(data, eqn.params["dimension"] + 1)]


def _pad(eqn: Any, data: Arrays, index: Arrays) -> Arrays:
    operand, value = data
    sizes = shape(eqn.outvars[0])
    out = np.broadcast_to(value.reshape(-1, *[1] * len(sizes)), (len(operand), *sizes)).copy()
    read, write = [np.arange(len(operand))], [np.arange(len(operand))]
    for size, new, (low, _, inner) in zip(operand.shape[1:], sizes, eqn.params["padding_config"], strict=True):
        at = low + np.arange(size) * (inner + 1)
        inside = np.flatnonzero((at >= 0) & (at < new))
        read.append(inside)
        write.append(at[inside])
    out[np.ix_(*write)] = operand[np.ix_(*read)]
    return [out]


def _starts(index: Arrays, sizes: Sequence[int], window: Sequence[int]) -> np.ndarray:
    """Per device the start in each dim, clamped into the array as XLA does."""
    return np.stack([np.clip(i, 0, size - w) for i, size, w in zip(index, sizes, window, strict=True)], -1)


def beyond(eqn: Any, data: Arrays, index: Arrays) -> np.ndarray:
    """For each device whether a dynamic slice or update leaves the array, so that XLA would shift it back."""
    if eqn.primitive.name not in ("dynamic_slice", "dynamic_update_slice") or not index:
        return np.zeros(len(data[0]), bool)
    window = eqn.params["slice_sizes"] if eqn.primitive.name == "dynamic_slice" else data[1].shape[1:]
    starts = np.stack([i.astype(np.int64) for i in index], -1)
    return (starts != _starts(index, data[0].shape[1:], window)).any(-1)


def _dynamic_slice(eqn: Any, data: Arrays, index: Arrays) -> Arrays:
    window = eqn.params["slice_sizes"]
    if not window:
        return [data[0]]
    starts = _starts(index, data[0].shape[1:], window)
    if (starts == starts[0]).all():
        return [data[0][(slice(None), *(slice(s, s + w) for s, w in zip(starts[0], window, strict=True)))]]
    if all(stride == 0 for stride in data[0].strides[1:]):  # one value on each device
        return [data[0][(slice(None), *map(slice, window))]]
    flat = [stride == 0 for stride in data[0].strides[1:]]  # wherever these begin, it is the same
    few = data[0][(slice(None), *(slice(0, 1) if f else slice(None) for f in flat))]
    windows = (
        tuple(slice(0, 1) if f else slice(s, s + w) for s, w, f in zip(at, window, flat, strict=True)) for at in starts
    )
    made = np.stack([row[at] for row, at in zip(few, windows, strict=True)])
    return [np.broadcast_to(made, (len(made), *window))]


def _dynamic_update_slice(eqn: Any, data: Arrays, index: Arrays) -> Arrays:
    operand, update = data
    out = operand.copy()
    starts = _starts(index, operand.shape[1:], update.shape[1:]) if index else np.zeros((len(operand), 0), int)
    for row, new, at in zip(range(len(out)), update, starts, strict=True):
        out[(row, *(slice(s, s + w) for s, w in zip(at, new.shape, strict=True)))] = new
    return [out]


def _select(eqn: Any, data: Arrays, index: Arrays) -> Arrays:
    which = index[0].astype(int).reshape(index[0].shape + (1,) * (data[0].ndim - index[0].ndim))
    return [choose(np.broadcast_to(which, data[0].shape), data)]


def choose(which: np.ndarray, cases: Arrays) -> np.ndarray:
    """``cases[which]``, cell by cell."""
    if which.size and (first := int(which.flat[0])) == which.max() == which.min():
        return cases[first]

    def chosen(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
        return functools.reduce(lambda rest, k: np.where(which == k, cases[k], rest), range(1, len(cases)), cases[0])

    return spread(chosen, which, *cases)


def _by_position(eqn: Any, data: Arrays, index: Arrays) -> Arrays:
    """Any move, a gather say: run it on the numbers of the cells, then move the cells accordingly."""
    starts = np.cumsum([0, *(int(np.prod(d.shape[1:])) for d in data)])
    numbers = [
        np.arange(a, b, dtype=np.int32).reshape(d.shape[1:]) for d, a, b in zip(data, starts, starts[1:], strict=False)
    ]
    params = {**eqn.params, "fill_value": -1} if "fill_value" in eqn.params else eqn.params
    flat = np.concatenate([d.reshape(len(d), -1) for d in data], 1)
    made_at: dict[bytes, Arrays] = {}
    rows = []
    for device in range(len(flat)):
        at = [i[device] for i in index]
        key = b"".join(i.tobytes() for i in at)
        if key not in made_at:
            given, others = iter(numbers), iter(at)
            args = [next(given if i in _data(eqn) else others) for i in range(len(eqn.invars))]
            found = eqn.primitive.bind(*args, **params)
            made_at[key] = [np.asarray(x) for x in (found if eqn.primitive.multiple_results else [found])]
        if any((moved < 0).any() for moved in made_at[key]):
            raise VerificationError(f"{eqn.primitive.name} reads out of bounds")
        rows.append([flat[device][moved] for moved in made_at[key]])
    return [np.stack(column) for column in zip(*rows, strict=True)]


Rule = Callable[[Any, Arrays, Arrays], Arrays]
# Moves that numpy does at once for all devices.
AT_ONCE: dict[str, Rule] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "concatenate": _concatenate,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "select_n": _select,
}


def move_of(primitive: core.Primitive) -> Rule:
    """How a primitive moves cells, or leaves them where they are."""
    if known(primitive).seen == "same":
        return lambda eqn, data, index: data
    return AT_ONCE.get(primitive.name, _by_position)


def concrete(eqn: Any, args: Arrays, count: int, like: Any) -> Arrays:
    """An equation of concrete values on ``count`` devices; worked out once where all have the same."""
    one = known(eqn.primitive)
    if one.seen == "same" or one.name in AT_ONCE:
        return move_of(eqn.primitive)(eqn, *operands(eqn, args))
    if one.numpy is not None and len({a.shape for a in args}) == 1:  # everything else is run by JAX
        return [spread(one.numpy, *args).astype(eqn.outvars[0].aval.dtype, copy=False)]
    if all(a.strides[0] == 0 or len(a) == 1 for a in args):
        return [np.broadcast_to(r[None], (count, *r.shape)) for r in _eager(eqn, [a[0] for a in args], like)]
    rows = [_eager(eqn, [a[device] for a in args], like) for device in range(len(args[0]))]
    return [np.stack(column) for column in zip(*rows, strict=True)]


def operands(eqn: Any, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The data and the index operands of a move."""
    which = _data(eqn)
    return [args[i] for i in which], [a for i, a in enumerate(args) if i not in which]


def _data(eqn: Any) -> Sequence[int]:
    return known(eqn.primitive).data(len(eqn.invars))


def _eager(eqn: Any, args: Arrays, like: Any) -> list[np.ndarray]:
    """The equation's results by JAX itself, on the CPU."""
    variables = [core.Var(a.aval) for a in eqn.invars]
    alone = make_jaxpr([eqn.replace(invars=variables)], variables, eqn.outvars, like)
    with jax.default_device(jax.devices("cpu")[0]):
        return [np.asarray(r) for r in evaluate(alone, args)]
