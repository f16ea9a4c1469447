"""What runs on which device group, and what goes from group to group: a program for each group and phase of a step.

`lower.phases` says what the phases are, and `lower.op_blocks` of which block each op of a phase is. A block's *level* is
behind those of the blocks that it reads. `lower.passing` brings tensors to the programs that read them.

Where stages have ranges of a stack of layers, the layers of a group are a program, and what it does besides (a look-up in a
table of words, the loss) is another: two *places* of one group, between which a value counts as crossing and is not sent.
So the layers of all stages are one program, for `lower.twins`, JAX and XLA.

Where a table has such blocks, gradients of weights (W), which no crossing waits for, are a part of their backward's level,
and what is computed again (R) is one of its forward's. `lower.block_cuts` cuts each program by these levels.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jscaler.clusters import FEW_STEPS, CostModel
from jscaler.ir import Graph, Loop, Nest, Op, PTensor, nested
from jscaler.ir.loop import Item, made_by
from jscaler.ir.op import RecomputeRegion
from jscaler.ir.walk import closure
from jscaler.lower.draft import Draft, ProgramKey
from jscaler.lower.level import WEIGHTS, Level
from jscaler.lower.op_blocks import OpBlocks, region_of
from jscaler.lower.passing import Bring, MadeAt, Passing, Value, between
from jscaler.lower.phases import find_phases, ops_of
from jscaler.lower.program import Program, Writer
from jscaler.lower.spanning_loop import CarriedValue, SpanningLoop, StackedValue, Transfer
from jscaler.lower.sums import summing_dtypes
from jscaler.materialize import Completed, Layout
from jscaler.rules.rule_book import RuleBook
from jscaler.tables.cuts import Cuts


@dataclass(frozen=True)
class Programs:
    """A step on device groups.

    Attributes:
        programs: by phase, then by group.
        spanning: the loop over groups, if there is one.
        values: how many numbers of values are taken; results have the first ones.
    """

    programs: tuple[Program, ...]
    transfers: tuple[Transfer, ...]
    spanning: SpanningLoop | None
    values: int


def make_programs(
    graph: Graph,
    order: Sequence[Op],
    completed: Completed,
    book: RuleBook,
    after: Mapping[str, Sequence[str]],
    cost: CostModel = FEW_STEPS,
    reduce_dtype: str | None = None,
    cuts: Cuts | None = None,
) -> Programs:
    """Lay ops out in ``order``, on each group, with an adapter wherever a reader wants another layout than is at hand.

    Args:
        after: op path -> paths of ops that ``op_order`` puts before it.
        cost: what adapters and crossings cost.
        reduce_dtype: the dtype in which gradients are added between devices; see `lower.sums` for the default.
        cuts: what blocks of a loop over groups are cut at, beside crossings; two stages of one group are blocks of their
            own, too.

    Raises:
        PlanError: a loop lies on several groups which cannot be lowered so.
    """
    cuts = cuts or Cuts()
    read = _read(graph) if len(completed.groups) > 1 else graph.by_path
    order = [op for op in order if op.path in read]
    phases = find_phases(graph, nested(order, graph.loops), completed, after)
    dtypes = summing_dtypes(graph, order, reduce_dtype)
    blocks = OpBlocks(graph, completed, after, cuts)
    blocks.find_layers(phases)

    def new_writer(key: tuple[int, int], bring: Bring) -> Writer:
        return Writer(graph, completed, book, cost, dtypes, after, bring, key)

    numbers = itertools.count(len(graph.outputs))  # behind those of results
    writer = _PhaseWriter(Passing(graph, completed, cost, phases, blocks, new_writer, numbers), cuts.weights)
    spanning = writer.write_phases()
    return Programs(writer.programs(), tuple(writer.passing.transfers), spanning, next(numbers))


def _read(graph: Graph) -> set[str]:
    """The ops in loops, those whose results are read, and those that do more; an unread loss is none."""
    ends = [t for loop in graph.loops.values() for t in (*loop.operands, *loop.returned)]
    found = [graph.producer[t] for t in (*graph.outputs, *ends) if t in graph.producer]
    found += [op for op in graph.ops if op.loop is not None or (op.body is not None and op.body.jaxpr.effects)]
    return {op.path for op in closure(found, lambda op: (graph.producer[t] for t in op.inputs if t in graph.producer))}


class _PhaseWriter:
    """Writes the programs of all phases."""

    def __init__(self, passing: Passing, weights_apart: bool):
        self.passing, self.graph, self.completed = passing, passing.graph, passing.completed
        self.phases, self.blocks = passing.phases, passing.blocks
        self.weights_apart = weights_apart
        after = self.blocks.after
        self.ordered = after.keys() | {path for paths in after.values() for path in paths}
        loops = self.graph.loops.values()
        ends = (t for loop in loops for t in (*loop.operands, *loop.returned))
        self.read = {*self.graph.outputs, *ends, *(t for op in self.graph.ops for t in op.inputs)}
        self.differentiated = {op.forward.path for op in self.graph.ops if op.forward is not None}

    def write_phases(self) -> SpanningLoop | None:
        """Write all phases; the results are left where they are made, or else in the last. Returns the loop over groups."""
        if len(self.completed.groups) == 1:
            self.passing.draft(ProgramKey(0, 0))
        spanning = None
        for number, phase in enumerate(self.phases):
            if phase.loop is None:
                finals = {t: value.layout for t, value in self.passing.finals.items()}
                self.blocks.begin(number, phase, finals)
                self._write(number, phase.items)
            elif phase.first == number:
                spanning = self._repeat(phase.loop, range(number, number + phase.loop.turns))
        for number, (tensor, layout) in enumerate(zip(self.graph.outputs, self.completed.outputs, strict=True)):
            self.passing.draft(self._home_of_result(tensor, layout)).leave_result(tensor, layout, number)
        return spanning

    def _home_of_result(self, tensor: PTensor, layout: Layout) -> ProgramKey:
        held = (self.passing.held.get((tensor, place)) for place in self.blocks.places(layout))
        known = (key for key in held if key is not None and self.phases[key.phase].loop is None)
        return next(known, ProgramKey(len(self.phases) - 1, self.blocks.number_of(layout)))

    def _write(self, phase: int, items: Iterable[Item]) -> None:
        again: dict[tuple[ProgramKey, RecomputeRegion | None], dict[str, Level]] = {}
        for item in items:
            ops = ops_of(item)
            level, place, work = self.blocks.of_op[ops[0].path]
            draft = self.passing.draft(ProgramKey(phase, place))
            for tensor in self.blocks.handed_over(item):
                draft.leave(tensor, between(draft.writer.slots[tensor][0][0]), self.blocks.of_tensor[tensor][0])
            draft.writer.write([item])
            for op in ops:
                draft.run(op, level, op.path in self.ordered)
            kind = work[1] if work is not None else None
            if self.blocks.in_loop and self.blocks.cuts.forward and kind == "F":
                for tensor in self._unread_losses(item):
                    draft.leave(tensor, between(draft.writer.slots[tensor][0][0]), level)
            if kind == "R":
                again.setdefault((draft.key, region_of(ops[0])), {}).update((op.path, level) for op in ops)
            inside = (t for op in ops for t in op.outputs) if isinstance(item, Nest) else ()
            for tensor in (*inside, *made_by(item)):
                self.passing.held[tensor, place] = draft.key
                self.passing.made[tensor] = MadeAt(draft.key, level, kind == "B")
        for (key, _), levels in again.items():  # a region runs when all that it reads is there
            self.passing.drafts[key].pinned.update(dict.fromkeys(levels, max(levels.values())))

    def _unread_losses(self, item: Item) -> list[PTensor]:
        """What ``item`` makes for a gradient alone, and nobody reads: a loss that the step does not return.

        Where the table has a forward apart from its backward, it leaves its block as a loss that is returned does. Else
        nothing would wait for that forward, and it would run in the block of the backward.
        """
        made = list(made_by(item))
        if not self.read.isdisjoint(made) or self.differentiated.isdisjoint(op.path for op in ops_of(item)):
            return []
        return made if isinstance(item, Op) else [t for t in made if not t.shape]  # a loop's other results are no loss

    def _repeat(self, loop: Loop, phases: range) -> SpanningLoop:
        """The body of a loop over groups, once for all iterations."""
        laid, numbers = self.completed.loops[loop.name], self.passing.numbers
        carried = []
        for carry, layout in zip(loop.carries, laid.carries, strict=True):
            front = self.passing.leaving(carry.init, layout, phases.start - 1)
            init = front.leave_alone(carry.init, layout, None)
            values = CarriedValue(init, next(numbers), next(numbers), next(numbers), carry.is_sum)
            self.passing.carried[carry.inside] = Value(values.inside, layout)
            carried.append(values)
        self.passing.slices = {x.slice for x in loop.xs}
        for phase in phases:
            there = {c.inside: layout for c, layout in zip(loop.carries, laid.carries, strict=True)}
            self.blocks.begin(phase, self.phases[phase], there)
            self._write(phase, self.phases[phase].items)
        for values, carry, layout in zip(carried, loop.carries, laid.carries, strict=True):
            draft = self._leaving(carry.out, layout, phases)
            draft.leave_alone(carry.out, layout, self._exit(carry.out, draft), values.out)
            self.passing.finals[carry.final] = Value(values.final, layout)
        stacks = []
        for y, layout in zip(loop.ys, laid.ys, strict=True):
            draft = self._leaving(y.slice, layout, phases)
            piece = draft.leave_alone(y.slice, layout, self._exit(y.slice, draft))
            stacks.append(StackedValue(piece, next(numbers)))
            self.passing.finals[y.stack] = Value(stacks[-1].stack, layout.stacked(loop.length))
        indices = {value: key.phase - phases.start for key, value in self.passing.indices.items()}
        return SpanningLoop(loop, phases, tuple(carried), tuple(stacks), indices)

    def _leaving(self, tensor: PTensor, layout: Layout, phases: range) -> Draft:
        """The program out of which an iteration leaves ``tensor``."""
        made = self.passing.made.get(tensor)
        phase = phases.start if made is None else max(made.program.phase, phases.start)
        return self.passing.leaving(tensor, layout, phase)

    def _exit(self, tensor: PTensor, draft: Draft) -> Level | None:
        """Behind which level an iteration leaves ``tensor``: that of its op, or the one of weights behind it."""
        made = self.passing.made.get(tensor)
        if made is None or made.program != draft.key:
            return None
        return Level(made.level.number, WEIGHTS) if made.is_backward and self.weights_apart else made.level

    def programs(self) -> tuple[Program, ...]:
        """All programs, by phase and by group."""
        groups = len(self.completed.groups)
        programs: dict[ProgramKey, Program] = {}
        for key in sorted(self.passing.drafts, key=lambda key: (key.phase, key.place % groups, key.place)):
            loop = self.phases[key.phase].loop
            times, of_layers = loop.length if loop is not None else 1, self.blocks.is_layers(key.place)
            programs[key] = self.passing.drafts[key].program(self.passing.constants, times, of_layers)
        names = self.blocks.names({key: program.block_levels for key, program in programs.items()})
        return tuple(dataclasses.replace(program, names=names.get(key, {})) for key, program in programs.items())
