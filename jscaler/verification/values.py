"""Do two local programs compute the same values? Equal equations of equal values are one value: numbered, and compared."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import inner_jaxpr, open_jaxpr, params_key, shape
from jscaler.capture.opening import scan_parts
from jscaler.lax_primitives import known
from jscaler.verification import collectives
from jscaler.verification.local_programs import Local


def numbered(programs: Sequence[Local], num_args: int, most: int) -> list[list[int]]:
    """The numbers of the results of ``programs``, given the same arguments: of equal numbers, equal values.

    Args:
        most: rounds after which carries of loops are told apart for certain: as many as all programs' loops have carries.
    """
    rounds = 1
    while True:  # a few rounds nearly always do, and of loops in loops each costs those of the others
        values = Values(rounds)
        found = [values.results(program, num_args) for program in programs]
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
        self._dots: dict[int, Any] = {}  # results of dots -> their other parameters, and operands with the dims' labels
        self._kept: list[Any] = []  # what is known by identity must stay alive

    def results(self, local: Local, num_args: int) -> list[int]:
        """The numbers of ``local``'s results, given arguments 0, 1, ..."""
        args = [self._number(("argument", i)) for i in range(num_args)]
        return self._run(local.jaxpr, local.bind(args, self._constant))

    def _run(self, jaxpr: core.Jaxpr, args: Sequence[int]) -> list[int]:
        env: dict[core.Var, int] = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

        def read(atom: Any) -> int:
            return self._constant(atom.val, str(atom.aval)) if isinstance(atom, core.Literal) else env[atom]

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
            return self._run(inner, [*map(self._constant, consts), *args])
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
        params = params_key(eqn.params, self._content)
        if one.seen == "casts":
            return [self._cast(params, args[0])]
        key = (name, params, tuple(args))
        numbers = [self._number((key, i)) for i in range(len(eqn.outvars))]
        if name in collectives.MOVES or (one.seen == "moves" and "fill_value" not in eqn.params):
            self._moved[numbers[0]] = (*key, one.data(len(args)))
        return numbers

    def _condition(self, eqn: core.JaxprEqn, args: list[int]) -> list[int]:
        """A condition, result by result, so that several of one predicate are the one that holds them all."""
        branches = [open_jaxpr(branch) for branch in eqn.params["branches"]]
        each = [self._run(branch, [*map(self._constant, consts), *args[1:]]) for branch, consts in branches]
        return [self._number(("cond", args[0], made)) for made in zip(*each, strict=True)]

    def _scan(self, eqn: core.JaxprEqn, args: list[int]) -> list[int]:
        """A loop: its carries are told apart by what they are before it, and by what an iteration makes of them.

        At first carries with one initial value are one symbol; each round, those of which an iteration makes different
        values part. As in the minimization of an automaton, once a round parts none (of both programs that are compared)
        equal symbols mean equal values in every iteration.
        """
        parts = scan_parts(eqn)
        self._depth += 1  # a loop's iterations are not those of the loop around it
        how = (self._depth, eqn.params["length"], eqn.params["reverse"])
        first, last = len(parts.consts), len(parts.consts) + len(parts.inits)
        consts, inits = [*map(self._constant, parts.body_consts), *args[:first]], args[first:last]
        slices = [self._slice(how, stack) for stack in args[last:]]
        symbols = [self._number(("carry", how, init)) for init in inits]
        for _ in range(self._rounds):
            results = self._run(parts.body, [*consts, *symbols, *slices])
            made = zip(inits, results, strict=False)
            symbols = [self._number(("carry", how, init, result)) for init, result in made]
        results = self._run(parts.body, [*consts, *symbols, *slices])
        for symbol, init, result in zip(symbols, inits, results, strict=False):
            after = self._number(("carry", how, init, result))
            self.settled &= self._next.setdefault(symbol, after) == after
        self._depth -= 1
        finals = [self._number(("final", symbol)) for symbol in symbols]
        pieces = results[len(inits) :]
        stacks = [self._number(("stack", how, piece)) for piece in pieces]
        self._pieces.update((stack, (how, piece)) for stack, piece in zip(stacks, pieces, strict=True))
        return [*finals, *stacks]

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
        """The number of a cast. What only moves elements may be cast before or after: before is the form compared."""
        if arg in self._moved:
            name, how, args, data = self._moved[arg]
            key = (name, how, tuple(self._cast(params, a) if i in data else a for i, a in enumerate(args)))
            moved = self._number((key, 0))
            self._moved[moved] = (*key, data)
            return moved
        return self._number((("convert_element_type", params, (arg,)), 0))

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
        return self._labelled_dot(params_key(rest, self._content), operands)

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

    def _constant(self, value: Any, kind: str = "") -> int:
        return self._number(("constant", self._content(value), kind))

    def _content(self, value: Any) -> Any:
        self._kept.append(value)
        return content_key(value)


def content_key(value: Any) -> Any:
    """A key of an array's content; what is no plain array (a PRNG key) is known by identity while it lives."""
    try:
        array = np.asarray(value)
    except TypeError:
        return id(value)
    if array.dtype == object:
        return id(value)
    return array.shape, array.dtype.str, hashlib.sha256(array.tobytes()).digest()
