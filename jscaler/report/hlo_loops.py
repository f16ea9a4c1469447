"""How often each line of an HLO text runs: a loop's body stands there once, and runs once per iteration.

XLA says of most loops how many iterations they have (``known_trip_count``). Of another it is the one number that the
condition compares with, for ``lax.scan`` counts from zero. Where that is not to be seen, a body counts once, and so does
each branch of a condition.
"""

import re
from collections.abc import Sequence

from jscaler.ir.walk import closure

_HEADER = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_WHILE = re.compile(r"\bwhile\(.*\bcondition=%?(?P<condition>[\w.\-]+), body=%?(?P<body>[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"\b(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_LATER = re.compile(r"\basync-(?:update|done)\(")  # they name what their start has begun
_NUMBER = re.compile(r"= [su](?:32|64)\[\] constant\((\d+)\)")


Blocks = dict[str, list[int]]  # name of a computation -> its lines


def times(lines: Sequence[str]) -> list[int]:
    """Per line how often it runs when the module runs once; lines of no computation count once.

    Example:
        >>> body = ["%body (p: f32[4]) -> f32[4] {", "  %a = f32[4]{0} all-reduce(%p)", "}"]
        >>> loop = '  %w = f32[4]{0} while(%p), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}'
        >>> times([*body, "ENTRY %main (p: f32[4]) -> f32[4] {", loop, "}"])
        [3, 3, 3, 1, 1, 1]
    """
    table = _computations(lines)
    callers: dict[str, list[tuple[str, int]]] = {}
    for name, numbers in table.items():
        for callee, count in (call for i in numbers for call in _calls(lines[i], lines, table)):
            callers.setdefault(callee, []).append((name, count))
    runs: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in runs:
            runs[name] = sum(count * of(caller) for caller, count in callers[name]) if name in callers else 1
        return runs[name]

    found = [1] * len(lines)
    for name, numbers in table.items():
        for number in numbers:
            found[number] = of(name)
    return found


def _computations(lines: Sequence[str]) -> Blocks:
    table: Blocks = {}
    here: list[int] | None = None
    for number, line in enumerate(lines):
        header = _HEADER.match(line)
        if header is not None:
            here = table.setdefault(header[1], [])
        if here is not None:
            here.append(number)
        if line == "}":
            here = None
    return table


def _calls(line: str, lines: Sequence[str], table: Blocks) -> list[tuple[str, int]]:
    """What a line runs, and how often, as far as the text holds it."""
    loop = _WHILE.search(line)
    if loop is not None:
        known = _TRIPS.search(line)
        count = int(known[1]) if known is not None else _compared(loop["condition"], lines, table)
        found = [(loop["body"], count)]
    elif _LATER.search(line) is None:
        found = [(name, 1) for name in _named(line)]
    else:
        found = []
    return [(name, count) for name, count in found if name in table]


def _named(line: str) -> list[str]:
    """The computations that a line names."""
    listed = [name.strip().lstrip("%") for names in _CALLED_LIST.findall(line) for name in names.split(",")]
    return [*_CALLED.findall(line), *listed]


def _compared(condition: str, lines: Sequence[str], table: Blocks) -> int:
    """The number that a loop's condition compares with; 1 where there is no such, or more than one."""

    def own(name: str) -> list[str]:
        return [lines[i] for i in table[name]] if name in table else []

    inside = [
        line
        for name in closure([condition], lambda name: (n for line in own(name) for n in _named(line)))
        for line in own(name)
    ]
    numbers = {int(n) for line in inside for n in _NUMBER.findall(line)}
    less = any("compare(" in line and "direction=LT" in line for line in inside)
    return numbers.pop() if less and len(numbers) == 1 else 1
