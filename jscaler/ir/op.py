"""``Op``: a fragment of the captured program, and ``VTensor``: an op's own view of a PTensor."""

import dataclasses
import fnmatch
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jax.extend import source_info_util
from jax.extend.core import Jaxpr

from jscaler.ir.mask import Mask
from jscaler.ir.name import without
from jscaler.ir.overview import clipped
from jscaler.ir.rule import FactorNames, NamedDims, unnamed
from jscaler.ir.tensor import PTensor

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # frames of jscaler itself are nobody's model
OpKind = Literal["forward", "backward", "update"]
Residuals = Literal["inputs", "saved"]
RANGES, JOINED = "@ranges", "@joined"  # behind the name of what is taken apart into ranges, or made of them


def user_line(source_info: Any) -> str:
    """``file:line`` of the innermost frame outside installed packages; the innermost frame where there is none."""
    frames = source_info.traceback.frames if source_info.traceback else ()
    for frame in frames:
        if "site-packages" not in frame.file_name and not frame.file_name.startswith(PACKAGE):
            return f"{os.path.relpath(frame.file_name)}:{frame.line_num}"
    return source_info_util.summarize(source_info).split(" (")[0].rsplit(":", 1)[0]


def matches(name: str, pattern: str) -> bool:
    """Whether the name of an op, or of an input, is a shell pattern's; one of a range is that of the whole, too."""
    return name == pattern or any(fnmatch.fnmatchcase(n, pattern) for n in {name, without(name, "layers")})


@dataclass(frozen=True, eq=False)
class Body:
    """What an op computes: a jaxpr without constants. Equal ops (equal layers) hold the *same* Body object.

    Bodies are interned at capture, so identity is equality, and whatever is derived from a body (its rule, its backward
    jaxpr, its parts) is worked out once for all the ops that share it.
    """

    jaxpr: Jaxpr

    def __repr__(self) -> str:
        return f"Body({len(self.jaxpr.eqns)} equations)"


@dataclass(frozen=True)
class VTensor:
    """A part of a PTensor as one op sees it. Ops never share VTensors; overlapping masks are dependencies."""

    ptensor: PTensor
    mask: Mask

    def __str__(self) -> str:
        return f"{self.ptensor.name}{self.mask}"


@dataclass(frozen=True)
class RecomputeRegion:
    """What is computed again for the backward pass (``jax.checkpoint``, ``nn.remat``, a plan's), and the loop around it."""

    name: str
    loop: str | None = None


