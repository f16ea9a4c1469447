"""Which name scope an HLO instruction belongs to; where its own metadata does not say, by what it is made of."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_NAME = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_OPCODE = re.compile(r"([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_METADATA = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"\b(?:calls|to_apply|body)=%?([\w.\-]+)")
_TUPLE_INDEX = re.compile(r"\bindex=(\d+)")
_PASSING = frozenset(
    {"bitcast", "copy", "copy-start", "copy-done", "convert", "reshape", "transpose", "slice", "broadcast"}
)
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
MOST_SEGMENTS = 16  # of a name, that are compared with scopes: XLA joins the names of what it merges


@dataclass(frozen=True)
class Instruction:
    """One instruction of an HLO text; ``called`` is the computation of a fusion or the body of a loop."""

    name: str
    opcode: str
    operands: tuple[str, ...]
    op_name: str
    called: str
    index: int


class Scopes:
    """Finds scopes in the text of a compiled module.

    Args:
        text: the module, with metadata.
        known: the scopes to look for, as they are written in the program's name stacks.
    """

    def __init__(self, text: str, known: Iterable[str]):
        self.known = frozenset(known)
        self.instructions: dict[str, Instruction] = {}
        self.roots: dict[str, str] = {}
        self.parameters: dict[int, str] = {}  # number -> name of the argument, as metadata has it
        self._parse(text)

    def _parse(self, text: str) -> None:
        here = ""
        entry = False
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                here, entry = head[1], line.startswith("ENTRY")
            elif found := _NAME.match(line):
                made = _instruction(found[2], found[3])
                self.instructions[made.name] = made
                if found[1]:
                    self.roots[here] = made.name
                if entry and made.opcode == "parameter":
                    number = re.search(r"parameter\((\d+)\)", found[3])
                    assert number is not None, line
                    self.parameters[int(number[1])] = made.op_name

    def of(self, name: str, index: tuple[int, ...] = ()) -> str:
        """The scope of what instruction ``name`` leaves at ``index`` of its result; empty where none is known.

        Breadth first: the instruction itself, what it computes inside, then its operands.
        """
        waiting, seen = [(name, index)], {(name, index)}
        for here, place in waiting:
            made = self.instructions.get(here)
            if made is None:
                continue
            inside = self._inside(made, place)
            merged = bool(place) and len(made.operands) > 1 and made.opcode.startswith(_COLLECTIVES)
            if merged:  # of several tensors; its name is that of all together
                waiting.append((made.operands[place[-1]], ()))
                continue
            if not place or not inside:
                scope = self.scope(made.op_name)
                if scope:
                    return scope
            for step in (*inside, *self._operands(made, place)):
                if step not in seen:
                    seen.add(step)
                    waiting.append(step)
        return ""

    def _inside(self, made: Instruction, place: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        """The root of what an instruction calls, or the part of it that makes its result at ``place``."""
        root = self.instructions.get(self.roots.get(made.called, ""))
        if root is None:
            return []
        if root.opcode == "tuple" and place:
            return [(root.operands[place[0]], place[1:])]
        return [(root.name, place)]

    def _operands(self, made: Instruction, place: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        if made.opcode == "get-tuple-element":
            return [(made.operands[0], (made.index, *place))]
        if made.opcode == "tuple" and place:
            return [(made.operands[place[0]], place[1:])]
        if made.opcode == "dynamic-update-slice":  # what is written, rather than what it is written into
            return [(made.operands[1], ())]
        if made.opcode in _PASSING or made.opcode.endswith(("-start", "-done")):
            return [(made.operands[0], ())] if made.operands else []
        return [(operand, ()) for operand in made.operands] if made.opcode != "parameter" else []

    def scope(self, op_name: str) -> str:
        """The outermost known scope in a name, the longest where several begin at one place."""
        parts = op_name.replace("/(", "/").split("/")[:MOST_SEGMENTS]
        for start in range(len(parts)):
            for stop in range(len(parts), start, -1):
                if (candidate := "/".join(parts[start:stop])) in self.known:
                    return candidate
        return ""


def _instruction(name: str, rest: str) -> Instruction:
    after = _after_shape(rest)
    opcode = _OPCODE.match(after)
    assert opcode is not None, rest
    inner, tail = _parenthesised(after[opcode.end() - 1 :])
    metadata, called, index = _METADATA.search(tail), _CALLS.search(tail), _TUPLE_INDEX.search(tail)
    return Instruction(
        name,
        opcode[1],
        tuple(_OPERAND.findall(inner)),
        metadata[1] if metadata else "",
        called[1] if called else "",
        int(index[1]) if index else 0,
    )


def _after_shape(rest: str) -> str:
    """What stands behind the shape of the result, which may be a tuple."""
    return _parenthesised(rest)[1].lstrip() if rest.startswith("(") else rest.partition(" ")[2]


def _parenthesised(text: str) -> tuple[str, str]:
    """What stands between the parenthesis at the beginning and its partner, and what follows."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[1:position], text[position + 1 :]
    raise AssertionError(text)
