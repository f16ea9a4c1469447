"""Which of several dims each op is split along, over the same devices, such that the fewest bytes change places.

::

    m cut by s ──► row attention ──► all-to-all ──► m cut by i ──► column attention ──► …
    z cut by i ──► gather one operand of a product, or add up shares of it, or switch before it: what is least?

Every op has a few choices: the factors that one of the dims is there. What it reads lies as earlier choices left it, and is
brought if it lies otherwise; a copy that was brought is there for later readers too. The choices of all ops are made
together, in the order of the program, with the cheapest ways so far kept for each way that what is read later may lie.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from jscaler.ir import Op, PTensor
from jscaler.ir.loop import Item, Loop
from jscaler.ir.rule import Rule, TensorFactors
from jscaler.plans.attention import cores_of, holds_contraction
from jscaler.plans.factors import Factors, can_be_split
from jscaler.primitives import Planner
from jscaler.rules.reached_factors import all_reached_factors

Cut = tuple[int, int]  # a dim, and the size of its sub-dims in front of the one that is cut
WHOLE, SHARES = (-1, 0), (-1, 1)
LAUNCH = 1 << 20  # bytes that count as much as starting a collective: some 10 µs of a fast link
KEPT = 64  # ways


@dataclass(slots=True)
class Way:
    """The choices for all ops so far.

    Attributes:
        lies: how the tensors lie that are read later on, by their numbers; what is not named is on every device.
        last: the last choice, with all before it.
    """

    cost: float = 0.0
    lies: dict[int, frozenset[Cut]] = field(default_factory=dict)
    last: "tuple[Op, str, Way] | None" = None

    def choices(self) -> Factors:
        """The factor of each op."""
        found, way = Factors(), self
        while way.last is not None:
            op, name, way = way.last
            if name:
                found[op] = name
        return found


@dataclass(frozen=True)
class Choice:
    """An op split along one factor: how it wants what it reads, and how what it makes lies, if that is read later."""

    op: Op
    name: str
    reads: Sequence[tuple[int, Cut]]
    makes: Sequence[tuple[int, frozenset[Cut]]]


def fewest_switches(graph: Planner, dims: Iterable[tuple[PTensor, int]], parts: int) -> Factors:
    """The factor of every forward op that some of ``dims`` reach, of all that they are there the one to be split."""
    return _Chooser(graph, dims, parts).best().choices()


class _Chooser:
    def __init__(self, graph: Planner, dims: Iterable[tuple[PTensor, int]], parts: int):
        self.graph, self.parts = graph, parts
        cores = {op for core in cores_of(graph, every=True) for op in core if holds_contraction(op)}
        self.choices: dict[Op, Sequence[str]] = {}
        for op, names in all_reached_factors(graph.graph, dims).items():
            if op.kind == "forward":
                rule = graph.rule(op)
                able = [name for name in rule.factors if name in names and can_be_split(graph, op, name, parts)]
                free = [n for n in able if rule.factors[n].kind != "blocked"] or able or [""]
                rows = [n for n in free if all(any(n in own for own in dims) for dims in rule.operands)]
                self.choices[op] = (rows if op in cores else []) or free
        last_read: dict[PTensor, int] = {}
        for place, item in enumerate(self._in_order(graph.tree)):
            finals = [] if isinstance(item, Op) else [c.final for c in item.carries]  # which say how carries lie
            reads = item.inputs if isinstance(item, Op) else (*item.operands, *item.returned, *finals)
            last_read.update(dict.fromkeys(reads, place))
        self.number = {tensor: number for number, tensor in enumerate(last_read)}  # of those that are read
        self.nbytes = [tensor.nbytes for tensor in last_read]
        self.behind: dict[int, list[int]] = {}  # which nothing reads behind a place
        for tensor, place in last_read.items():
            self.behind.setdefault(place, []).append(self.number[tensor])

    def _in_order(self, items: Iterable[Item]) -> Iterator[Op | Loop]:
        """The forward ops, and each loop before and after those in it."""
        for item in items:
            if isinstance(item, Op):
                if item.kind == "forward":
                    yield item
            elif any(op.kind == "forward" for op in item.ops()):
                yield item.loop
                yield from self._in_order(item.items)
                yield item.loop

    def best(self) -> Way:
        ways, inside = [Way()], list[Loop]()
        for place, item in enumerate(self._in_order(self.graph.tree)):
            times = math.prod(loop.length for loop in inside)
            found: Iterable[Way] = ways
            if isinstance(item, Op):
                choices = [self._choice(item, name) for name in self.choices.get(item, ())]
                found = [self._with(way, choice, times) for way in ways for choice in choices] or ways
            elif item in inside:
                found = [self._left(way, item, times) for way in ways]
                inside.remove(item)
            else:
                found = [one for way in ways for one in self._entered(way, item)]
                inside.append(item)
            ways = self._kept(found, place, inside)
        return ways[0]

    def _choice(self, op: Op, name: str) -> Choice:
        rule = self.graph.rule(op)
        reads = [(self.number[t], _cut(rule, dims, name)) for t, dims in zip(op.inputs, rule.operands, strict=True)]
        makes = []
        for i, (tensor, dims) in enumerate(zip(op.outputs, rule.results, strict=True)):
            if tensor in self.number:
                cut = _cut(rule, dims, name)
                lies = SHARES if cut == WHOLE and (name, i) in rule.shares else cut
                makes.append((self.number[tensor], frozenset([lies])))
        return Choice(op, name, reads, makes)

    def _kept(self, ways: Iterable[Way], place: int, inside: Sequence[Loop]) -> list[Way]:
        """The cheapest, without those that differ from a cheaper one by more than it costs to bring that to the same.

        Those whose loops have carries that lie otherwise are no rivals yet.
        """
        carried = [self.number[c.final] for loop in inside for c in loop.carries]
        times = math.prod(loop.length for loop in inside)
        rivals: dict[object, list[Way]] = {}
        for way in sorted(ways, key=lambda way: way.cost):
            for number in self.behind.get(place, ()):
                way.lies.pop(number, None)
            rivals.setdefault(tuple(way.lies.get(n) for n in carried), []).append(way)
        kept = itertools.chain.from_iterable(self._unserved(own, times) for own in rivals.values())
        return sorted(kept, key=lambda way: way.cost)

    def _unserved(self, ways: Sequence[Way], times: int) -> list[Way]:
        """The first of ``ways``, cheapest first, that none of those before them serves.

        One serves another if it costs no more, with all that is read later brought to where the other has it.
        """
        costs = np.array([way.cost for way in ways])
        served = np.repeat(costs[:, None], len(ways), axis=1)  # what each costs if it is to serve each
        for tensor in ways[0].lies:
            kinds = {way.lies[tensor]: None for way in ways}
            if len(kinds) > 1:
                number = {cuts: i for i, cuts in enumerate(kinds)}
                prices = [[sum(self._price(tensor, here, cut) for cut in there) for there in kinds] for here in kinds]
                own = np.array([number[way.lies[tensor]] for way in ways])
                served += times * np.array(prices)[own[:, None], own]
        serves = served <= costs
        kept: list[int] = []
        for i in range(len(ways)):
            if len(kept) < KEPT and not serves[kept, i].any():
                kept.append(i)
        return [ways[i] for i in kept]

    def _with(self, way: Way, choice: Choice, times: int) -> Way:
        cost, lies = way.cost, way.lies.copy()
        for tensor, cut in choice.reads:
            here = lies.get(tensor)
            if here is not None and cut not in here:
                cost += times * self._price(tensor, here, cut)
                lies[tensor] = here | {cut}
        lies.update(choice.makes)
        return Way(cost, lies, (choice.op, choice.name, way))

    def _price(self, tensor: int, lies: frozenset[Cut], cut: Cut) -> float:
        """Bytes that a device sends, to have ``cut`` of a tensor that lies in one or several ways."""
        if cut in lies or WHOLE in lies:
            return 0.0
        sent = self.nbytes[tensor] * (1 - 1 / self.parts)  # a gather, or shares that are added up and scattered
        if cut == WHOLE:
            return LAUNCH + sent * (2 if lies == {SHARES} else 1)
        return LAUNCH + sent / (1 if lies == {SHARES} else self.parts)

    def _lies(self, way: Way, tensor: PTensor) -> frozenset[Cut] | None:
        """How a tensor lies that is not on every device, and is read later on."""
        number = self.number.get(tensor)
        return None if number is None else way.lies.get(number)

    def _entered(self, way: Way, loop: Loop) -> Iterator[Way]:
        """A loop's carries lie in one way, which is a choice, from the first iteration to the last."""
        lies = way.lies.copy()
        for x in loop.xs:
            stack = self._lies(way, x.stack)
            if stack is not None and x.slice in self.number:
                lies[self.number[x.slice]] = frozenset((d - 1, n) if d > 0 else WHOLE for d, n in stack)
        carries = [c for c in loop.carries if self._lies(way, c.init) is not None or self._cuts_of(c.inside)]
        for cuts in itertools.product(*(self._cuts_of(c.inside) or [WHOLE] for c in carries)):
            cost, inside = way.cost, lies.copy()
            for carry, cut in zip(carries, cuts, strict=True):
                here = self._lies(way, carry.init)
                if here is not None:
                    cost += self._price(self.number[carry.init], here, cut)
                for tensor in (carry.inside, carry.final):
                    if tensor in self.number:
                        inside[self.number[tensor]] = frozenset([cut])
            yield Way(cost, inside, way.last)

    def _cuts_of(self, tensor: PTensor) -> list[Cut]:
        """How the readers of a tensor may want it."""
        found: dict[Cut, None] = {}
        for op in self.graph.consumers.get(tensor, ()):
            for name in self.choices.get(op, ()):
                rule = self.graph.rule(op)
                found[_cut(rule, rule.operands[op.inputs.index(tensor)], name)] = None
        found.pop(WHOLE, None)
        return list(found)

    def _left(self, way: Way, loop: Loop, times: int) -> Way:
        cost, lies = way.cost, way.lies.copy()
        for carry in loop.carries:
            out, final = self._lies(way, carry.out), self._lies(way, carry.final)
            if out is not None and final is not None:
                (cut,) = final
                cost += times * self._price(self.number[carry.out], out, cut)
        for y in loop.ys:
            slice_ = self._lies(way, y.slice)
            if slice_ is not None and y.stack in self.number:
                lies[self.number[y.stack]] = frozenset((d + 1, n) if d >= 0 else (d, n) for d, n in slice_)
        return Way(cost, lies, way.last)


def _cut(rule: Rule, dims: TensorFactors, name: str) -> Cut:
    """Where a tensor is cut if a factor is."""
    for dim, names in enumerate(dims):
        if name in names:
            before = 1
            for other in itertools.takewhile(lambda n: n != name, names):
                before *= rule.factors[other].size
            return dim, before
    return WHOLE
