"""``Primitive``: what jscaler knows of one primitive of JAX, in one record.

The other files of this package hold the records, by family, to be read against the documentation of ``jax.lax``. A
primitive without one is never split, is a kernel of its own, and is refused by the verifier where data is under way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jax.extend import core

from jscaler.ir import Halo
from jscaler.ir.mask import Combiner
from jscaler.lax_primitives.spec import SpecFunction


class Part(Protocol):
    """One part of an op that is bound equation by equation: what a record may ask about it. Sizes are local ones.

    Attributes:
        index: leaf atom that is split -> the part's index, a tracer.
        sizes: leaf atom that is split into unequal parts -> their sizes.
    """

    index: dict[int, Any]
    sizes: dict[int, tuple[int, ...]]

    def leaves_of(self, var: Any) -> Sequence[Sequence[int]]: ...
    def shape(self, var: Any) -> tuple[int, ...]: ...
    def extended(self, var: Any) -> tuple[int, ...]: ...
    def around(self, var: Any, dim: int) -> Halo: ...
    def positions(self, var: Any, dim: int, dtype: Any) -> Any: ...
    def locate(self, var: Any, dim: int, positions: Any) -> tuple[Any, Any]: ...
    def bind(self, eqn: core.JaxprEqn, values: Sequence[Any], **params: Any) -> Sequence[Any]: ...


Bound = Callable[[Part, core.JaxprEqn, Sequence[Any]], Sequence[Any]]
Shaped = Callable[[Part, core.JaxprEqn], Mapping[str, Any]]
Role = Literal["", "moves", "mixes", "reduces", "contracts", "alone"]
Opened = Literal["", "call", "vjp", "jvp", "remat"]
Cost = Literal["call", "alias", "fused", "drawn", "reduced"]
Seen = Literal["", "same", "moves", "joins", "sums", "casts", "scales"]


@dataclass(frozen=True)
class Windows:
    """Windows that read beyond a part.

    Attributes:
        sweeps: how they slide, by the ``number`` of the spec's windows (see ``windows.Sweep``).
        fills: per operand the combiner that leaves what lies beyond the border as it is; None where it is not read there.
        fold: the parameters with a ``padding_config`` in front of the windows folded in; None where that cannot be.
        scatters: whether rows get what windows give back, and not windows what rows hold.
        grouped: whether the backend may go over all groups at once, with zeros between them.
    """

    sweeps: Callable[[core.JaxprEqn], Sequence[Any]]
    fills: Callable[[core.JaxprEqn], tuple[Combiner | None, ...]]
    fold: Callable[[core.JaxprEqn, Sequence[tuple[int, int, int]]], dict[str, Any] | None] | None = None
    scatters: bool = False
    grouped: bool = False


@dataclass(frozen=True)
class Primitive:
    """One primitive of JAX, or of a user.

    How it is split:

    Attributes:
        spec: its dims, its sums and what is linear, of an equation; without one nothing is split.
        why: why it has none on purpose.
        asks_shardy: whether Shardy's factors may stand in for a missing spec.
        nested: whether it runs programs of its own (``rules.nested`` knows how).
        shaped: the parameters that carry shapes, at one part's.
        bound: how it is bound where an operand or a result is split, if not on parts of the operands.
        windows: what it reads beyond a part.
        even_only: whether it takes no parts of unequal sizes.

    What passes it:

    Attributes:
        data: which of so many operands are data; the others are indices.
        by_row: whether each row is made of the same row of the operands, once shapes are set.
        zero: whether the result is zero where ``any`` or ``all`` of the data is.
        hands_on: whether the result is one of the data, as far as somebody who follows state through a program cares.
        counts: whether a sum over rows is still one behind it, as far as dividing it by their number makes a mean.
        combiner: how it joins data: cell by cell, or along dims.
        running: of a running sum what joins two neighbouring runs, and what leaves any run as it is.
        numpy: the same on numpy arrays, cell by cell.

    What an op is made of:

    Attributes:
        role: what it does in a fragment: ``moves`` what prepares an operand, ``mixes`` or ``reduces`` elements,
            ``contracts`` (which ends the fragment), stays ``alone``.
        opened: which kind of call it is, if what it calls may stand in for it.
        weight: of a fragment's primitives the heaviest names it; none where 0.
        word: what a fragment is called, if not by ``name``.

    What runs:

    Attributes:
        fence: whether it orders, and changes no value.
        refilled: whether loops make it anew: what they read of the program around them lies in memory, and in no register.
            A device's counts for random bits, for one, are as large as what is drawn.
        cost: what becomes of it on a GPU, see ``xla_model.block``.
        flops: of a product; else every element counts as one.
        changes: whether the result is written over the first operand.
        picks: whether it reads no more than it leaves.

    Attributes:
        seen: how the verifier sees it, where data is under way: the ``same``, ``moves``, ``joins`` cells, ``sums`` along
            dims, ``casts``, ``scales``.
    """

    name: str
    spec: SpecFunction | None = None
    why: str = ""
    asks_shardy: bool = True
    nested: bool = False
    shaped: Shaped | None = None
    bound: Bound | None = None
    windows: Windows | None = None
    even_only: bool = False
    data: Callable[[int], Sequence[int]] = range
    by_row: bool = False
    zero: Literal["", "any", "all"] = ""
    hands_on: bool = False
    counts: bool = False
    combiner: Combiner | None = None
    running: tuple[Callable[[Any, Any], Any], Combiner | float] | None = None
    numpy: Callable[..., Any] | None = None
    role: Role = ""
    opened: Opened = ""
    weight: int = 0
    word: str = ""
    fence: bool = False
    refilled: bool = False
    cost: Cost = "call"
    flops: Callable[[core.JaxprEqn], float] | None = None
    changes: bool = False
    picks: bool = False
    seen: Seen = ""
