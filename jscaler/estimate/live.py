"""``LiveTensor``: what a buffer is to the step that holds it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from jscaler.ir import Graph, PTensor
from jscaler.ir.kinds import gradient_parts, tensor_kinds
from jscaler.ir.walk import closure
from jscaler.lower.flat_program import FlatProgram

HeldKind = str  # a TensorKind, or "temporary"


@dataclass(frozen=True)
class LiveTensor:
    """A buffer at the peak.

    Attributes:
        name: of the tensor whose part it is, or its type where it lies inside an op.
        op: path of the op that made it; "" where a loop or an exchange did.
        kind: ``activation``, ``gradient`` (of a parameter) or ``temporary``.
    """

    name: str
    op: str
    kind: HeldKind
    nbytes: int


class LiveTensors:
    """Says of the variables of a step's programs, and of its tensors, what they are.

    Attributes:
        kinds: of inputs, constants and gradients; a tensor that is not listed is an activation, or a temporary.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        kinds = tensor_kinds(graph)
        found = (t for t, kind in kinds.items() if kind == "gradient")
        gradients = closure(found, lambda tensor: [t for t in gradient_parts(graph, tensor) if t not in kinds])
        self.kinds: Mapping[PTensor, HeldKind] = {**kinds, **dict.fromkeys(gradients, "gradient")}

    def of_variable(self, flat: FlatProgram, var: core.Var | None, nbytes: int, name: Any) -> LiveTensor:
        """What a variable of ``flat`` holds; of what has no tensor the ``name`` is given."""
        tensor = flat.origins.tensor.get(var) if var is not None else None
        op = flat.origins.op.get(var, "") if var is not None else ""
        return LiveTensor(tensor.name if tensor is not None else str(name), op, self._kind(tensor, op), nbytes)

    def of_tensor(self, tensor: PTensor, nbytes: int) -> LiveTensor:
        """What a device has of a tensor that has come from elsewhere."""
        maker = self.graph.producer.get(tensor)
        op = maker.path if maker is not None else ""
        return LiveTensor(tensor.name, op, self._kind(tensor, op), nbytes)

    def _kind(self, tensor: PTensor | None, op: str) -> HeldKind:
        if tensor is not None and self.kinds.get(tensor) == "gradient":
            return "gradient"
        maker = self.graph.producer.get(tensor) if tensor is not None else self.graph.by_path.get(op)
        if maker is not None:
            return "activation" if maker.kind == "forward" else "temporary"
        a_loops = tensor is not None and tensor.role in ("activation", "residual")
        return "activation" if a_loops else "temporary"
