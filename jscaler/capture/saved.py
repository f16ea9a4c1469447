"""What a backward loop reads of its forward's iterations is saved: written by the one as a stack, read by the other.

    forward loop    … ──► h ──► …            h is saved for each iteration: the loop gains a stack that it writes
                          └──► stack ──┐
    backward loop   … ◄── h' ◄─────────┘     and the backward loop one that it reads

A slice of a stack that the forward loop reads itself is read from there again, and a carry that never changes is its
initial value. Through nested loops a tensor is threaded level by level.
"""

import dataclasses

from jscaler.ir import Graph, Loop, Op, PTensor, Stacked
from jscaler.ir.loop import chain_of


def thread_saved(graph: Graph) -> Graph:
    """``graph``, whose backward ops have bodies, with all that crosses from loop to loop threaded through stacks."""
    return _Threader(graph).run() if graph.loops else graph


class _Threader:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.loops = dict(graph.loops)
        self.home = dict(graph.homes)
        self.slices: dict[PTensor, PTensor] = {}
        self.constant: dict[PTensor, PTensor] = {}
        for loop in graph.loops.values():
            self.slices.update({x.slice: x.stack for x in loop.xs})
            self.constant.update({c.inside: c.init for c in loop.carries if c.out == c.inside})
        self.stacks: dict[PTensor, PTensor] = {}
        self.read_by: dict[tuple[PTensor, str], PTensor] = {}

    def run(self) -> Graph:
        ops = tuple(self._op(op) for op in self.graph.ops)
        for name in self.graph.loops:
            loop = self.loops[name]
            outside = {t: self.read(t, loop.parent) for t in loop.operands}
            inside = {t: self.read(t, name) for t in loop.returned}
            self.loops[name] = self.loops[name].renamed(outside, inside)
        there = {name for op in ops for name in chain_of(op.loop, self.loops)}  # a clone may have been left without ops
        return dataclasses.replace(self.graph, ops=ops, loops={n: loop for n, loop in self.loops.items() if n in there})

    def _op(self, op: Op) -> Op:
        table = {t: self.read(t, op.loop) for t in dict.fromkeys(op.inputs)}
        return op.renamed({t: new for t, new in table.items() if new != t})

    def read(self, tensor: PTensor, place: str | None) -> PTensor:
        """What holds ``tensor`` where a reader in the loop ``place`` can see it."""
        if self._sees(place, tensor):
            return tensor
        if tensor in self.constant:
            return self.read(self.constant[tensor], place)
        home = chain_of(self.home[tensor], self.loops)
        reader = chain_of(place, self.loops)[len(home) - 1]
        writer = home[-1]
        assert self.loops[writer].length == self.loops[reader].length, f"'{reader}' reads '{tensor}' of '{writer}'"
        if (tensor, reader) not in self.read_by:
            stack = self.slices[tensor] if tensor in self.slices else self._stack(tensor, self.loops[writer])
            outside = self.read(stack, self.loops[reader].parent)
            made = PTensor(tensor.name + "@" + reader, tensor.aval, tensor.role)
            self.home[made] = reader
            self.slices[made] = outside
            loop = self.loops[reader]
            self.loops[reader] = dataclasses.replace(loop, xs=(*loop.xs, Stacked(outside, made)))
            self.read_by[tensor, reader] = made
        return self.read_by[tensor, reader]

    def _sees(self, place: str | None, tensor: PTensor) -> bool:
        home = self.home.get(tensor)
        return home is None or home in chain_of(place, self.loops)

    def _stack(self, tensor: PTensor, loop: Loop) -> PTensor:
        """The stack that ``loop`` writes of ``tensor``."""
        if tensor not in self.stacks:
            aval = tensor.aval.update(shape=(loop.length, *tensor.shape), weak_type=False)
            made = PTensor(tensor.name + "@saved", aval)
            self.stacks[tensor] = made
            self.home[made] = loop.parent
            self.loops[loop.name] = dataclasses.replace(loop, ys=(*loop.ys, Stacked(made, tensor, saved=True)))
        return self.stacks[tensor]