@dataclass(frozen=True, repr=False)
class Op:
    """A fragment of the program.

    Attributes:
        path: unique name: Flax module path and function, e.g. ``block_0/mlp/up/dot``.
        kind: ``forward``, ``backward`` or ``update`` (what a train step does outside its gradient calls).
        inputs, outputs: the PTensors it reads and writes.
        body: what it computes. None for a backward handle, until the policy has run.
        source_info: JAX's record of the user's code, handed on to the compiled program.
        call: which gradient call of the step the op belongs to; None outside.
        backward: the handle of its backward op; None where no gradient flows through it.
        forward: on a backward op, its forward op.
        cotangents: on a backward op, the gradient PTensors of ``forward``'s outputs, by output index.
        gradients: on a backward op, which inputs of ``forward`` its outputs belong to.
        named: names of its factors, where it is a piece of another op.
        residuals: what its backward reads: its ``inputs``, or residuals that it has ``saved`` behind its outputs.
        primal: on a forward op that saves residuals, the body it had before.
        loop: the name of the loop in whose body it stands; None outside.
        remat: the checkpointed regions it is part of, outermost first; of a fence that whose clones run apart behind it.
        kept: those of its outputs that are saved though it lies in a checkpointed region.
        again: on an op that computes a checkpointed region again, the op that it repeats.
        saved: on a backward op, pairs of a tensor that it reads and the forward's tensor that this stands for.
        anywhere: whether it is right for any part: a ``fence``, the ``sum`` of a loop's gradients, or its first ``zeros``.
        joins_shards: whether it puts a parameter that lies in parts together, once for all that runs part by part in time.
        added: on an op that each part in time runs alone, the results that leave it as the sum over all parts.
        turn: on an op of a loop that takes several parts in time in an iteration: which of them it is for.
        ranges: whether it only takes a stack apart into the ranges of stages, or joins it of them.
    """

    path: str
    kind: OpKind
    inputs: tuple[PTensor, ...]
    outputs: tuple[PTensor, ...]
    body: Body | None = field(default=None, compare=False)
    source_info: Any = field(default=None, compare=False)
    call: int | None = None
    backward: "Op | None" = field(default=None, compare=False)
    forward: "Op | None" = field(default=None, compare=False)
    cotangents: tuple[tuple[int, PTensor], ...] = field(default=(), compare=False)
    gradients: tuple[int, ...] = field(default=(), compare=False)
    named: FactorNames | None = field(default=None, compare=False)
    residuals: Residuals = field(default="inputs", compare=False)
    primal: Body | None = field(default=None, compare=False)
    loop: str | None = None
    remat: tuple[RecomputeRegion, ...] = field(default=(), compare=False)
    kept: tuple[PTensor, ...] = field(default=(), compare=False)
    again: "Op | None" = field(default=None, compare=False)
    saved: tuple[tuple[PTensor, PTensor], ...] = field(default=(), compare=False)
    anywhere: Literal["", "fence", "sum", "zeros"] = field(default="", compare=False)
    joins_shards: bool = field(default=False, compare=False)
    added: tuple[int, ...] = field(default=(), compare=False)
    turn: int = 0
    ranges: Literal["", "apart", "joined"] = field(default="", compare=False)

    def renamed(self, table: Mapping[PTensor, PTensor]) -> "Op":
        """It reads other tensors, which stand for those that it read."""
        if not any(t in table for t in self.inputs):
            return self
        inputs = tuple(table.get(t, t) for t in self.inputs)
        stood = dict(self.saved)
        saved = tuple((table.get(t, t), stood.get(t, t)) for t in dict.fromkeys(self.inputs) if t in table or t in stood)
        cotangents = tuple((i, table.get(t, t)) for i, t in self.cotangents)
        return dataclasses.replace(self, inputs=inputs, saved=saved, cotangents=cotangents)

    def mapped(self, new: Callable[[PTensor], PTensor]) -> "Op":
        """It has other tensors throughout."""
        inputs, outputs, kept = (tuple(map(new, tensors)) for tensors in (self.inputs, self.outputs, self.kept))
        cotangents = tuple((i, new(t)) for i, t in self.cotangents)
        saved = tuple((new(t), new(stands)) for t, stands in self.saved)
        return dataclasses.replace(self, inputs=inputs, outputs=outputs, kept=kept, cotangents=cotangents, saved=saved)

    @property
    def source(self) -> str:
        """``file:line`` of the user's own code that made the op; empty for ops of our own making."""
        return user_line(self.source_info) if self.source_info is not None else ""

    @property
    def whole(self) -> str:
        """Its path in the graph in front of loops over parts and of copies for groups."""
        return without(self.path, "turn", "group")

    @property
    def name(self) -> str:
        """The last part of the path: the function."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def shapes(self) -> str:
        """What it reads and makes: ``f32[4,8], f32[8] -> f32[4,8]``."""
        return " -> ".join(", ".join(t.type for t in tensors) for tensors in (self.inputs, self.outputs))

    def __hash__(self) -> int:
        return hash(self.path)

    def __repr__(self) -> str:
        return clipped(f"Op({self.path}, {self.kind}, {self.shapes})")

    def __str__(self) -> str:
        return self.path


def sub_dims(ops: Iterable[Op]) -> dict[PTensor, NamedDims]:
    """The sub-dims, without names, of what these ops read and make, where their bodies need not tell them apart."""
    found: dict[PTensor, NamedDims] = {}
    for op in ops:
        tensors = zip((*op.inputs, *op.outputs), op.named.tensors, strict=True) if op.named is not None else ()
        found.update((t, tuple(tuple(("", n) for _, n in dim) for dim in dims)) for t, dims in tensors)
    return found


def names_of(tensors: Sequence[PTensor], known: Mapping[PTensor, NamedDims]) -> FactorNames | None:
    """For an op on these tensors, inputs first, the ``known`` sub-dims; None where all are dims."""
    if not any(len(dim) > 1 for t in tensors for dim in known.get(t, ())):
        return None
    return FactorNames(tuple(known[t] if t in known else unnamed(t.shape, {}) for t in tensors))
