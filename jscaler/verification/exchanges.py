"""Proofs of exchanges: each is traced as it is emitted, and interpreted on all devices in lockstep; equal ones once.

A large exchange is proven on a smaller tensor (`verification.smaller`): the equations are the same, the rows are fewer.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core

from jscaler.capture.jaxprs import dtype as dtype_of
from jscaler.capture.jaxprs import shape as shape_of
from jscaler.errors import VerificationError
from jscaler.lower.emit_crossing import in_one_program
from jscaler.lower.positions import Positions
from jscaler.lower.program import Adapt, Extend
from jscaler.materialize import DeviceMesh
from jscaler.materialize.crossing import Crossing
from jscaler.materialize.edges import Edge
from jscaler.verification.arrival import Arrival
from jscaler.verification.collectives import COLLECTIVES
from jscaler.verification.extended import check_extended, extended
from jscaler.verification.flow import HeldSlot, emitted_exchange
from jscaler.verification.frames import Frame
from jscaler.verification.interpret import Interpreter
from jscaler.verification.local_programs import Local, trace_local
from jscaler.verification.segments import hop_masks, number_like
from jscaler.verification.smaller import (
    Ratios,
    layouts_of,
    ratios_of,
    smaller_adapter,
    smaller_crossing,
    smaller_layout,
    smaller_masks,
)
from jscaler.verification.symbols import Patterns, Symbolic

MOST_CELLS = 2**18  # of all devices' local arrays: beyond, exchanges are proven on smaller tensors
MOST_DIRECT = 2**23  # of those of which there is no smaller one, as they are
Proof = tuple[list[str], int]  # the collectives that an exchange runs; the elements that it puts in place, -1 if left out


@dataclass
class Exchanges:
    """The exchanges of one step that were traced and proven so far.

    Attributes:
        on_smaller: how many distinct ones were proven on a smaller tensor.
        left_out: those that could not be, by the tensor's name.
    """

    on_smaller: int = 0
    left_out: list[str] = field(default_factory=list)
    _traced: dict[Hashable, Local] = field(default_factory=dict)
    _proven: dict[Hashable, Proof] = field(default_factory=dict)
    _positions: dict[DeviceMesh, Positions] = field(default_factory=dict)

    @property
    def distinct(self) -> int:
        """How many different ones there were."""
        return sum(elements >= 0 for _, elements in self._proven.values())

    def traced(self, group: DeviceMesh, task: Adapt | Extend) -> tuple[Hashable, Local]:
        """A key that equal exchanges share on any group, and the program that one device runs."""
        if isinstance(task, Adapt):
            local, what = task.adapter.source.local_shape, (task.adapter, task.reduce_dtype)
        else:
            local, what = task.layout.local_shape, (task.layout, task.edges)
        struct = jax.ShapeDtypeStruct(local, task.tensor.dtype)
        key = group.axes, self._on(group).of(what), struct.dtype
        if key not in self._traced:
            self._traced[key] = trace_local(emitted_exchange(group, task), dict(group.axes), [struct])
        return key, self._traced[key]

    def _on(self, group: DeviceMesh) -> Positions:
        return self._positions.setdefault(group, Positions(group))

    def prove(self, group: DeviceMesh, task: Adapt | Extend, held: HeldSlot, wanted: HeldSlot, where: str) -> Proof:
        """Prove that an exchange turns what lies in its input slot into what is promised to its readers.

        Raises:
            VerificationError: it does not; says which, on which device, and how.
        """
        key, local = self.traced(group, task)
        known = key, held.masks, wanted.masks, wanted.edges
        if known not in self._proven:
            if (taken := shape_of(local.jaxpr.invars[-1])) != (parts := held.shape):
                raise VerificationError(f"{where}: takes {list(taken)} for parts of {list(parts)}")
            self._proven[known] = self._prove(group, task, local, held, wanted, where)
        return self._noted(known, held.tensor.name)

    def _prove(
        self, group: DeviceMesh, task: Adapt | Extend, local: Local, held: HeldSlot, wanted: HeldSlot, where: str
    ) -> Proof:
        sizes, names, shape = dict(group.axes), group.devices, held.tensor.shape
        if self._is_large(local, len(names)):
            made = _smaller_task(task)
            ends = [smaller_masks(one.masks, made[1]) for one in (held, wanted)] if made is not None else [None, None]
            if made is not None and ends[0] is not None and ends[1] is not None:
                few, ratios = made
                struct = jax.ShapeDtypeStruct(Frame(ends[0]).shape, held.tensor.dtype)
                small = trace_local(emitted_exchange(group, few), sizes, [struct])
                if outline(local.jaxpr) == outline(small.jaxpr):
                    return self._prove_smaller(small, sizes, shape, ratios, ends, names, where, wanted.edges)
            if _cells(local, len(names)) > MOST_DIRECT:
                return _collectives(local), -1
        return prove(local, sizes, shape, Frame(held.masks), Frame(wanted.masks), names, lambda: where, wanted.edges)

    def prove_crossing(self, crossing: Crossing, shape: tuple[int, ...], dtype: Any, where: str) -> Proof:
        """Prove that a crossing turns what the producers' group holds into what the consumers' wants; raises as `prove`."""
        mesh, masks = hop_masks(crossing)
        key = "crossing", self._on(mesh).of(crossing), number_like(dtype)
        if key not in self._proven:
            self._proven[key] = self._prove_crossing(crossing, mesh, masks, shape, number_like(dtype), where)
        return self._noted(key, where)

    def _noted(self, key: Hashable, name: str) -> Proof:
        """The result for an exchange; one that was left out is listed under ``name``."""
        passed, elements = self._proven[key]
        if elements < 0:
            self.left_out.append(name)
        return passed, max(elements, 0)

    def _prove_crossing(
        self, crossing: Crossing, mesh: DeviceMesh, masks: Any, shape: tuple[int, ...], dtype: Any, where: str
    ) -> Proof:
        sizes, names = dict(mesh.axes), mesh.devices

        def traced(of: Crossing, held: Frame) -> Local:
            return trace_local(lambda x: in_one_program(of, x, mesh), sizes, [jax.ShapeDtypeStruct(held.shape, dtype)])

        before, after = map(Frame, masks)
        local = traced(crossing, before)
        made = smaller_crossing(crossing) if self._is_large(local, len(names)) else None
        if made is not None:
            _, ends = hop_masks(made[0])
            small = traced(made[0], Frame(ends[0]))
            if outline(local.jaxpr) == outline(small.jaxpr):
                return self._prove_smaller(small, sizes, shape, made[1], ends, names, where)
        if self._is_large(local, len(names)) and _cells(local, len(names)) > MOST_DIRECT:
            return _collectives(local), -1
        return prove(local, sizes, shape, before, after, names, lambda: where)

    def _is_large(self, local: Local, devices: int) -> bool:
        return _cells(local, devices) > MOST_CELLS

    def _prove_smaller(
        self, small: Local, sizes: Mapping[str, int], shape: tuple[int, ...], ratios: Ratios, ends: Any,
        names: Sequence[Any], where: str, edges: tuple[Edge, ...] = (),
    ) -> Proof:  # fmt: skip
        few = tuple(n // ratio for n, ratio in zip(shape, ratios, strict=True))
        before, after = map(Frame, ends)
        passed, elements = prove(small, sizes, few, before, after, names, lambda: f"{where}, of {list(few)} rows", edges)
        self.on_smaller += 1
        return passed, elements * math.prod(ratios)


def _cells(local: Local, devices: int) -> int:
    """The number of cells in all local arrays, before or after, whichever are larger."""
    return devices * max(math.prod(shape_of(v)) for v in (*local.jaxpr.invars[-1:], *local.jaxpr.outvars))


def _collectives(local: Local) -> list[str]:
    return [e.primitive.name for e in local.jaxpr.eqns if e.primitive.name in COLLECTIVES]


def _smaller_task(task: Adapt | Extend) -> tuple[Adapt | Extend, Ratios] | None:
    """The same exchange of a smaller tensor, and the ratios; None where there is none."""
    if isinstance(task, Extend):
        ratios = ratios_of([task.layout], {edge.dim for edge in task.edges})
        if ratios is None:
            return None
        layout = smaller_layout(task.layout, ratios)
        return Extend(task.tensor, layout, task.edges, task.input, task.output), ratios
    ratios = ratios_of(layouts_of(task.adapter))
    adapter = smaller_adapter(task.adapter, ratios) if ratios is not None else None
    if ratios is None or adapter is None:
        return None
    return Adapt(task.tensor, adapter, task.input, task.output, task.reduce_dtype), ratios


def outline(jaxpr: core.Jaxpr) -> list[Hashable]:
    """A program of exchanges but for its sizes: primitives, ranks, and members of collectives."""
    return [
        (
            e.primitive.name,
            tuple(len(shape_of(v)) for v in e.outvars),
            tuple((k, str(v)) for k, v in sorted(e.params.items()) if e.primitive.name in COLLECTIVES),
        )
        for e in jaxpr.eqns
    ]


def prove(
    local: Local,
    sizes: Mapping[str, int],
    shape: tuple[int, ...],
    held: Frame,
    wanted: Frame,
    names: Sequence[Any],
    where: Callable[[], str],
    edges: tuple[Edge, ...] = (),
) -> Proof:
    """Interpret one exchange and check what arrives.

    Args:
        local: what one device runs.
        sizes: of the axes of its mesh.
        shape: of the whole tensor.
        held, wanted: the parts before and after.
        names: the devices, by position in the mesh.
        where: the exchange's name in messages.
        edges: the rows around the parts that are wanted.

    Raises:
        VerificationError: something arrives wrong, or devices would wait for each other.
    """
    patterns = Patterns(shape)
    interpreter = Interpreter(sizes, patterns)
    start, expected = patterns.held(held), list(wanted.shape)
    for edge in edges:
        expected[edge.dim] += edge.before + edge.after

    def here() -> str:
        return where() + (f" by {', '.join(interpreter.passed)}" if interpreter.passed else "")

    try:
        (end,) = interpreter.run(local.jaxpr, local.bind([start], interpreter.constant))
    except VerificationError as error:
        raise VerificationError(f"{here()}: {error}") from None
    if (left := list(end.shape[1:])) != expected:
        raise VerificationError(f"{here()} leaves local arrays of {left}; {expected} are wanted")
    if (kind := dtype_of(local.jaxpr.outvars[0])) != (started := dtype_of(local.jaxpr.invars[-1])):
        raise VerificationError(f"{here()} makes {kind} of {started}")
    cells = end if isinstance(end, Symbolic) else patterns.constants(end)
    if edges:
        right = extended(patterns, held, edges, start.pattern.reshape(len(names), -1)[:, 0])
        return interpreter.passed, check_extended(patterns, cells, right, edges, names, here)
    return interpreter.passed, Arrival(patterns, held, wanted, names, here).check(cells)
