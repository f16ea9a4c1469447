"""Which ops share the loop of a time axis: what is made in parts and read in the same parts, as far as it is convex.

Items (ops, and loops over layers) of one level get a *depth*. Whoever reads a part as it is made may stand as deep as its
maker; whoever needs the whole (a sum over all parts) stands one deeper. Items in time of one depth that share parts are one
region: nothing that leaves it comes back.

    depth 0   norm                      depth 1   qkv' ─► attention' ─► out' ─┐        one region: parts of heads
    depth 2   residual, norm  ◄─ sum ─────────────────────────────────────────┘
    depth 2   up' ─► gelu' ─► down' ─┐                                                 another: parts of hidden units
    depth 3   residual  ◄─ sum ──────┘
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from jscaler.capture.bodies import filled_with
from jscaler.ir import Carry, Graph, Nest, Op, PTensor, flat
from jscaler.ir.loop import Item, chain_of, item_name, made_by, nests, reads_of
from jscaler.ir.walk import Sets, closure, in_order
from jscaler.rules.part_forms import Form, OpPart, Piece, Sliced, Summed

T = TypeVar("T")


@dataclass(frozen=True)
class TimeRegion:
    """Items of one level that run part by part.

    Attributes:
        items: in order.
        ops, loops: the names of all that stands in them.
    """

    items: tuple[Item, ...]
    ops: frozenset[str] = frozenset()
    loops: frozenset[str] = frozenset()


class BehindSumsError(Exception):
    """In loops over layers that run part by part stand items that need what all parts add up to, and could stand behind.

    Attributes:
        late: loop -> the names of the items.
    """

    def __init__(self, late: Mapping[str, Set[str]]):
        self.late = late


Follow = Callable[[Op, Mapping[PTensor, Form], bool], "OpPart | None"]
WriteRegion = Callable[[TimeRegion, "str | None"], "list[Item]"]


@dataclass
class _Node:
    item: Item
    read: Mapping[PTensor, int]  # what it reads of other nodes, with their numbers
    in_time: bool = False
    depth: int = 0

    @cached_property
    def sources(self) -> Set[int]:
        return frozenset(self.read.values())


@dataclass
class TimeRegions:
    """Finds the regions of one time axis.

    Attributes:
        graph: the graph.
        parts: what the ops do for one part; grows by the ops that go on with parts though no plan splits them.
        follow: how an op that no plan splits goes on with the parts that it reads, if it can; and whether it stands in a
            loop that runs part by part.
        closed: loops that do not run part by part as a whole.
        forms: tensor -> which part of it is made in a region; None there if it is the same for all parts.
        lifts: loop -> whether its whole body runs part by part; grows level by level.
        late: loop -> what in it cannot, and need not: it may run behind the loop.
        far: whether what one item makes goes whole to another, since they lie on different device groups.
        spans: whether items lie on several device groups; regions that do are one, if they do not wait for each other.
        whole_sums: items with sums that they read whole, since they cannot share the loop that adds up; grows.
    """

    graph: Graph
    parts: dict[str, OpPart]
    follow: Follow
    closed: Set[str] = frozenset()
    forms: dict[PTensor, Form] = field(default_factory=dict)
    lifts: dict[str, bool] = field(default_factory=dict)
    late: dict[str, Set[str]] = field(default_factory=dict)
    far: Callable[[Item, Item], bool] = lambda item, other: False
    whole_sums: set[tuple[str, PTensor]] = field(default_factory=set)  # (item, a sum that it reads whole)
    spans: Callable[[Iterable[Item]], bool] = lambda items: False

    def __post_init__(self) -> None:
        self.planned = frozenset(self.parts)

    def arranged(self, items: Sequence[Item]) -> list[tuple[Item, ...] | TimeRegion]:
        """``items`` in an order in which every region stands together; runs of what is in none between them."""
        before = dict(self.parts), dict(self.forms), dict(self.lifts), dict(self.late)
        while True:
            nodes = self._deepened(items)
            roots = _joined(nodes)
            torn = {pair for node, root in zip(nodes, roots, strict=True) for pair in self._torn_sums(node, root, roots)}
            if not torn:
                return _sorted(nodes, roots, self.spans)
            assert not torn <= self.whole_sums, torn
            self.whole_sums |= torn
            self.parts, self.forms, self.lifts, self.late = (dict(one) for one in before)  # type: ignore[assignment]

    def _deepened(self, items: Sequence[Item]) -> list[_Node]:
        """``items`` with the parts that they read, and their depths."""
        nodes: list[_Node] = []
        maker: dict[PTensor, int] = {}
        for item in items:
            node = _Node(item, {t: maker[t] for t in reads_of(item) if t in maker})
            node.in_time = self._enters(node, nodes)
            for source in node.sources:
                deeper = nodes[source].in_time and not (node.in_time and self._as_made(node, source, nodes))
                node.depth = max(node.depth, nodes[source].depth + deeper)
            maker.update(dict.fromkeys(made_by(item), len(nodes)))
            nodes.append(node)
        self._clones_late(nodes)
        return nodes

    def _torn_sums(self, node: _Node, root: int, roots: Sequence[int]) -> set[tuple[str, PTensor]]:
        """The sums that a node in time takes for summands, and whose parts another region adds up: they arrive whole."""
        if not node.in_time:
            return set()
        wanted = self.wanted(node.item)
        summands = (t for t in node.read if isinstance(wanted.get(t), Summed))
        return {(item_name(node.item), t) for t in summands if roots[node.read[t]] != root}

    def rewritten(self, items: Sequence[Item], place: str | None, write: WriteRegion) -> list[Item]:
        """``items`` of the loop ``place``, and what stands in their loops, with every region as ``write`` writes it.

        Raises:
            BehindSumsError: loops would run part by part without their last items.
        """
        found: list[Item] = []
        arranged = self.arranged(items)
        if self.late:
            raise BehindSumsError(self.late)
        for group in arranged:
            if isinstance(group, TimeRegion):
                found += write(group, place)
                continue
            for item in group:
                if isinstance(item, Nest):
                    item = Nest(item.loop, tuple(self.rewritten(item.items, item.loop.name, write)))
                found.append(item)
        return found

    def _clones_late(self, nodes: Sequence[_Node]) -> None:
        """Let what is computed again stand as deep as its readers, the backward ops: it could run long before them."""
        latest: dict[int, int] = {}
        for index in range(len(nodes) - 1, -1, -1):
            node = nodes[index]
            if node.in_time and _is_clone(node.item):
                node.depth = max(node.depth, latest.get(index, 0))
            for source in node.sources:
                apart = nodes[source].in_time and not (node.in_time and self._as_made(node, source, nodes))
                latest[source] = min(latest.get(source, node.depth - apart), node.depth - apart)

    def _enters(self, node: _Node, nodes: Sequence[_Node]) -> bool:
        """Whether a node runs part by part; notes the forms of what it makes."""
        item = node.item
        if isinstance(item, Nest):
            found = self._lifted(item, self._seen(node, nodes))
            self.forms.update(found or {})
            self.lifts.update(dict.fromkeys(_loops([item]) if found is not None else [item.loop.name], found is not None))
            return found is not None
        if item.path not in self.planned:
            seen = dict.fromkeys(item.inputs) | self._seen(node, nodes)
            enters = any(f is not None for f in seen.values()) or self._runs_with_readers(item)
            part = self.follow(item, seen, False) if enters else None
            if part is None and item.again is not None and item.kind != "update":
                part = self._behind_a_fence(item, node, nodes)
            if part is None:
                return False
            self.parts[item.path] = part
        self.forms.update(zip(item.outputs, self.parts[item.path].outputs, strict=True))
        return True

    def _runs_with_readers(self, item: Op) -> bool:
        """Whether it is a fence in front of what runs apart from its backward: in every part, though it may read none."""
        clones = (op for op in self.graph.ops if op.again is not None and op.again.remat[:1] == item.remat)
        return item.anywhere == "fence" and any(op.path in self.parts for op in clones)

    def _behind_a_fence(self, clone: Op, node: _Node, nodes: Sequence[_Node]) -> OpPart | None:
        """A clone of what all parts share (a cast of parameters) runs in every part, as the fence in front of it does."""
        makers = [nodes[s].item for s in node.sources if nodes[s].in_time]
        fenced = bool(makers) and all(isinstance(m, Op) and (m.anywhere == "fence" or m.again is not None) for m in makers)
        if not fenced or any(self.forms.get(t) is not None for t in clone.inputs):
            return None
        return OpPart((None,) * len(clone.inputs), (None,) * len(clone.outputs))

    def _seen(self, node: _Node, nodes: Sequence[_Node]) -> dict[PTensor, Form]:
        """The parts that a node finds of what it reads.

        Summands only where it may stand as deep as all that it reads: another device group sends their sum.
        """
        deepest = max((nodes[s].depth for s in node.sources), default=0)
        found: dict[PTensor, Form] = {}
        for tensor, source in node.read.items():
            form = self.forms.get(tensor)
            shallow = nodes[source].depth < deepest or self.far(node.item, nodes[source].item)
            whole = isinstance(form, Summed) and (shallow or (item_name(node.item), tensor) in self.whole_sums)
            if nodes[source].in_time and not whole:
                found[tensor] = form
        return found

    def _as_made(self, node: _Node, source: int, nodes: Sequence[_Node]) -> bool:
        """Whether a node reads what the one of number ``source`` makes as it is made: part for part."""
        if self.far(node.item, nodes[source].item):
            return False
        wanted = self.wanted(node.item)
        return all(wanted.get(t) == self.forms.get(t) for t, maker in node.read.items() if maker == source)

    def wanted(self, item: Item) -> dict[PTensor, Form]:
        """Which part of each tensor an item in time reads."""
        if isinstance(item, Op):
            return dict(zip(item.inputs, self.parts[item.path].inputs, strict=True))
        found: dict[PTensor, Form] = {}
        for inner in item.items:
            found.update(self.wanted(inner) if not isinstance(inner, Op) or inner.path in self.parts else {})
        for carry in item.loop.carries:
            found[carry.init] = self.begun(carry)
        for x in item.loop.xs:
            found[x.stack] = shifted(self.forms.get(x.slice), 1)
        return found

    def begun(self, carry: Carry) -> Form:
        """Which part of ``carry.init`` a loop in time begins with: a sum with summands, or at zeros, whoever has them."""
        form = self.forms.get(carry.inside)
        return self.forms.get(carry.init) if isinstance(form, Summed) else form

    # -- loops over layers

    def _lifted(self, nest: Nest, known: Mapping[PTensor, Form]) -> dict[PTensor, Form] | None:
        """The forms of all that a loop makes, if its whole body can run part by part; else None."""
        if nest.loop.name in self.closed or not any(op.path in self.planned for op in nest.ops()):
            return None
        if any(self._apart(t, nest) for t in nest.reads() if t not in known and t not in self.forms):
            return None
        found = self._settled(nest, known)
        if found is None:  # forget what went on with parts for a moment
            for op in nest.ops():
                if op.path not in self.planned:
                    self.parts.pop(op.path, None)
        return found

    def _apart(self, tensor: PTensor, nest: Nest) -> bool:
        """Whether ``tensor`` is made in an iteration of another loop, which does not run part by part as a whole."""
        home = self.graph.homes.get(tensor)
        return home is not None and home not in _loops([nest]) and home not in chain_of(nest.loop.parent, self.graph.loops)

    def _settled(self, nest: Nest, known: Mapping[PTensor, Form]) -> dict[PTensor, Form] | None:
        loop = nest.loop
        sums = {c.inside for c in loop.carries if c.is_sum or known.get(c.init) == Summed("add") or self._begins_at_zero(c)}
        guess: dict[PTensor, Form] = {
            c.inside: None if c.is_sum else known.get(c.init) or self._likely(c.out, c.inside in sums) for c in loop.carries
        }
        for _ in range(len(loop.carries) + 2):
            forms: dict[PTensor, Form] = dict(guess)
            for x in loop.xs:
                forms[x.slice] = shifted(known[x.stack], -1) if x.stack in known else self._first_wanted(nest, x.slice)
            late: dict[str, Set[PTensor]] = {}
            if (made := self._through(nest, {**known, **forms}, late)) is None:
                return None
            forms |= made
            after: dict[PTensor, Form] = {c.inside: forms.get(c.out, known.get(c.out)) for c in loop.carries}
            if after == guess:
                break
            guess = after
        else:
            return None
        if not any(f is not None for f in forms.values()):
            return None
        for carry in loop.carries:
            forms[carry.final] = forms[carry.inside]
            if isinstance(forms[carry.inside], Summed) and carry.inside not in sums:
                return None
        for y in loop.ys:
            forms[y.stack] = shifted(forms.get(y.slice), 1)
        if late:
            self.late[loop.name] = late.keys()
        return forms

    def _begins_at_zero(self, carry: Carry) -> bool:
        """Whether a carry that each iteration adds to begins as the sum of nothing."""
        maker = self.graph.producer.get(carry.init)
        value = filled_with(maker.body.jaxpr) if maker is not None and maker.body is not None else None
        value = next((own for constant, own in self.graph.constants if constant == carry.init), value)
        return value is not None and not np.any(value)

    def _through(self, nest: Nest, known: dict[PTensor, Form], late: dict[str, Set[PTensor]]) -> dict[PTensor, Form] | None:
        """The forms of all that a loop's body makes; None where something needs what only all parts give.

        Args:
            late: filled here: what does, and may stand behind the loop, by name; and what it makes.
        """
        found: dict[PTensor, Form] = {}
        for item in nest.items:
            waits = any(not own.isdisjoint(reads_of(item)) for own in late.values())
            made = None if waits else self._made_in_turn(item, known)
            if made is None:
                if not self._may_wait(item, nest, known):
                    return None
                late[item_name(item)] = {*made_by(item)}
                made = dict.fromkeys(made_by(item))
            found |= made
            known.update(made)
        delayed = {t for own in late.values() for t in own}
        for carry in nest.loop.carries:  # what an iteration waits for cannot stand behind all of them
            readers = (item for item in nest.items if carry.inside in reads_of(item))
            if carry.out in delayed and not all(item_name(item) in late for item in readers):
                return None
        return found

    def _made_in_turn(self, item: Item, known: Mapping[PTensor, Form]) -> dict[PTensor, Form] | None:
        """The forms of what an item in a loop makes; None where it needs what only all parts give."""
        if isinstance(item, Op):
            return self._made_by(item, known)
        made = self._lifted(item, known)
        if made is None and any(known.get(t) is not None for t in item.reads()):
            return None
        return made if made is not None else dict.fromkeys(made_by(item))

    def _may_wait(self, item: Item, nest: Nest, known: Mapping[PTensor, Form]) -> bool:
        """Whether ``item`` of a backward loop reads sums of its own iteration alone, and is split by no plan."""
        homes = (self.graph.homes.get(t) for t in {*reads_of(item)} - {*made_by(item)})
        around = chain_of(nest.loop.name, self.graph.loops)
        return (
            all(op.kind == "backward" and op.again is None and op.path not in self.planned for op in flat([item]))
            and all(known.get(t) in (None, Summed("add")) for t in reads_of(item))
            and all(home in (None, *around) for home in homes)
        )

    def _made_by(self, op: Op, known: Mapping[PTensor, Form]) -> dict[PTensor, Form] | None:
        if op.path in self.planned:
            part = self.parts[op.path]
            if any(known.get(t) not in (f, None) for t, f in zip(op.inputs, part.inputs, strict=True)):
                return None
            return dict(zip(op.outputs, part.outputs, strict=True))
        seen = {t: known.get(t) for t in op.inputs}
        if op.anywhere == "sum":  # the carry is what is added to it
            seen[op.inputs[0]] = seen[op.inputs[1]]
        if not any(f is not None for f in seen.values()):
            return dict.fromkeys(op.outputs)
        part = self.follow(op, seen, True)
        if part is None:
            return None
        self.parts[op.path] = part
        return dict(zip(op.outputs, part.outputs, strict=True))

    def _likely(self, tensor: PTensor, is_sum: bool) -> Form:
        """As which part planned ops make ``tensor``, or its summands; a carry that begins whole is cut before its loop.

        Args:
            is_sum: whether it may be a summand itself: its carry begins at zero.
        """
        graph, producer = self.graph, self.graph.producer

        def summands(made: PTensor) -> Iterable[PTensor]:
            op = producer.get(made)
            if op is None:
                return graph.flow.sources(made, "exit")
            return () if op.path in self.planned else (t for t in op.inputs if is_sum or t.shape == made.shape)

        for made in closure([tensor], summands):
            op = producer.get(made)
            if op is not None and op.path in self.planned:
                form = self.parts[op.path].outputs[op.outputs.index(made)]
                if (isinstance(form, Piece) and made.shape == tensor.shape) or (is_sum and form == Summed("add")):
                    return form
        return None

    def _first_wanted(self, nest: Nest, tensor: PTensor) -> Form:
        """Which part of ``tensor``, a slice of a stack from outside, the loop's ops read."""
        for op in nest.ops():
            if tensor in op.inputs and op.path in self.planned:
                return self.parts[op.path].inputs[op.inputs.index(tensor)]
        return None


