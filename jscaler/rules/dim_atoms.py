"""Union-find over sub-dims that can be refined: what names the factors of an op.

Every dim of every tensor in an op is a list of *atoms*, major first. Two dims that are one index are unified atom by
atom from the minor end; where sizes differ and one divides the other, the larger atom is refined into two.
"""

import math
from collections.abc import Collection


class Atoms:
    """A forest of atoms. An atom is an int; ``leaves`` gives what it stands for now."""

    def __init__(self) -> None:
        self.size: list[int] = []
        self.reason: dict[int, str] = {}  # root -> why it cannot be split
        self.changes = 0  # unions and refinements so far: what ``leaves`` gave before the last one may have changed
        self._parent: list[int] = []
        self._children: dict[int, tuple[int, int]] = {}

    def new(self, size: int) -> int:
        self.size.append(size)
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def root(self, atom: int) -> int:
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = self._parent[atom]
        return atom

    def leaves(self, atoms: list[int]) -> list[int]:
        """The unrefined atoms that ``atoms`` stand for, major first."""
        result: list[int] = []
        for atom in map(self.root, atoms):
            children = self._children.get(atom)
            result += self.leaves(list(children)) if children else [atom]
        return result

    def resized(self, leaves: Collection[int], size: int) -> "Atoms | None":
        """The same forest with leaves of another size; None where some atom is refined, as the sizes decided."""
        if self._children:
            return None
        made = Atoms()
        made.size = [size if self.root(atom) in leaves else own for atom, own in enumerate(self.size)]
        made.reason, made.changes, made._parent = dict(self.reason), self.changes, list(self._parent)
        return made

    def block(self, atoms: list[int], reason: str) -> None:
        """Mark what ``atoms`` stand for as unsplittable; the first reason stays."""
        for leaf in self.leaves(atoms):
            self.reason.setdefault(leaf, reason)

    def unify(self, a: list[int], b: list[int], where: str) -> None:
        """Make two lists of atoms, of equal total size, one index."""
        left, right = self.leaves(a), self.leaves(b)
        while left and right:
            x, y = left.pop(), right.pop()
            if x == y:
                continue
            if self.size[x] == self.size[y]:
                self._union(x, y)
            elif self.size[y] and self.size[x] % self.size[y] == 0:
                left += self._refine(x, self.size[y])
                right.append(y)
            elif self.size[x] and self.size[y] % self.size[x] == 0:
                right += self._refine(y, self.size[x])
                left.append(x)
            elif (common := math.gcd(self.size[x], self.size[y])) > 1:
                left += self._refine(x, common)
                right += self._refine(y, common)
            else:
                self.block([*left, x, *right, y], f"{where} mixes parts of sizes {self.size[x]} and {self.size[y]}")
                return
            # a union may have refined nothing, but a refinement may touch what is still listed: look again
            left, right = self.leaves(left), self.leaves(right)
        assert math.prod(map(self.size.__getitem__, left)) == math.prod(map(self.size.__getitem__, right)) == 1

    def _refine(self, atom: int, minor: int) -> list[int]:
        children = (self.new(self.size[atom] // minor), self.new(minor))
        if atom in self.reason:
            reason = self.reason.pop(atom)
            self.reason.update(dict.fromkeys(children, reason))
        self._children[atom] = children
        self.changes += 1
        return list(children)

    def _union(self, x: int, y: int) -> None:
        keep, gone = min(x, y), max(x, y)
        self._parent[gone] = keep
        self.changes += 1
        if gone in self.reason:
            self.reason.setdefault(keep, self.reason.pop(gone))
