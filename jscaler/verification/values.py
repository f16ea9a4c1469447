"""Do two local programs compute the same values? Equal equations of equal values are one value: numbered, and compared."""

import hashlib
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import core

from jscaler.capture.inner_jaxprs import scan_parts
from jscaler.capture.jaxprs import dtype, inner_jaxpr, open_jaxpr, params_key, shape
from jscaler.lax_primitives import known
from jscaler.verification import collectives
from jscaler.verification.local_programs import Local
from jscaler.verification.slice_sums import slice_sums

T = TypeVar("T")
Sizes = tuple[int, ...]
LoopBody = Callable[[Sequence[int], Sequence[int]], Sequence[int]]  # from carries and slices to carries and pieces
ASIDE = frozenset({"sharding", "out_sharding", "weak_type"})  # parameters that no value depends on


def numbered(number: Callable[["Values"], T], most: int) -> T:
    """What ``number`` says of the values of several programs, whose loops it tells apart: of equal numbers, equal values.

    Args:
        number: is asked again, with fresh numbers, until the carries of all loops are told apart.
        most: rounds after which they are for certain: as many as all programs' loops have carries.
    """
    rounds = 1
    while True:  # a few rounds nearly always do, and of loops in loops each costs those of the others
        values = Values(rounds)
        found = number(values)
        if values.settled or rounds >= most:
            return found
        rounds = min(2 * rounds, most)


