"""What a call of a compiled step costs before the step runs: its arguments are recognised, and moved where they must be.

An array that a step returned has the same type and sharding objects whenever the step returns it, so comparing lists of
them is comparing identities: a state of 300 leaves is known again in some 30 µs, and passes through untouched. Whatever
is not recognised goes the long way: it is bound to the step's signature, and its types decide which executable runs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import jax
import jax.core
import numpy as np

from jscaler.errors import DeletedArgumentError
from jscaler.runtime.arguments import BoundCall, leaf_type
from jscaler.runtime.chunked_array import ChunkedArray, ChunkedSharding, is_equivalent
from jscaler.runtime.failures import unchecked

_AVAL, _SHARDING, _DELETED = attrgetter("aval"), attrgetter("sharding"), methodcaller("is_deleted")


def place(value: Any, sharding: Any, returned: bool = False) -> Any:
    """``value`` under ``sharding``: itself, where it lies so already.

    What is ``returned`` untouched shares no memory with a numpy array, into which its owner may write later.
    """
    if isinstance(value, (jax.Array, ChunkedArray)):
        held = value.sharding
        if held is sharding or is_equivalent(held, sharding, value.ndim):
            return value
    elif returned and isinstance(value, np.ndarray):
        value = value.copy()
    if isinstance(sharding, ChunkedSharding):
        return sharding.placed(value)
    if isinstance(value, ChunkedArray):
        return value.whole(sharding)
    return unchecked(jax.device_put)(value, sharding)


def distinct(leaves: Sequence[Any], donated: Sequence[int]) -> Sequence[Any]:
    """``leaves``; of an array that is given twice (averages that start as the parameters) the donated one is a copy.

    Memory can be given away once; XLA refuses, or dies, where it is given twice.
    """
    given = Counter(id(x) for x in leaves if isinstance(x, (jax.Array, ChunkedArray)))
    if not donated or len(given) == given.total():
        return leaves
    own = list(leaves)
    for i in donated:
        if given[id(own[i])] > 1:
            given[id(own[i])] -= 1
            own[i] = own[i].copy()
    return own


def _is_gone(leaf: Any) -> bool:
    is_array = isinstance(leaf, (jax.Array, ChunkedArray)) and not isinstance(leaf, jax.core.Tracer)
    return is_array and leaf.is_deleted()


class KnownArguments:
    """The form of the last call of one executable: enough to know the next one again, and none of its arrays.

    Leaves come in three kinds. *Settled* ones were arrays in the plan's layout: they are compared by the objects that
    describe them. *Moved* ones (a batch) are typed and placed one by one. *Static* ones are compared by value. Where most
    of those that were moved lie as the plan wants them by now, the form is learned again.
    """

    def __init__(
        self, shardings: Sequence[Any], returned: frozenset[int] = frozenset(), donated: Sequence[int] = (),
        names: Sequence[str] = (),
    ):  # fmt: skip
        self._shardings = shardings
        self._names = names
        self._returned = [i in returned for i in range(len(shardings))]
        self._donated = donated
        self._tree: Any = None

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """``leaves`` in the plan's layout.

        Raises:
            DeletedArgumentError: one of them has no memory any more; XLA's CPU backend may die of it.
        """
        gone = [name for name, leaf in zip(self._names, leaves) if _is_gone(leaf)]  # noqa: B905
        if gone:
            raise DeletedArgumentError(gone)
        return list(map(place, distinct(leaves, self._donated), self._shardings, self._returned))

    def learn(self, args: Sequence[Any], kwargs: Mapping[str, Any], call: BoundCall, placed: Sequence[Any]) -> None:
        """Remember the form of a call that was bound as ``call``, and whose leaves were placed as ``placed``."""
        self._tree = None
        if call.nodes:
            return  # the graph of nnx objects has to be walked in any case
        flat, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
        numbered, named = tree.unflatten(range(len(flat)))
        self._order = call.arguments.bind(numbered, named).leaves  # of every leaf of the step its place in ``flat``
        dynamic = set(self._order)
        self._static = [(i, x) for i, x in enumerate(flat) if i not in dynamic]
        both = zip(placed, call.leaves, strict=True)
        stays = [isinstance(x, (jax.Array, ChunkedArray)) and p.sharding == x.sharding for p, x in both]
        settled = [i for i, same in enumerate(stays) if same]
        moved = [i for i, same in enumerate(stays) if not same]
        self._moved = [(i, call.types[i], self._shardings[i], self._returned[i]) for i in moved]
        self._settled = itemgetter(*settled) if len(settled) > 1 else lambda leaves: [leaves[i] for i in settled]
        arrays = self._settled(placed)
        self._avals, self._held = [x.aval for x in arrays], [x.sharding for x in arrays]
        self._tree = tree

    def placed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """The leaves of a call in the plan's layout; None where it has another form than the last."""
        if self._tree is None:
            return None
        flat, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
        if tree != self._tree:
            return None
        leaves = [flat[i] for i in self._order]
        arrays = self._settled(leaves)
        try:
            avals, held = list(map(_AVAL, arrays)), list(map(_SHARDING, arrays))
            if any(map(_DELETED, arrays)):
                return None  # and is named
        except AttributeError:  # not an array any more
            return None
        if avals != self._avals or held != self._held:
            return None
        if self._donated and len(set(map(id, arrays))) < len(arrays):
            return None
        self._avals, self._held = avals, held  # the next call is likely to bring these very objects
        if any(type(flat[i]) is not type(x) or flat[i] != x for i, x in self._static):
            return None
        settled = 0
        for i, wanted, sharding, returned in self._moved:
            leaf = leaves[i]
            if leaf_type(leaf, "", leaf, 0) != wanted or _is_gone(leaf):
                return None
            leaves[i] = place(leaf, sharding, returned)
            settled += leaves[i] is leaf
        if settled > len(arrays):  # a state that was moved at the last call, and has been returned since: known from now on
            return None
        return leaves