def shifted(form: Form, by: int) -> Form:
    """``form`` of a stack of what has it, or of a slice."""
    return form.shifted(by) if isinstance(form, Sliced) else form


def _is_clone(item: Item) -> bool:
    return isinstance(item, Op) and item.again is not None


def _joined(nodes: Sequence[_Node]) -> list[int]:
    """For every node one that stands for its region: nodes in time of one depth that hand parts to each other."""
    sets = Sets[int]()
    for index, node in enumerate(nodes):
        for source in node.sources if node.in_time else ():
            if nodes[source].in_time and nodes[source].depth == node.depth:
                sets.join(source, index)
    return [sets.root(i) for i in range(len(nodes))]


def _sorted(
    nodes: Sequence[_Node], roots: Sequence[int], spans: Callable[[Iterable[Item]], bool]
) -> list[tuple[Item, ...] | TimeRegion]:
    """Nodes in an order that respects data, every region's in one piece; early ones first."""
    group = [(node.depth, roots[i]) if node.in_time else (-1, i) for i, node in enumerate(nodes)]
    members: dict[tuple[int, int], list[int]] = {}
    for i, name in enumerate(group):
        members.setdefault(name, []).append(i)
    before = {name: {group[s] for i in own for s in nodes[i].sources} - {name} for name, own in members.items()}
    _merge(members, before, lambda name: name[0] >= 0 and spans(nodes[i].item for i in members[name]))
    found: list[tuple[Item, ...] | TimeRegion] = []
    # a region stands where the last of its items stood: by then all that it reads is there, or can be
    for name in in_order(before, key=lambda name: members[name][-1]):
        items = tuple(nodes[i].item for i in members[name])
        if name[0] >= 0:
            found.append(_region(items))
        elif found and isinstance(found[-1], tuple):
            found[-1] = (*found[-1], *items)
        else:
            found.append(items)
    return found


def _merge(members: dict[T, list[int]], before: dict[T, set[T]], spans: Callable[[T], bool]) -> None:
    """Make one of groups of nodes that span devices and do not wait for each other: of two losses, say."""
    first, *others = [name for name in members if spans(name)] or [None]
    for name in others:
        if first is None or name is None or _waits(first, name, before) or _waits(name, first, before):
            continue
        members[first] = sorted(members[first] + members.pop(name))
        before[first] |= before.pop(name)
        for sources in before.values():
            sources.update([first] if name in sources else [])
            sources.discard(name)


def _waits(one: T, other: T, before: Mapping[T, Iterable[T]]) -> bool:
    return other in closure([one], lambda name: before[name])


def _region(items: tuple[Item, ...]) -> TimeRegion:
    return TimeRegion(items, frozenset(op.path for op in flat(items)), frozenset(_loops(items)))


def _loops(items: Iterable[Item]) -> list[str]:
    return [nest.loop.name for nest in nests(items)]
