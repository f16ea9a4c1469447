"""Names of ops, tensors and loops: text for a person, with typed marks for what was cut or copied.

    "layers/mlp/dot" + range_mark((4, 8)) + "@backward"        layers/mlp/dot[4:8]@backward

A name is put together with ``+``, which keeps marks. Nobody reads a mark back from the text: `layers_of` and `without` ask
the name for it.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Self, SupportsIndex

SHARED = "shared"  # how `shared_axis` begins
MarkKind = Literal["layers", "turn", "group", "shared"]


class Mark(NamedTuple):
    """A part of a name that says for which of several equal things it is.

    Attributes:
        kind: ``layers``, of a range of these; ``turn`` of a loop's iteration; ``group`` of devices, or stage, of a copy;
            ``shared``, of a time axis whose cells share devices.
        value: the bounds of a range of layers; else nothing.
    """

    text: str
    kind: MarkKind
    value: tuple[int, int] | None = None


class Name(str):
    """A text with marks in it.

    Attributes:
        parts: plain texts and marks, in order.
    """

    __slots__ = ("parts",)
    parts: tuple[str | Mark, ...]

    def __new__(cls, parts: Sequence[str | Mark]) -> Self:
        name = str.__new__(cls, "".join(part.text if isinstance(part, Mark) else part for part in parts))
        name.parts = tuple(parts)
        return name

    def __getnewargs__(self) -> tuple[tuple[str | Mark, ...]]:
        return (self.parts,)

    def __add__(self, other: str) -> "Name":
        return Name((*self.parts, *_parts(other)))

    def __radd__(self, other: str) -> "Name":
        return Name((*_parts(other), *self.parts))

    def __mul__(self, count: SupportsIndex) -> "Name":
        return Name(self.parts * count)


def _parts(name: str) -> tuple[str | Mark, ...]:
    return name.parts if isinstance(name, Name) else (name,)


def range_mark(bounds: tuple[int, int]) -> Name:
    """What follows the names of what is for the iterations from the first of ``bounds`` to before the second: ``[4:8]``."""
    return Name([Mark("[{}:{}]".format(*bounds), "layers", bounds)])


def turn_mark(turn: int) -> str:
    """What follows the names of what a loop does for its parts after the first of an iteration: ``~1``."""
    return Name([Mark(f"~{turn}", "turn")]) if turn else ""


def group_mark(numbers: Sequence[int]) -> Name:
    """What follows the names of copies for one group of devices, or for one stage: ``@0-1``."""
    return Name([Mark("@" + "-".join(map(str, numbers)), "group")])


def shared_axis(number: int, parts: str) -> Name:
    """The name of a time axis of ``parts`` whose cells share devices: ``shared+4``; of others of an op ``shared2+4``."""
    return Name([Mark(f"{SHARED}{number if number > 1 else ''}+{parts}", "shared")])


def has_mark(name: str, kind: MarkKind) -> bool:
    return any(isinstance(part, Mark) and part.kind == kind for part in _parts(name))


def general(name: str) -> str:
    """``name`` as it is for any range, turn and group."""
    return without(name, "layers", "turn", "group")


def layers_of(name: str) -> tuple[int, int] | None:
    """The iterations of a loop over layers for which a thing is, if it is for a range: (4, 8)."""
    marks = (part for part in _parts(name) if isinstance(part, Mark) and part.kind == "layers")
    return next((mark.value for mark in marks), None)


def without(name: str, *kinds: MarkKind) -> str:
    """``name`` without its marks of these kinds.

    Example:
        >>> without("layers/dot" + range_mark((4, 8)) + "@backward", "layers")
        'layers/dot@backward'
    """
    if not isinstance(name, Name):
        return name
    return Name([part for part in name.parts if not isinstance(part, Mark) or part.kind not in kinds])
