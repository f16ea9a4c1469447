"""Where ops stand in a compiled program: the order of instructions that XLA's scheduler has settled on."""

import re
from collections.abc import Iterable

from jscaler.ir import Op
from jscaler.lower.scopes import op_scope
from jscaler.report.hlo_scopes import Instruction, Scopes

FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy", "broadcast"})
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = ")


class Schedule:
    """The scheduled instructions of a module's text, by op; a loop stands for all that is in it."""

    def __init__(self, text: str, ops: Iterable[Op]):
        assert "is_scheduled=true" in text.splitlines()[0]
        self.path = {op_scope(op): op.path for op in ops}
        self.scopes = Scopes(text, self.path)
        self.computations: dict[str, list[Instruction]] = {}
        here = ""
        for line in text.splitlines():
            if line.rstrip().endswith("{") and not line.startswith(" "):
                here = "ENTRY" if line.startswith("ENTRY") else line.split()[0].lstrip("%")
            elif here and (found := _INSTRUCTION.match(line)):
                self.computations.setdefault(here, []).append(self.scopes.instructions[found[1]])

    def positions(self, path: str, computation: str = "ENTRY") -> list[int]:
        """Where the instructions of an op stand in a computation."""
        return [i for i, made in enumerate(self.computations[computation]) if self._does(made, path)]

    def _does(self, made: Instruction, path: str) -> bool:
        if made.opcode == "while" or (made.opcode == "call" and made.called):
            return any(self._does(inner, path) for inner in self.computations.get(made.called, ()))
        return made.opcode not in FREE and self.path.get(self.scopes.scope(made.op_name)) == path

    def body_of(self, path: str) -> str:
        """The loop's body in which an op stands by itself."""
        bodies = {m.called for inner in self.computations.values() for m in inner if m.opcode == "while"}
        return next(n for n in bodies if any(m.opcode != "while" and self._does(m, path) for m in self.computations[n]))

    def holds(self, first: str, second: str, computation: str = "ENTRY") -> bool:
        """Whether all of one op is done before another begins."""
        before, after = self.positions(first, computation), self.positions(second, computation)
        assert before, f"{first} is not in {computation}"
        assert after, f"{second} is not in {computation}"
        return max(before) < min(after)
