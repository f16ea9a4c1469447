"""What is said of a step that fails while it runs: where, and by which op; and what of the state is lost.

An executable says little of itself: of a NaN only that there is one. So the block that failed runs once more, watched: its
values are those of the failed run, for under ``jax.debug_nans`` and ``jax.debug_infs`` nothing is donated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jscaler.capture.wishes import no_mesh
from jscaler.errors import BlockError, JscalerError, NotFiniteError, StateLostError
from jscaler.lower.emit import ValueWatch, emit_watched, physical_mesh
from jscaler.lower.flat_program import FlatLoop, Item
from jscaler.lower.instructions import microbatch_text
from jscaler.lower.segment import PlacedBlock, own_ops
from jscaler.lower.step_plan import StepPlan
from jscaler.runtime.devices import by_gloo
from jscaler.runtime.out_of_memory import is_out_of_memory, out_of_memory
from jscaler.tables.table import KINDS


def failure(
    step: StepPlan, devices: Sequence[Any], error: Exception, number: int, given: Sequence[Any], microbatches: Sequence[int]
) -> Exception:
    """What is raised in place of ``error``, with which block ``number`` of a step failed.

    Args:
        given: the leaves and imports that the block was run with.
        microbatches: which it was run for, in a loop over groups.
    """
    if isinstance(error, JscalerError):
        return error
    where = place_of(step, number, microbatches)
    if is_out_of_memory(error):
        return out_of_memory(step, where, error)
    kinds = asked_for()
    own = {devices[i].process_index for i in step.blocks[number].group.devices} == {jax.process_index()}
    if kinds and own:  # others may have seen nothing, and would not run it again
        found = first_not_finite(step, devices, number, given, kinds)
        if found:
            return NotFiniteError(f"{found}, in {where}")
    reason = str(error).strip().splitlines() or [""]
    told = f"{where} failed ({_ops(step, step.blocks[number])}): {type(error).__name__}: {reason[0]}"
    alone = "; the op that makes it is looked for where one process has all devices of the block: run the job in one"
    return BlockError(told + (alone if kinds and not own else ""))


def asked_for() -> list[str]:
    """What JAX is told to raise an error for, where a program makes it."""
    asked = {"NaN": jax.config.jax_debug_nans, "infinity": jax.config.jax_debug_infs}  # type: ignore[attr-defined]
    return [kind for kind in asked if asked[kind]]


def unchecked(moves: Callable[..., Any]) -> Callable[..., Any]:
    """``moves``, in front of blocks and between them: it makes no NaN; who makes or reads one that it moves is named."""

    def run(*args: Any) -> Any:
        if not asked_for():
            return moves(*args)
        with jax.debug_nans(False), jax.debug_infs(False):
            return moves(*args)

    return run


def place_of(step: StepPlan, number: int, microbatches: Sequence[int] = ()) -> str:
    """Which block it is, in a sentence: ``the backward block of stage 1 (devices 2 3), micro-batch 5 of 8``."""
    block = step.blocks[number]
    devices = f"device{'s' if len(block.group.devices) > 1 else ''} {' '.join(map(str, block.group.devices))}"
    if len(step.blocks) == 1:
        return f"the step on {devices}"
    names = step.instructions.names.get(number, ())
    does = " and ".join(dict.fromkeys(KINDS[kind].name for _, kind in names))
    stages = " and ".join(dict.fromkeys(str(stage) for stage, _ in names))
    what = f"the {does} block of stage {stages}" if names else step.block_name(number)
    if not microbatches or step.spanning is None:
        return f"{what} ({devices})"
    return f"{what} ({devices}), {microbatch_text(microbatches)} of {step.spanning.loop.parts}"


def _ops(step: StepPlan, block: PlacedBlock) -> str:
    """The first and the last op of a block that the user wrote, with their source lines."""
    paths = own_ops(step.graph, block)
    if not paths:
        return "no ops"
    shown = " to ".join(dict.fromkeys(_op(step, path) for path in (paths[0], paths[-1])))
    return f"{len(paths)} op{'s' if len(paths) > 1 else ''}, {shown}"


def _op(step: StepPlan, path: str) -> str:
    op = step.graph.by_path.get(path)
    return f"'{path}'" + (f" ({op.source})" if op is not None and op.source else "")


def first_not_finite(
    step: StepPlan, devices: Sequence[Any], number: int, given: Sequence[Any], kinds: Sequence[str]
) -> str:
    """Who makes the first value of ``kinds`` in a block, in a sentence; empty where nobody does.

    It is the first in the order of the block's program, of any device.
    """
    block = step.blocks[number]
    constants = dict(step.graph.constants)
    leaves = sum(t not in constants for t in block.takes)  # they come first
    arguments = [t.name for t in block.takes[:leaves]]
    arguments += [_tensor(block, v) for v in block.flat.inputs[len(block.takes) :]]

    def bad(value: Any) -> Any:
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return jnp.zeros((), bool)
        found = jnp.isnan(value) if "NaN" in kinds else jnp.zeros_like(value, bool)
        return jnp.any(found | jnp.isinf(value) if "infinity" in kinds else found)

    with no_mesh(), jax.debug_nans(False), jax.debug_infs(False):
        if any(x.is_deleted() for x in given if isinstance(x, jax.Array)):
            return ""
        for name, value in zip(arguments, given, strict=True):
            if bool(bad(value)):
                return f"'{name}' holds {_what(value, kinds)} already"
        watch = ValueWatch(bad)
        args = [*given[:leaves], *(constants[t] for t in block.takes[leaves:]), *given[leaves:]]
        run = emit_watched(block, physical_mesh(block.group, devices), watch, by_gloo(devices))
        said = jax.jit(run)(*args)
        said = [np.asarray(np.asarray(flags).any(axis=0)) for flags in said]  # on any device
    rows = ((places, var, flags) for (var, places, _), flags in zip(watch.seen, said, strict=True) if flags.any())
    found = min(((_moment(places, flags), i, places, var) for i, (places, var, flags) in enumerate(rows)), default=None)
    if found is None:
        return ""
    moment, _, places, var = found
    path, item = block.flat.origins.op.get(var), _item(block.flat.items, places)
    maker = f"op {_op(step, path)}" if path else f"what brings '{_tensor(block, var)}' to another layout"
    by = f", by {item.primitive.name}" if isinstance(item, core.JaxprEqn) else ""
    inside = f", in iteration {moment[1]} of its loop" if len(moment) > 1 else ""
    return f"{maker} makes the first {' or '.join(kinds)}{by}{inside}"


def _item(items: Sequence[Item], places: Sequence[int]) -> Item:
    item = items[places[0]]
    for place in places[1:]:
        assert isinstance(item, FlatLoop)
        item = item.items[place]
    return item


def _moment(places: tuple[int, ...], flags: np.ndarray) -> tuple[int, ...]:
    """When a value was bad first: places in the program and iterations in turn."""
    iterations = np.argwhere(flags)[0] if flags.ndim else ()
    return tuple(int(n) for pair in zip(places, iterations) for n in pair) + places[len(iterations) :]  # noqa: B905


def _tensor(block: PlacedBlock, var: core.Var) -> str:
    tensor = block.flat.origins.tensor.get(var)
    return tensor.name if tensor is not None else "a value of another block"


def _what(value: Any, kinds: Sequence[str]) -> str:
    return "a NaN" if "NaN" in kinds and bool(jnp.isnan(value).any()) else "an infinity"


def tell_lost(error: BaseException, names: Sequence[str], placed: Sequence[Any], donated: Sequence[int]) -> None:
    """Say which donated leaves a step that failed with ``error`` has taken.

    Raises:
        StateLostError: some are gone. Of an interrupt, which stays what it is, a note says so.
    """
    lost = [names[i] for i in donated if placed[i].is_deleted()]
    if not lost:
        return
    told = StateLostError(lost, len(donated), str(error) or type(error).__name__)
    if isinstance(error, Exception):
        raise told from error
    error.add_note(str(told))
