"""Expansions: an algorithm replaces an op by steps of its own, each an ordinary op once it is traced.

A step is a function of *whole* arrays in which the parts are a dim of their own: a tensor of ``size`` rows is seen as
``(parts, size / parts)``. From that its rule, its local program, its layouts and the communication in front of it follow
as for any op, so that an algorithm declares nothing that could be wrong. A part's own number is ``jnp.arange(parts)``
along that dim. Where steps exchange values (totals of a prefix sum, the (max, sum, output) of attention over key blocks),
one makes them and the next one reads them in the way it needs.

    running sum in 4 parts    x (4, n) ──► sums within each part, totals (4,) ──► totals of the parts before ──► add
                              split        split                                  copied                         split
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
from jax.extend import core

from jscaler.capture.jaxprs import shape_struct
from jscaler.rules.analysed import Analysis
from jscaler.rules.factor_states import Leaves

Value = int | str  # an operand or result of the op by its number, or a value between steps by its name


@dataclass(frozen=True)
class Step:
    """One op of an expansion.

    Attributes:
        name: the last part of its path, unique in its expansion.
        run: from whole arrays to a sequence of whole arrays.
        reads: operands of the op by number, or values that earlier steps make.
        makes: for each array that ``run`` returns the result of the op it is, or a name for later steps.
    """

    name: str
    run: Callable[..., Sequence[Any]]
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]


@dataclass(frozen=True)
class Site:
    """The op that an algorithm is to expand.

    Attributes:
        jaxpr: what it computes, with calls opened.
        parts: into how many parts the factor is to be cut.
    """

    analysis: Analysis
    group: Leaves
    parts: int

    @property
    def jaxpr(self) -> core.Jaxpr:
        return self.analysis.jaxpr

    @property
    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the operands."""
        return tuple(shape_struct(v.aval) for v in self.jaxpr.invars)

    def dim(self, atom: core.Var | core.Literal) -> int | None:
        """The dim of a variable whose major index is the factor, if there is one."""
        if not isinstance(atom, core.Var):
            return None
        found = [dim for dim, leaves in enumerate(self.analysis.leaves(atom)) if leaves and leaves[0] in self.group]
        return found[0] if len(found) == 1 else None


@runtime_checkable
class Expanding(Protocol):
    """An algorithm with steps of its own, for ``op_trans``. Make it a frozen dataclass: plans compare and print it.

    Attributes:
        factor: the factor that it cuts into parts, as in `Split`; it may be blocked.
        parts: how many; must divide the factor's size.

    Example:
        >>> @dataclass(frozen=True)
        ... class Total:
        ...     '''A sum, part by part, whatever follows it in the op.'''
        ...     factor: str
        ...     parts: int
        ...     def expand(self, site):
        ...         if [e.primitive.name for e in site.jaxpr.eqns] != ["reduce_sum", "sin"]:
        ...             return None
        ...         rows = lambda x: [x.reshape(self.parts, -1).sum(1)]
        ...         return [Step("rows", rows, (0,), ("sums",)), Step("end", lambda s: [jnp.sin(s.sum())], ("sums",), (0,))]
    """

    @property
    def factor(self) -> str | tuple[str, int]: ...

    @property
    def parts(self) -> int: ...

    def expand(self, site: Site) -> Sequence[Step] | None:
        """The steps, in order; None where this is no op for the algorithm.

        It is asked for the op itself, and for its backward once that has a body: what a backward cannot be expanded to
        is split as usual where its rule allows that, and copied where not.
        """
        ...
