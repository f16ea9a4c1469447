"""``Block``: a program as values and steps, as far as memory is concerned. A step says how its results come to lie.

alias    a result is its operand's buffer: a reshape, a fence
fused    computed inside whoever reads it, and stored only if somebody needs it as a buffer: elementwise, a transpose
drawn    fused, but too costly to do twice: random bits
reduced  stored, its operands fused into it: a sum along some dims
call     reads buffers and leaves buffers: a dot, a scatter, a collective
loop     a call whose own block runs many times
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jscaler.lax_primitives import named
from jscaler.lax_primitives.primitive import Cost
from jscaler.lower.flat_program import Item
from jscaler.xla_model.flops import NONE, Flops

TURN = "turn"  # the name of a matrix's transpose, which a dot reads for free
Kind = Cost | Literal["loop"]


@dataclass(frozen=True, eq=False)
class Value:
    """One local array, known by identity.

    Attributes:
        nbytes: of the array.
        about: a name for people, or the abstract value, written out when somebody asks.
        is_flag: whether it holds booleans.
    """

    nbytes: int
    about: Any = ""
    is_flag: bool = False

    def __repr__(self) -> str:
        text = self.about if isinstance(self.about, str) else self.about.str_short(short_dtypes=True)
        return text or f"{self.nbytes} bytes"


@dataclass(frozen=True)
class Inner:
    """What a loop's step runs.

    Attributes:
        block: its inputs are ``inside`` of the carries and the slices; it may also read values of the block around it.
        carries: per carry its value before the first iteration (None for a constant), in an iteration, at its end, and
            after the last.
        length: number of iterations.
    """

    block: "Block"
    carries: tuple[tuple[Value | None, Value, Value | None, Value], ...] = ()
    length: int = 1


@dataclass(frozen=True)
class BlockStep:
    """One equation, or one step of a collective.

    Attributes:
        name: the primitive, or the kind of collective.
        reads, writes: values; constants are left out.
        over: pairs (result, operand): the result may be written over the operand, if nobody reads that afterwards.
        inner: of a loop what it runs; of a ``cond`` its branches, of which one runs.
        op: path of the op that it belongs to; "" for what belongs to none.
        flops: what it computes.
        row: of a reduction along the last dims how many elements it makes one of; else 0.
        item: of the flat program, that it comes from.
    """

    kind: Kind
    name: str
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    over: tuple[tuple[int, int], ...] = ()
    inner: tuple[Inner, ...] = ()
    op: str = ""
    flops: Flops = NONE
    row: int = 0
    item: Item | None = field(default=None, compare=False, repr=False)

    @property
    def is_fence(self) -> bool:
        return named(self.name).fence

    @property
    def is_product(self) -> bool:
        return named(self.name).role == "contracts"


@dataclass(frozen=True)
class Block:
    """Steps in order.

    Attributes:
        inputs: values that lie there before the first step.
        outputs: values that are needed after the last.
        memo: what others work out of this very block, by keys of their own.
    """

    inputs: tuple[Value, ...]
    steps: tuple[BlockStep, ...]
    outputs: tuple[Value, ...]
    memo: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)


@dataclass(frozen=True)
class Kernel:
    """What is launched: it reads buffers and leaves buffers.

    Attributes:
        step: the step whose results are left.
        reads: buffers, and how many bytes of each; aliases are resolved.
        writes: buffers.
        over: pairs (result, operand): the result may be written over the operand, if that dies here.
        fused: the other steps that it computes.
        row: elements of the rows that it holds as a whole; else 0.
    """

    step: BlockStep
    reads: Mapping[Value, int]
    writes: tuple[Value, ...]
    over: tuple[tuple[Value, Value], ...] = ()
    fused: tuple[BlockStep, ...] = ()
    row: int = 0


@dataclass
class Aliases:
    """Which value lies in whose buffer."""

    table: dict[Value, Value] = field(default_factory=dict)

    def add(self, step: BlockStep) -> None:
        self.table.update(zip(step.writes, map(self.of, step.reads), strict=False))

    def of(self, value: Value) -> Value:
        return self.table.get(value, value)

    def all(self, values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(dict.fromkeys(map(self.of, values)))
