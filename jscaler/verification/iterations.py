"""What a jaxpr that moves elements, or joins two values, does in each iteration of a loop."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import dtype, shape
from jscaler.errors import VerificationError
from jscaler.ir.mask import Combiner
from jscaler.lax_primitives import known
from jscaler.verification.interpret import Interpreter
from jscaler.verification.symbols import Patterns, Symbolic


def ids(sizes: Sequence[int]) -> np.ndarray:
    """The numbers of the elements of an array."""
    return np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes)


def only_moves(jaxpr: core.Jaxpr) -> bool:
    """Whether ``jaxpr`` moves elements, to places that it works out of whole numbers, and does nothing else."""

    def is_place(eqn: core.JaxprEqn) -> bool:
        return all(not shape(v) and dtype(v).kind in "biu" for v in eqn.outvars)

    return all(known(e.primitive).seen in ("same", "moves", "casts") or is_place(e) for e in jaxpr.eqns)


def joins(jaxpr: core.Jaxpr) -> Combiner | None:
    """How ``jaxpr`` joins its two operands, if that is all it does; in more bits perhaps."""
    rest = [e for e in jaxpr.eqns if known(e.primitive).seen != "casts"]
    if len(jaxpr.invars) != 2 or len(rest) != 1 or known(rest[0].primitive).seen != "joins":
        return None
    casts = {e.outvars[0]: e.invars[0] for e in jaxpr.eqns if e is not rest[0]}
    joined = [casts.get(v, v) if isinstance(v, core.Var) else v for v in rest[0].invars]
    return known(rest[0].primitive).combiner if joined in ([*jaxpr.invars], [*jaxpr.invars][::-1]) else None


def adds_all(jaxpr: core.Jaxpr) -> bool:
    """Whether ``jaxpr`` adds up its operands, each once, and does nothing else."""
    read = [v for e in jaxpr.eqns for v in e.invars]
    made = [v for e in jaxpr.eqns for v in e.outvars]
    each = sorted(map(id, read)) == sorted(map(id, (*jaxpr.invars, *made[:-1])))
    return each and all(known(e.primitive).seen == "joins" and known(e.primitive).combiner == "add" for e in jaxpr.eqns)


def each_once(
    jaxpr: core.Jaxpr, args: Sequence[np.ndarray], count: int, places: Sequence[int], where: str
) -> np.ndarray:  # fmt: skip
    """Which elements ``jaxpr`` moves in each of ``count`` iterations: each once on a device, and all on some.

    Args:
        args: element numbers, and for scalars a number for each iteration.
        places: how many devices differ along each of its last operands.
    """
    read = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, core.Var)}
    own = [n if v in read else 1 for n, v in zip(places, jaxpr.invars[len(args) :], strict=True)]
    devices = np.indices(own).reshape(len(own), -1) if own else np.zeros((0, 1), int)
    total = count * devices.shape[1]
    patterns = Patterns(())
    given: list[Any] = []
    for atom, x in zip(jaxpr.invars, args, strict=False):
        if not shape(atom) and x.shape == (count,):
            given.append(np.tile(x, devices.shape[1]))
        else:
            cells = np.broadcast_to(x, (total, *x.shape))
            given.append(Symbolic(cells, np.broadcast_to(np.int32(patterns.whole), cells.shape)))
    given += [np.repeat(device.astype(np.int32), count) for device in devices]
    try:
        (result,) = Interpreter({"part": total}, patterns).run(jaxpr, given)
    except VerificationError as error:
        raise VerificationError(f"{where}: {str(error).replace('on devices', 'in iterations')}") from None
    found = result.element if isinstance(result, Symbolic) else np.full(result.shape, -1)
    size = max(x.size for x, atom in zip(args, jaxpr.invars, strict=False) if shape(atom))
    often = np.stack([np.bincount(x[x >= 0], minlength=size) for x in found.reshape(devices.shape[1], -1)])
    missing, twice = int((often == 0).all(0).sum()), int((often > 1).any(0).sum())
    if missing or twice or found.size < size:
        raise VerificationError(f"{where}: of {size} elements {missing} are left out, {twice} come more than once")
    return found


def parts_of(whole: np.ndarray, dim: int, blocks: int, parts: int, rows: int) -> np.ndarray | None:
    """The parts of ``whole``, one after another: of ``dim``, seen as (blocks, parts, rows)."""
    if whole.shape[dim] != blocks * parts * rows:
        return None
    seen = whole.reshape((*whole.shape[:dim], blocks, parts, rows, *whole.shape[dim + 1 :]))
    return np.moveaxis(seen, dim + 1, 0).reshape((parts, *whole.shape[:dim], blocks * rows, *whole.shape[dim + 1 :]))