class Values:
    """Numbers for values; the same number for the same expression, in whatever program it stands.

    Args:
        rounds: how often the body of a loop is gone through; enough if ``settled`` after all programs were numbered.

    Attributes:
        settled: whether another round would part no carries that are one so far, in no loop: equal symbols mean equal
            values in every iteration then, by induction.
    """

    def __init__(self, rounds: int = 1) -> None:
        self.settled = True
        self._rounds = rounds
        self._depth = 0
        self._scans: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # loops that were numbered, and with what
        self._pieces: dict[int, tuple[Any, int]] = {}  # a stack -> the loops that leave it, and what an iteration leaves
        self._next: dict[int, int] = {}  # a carry's symbol -> what it is after one round more
        self._numbers: dict[Any, int] = {}
        self._moved: dict[int, Any] = {}  # results of what only moves elements -> how they were made
        self._reshaped: dict[int, tuple[int, Sizes, Sizes]] = {}  # results of reshapes -> of what, its shape, and theirs
        self._dots: dict[int, Any] = {}  # results of dots -> their other parameters, and operands with the dims' labels
        self._kept: list[Any] = []  # what is known by identity must stay alive

    def argument(self, key: Hashable) -> int:
        """The number of what is known by ``key`` alone."""
        return self._number(("argument", key))

    def constant(self, value: Any) -> int:
        """The number of an array: of equal content, the same."""
        return self._number(("constant", self._content(value)))

    def results(self, local: Local, args: Sequence[int]) -> list[int]:
        """The numbers of ``local``'s results, given those of its arguments."""
        return self.run(local.jaxpr, local.bind(args, self.constant))

    def run(self, jaxpr: core.Jaxpr, args: Sequence[int]) -> list[int]:
        """The numbers of the results of ``jaxpr``, given those of its constants and arguments."""
        env: dict[core.Var, int] = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

        def read(atom: Any) -> int:
            return self.constant(value_of(atom)) if isinstance(atom, core.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._equation(eqn, [read(a) for a in eqn.invars]), strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _equation(self, eqn: core.JaxprEqn, args: list[int]) -> list[int]:
        one = known(eqn.primitive)
        name = one.name
        if one.fence:
            return args
        if one.opened:
            inner, consts = inner_jaxpr(eqn)
            return self.run(inner, [*map(self.constant, consts), *args])
        if name == "scan":
            key = (id(eqn), tuple(args))
            if key not in self._scans:
                self._kept.append(eqn)
                self._scans[key] = self._scan(eqn, args)
            return self._scans[key]
        if name == "cond" and not eqn.effects:
            return self._condition(eqn, args)
        if name == "dot_general":
            return [self._dot(eqn, args)]
        if name == "transpose" and args[0] in self._dots:
            return [self._transposed_dot(args[0], eqn.params["permutation"])]
        params = self._params(eqn.params)
        if one.seen == "casts":
            same = dtype(eqn.invars[0]) == dtype(eqn.outvars[0])  # whether its type is weak makes no other number
            return [args[0] if same else self._cast(params, args[0])]
        if name == "reshape" and eqn.params.get("dimensions") is None:
            return [self._reshape(params, args[0], shape(eqn.invars[0]), shape(eqn.outvars[0]))]
        key = (name, params, tuple(args))
        numbers = [self._number((key, i)) for i in range(len(eqn.outvars))]
        if name in collectives.MOVES or (one.seen == "moves" and "fill_value" not in eqn.params):
            self._moved[numbers[0]] = (*key, one.data(len(args)))
        return numbers

    def _params(self, params: Mapping[str, Any]) -> Hashable:
        """The parameters that tell values apart."""
        return params_key({name: value for name, value in params.items() if name not in ASIDE}, self._content)

    def _condition(self, eqn: core.JaxprEqn, args: list[int]) -> list[int]:
        """A condition, result by result, so that several of one predicate are the one that holds them all."""
        branches = [open_jaxpr(branch) for branch in eqn.params["branches"]]
        each = [self.run(branch, [*map(self.constant, consts), *args[1:]]) for branch, consts in branches]
        return [self._number(("cond", args[0], made)) for made in zip(*each, strict=True)]

    def _scan(self, eqn: core.JaxprEqn, args: list[int]) -> list[int]:
        parts, length, reverse = scan_parts(eqn), eqn.params["length"], eqn.params["reverse"]
        first, last = len(parts.consts), len(parts.consts) + len(parts.inits)
        consts, inits = [*map(self.constant, parts.body_consts), *args[:first]], args[first:last]
        start = self.constant(np.uint32(length - 1 if reverse else 0))
        sums = [one for one in slice_sums(parts, reverse) if inits[one.counter] == start]
        apart = {number: self._number(("summed", number)) for one in sums for number in (one.carry, one.counter)}
        kept = [number for number in range(len(inits)) if number not in apart]
        ends = [*(parts.body.outvars[n] for n in kept), *parts.body.outvars[len(inits) :], *(one.piece for one in sums)]
        inside = parts.body.replace(outvars=ends) if sums else parts.body

        def body(carries: Sequence[int], slices: Sequence[int]) -> Sequence[int]:
            known = dict(zip(kept, carries, strict=True)) | apart
            return self.run(inside, [*consts, *(known[n] for n in range(len(inits))), *slices])

        left = self.loop((length, reverse), [inits[n] for n in kept], args[last:], body)
        results = dict(zip(kept, left, strict=False))
        for one, stack in zip(sums, left[len(left) - len(sums) :], strict=True):
            results[one.carry] = self._number((("add", self._params({}), (inits[one.carry], stack)), 0))
            results[one.counter] = self._number(("counted", start, length))
        return [*(results[n] for n in range(len(inits))), *left[len(kept) : len(left) - len(sums)]]

    def loop(
        self,
        times: tuple[int, bool],
        inits: Sequence[int],
        stacks: Sequence[int],
        body: LoopBody,
    ) -> list[int]:
        """The numbers of a loop's last carries, and of the stacks that it leaves.

        Carries are told apart by what they are before the loop, and by what an iteration makes of them. At first carries
        with one initial value are one symbol; each round, those of which an iteration makes different values part. As in
        the minimization of an automaton, once a round parts none (of both programs that are compared) equal symbols mean
        equal values in every iteration. As JAX has it, a carry that no iteration changes is what it was before the loop,
        and a stack of the slices of another is that one.

        Args:
            times: how often it runs, and whether from the end.
            body: from carries and slices to what an iteration leaves of carries, and then of stacks.
        """
        self._depth += 1  # a loop's iterations are not those of the loop around it
        how = (self._depth, *times)
        slices = [self._slice(how, stack) for stack in stacks]
        first = [self._number(("carry", how, init)) for init in inits]
        same: frozenset[int] = frozenset()
        if any(map(operator.eq, body(first, slices), first)):
            same = self._unchanged(how, inits, slices, body)

        def symbols_of(results: Sequence[int]) -> list[int]:
            pairs = enumerate(zip(inits, results, strict=False))
            return [init if i in same else self._number(("carry", how, init, result)) for i, (init, result) in pairs]

        symbols = [init if i in same else symbol for i, (init, symbol) in enumerate(zip(inits, first, strict=True))]
        for _ in range(self._rounds):
            symbols = symbols_of(body(symbols, slices))
        results = body(symbols, slices)
        for i, (symbol, after) in enumerate(zip(symbols, symbols_of(results), strict=True)):
            self.settled &= i in same or self._next.setdefault(symbol, after) == after
        self._depth -= 1
        finals = [symbol if i in same else self._number(("final", symbol)) for i, symbol in enumerate(symbols)]
        pieces, given = results[len(inits) :], dict(zip(slices, stacks, strict=True))
        left = [given[piece] if piece in given else self._stack(how, piece) for piece in pieces]
        return [*finals, *left]

    def _stack(self, how: Any, piece: int) -> int:
        """What a loop leaves of the pieces that its iterations make."""
        stack = self._number(("stack", how, piece))
        self._pieces[stack] = how, piece
        return stack

    def _unchanged(self, how: Any, inits: Sequence[int], slices: Sequence[int], body: LoopBody) -> frozenset[int]:
        """The carries that each iteration leaves as it found them: known by symbols that no others have."""
        same: frozenset[int] = frozenset()
        while True:  # one that becomes another, which does not change, changes no more behind the first iteration
            symbols = [init if i in same else self._number(("own", how, i)) for i, init in enumerate(inits)]
            results = body(symbols, slices)
            found = frozenset(i for i, (a, b) in enumerate(zip(symbols, results, strict=False)) if a == b)
            if found <= same:
                return same
            same |= found

    def _slice(self, how: Any, stack: int) -> int:
        """What an iteration takes of a stack: of one that such a loop has left, what it has put there at this iteration. A
        cast of a slice is the slice of a stack that was cast whole."""
        if stack in self._pieces and self._pieces[stack][0] == how:
            return self._pieces[stack][1]
        key = ("slice", how, (stack,))
        number = self._number((key, 0))
        self._moved[number] = (*key, {0})
        return number

    def _cast(self, params: Any, arg: int) -> int:
        """The number of a cast. What only moves elements may be cast before or after: before is the form compared. What a
        loop stacks up may be cast as a whole, or piece by piece: piece by piece is."""
        if arg in self._pieces:
            how, piece = self._pieces[arg]
            return self._stack(how, self._cast(params, piece))
        if arg in self._moved:
            name, how, args, data = self._moved[arg]
            if arg in self._reshaped:
                source, before, after = self._reshaped[arg]
                return self._reshape(how, self._cast(params, source), before, after)
            key = (name, how, tuple(self._cast(params, a) if i in data else a for i, a in enumerate(args)))
            moved = self._number((key, 0))
            self._moved[moved] = (*key, data)
            return moved
        return self._number((("convert_element_type", params, (arg,)), 0))

    def _reshape(self, params: Any, arg: int, before: Sizes, after: Sizes) -> int:
        """The number of a reshape from one shape to another; of one that undoes another, what that one was of."""
        source, sizes, _ = self._reshaped.get(arg, (arg, before, before))
        if sizes == after:
            return source
        key = ("reshape", params, (arg,))
        number = self._number((key, 0))
        self._moved[number] = (*key, {0})
        self._reshaped[number] = (arg, before, after)
        return number

    def _dot(self, eqn: core.JaxprEqn, args: list[int]) -> int:
        """The number of a dot, whichever operand comes first: each operand's dims are labelled by the dim of the result
        that they become, or by which pair they are of those that are summed."""
        (contracted, batch), precision = eqn.params["dimension_numbers"], eqn.params["precision"]
        known, operands = len(batch[0]), []
        for side, arg in enumerate(args):
            labels = {dim: label for label, dim in enumerate(batch[side])}
            labels |= {dim: -1 - pair for pair, dim in enumerate(contracted[side])}
            for dim in range(len(shape(eqn.invars[side]))):
                if dim not in labels:
                    labels[dim], known = known, known + 1
            exactness = precision[side] if isinstance(precision, tuple) else precision
            operands.append((arg, tuple(labels[dim] for dim in sorted(labels)), str(exactness)))
        rest = {name: value for name, value in eqn.params.items() if name not in ("dimension_numbers", "precision")}
        return self._labelled_dot(self._params(rest), operands)

    def _transposed_dot(self, dot: int, permutation: Sequence[int]) -> int:
        how, operands = self._dots[dot]
        places = {dim: place for place, dim in enumerate(permutation)}
        moved = [(arg, tuple(places.get(label, label) for label in labels), exact) for arg, labels, exact in operands]
        return self._labelled_dot(how, moved)

    def _labelled_dot(self, how: Any, operands: Sequence[Any]) -> int:
        number = self._number(("dot", how, tuple(sorted(operands))))
        self._dots[number] = (how, operands)
        return number

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _content(self, value: Any) -> Any:
        self._kept.append(value)
        return content_key(value)


def value_of(literal: core.Literal) -> Any:
    """A literal as an array of its type."""
    kind = dtype(literal)
    return literal.val if jax.dtypes.issubdtype(kind, jax.dtypes.extended) else np.asarray(literal.val, kind)


def content_key(value: Any) -> Any:
    """A key of an array's content; what is no plain array (a PRNG key) is known by identity while it lives."""
    try:
        array = np.asarray(value)
    except TypeError:
        return id(value)
    if array.dtype == object:
        return id(value)
    return array.shape, str(array.dtype), hashlib.sha256(array.tobytes()).digest()
