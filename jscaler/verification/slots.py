"""Do the instructions of a step hand each block what it takes: of its micro-batch, before it is freed or given away, once?

The instructions are run on labels. A slot's label says which value it holds, of which iteration; of a sum, what was added::

    Run 0F, micro-batch 1      writes   (value 12, 1)
    Send 12 ► 31               reads    (value 12, 1)        writes   (value 31, 1)
    Run 1B, micro-batch 1      reads    (value 31, 1) and the sum of {0}, donated;   writes   the sum of {0, 1}

It looks at blocks, what they take and leave, and at the instructions, never at the table or how they were ordered. They
run one after another, on all groups in one order, and read what was written before: so no two groups wait for each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from jscaler.errors import VerificationError
from jscaler.lower.donation import donated_imports
from jscaler.lower.instructions import Gather, Instruction, Run, Send, microbatch_text
from jscaler.lower.segment import PlacedBlock
from jscaler.lower.spanning_loop import CarriedValue
from jscaler.lower.step_plan import StepPlan


@dataclass(frozen=True)
class Label:
    """What a slot holds: a value, of an iteration if iterations have it; of a carry what it is made of so far."""

    value: int
    iteration: int | None = None
    added: frozenset[int] = frozenset()

    def __str__(self) -> str:
        if self.added:
            return f"value {self.value} of iterations {sorted(self.added)}"
        return f"value {self.value}" + (f" of iteration {self.iteration}" if self.iteration is not None else "")


def check_instructions(step: StepPlan) -> int:
    """The number of reads proven.

    Raises:
        VerificationError: an instruction reads another value than it should, of another micro-batch, or what was freed or
            donated; a block runs twice for a micro-batch, or not at all; a result is left by none.
    """
    return _Check(step).run()


@dataclass
class _Check:
    step: StepPlan
    held: dict[int, Label] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)  # slot -> what has become of it
    ran: set[tuple[int, int | None]] = field(default_factory=set)  # by the block's identity
    reads: int = 0

    def __post_init__(self) -> None:
        spanning = self.step.spanning
        self.carries = {c.inside: c for c in spanning.carries} if spanning is not None else {}
        self.left_by = {c.out: c for c in self.carries.values()}
        self.finals = {c.final: c for c in self.carries.values()}
        self.loop = range(0) if spanning is None else spanning.phases
        self.count = spanning.loop.length if spanning is not None else 0
        own = [b for b in self.step.blocks if b.phase in self.loop]
        self.repeated = {v for b in own for v in b.exports}
        self.repeated |= {t.target for t in self.step.transfers if t.phase in self.loop}

    def run(self) -> int:
        for slot, (value, number) in self.step.instructions.counts.items():
            self.held[slot] = Label(value, number)
        for instruction in self.step.instructions.steps:
            if isinstance(instruction, Run):
                self._run(instruction)
            elif isinstance(instruction, Send):
                self._send(instruction)
            else:
                self._gather(instruction)
            for slot in instruction.freed:
                self.gone.setdefault(slot, f"freed behind {self._name(instruction)}")
        parts = {
            id(part): number for number, block in enumerate(self.step.blocks) for part, _ in block.parts or ((block, 0),)
        }
        for part, number in parts.items():
            turns = range(self.count) if self.step.blocks[number].phase in self.loop else (None,)
            missing = [i for i in turns if (part, i) not in self.ran]
            if missing:
                self._fail(
                    f"{self.step.block_name(number)} does not run" + (f" for {missing}" if missing != [None] else "")
                )
        results = {number for block in self.step.blocks for number in block.results}
        lost = [number for number in sorted(results) if self.held.get(number) != Label(number) or number in self.gone]
        if lost:
            self._fail(f"results {lost} are not in their slots at the end")
        return self.reads

    # -- instructions

    def _run(self, run: Run) -> None:
        block, where = self.step.blocks[run.block], self._name(run)
        iterations = [self._iteration(block, number) for number in run.microbatches or (None,)]
        for part, place in block.parts or ((block, 0),):
            if (id(part), iterations[place]) in self.ran:
                self._fail(f"{where} runs a second time")
            self.ran.add((id(part), iterations[place]))
        taken: dict[int, Label] = {}
        for slot, (value, place) in zip(run.reads, block.taken, strict=True):
            number = run.microbatches[place] if run.microbatches else None
            taken[value] = self._read(slot, self._wanted(block, value, iterations[place], number), where)
        for place in donated_imports(self.step, block):
            self.gone[run.reads[place]] = f"donated to {where}"
        left = (*((value, 0) for value in block.results), *block.left)
        for slot, (value, place) in zip(run.writes, left, strict=True):
            added = [iterations[at] for part, at in block.parts if value in part.exports] or [iterations[place]]
            self._write(slot, self._left(value, added if value in self.left_by else [iterations[place]], taken, where))

    def _send(self, send: Send) -> None:
        transfer, where = self.step.transfers[send.transfer], self._name(send)
        iteration = None
        if self.step.spanning is not None and transfer.phase in self.loop and send.microbatch is not None:
            iteration = send.microbatch // len(self.loop)
        block = next(b for b in self.step.blocks if transfer.target in b.imports or transfer.source in b.exports)
        self._read(send.source, self._wanted(block, transfer.source, iteration, send.microbatch), where)
        self._write(send.target, Label(transfer.target, iteration if transfer.target in self.repeated else None))

    def _gather(self, gather: Gather) -> None:
        assert self.step.spanning is not None
        piece = next(s.piece for s in self.step.spanning.stacks if s.stack == gather.value)
        if len(gather.pieces) != self.count:
            self._fail(f"{self._name(gather)} has {len(gather.pieces)} pieces of {self.count}")
        for i, slot in enumerate(gather.pieces):
            self._read(slot, lambda label, i=i: label == Label(piece, i), self._name(gather), f"{Label(piece, i)}")
        self._write(gather.target, Label(gather.value))

    # -- slots

    def _wanted(
        self, block: PlacedBlock, value: int, iteration: int | None, microbatch: int | None
    ) -> Callable[[Label], bool]:
        """Whether a label is what a block should take as ``value``."""
        if self.step.spanning is not None and value in self.step.spanning.indices:
            return lambda label: label == Label(value, microbatch)
        carry = self.carries.get(value)
        if carry is not None:
            return lambda label: self._is_carried(carry, label, iteration, carry.out in block.exports)
        final = self.finals.get(value)
        if final is not None:
            return lambda label: label == Label(final.out, None, frozenset(range(self.count)))
        return lambda label: label == Label(value, iteration if value in self.repeated else None)

    def _is_carried(self, carry: CarriedValue, label: Label, iteration: int | None, adds: bool) -> bool:
        """A sum that does not hold this iteration yet; a state that the one before has left."""
        before = label.added if label.value == carry.out else frozenset() if label == Label(carry.init) else None
        if before is None:
            return False
        return iteration not in before if carry.is_sum and adds else before == frozenset(range(iteration or 0))

    def _left(self, value: int, iterations: Sequence[int | None], taken: dict[int, Label], where: str) -> Label:
        """What a block leaves, of an iteration; of a sum of several."""
        carry, iteration = self.left_by.get(value), iterations[-1]
        if carry is None or iteration is None:
            return Label(value, iteration if value in self.repeated else None)
        known = taken.get(carry.inside)
        if carry.is_sum and known is not None:
            return Label(value, None, known.added | {i for i in iterations if i is not None})
        if carry.is_sum:
            self._fail(f"{where} leaves a sum without taking what there is of it")
        return Label(value, None, frozenset(range(iteration + 1)))

    def _read(self, slot: int, fits: Callable[[Label], bool], where: str, wanted: str = "") -> Label:
        if slot in self.gone:
            self._fail(f"{where} reads slot {slot}, which was {self.gone[slot]}")
        label = self.held.get(slot)
        if label is None:
            self._fail(f"{where} reads slot {slot}, into which nothing has been written")
        if not fits(label):
            self._fail(f"{where} reads slot {slot}, which holds {label}" + (f" and not {wanted}" if wanted else ""))
        self.reads += 1
        return label

    def _write(self, slot: int, label: Label) -> None:
        if slot in self.held:
            self._fail(f"slot {slot} is written twice: {self.held[slot]}, and {label}")
        self.held[slot] = label

    def _iteration(self, block: PlacedBlock, microbatch: int | None) -> int | None:
        if block.phase not in self.loop:
            return None
        if microbatch is None or microbatch % len(self.loop) != block.phase - self.loop.start:
            self._fail(f"a block of turn {block.phase - self.loop.start} runs for micro-batch {microbatch}")
        return microbatch // len(self.loop)

    def _name(self, instruction: Instruction) -> str:
        if isinstance(instruction, Run):
            return " of ".join(
                filter(None, (self.step.block_name(instruction.block), microbatch_text(instruction.microbatches)))
            )
        if isinstance(instruction, Send):
            what = f"the send of '{self.step.transfers[instruction.transfer].tensor.name}'"
            microbatch = instruction.microbatch
        else:
            return f"the stack of value {instruction.value}"
        return what + (f" of micro-batch {microbatch}" if microbatch is not None else "")

    def _fail(self, why: str) -> NoReturn:
        raise VerificationError(f"instructions: {why}")
