"""The numbers of the values that a program's tasks make, one after another: what its emitted blocks must compute."""

from collections.abc import Sequence
from dataclasses import dataclass

from jscaler.lower.members import Members
from jscaler.lower.program import Compute, Program, Repeat, Task
from jscaler.verification.exchanges import Exchanges
from jscaler.verification.local_programs import Local, trace_local
from jscaler.verification.values import Values


@dataclass
class PlainValues:
    """Numbers the values of a program.

    Attributes:
        exchanges: what an exchange runs.
        device_numbers: the traced programs by which a device finds its number among those of a part; filled here.
    """

    program: Program
    exchanges: Exchanges
    values: Values
    device_numbers: dict[tuple[object, Members], Local]

    def numbers(self, inputs: Sequence[int]) -> list[int]:
        """Those of the program's outputs, given those of its inputs."""
        slots = dict(zip((slot for slot, _ in self.program.inputs), inputs, strict=True))
        self._run(self.program.tasks, slots)
        return [slots[slot] for slot, _ in self.program.outputs]

    def _run(self, tasks: Sequence[Task], slots: dict[int, int]) -> None:
        for task in tasks:
            if isinstance(task, Compute):
                given = [*(slots[s] for s in task.inputs), *map(self._device_number, task.parts)]
                slots.update(zip(task.outputs, self.values.run(task.jaxpr, given), strict=True))
            elif isinstance(task, Repeat):
                self._repeat(task, slots)
            else:
                _, local = self.exchanges.traced(self.program.group, task)
                (slots[task.output],) = self.values.results(local, [slots[task.input]])

    def _repeat(self, task: Repeat, slots: dict[int, int]) -> None:
        def body(carries: Sequence[int], slices: Sequence[int]) -> Sequence[int]:
            inner = {**slots, **dict(zip((slot for _, slot in task.xs), slices, strict=True))}
            inner.update(zip((inside for _, inside, _, _ in task.carries), carries, strict=True))
            self._run(task.tasks, inner)
            return [*(inner[out] for _, _, out, _ in task.carries), *(inner[piece] for piece, _ in task.ys)]

        times = task.loop.length, task.loop.reverse
        inits, stacks = [slots[init] for init, *_ in task.carries], [slots[stack] for stack, _ in task.xs]
        slots.update(zip(task.outputs, self.values.loop(times, inits, stacks, body), strict=True))

    def _device_number(self, who: Members) -> int:
        key = self.program.group.axes, who
        if key not in self.device_numbers:
            self.device_numbers[key] = trace_local(lambda: [who.index()], dict(self.program.group.axes), [])
        (number,) = self.values.results(self.device_numbers[key], [])
        return number
