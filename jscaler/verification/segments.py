"""What goes from segment to segment is taken as it was left, and crosses from the one layout to the other."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jscaler.errors import VerificationError
from jscaler.ir import PTensor
from jscaler.ir.mask import Mask
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize import DeviceMesh, Layout
from jscaler.materialize.crossing import Crossing

T = TypeVar("T")


def check_values(step: StepPlan) -> dict[int, PTensor]:
    """The values that go from segment to segment, by number.

    Raises:
        VerificationError: one is taken as another tensor, or in another layout, than it was left.
    """
    programs = [segment.program for segment in step.segments]
    left: dict[int, Layout] = {}
    for program in programs:
        left.update(zip(program.exports, (layout for _, layout in _last(program.outputs, program.exports)), strict=True))
    tensors: dict[int, PTensor] = {}
    tensors.update(_of_loop(step, left))
    for transfer in step.transfers:
        tensors.update({transfer.source: transfer.tensor, transfer.target: transfer.tensor})
        if left.get(transfer.source) != transfer.crossing.source:
            raise VerificationError(f"'{transfer.tensor.name}' crosses from another layout than it was left in")
        left[transfer.target] = transfer.crossing.target
    for program in programs:
        ends = _last(program.tensors, program.imports), _last(program.inputs, program.imports)
        for value, tensor, (_, layout) in zip(program.imports, *ends, strict=True):
            if left.get(value, layout) != layout or tensors.setdefault(value, tensor) != tensor:
                raise VerificationError(f"'{tensor.name}' is taken from another segment as it was not left there")
            if value not in left and (step.spanning is None or value not in step.spanning.indices):
                raise VerificationError(f"'{tensor.name}' is taken from another segment, and none leaves it")
    return tensors


def _of_loop(step: StepPlan, left: dict[int, Layout]) -> dict[int, PTensor]:
    """What a loop over groups carries, and stacks; its layouts go to ``left``. A carry comes as an iteration takes it."""
    if step.spanning is None:
        return {}
    loop, tensors = step.spanning.loop, dict[int, PTensor]()
    laid = step.completed.loops[loop.name]
    for carry, values, layout in zip(loop.carries, step.spanning.carries, laid.carries, strict=True):
        for value, tensor in ((values.init, carry.init), (values.out, carry.out)):
            if left.get(value) != layout:
                raise VerificationError(
                    f"loop '{loop.name}', '{tensor.name}': it is carried in another layout than it is left in"
                )
        left.update({values.inside: layout, values.final: layout})
        pairs = zip((values.init, values.inside, values.out, values.final), carry.tensors, strict=True)
        tensors.update(pairs)
    for y, values, layout in zip(loop.ys, step.spanning.stacks, laid.ys, strict=True):
        if left.get(values.piece) != layout:
            raise VerificationError(
                f"loop '{loop.name}', '{y.slice.name}': it is stacked in another layout than it is left in"
            )
        left[values.stack] = layout.stacked(loop.length)
        tensors.update({values.piece: y.slice, values.stack: y.stack})
    return tensors


def _last(items: Sequence[T], like: Sequence[object]) -> Sequence[T]:
    return items[len(items) - len(like) :]


def hop_masks(crossing: Crossing) -> tuple[DeviceMesh, tuple[list[Mask | None], list[Mask | None]]]:
    """A mesh of both groups, and what each device holds before and after."""
    mesh = DeviceMesh(crossing.devices, (("x", len(crossing.devices)),))

    def masks(layout: Layout) -> list[Mask | None]:
        at = {device: position for position, device in enumerate(layout.mesh.devices)}
        return [layout.mask(at[device]) if device in at else None for device in mesh.devices]

    return mesh, (masks(crossing.source), masks(crossing.target))


def number_like(dtype: Any) -> Any:
    """``dtype``; for keys one that has zeros: only where elements go is looked at."""
    return jnp.dtype("uint32") if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else dtype
