"""Autodiff on the graph: backward handles, gradient joins, and (after the policy) the handles' bodies.

    forward   x ──► f ──► y ──► g ──► loss
                    │           │
    backward  dx ◄─ f' ◄─ dy ◄─ g' ◄─ 1            f' reads x and dy: no hidden residuals

Gradients that one tensor gets from several readers stay separate PTensors, joined by an explicit n-ary add.
"""

from collections.abc import Iterable

import jax.numpy as jnp

from jscaler.capture.bodies import BodyTable
from jscaler.ir import Op, PTensor

SUFFIX = "@backward"


class Differentiator:
    """Adds backward handles for one gradient call, last op first."""

    def __init__(self, bodies: BodyTable, call: int):
        self.bodies = bodies
        self.call = call
        self.mark = f"#{call}" if call else ""  # a second call may differentiate the same tensors
        self.ops: list[Op] = []
        self.handles: dict[str, Op] = {}
        self._arrived: dict[PTensor, list[PTensor]] = {}

    def run(self, forward: list[Op], loss: PTensor, wrt: tuple[PTensor, ...]) -> list[PTensor]:
        """Returns the gradient PTensor of each tensor of ``wrt``; ``ops`` and ``handles`` hold the new ops."""
        active = _active(forward, wrt)
        seed = PTensor(f"d({loss.name}){self.mark}", loss.aval, "gradient")
        self._add(
            Op(f"{loss.name}@seed{self.mark}", "backward", (), (seed,), self.bodies.fill(loss.aval, 1.0), call=self.call)
        )
        self._arrived[loss] = [seed]
        for op in reversed(forward):
            self._visit(op, active)
        return [self._gradient(t) for t in wrt]

    def _visit(self, op: Op, active: set[PTensor]) -> None:
        outputs = [(i, t) for i, t in enumerate(op.outputs) if t in self._arrived and t in active]
        gradients = tuple(i for i, t in enumerate(op.inputs) if t in active)
        if not outputs or not gradients:
            return
        cotangents = tuple((i, self._gradient(t)) for i, t in outputs)
        path = op.path + SUFFIX
        made = tuple(PTensor(f"d({op.inputs[i].name})@{op.path}", op.inputs[i].aval, "gradient") for i in gradients)
        handle = Op(
            path, "backward", op.inputs + tuple(t for _, t in cotangents), made, None, op.source_info,
            self.call, forward=op, cotangents=cotangents, gradients=gradients,
        )  # fmt: skip
        self._add(handle)
        self.handles[op.path] = handle
        for i, tensor in zip(gradients, made, strict=True):
            self._arrived.setdefault(op.inputs[i], []).append(tensor)

    def _gradient(self, tensor: PTensor) -> PTensor:
        """What has arrived for ``tensor``, joined; zeros where nothing has."""
        parts = self._arrived.get(tensor, [])
        if len(parts) == 1:
            return parts[0]
        total = PTensor(f"d({tensor.name}){self.mark}", tensor.aval, "gradient")
        body = self.bodies.join(tensor.aval, len(parts)) if parts else self.bodies.fill(tensor.aval, 0.0)
        suffix = "@join" if parts else "@unused"
        self._add(Op(f"{tensor.name}{suffix}{self.mark}", "backward", tuple(parts), (total,), body, call=self.call))
        self._arrived[tensor] = [total]
        return total

    def _add(self, op: Op) -> None:
        self.ops.append(op)


def _active(forward: Iterable[Op], wrt: tuple[PTensor, ...]) -> set[PTensor]:
    """The floating-point tensors that depend on ``wrt``."""
    active = set(wrt)
    for op in forward:
        if any(t in active for t in op.inputs):
            active.update(t for t in op.outputs if jnp.issubdtype(t.dtype, jnp.inexact))
    return active
