"""From steps to kernels: which values are stored, and what each kernel reads.

A model of how XLA fuses on GPUs. A fused value is stored where a call reads it (a dot wants a buffer), where the block
ends, and where reading it once and again costs less than computing it in each of its readers; else it vanishes in them.
XLA duplicates cheap arithmetic into its readers as long as fewer bytes move, and so do we:

    in · (k - 1) < out · (k + 1)      k readers, in: bytes that computing it reads, out: its own bytes

Whatever is made of random bits is computed once: a mask that several read is stored, of one byte per element. A result is
written over an operand of its size, but not where a reduction of the same operand goes into it alone (a softmax's
gradient): that is one kernel, which reads whole rows.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jscaler.lax_primitives import named
from jscaler.xla_model.block import TURN, Aliases, Block, BlockStep, Kernel, Value

FUSED = frozenset({"fused", "drawn"})
MANY = 8  # readers beyond which no more are told apart

Reads = dict[Value, int]  # buffer -> bytes of it that are read


def kernels_of(block: Block) -> tuple[Kernel, ...]:
    """The kernels of a block in order, those of loops inside them not among them.

    Example:
        >>> a, b, c = (Value(400, t) for t in "abc")
        >>> steps = BlockStep("fused", "exp", (a,), (b,)), BlockStep("call", "dot_general", (b,), (c,))
        >>> [(k.step.name, dict(k.reads), k.writes) for k in kernels_of(Block((a,), steps, (c,)))]
        [('exp', {a: 400}, (b,)), ('dot_general', {b: 400}, (c,))]
    """
    if "kernels" not in block.memo:
        block.memo["kernels"] = _Fusion(dataclasses.replace(block, steps=_fills_anew(_turns_free(block.steps)))).run()
    return block.memo["kernels"]


def _fills_anew(steps: Sequence[BlockStep]) -> tuple[BlockStep, ...]:
    """``steps`` in which each reader of what literals alone make (zeros) has its own: XLA fills again, and keeps none."""
    fills = {step.writes[0]: step for step in steps if step.kind == "fused" and not step.reads and len(step.writes) == 1}
    found: list[BlockStep] = []
    taken: set[Value] = set()
    for step in steps:
        again = {v: Value(v.nbytes, v.about, v.is_flag) for v in step.reads if v in fills and v in taken}
        taken.update(step.reads)
        found += [dataclasses.replace(fills[v], writes=(own,)) for v, own in again.items()]
        found.append(dataclasses.replace(step, reads=tuple(again.get(v, v) for v in step.reads)) if again else step)
    return tuple(found)


def _turns_free(steps: Sequence[BlockStep]) -> tuple[BlockStep, ...]:
    """The transposes of matrices that only dots read as aliases: a dot reads its operands either way."""
    readers: dict[Value, set[str]] = {}
    for step in steps:
        for value in step.reads:
            readers.setdefault(value, set()).add(step.name)
    return tuple(
        dataclasses.replace(step, kind="alias")
        if step.name == TURN and readers.get(step.writes[0]) == {"dot_general"}
        else step
        for step in steps
    )


@dataclass
class _Fusion:
    block: Block
    aliases: Aliases = field(default_factory=Aliases)
    buffers: list[tuple[Value, ...]] = field(default_factory=list)  # by step: what it reads, through aliases
    stored: set[Value] = field(default_factory=set)
    drawn: set[Value] = field(default_factory=set)  # made of random bits
    made: set[Value] = field(default_factory=set)  # by fused steps
    readers: dict[Value, set[Value]] = field(default_factory=dict)  # value -> stored ones that it is computed into
    behind: dict[Value, Mapping[Value, int]] = field(default_factory=dict)  # unstored value -> what computing it reads
    inside: dict[Value, Mapping[int, BlockStep]] = field(default_factory=dict)  # and the steps, by their place
    summed: dict[Value, set[Value]] = field(default_factory=dict)  # result of a reduction -> what it reads

    def run(self) -> tuple[Kernel, ...]:
        self._store_what_is_needed()
        self._find_readers()
        kernels = []
        for place, step in enumerate(self.block.steps):
            if step.kind == "alias":
                continue
            reads, inside = self._reads(step, self.buffers[place])
            fused = tuple(inside[at] for at in sorted(inside))
            if step.kind == "reduced":
                self.summed.update({v: set(reads) for v in step.writes})
            if step.kind not in FUSED:
                over = tuple((step.writes[i], self.aliases.of(step.reads[j])) for i, j in step.over)
                kernels.append(Kernel(step, reads, step.writes, over, fused))
                continue
            self._decide(step, reads)
            through = {**inside, place: step}
            self.inside.update((value, through) for value in step.writes)
            for value in step.writes:
                if value in self.stored:
                    again = {v for r in reads if self.readers[r] == {value} for v in self.summed.get(r, ())}
                    over = tuple((value, v) for v in reads if v.nbytes == value.nbytes and v not in again)
                    kernels.append(Kernel(step, reads, (value,), over, fused))
        return tuple(kernels)

    def _store_what_is_needed(self) -> None:
        """What calls read, what leaves the block, and masks that were drawn and that several read."""
        times = Counter(v for step in self.block.steps for v in step.reads)
        for step in self.block.steps:
            reads = self.aliases.all(step.reads)
            self.buffers.append(reads)
            if step.kind == "alias":
                self.aliases.add(step)
                self.stored.update(reads if step.is_fence else ())
                continue
            if step.kind in FUSED:
                self.made.update(step.writes)
                if step.kind == "drawn" or not self.drawn.isdisjoint(reads):
                    masks = {v for v in step.writes if v.is_flag and times[v] > 1}
                    self.stored.update(masks)
                    self.drawn.update(v for v in step.writes if v not in masks)
                continue
            if step.kind != "reduced":
                self.stored.update(reads)
            self.stored.update(step.writes)
        self.stored.update(self.aliases.all(self.block.outputs))

    def _find_readers(self) -> None:
        for step, buffers in zip(reversed(self.block.steps), reversed(self.buffers), strict=True):
            if step.kind == "alias":
                continue
            ends: Iterable[Value] = step.writes[:1]
            if step.kind in FUSED:
                self.stored.update(v for v in step.writes if v in self.drawn and len(self.readers.get(v, ())) > 1)
                ends = {e for v in step.writes for e in ([v] if v in self.stored else self.readers.get(v, ()))}
            for value in buffers:
                known = self.readers.setdefault(value, set())
                if len(known) < MANY:
                    known.update(ends)

    def _reads(self, step: BlockStep, buffers: Sequence[Value]) -> tuple[Reads, dict[int, BlockStep]]:
        """The buffers behind what a step reads, and the steps between, by their place."""
        found: Reads = {}
        inside: dict[int, BlockStep] = {}
        for value in buffers:
            fused = value in self.made and value not in self.stored
            inside.update(self.inside[value] if fused else ())
            for buffer, nbytes in self.behind[value].items() if fused else ((value, value.nbytes),):
                found[buffer] = max(found.get(buffer, 0), nbytes)
        if named(step.name).picks:
            most = sum(v.nbytes for v in step.writes)
            found = {v: min(n, most) for v, n in found.items()}
        return found, inside

    def _decide(self, step: BlockStep, reads: Reads) -> None:
        """Whether the results of a fused step are stored after all."""
        read = sum(reads.values())
        for value in step.writes:
            if value in self.stored:
                continue
            count = len(self.readers.get(value, ()))
            if count > 1 and read * (count - 1) >= value.nbytes * (count + 1):
                self.stored.add(value)
            else:
                self.behind[value] = reads
