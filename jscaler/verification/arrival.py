"""Has every consumer what it wants? Each element of its mask once, each summand of each element once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jscaler.errors import VerificationError
from jscaler.ir.mask import Mask
from jscaler.verification.frames import Frame, Path, cells_of, element_ids, path_of
from jscaler.verification.symbols import Broken, Constant, Patterns, Symbolic, compact, leaf_counts, path_name


class Arrival:
    """What has arrived at the devices, checked against what they want.

    Args:
        patterns: the table that the symbols use.
        held: how the parts lay at the source; its masks name the summands.
        wanted: how the devices want them.
        names: a device's name by position.
        where: the place in the program, for messages.
    """

    def __init__(
        self,
        patterns: Patterns,
        held: Frame,
        wanted: Frame,
        names: Sequence[Any],
        where: Callable[[], str],
    ):
        self.patterns = patterns
        self.leaves = sorted({path_of(m) for m in held.masks if m is not None}, key=lambda p: [s.position for s in p])
        self.wanted = wanted
        self.names = names
        self.where = where

    def check(self, arrived: Symbolic) -> int:
        """The number of elements proven, over all devices.

        Raises:
            VerificationError: the first thing that is wrong.
        """
        ids = element_ids(self.patterns.shape)
        broken = np.array([isinstance(self.patterns[i], Broken) for i in range(len(self.patterns))])
        parts: dict[int, Symbolic] = {}
        groups: dict[Any, dict[Path, list[int]]] = {}
        for position, mask in enumerate(self.wanted.masks):
            if mask is None or not mask.size:
                continue
            parts[position] = self._part(arrived, position)
            self._check_elements(position, parts[position], cells_of(mask, ids), broken)
            groups.setdefault((mask.subdims, mask.box), {}).setdefault(path_of(mask), []).append(position)
        for (subdims, box), shares in groups.items():
            self._check_group(shares, parts, cells_of(Mask(subdims, box), ids))
        return sum(part.element.size for part in parts.values())

    def _part(self, arrived: Symbolic, position: int) -> Symbolic:
        return arrived.map(lambda x: self.wanted.part(x[position], position))

    def _check_elements(self, position: int, part: Symbolic, expected: np.ndarray, broken: np.ndarray) -> None:
        """Nothing is broken, and no other element stands in an element's place.

        Args:
            broken: for each pattern, by its number, whether it is broken.
        """
        pattern = compact(part.pattern)[0]
        if broken[pattern].any():
            at = np.broadcast_to(broken[pattern], part.shape)
            reason = self.patterns.describe(int(part.pattern[_first(at)]), self.leaves)
            self._fail([position], at, expected, lambda element: f"holds for element {element} {reason}")
        found, right = compact(part.element, expected)
        if np.array_equal(found, right):
            return
        at = (part.element >= 0) & (part.element != expected)
        if at.any():
            other = self.patterns.index(int(part.element[_first(at)]))
            self._fail([position], at, expected, lambda element: f"holds element {other} where element {element} belongs")

    def _check_group(self, shares: Mapping[Path, list[int]], parts: Mapping[int, Symbolic], expected: np.ndarray) -> None:
        """Devices with one box: all shares join to the whole, and equal masks hold equal contents."""
        if list(shares) == [()]:
            for position in shares[()]:
                self._check_whole([position], parts[position], expected)
            return
        first = [positions[0] for positions in shares.values()]
        members = {path: parts[position] for path, position in zip(shares, first, strict=True)}
        while any(members):
            members = self._joined(members, first)
        self._check_whole(first, members[()], expected)
        for one, *others in shares.values():
            for other in others:
                self._check_equal(one, other, parts, expected)

    def _check_whole(self, who: list[int], cells: Symbolic, expected: np.ndarray) -> None:
        at = compact(cells.pattern)[0] != self.patterns.whole
        if at.any():
            at = np.broadcast_to(at, expected.shape)
            number = int(cells.pattern[_first(at)])
            self._fail(who, at, expected, lambda element: self._wrong(number, element, len(who) == 1))

    def _joined(self, members: Mapping[Path, Symbolic], who: list[int]) -> dict[Path, Symbolic]:
        """Join the innermost shares that a group's devices want."""
        depth = max(map(len, members))
        families: dict[Path, list[Path]] = {}
        for path in members:
            if len(path) == depth:
                families.setdefault(path[:-1], []).append(path)
        result = {path: cells for path, cells in members.items() if len(path) < depth}
        for parent, paths in families.items():
            share = paths[0][-1]
            missing = sorted(set(range(share.count)) - {p[-1].position for p in paths})
            if missing or parent in result:
                lacking = f"without share {missing[0]} of {share.count}" if missing else "and what they join to"
                what = f"want shares of {self.wanted.mask(who[0])} {lacking}"
                raise VerificationError(f"{self.where()}: {self._who(who)} {what}")
            cells = members[paths[0]]
            for path in paths[1:]:
                cells = self.patterns.join(cells, members[path], share.combiner, lambda: "which the consumers would join")
            result[parent] = cells
        return result

    def _check_equal(self, one: int, other: int, parts: Mapping[int, Symbolic], expected: np.ndarray) -> None:
        """Devices with one mask must hold the same."""
        a, b = compact(parts[one].pattern, parts[other].pattern)
        if np.array_equal(a, b):
            return
        at = np.broadcast_to(a != b, expected.shape)
        first = _first(at)
        found = [self.patterns.describe(int(parts[p].pattern[first]), self.leaves) for p in (one, other)]
        share = path_name(path_of(self.wanted.mask(one)))
        self._fail(
            [one, other],
            at,
            expected,
            lambda element: f"differ in element {element} of share {share}: {found[0]} against {found[1]}",
        )

    def _wrong(self, number: int, element: tuple[int, ...], alone: bool) -> str:
        """What is wrong with a cell that does not hold the whole of ``element``."""
        pattern = self.patterns[number]
        found = self.patterns.describe(number, self.leaves)
        verb = "" if alone else "together "
        if isinstance(pattern, Broken):
            return f"{verb}hold for element {element} {found}"
        s = "s" if alone else ""
        if isinstance(pattern, Constant):
            return f"{verb}lack{s} element {element}: {found}"
        counts = leaf_counts(pattern, self.leaves)
        most = max(counts.values())
        if most > 1:
            often = "twice" if most == 2 else f"{most} times"
            return f"{verb}hold{s} element {element} {often} ({found}; expected {self._expected()})"
        missing = " ".join(path_name(leaf) for leaf in self.leaves if leaf not in counts)
        return f"{verb}lack{s} share {missing} of element {element} ({found}; expected {self._expected()})"

    def _expected(self) -> str:
        return " ".join(map(path_name, self.leaves))

    def _fail(self, who: list[int], at: np.ndarray, expected: np.ndarray, text: Callable[[tuple[int, ...]], str]) -> None:
        element = self.patterns.index(int(expected[_first(at)]))
        more = ""
        if (count := int(at.sum())) > 1:
            index = np.stack(np.unravel_index(expected[at], self.patterns.shape))
            box = ", ".join(f"{low}:{high + 1}" for low, high in zip(index.min(1), index.max(1), strict=True))
            more = f"; {count} such elements, in [{box}]"
        raise VerificationError(f"{self.where()}: {self._who(who)} {text(element)}{more}")

    def _who(self, positions: Sequence[int]) -> str:
        names = " ".join(str(self.names[p]) for p in positions)
        return f"device{'s' if len(positions) > 1 else ''} {names}"


def _first(at: np.ndarray) -> tuple[Any, ...]:
    return np.unravel_index(int(at.argmax()), at.shape)
