"""Does a loop over parts in time visit each part of each tensor once, and join each summand once?

What is cut, put together and added up is read off the program: slices are interpreted for all iterations in lockstep. In
between, the rules of the *whole* ops (of the graph before any was cut) say what a part of their operands makes:

    whole ──► slice of iteration i ──► Part ──► op ──► Part ──► stack ──► merged        each element once, in its place
                                              └──► Sum  ──► added to what was there     started at nothing, added once

An op has a factor of which the number of parts times its own part is the whole, or none of what it reads is a part. What
pieces of re-opened ops and ops that run on each part alone make for themselves is not followed. Where parts take turns in
an iteration, the ops of each are proven as those of a loop over all parts would be: each slices by its part's number, and
each turn adds its own summand, to one carry or to several that are joined behind the loop.
"""

import enum
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.extend import core

from jscaler.capture.bodies import filled_with
from jscaler.capture.jaxprs import evaluate
from jscaler.errors import VerificationError
from jscaler.ir import Carry, Loop, Op, PTensor, Rule
from jscaler.ir.mask import Combiner
from jscaler.ir.rule import TensorFactors
from jscaler.lower.program import Compute, Repeat, Task, all_tasks
from jscaler.rules.neutral import neutral
from jscaler.rules.rule_book import RuleBook
from jscaler.stages import StepPlan
from jscaler.verification import iterations
from jscaler.verification.iterations import adds_all, each_once, ids, joins, only_moves


class Mark(enum.Enum):
    """What there is nothing more to say of."""

    WHOLE = "the same in all iterations"
    INDEX = "the iteration's number"
    UNKNOWN = "not followed"
    OPEN = "a carry of a loop in the body, before it is known what an iteration leaves"


@dataclass(frozen=True)
class VisitedPart:
    """One of as many parts as there are iterations: of ``dim``, seen as (blocks, parts, rows), as far as that is known."""

    dim: int | None = None
    blocks: int | None = None
    rows: int | None = None

    def shifted(self, by: int) -> "VisitedPart":
        """The same of a stack, or of a slice of one."""
        return VisitedPart(self.dim + by if self.dim is not None else None, self.blocks, self.rows)


@dataclass(frozen=True)
class Sum:
    """A summand, or candidate, of what all parts join to."""

    combiner: Combiner


@dataclass(frozen=True)
class SoFar:
    """A carry of the loop as an iteration finds it; ``joined`` is what the iteration has added to it, at ``turns``."""

    carry: PTensor
    joined: "tuple[Combiner, State] | None" = None
    turns: tuple[int, ...] = ()


State = Mark | VisitedPart | Sum | SoFar
WHOLE, INDEX, UNKNOWN, OPEN = Mark.WHOLE, Mark.INDEX, Mark.UNKNOWN, Mark.OPEN
States = dict[PTensor, State]


def check_time_loops(step: StepPlan, left_out: list[str]) -> int:
    """Prove all loops over parts of ``step``; how many there are.

    Args:
        left_out: filled here: tensors whose parts are too large to be looked at.

    Raises:
        VerificationError: a part is left out or visited twice, or a summand is left out or added twice.
    """
    stacks, writers, around = States(), dict[PTensor, Loop](), dict[int, tuple[Loop, ...]]()
    if step.spanning is not None:
        loop = step.spanning.loop
        stacks = _over_groups(step, left_out).run()
        writers.update((y.stack, loop) for y in loop.ys)
        around.update(dict.fromkeys(step.spanning.phases, (loop,)))
    programs = [segment.program for segment in step.segments]
    levels = [_Level(step, p.tasks, left_out, around.get(p.phase, ()), stacks, writers) for p in programs]
    return (step.spanning is not None) + sum(level.check() for level in levels)


def _over_groups(step: StepPlan, left_out: list[str]) -> "_TimeLoop":
    """The proof of the loop over groups: its body is what all of them run, in the order of the graph."""
    assert step.spanning is not None
    loop, phases = step.spanning.loop, step.spanning.phases
    place = step.graph.position
    body = [t for s in step.segments if s.program.phase in phases for t in s.program.tasks]
    body.sort(key=lambda task: min((place[t.op.path] for t in all_tasks([task]) if isinstance(t, Compute)), default=-1))
    before = [t for s in step.segments if s.program.phase < phases.start for t in s.program.tasks if isinstance(t, Compute)]
    makers = {t: task for task in before for t in task.op.outputs}
    for x in loop.xs:  # the number of the micro-batch is told to the blocks
        op = step.graph.producer[x.stack]
        makers[x.stack] = Compute(op, _body(op), (), ())
    return _TimeLoop(step, Repeat(loop, tuple(body), (), (), ()), (), makers, {}, left_out)


@dataclass
class _Level:
    """The tasks of one loop's body, or of the program; ``around`` are the loops over parts that it stands in."""

    step: StepPlan
    tasks: Sequence[Task]
    left_out: list[str]
    around: tuple[Loop, ...]
    stacks: States = field(default_factory=dict)  # stacks of loops over parts -> what their slices are
    writers: dict[PTensor, Loop] = field(default_factory=dict)

    def check(self) -> int:
        makers = {t: task for task in self.tasks if isinstance(task, Compute) for t in task.op.outputs}
        count = 0
        for task in self.tasks:
            if isinstance(task, Compute):
                self._merge(task)
            elif isinstance(task, Repeat):
                inner = self.around
                if task.loop.time and task.loop.parts > 1:
                    self.stacks.update(_TimeLoop(self.step, task, self.around, makers, self.stacks, self.left_out).run())
                    self.writers.update((y.stack, task.loop) for y in task.loop.ys)
                    inner = (*self.around, task.loop)
                    count += 1
                count += _Level(self.step, task.tasks, self.left_out, inner).check()
        return count

    def _merge(self, task: Compute) -> None:
        """What puts a stack together puts each element where it was cut from."""
        op = task.op
        if not op.inputs or any(t not in self.stacks for t in op.inputs) or op.path in self.step.source.by_path:
            return
        stack, loop = op.inputs[0], self.writers[op.inputs[0]]
        where = f"loop '{loop.name}', '{op.outputs[0].name}' of all {loop.parts} parts"
        if len(op.inputs) > 1:
            self._merge_turns(task, loop, where)
            return
        local = each_once(task.jaxpr, [None], 1, [who.size for who in task.parts], where)
        moved = each_once(_body(op), [None], 1, [], where)
        if local is None or moved is None:
            self.left_out.append(op.outputs[0].name)
        state = self.stacks[stack]
        if state == WHOLE or isinstance(state, Sum):
            raise VerificationError(f"{where}: what each iteration leaves is no part: {_text(state)}")
        if moved is None or not isinstance(state, VisitedPart) or None in (state.dim, state.blocks, state.rows):
            return
        assert state.dim is not None
        assert state.blocks is not None
        assert state.rows is not None
        if not moved.puts_together(stack.shape, state.dim, state.blocks, loop.parts, state.rows):
            raise VerificationError(f"{where}: they are put together in another order than they were cut in")

    def _merge_turns(self, task: Compute, loop: Loop, where: str) -> None:
        """What puts the stacks of several turns together has the parts in their order."""
        made, states = task.op.outputs[0], {self.stacks[t] for t in task.op.inputs}
        sizes = (loop.parts, *task.op.inputs[0].shape[1:])
        in_order = len(task.op.inputs) == loop.turns
        if math.prod(sizes) > iterations.MOST_CELLS:
            self.left_out.append(made.name)
        elif in_order:
            every = ids(sizes)
            (moved,) = evaluate(_body(task.op), [every[turn :: loop.turns] for turn in range(loop.turns)])
            in_order = np.array_equal(moved, every)
        if not in_order or len(states) > 1:
            raise VerificationError(f"{where}: those of the {loop.turns} turns are not put together in their order")
        self.stacks[made], self.writers[made] = states.pop(), loop


@dataclass
class _TimeLoop:
    """The proof of one loop.

    Attributes:
        makers: what stands beside the loop, by what it makes.
        stacks: of loops before it, with what their slices are.
        joins: the carries that an iteration has joined something to, or read for another reason.
    """

    step: StepPlan
    task: Repeat
    around: tuple[Loop, ...]
    makers: Mapping[PTensor, Compute]
    stacks: Mapping[PTensor, State]
    left_out: list[str]
    read: list[PTensor] = field(default_factory=list)
    turns: dict[PTensor, tuple[int, ...]] = field(default_factory=dict)  # what a carry leaves -> when something is added

    def run(self) -> States:
        """What the slices of the stacks are that the loop leaves."""
        loop = self.task.loop
        states: States = {c.inside: SoFar(c.inside) for c in loop.carries}
        for x in loop.xs:
            states[x.slice] = self._slice(x.stack)
        self._numbers()
        self._tasks(self.task.tasks, states, (*self.around, loop))
        ends = {carry.final: states.get(carry.out, WHOLE) for carry in loop.carries}
        self.turns = {final: state.turns for final, state in ends.items() if isinstance(state, SoFar)}
        for carry in loop.carries:
            self._carry(carry, ends[carry.final])
        return {y.stack: states.get(y.slice, WHOLE) for y in loop.ys}

    def _here(self) -> str:
        return f"loop '{self.task.loop.name}' over {self.task.loop.parts} parts"

    def _slice(self, stack: PTensor) -> State:
        """What an iteration has of a stack: a part's number, or what another loop left in the iteration of this number."""
        if stack in self.stacks:
            return self.stacks[stack]
        return INDEX if self._counted(stack) is not None else UNKNOWN

    def _counted(self, stack: PTensor) -> list[int] | None:
        """The numbers in a stack; None where it holds something else."""
        maker = self._maker(stack)
        if stack in self.stacks or maker is None or maker.op.inputs or len(stack.shape) != 1 or stack.dtype.kind != "i":
            return None
        (numbers,) = evaluate(maker.jaxpr, [])
        return np.asarray(numbers).tolist()

    def _numbers(self) -> None:
        """The iterations and their turns together run each part once, in order."""
        loop = self.task.loop
        counted = [numbers for x in loop.xs if (numbers := self._counted(x.stack)) is not None]
        for at in range(0, len(counted), loop.turns):
            runs = [i for numbers in zip(*counted[at : at + loop.turns], strict=True) for i in numbers]
            if runs != list(range(loop.parts)) and runs[::-1] != list(range(loop.parts)):
                raise VerificationError(f"{self._here()} runs the parts {runs}")

    def _maker(self, tensor: PTensor) -> Compute | None:
        """What makes ``tensor`` in front of the loop, behind fences."""
        maker = self.makers.get(tensor)
        while maker is not None and maker.op.anywhere == "fence":
            tensor = maker.op.inputs[maker.op.outputs.index(tensor)]
            maker = self.makers.get(tensor)
        return maker

    def _carry(self, carry: Carry, state: State) -> None:
        here, reads = f"{self._here()}, '{carry.final.name}'", self.read.count(carry.inside)
        if isinstance(state, SoFar) and state.joined is not None:
            combiner, joined = state.joined
            if state.carry != carry.inside or reads != len(state.turns):
                raise VerificationError(f"{here}: what was joined so far is read {reads} times in an iteration")
            if joined not in (UNKNOWN, Sum(combiner)):
                raise VerificationError(f"{here}: what each iteration joins by {combiner} is no summand: {_text(joined)}")
            self._check_start(carry, combiner, here)
            self._check_turns(carry, here)
        elif isinstance(state, VisitedPart | Sum) or (isinstance(state, SoFar) and state.carry != carry.inside):
            raise VerificationError(f"{here}: what the last iteration leaves is not the whole: {_text(state)}")
        elif isinstance(state, SoFar) and carry.is_sum:
            raise VerificationError(f"{here}: no iteration adds anything to it")

    def _check_turns(self, carry: Carry, here: str) -> None:
        """What is added at each turn arrives in the sum of all, though it may be carried apart, and joined behind."""
        count, waiting = self.task.loop.turns, [carry.final]
        while waiting:
            tensor = waiting.pop()
            finals = self._summands(tensor)
            turns = sorted({turn for final in finals for turn in self.turns[final]})
            if len(set(finals)) < len(finals):
                raise VerificationError(f"{here}: it is added twice in '{tensor.name}'")
            joins = self.step.graph.consumers.get(tensor, ()) if len(turns) < count else ()
            for join in joins:
                if not adds_all(_body(join)):
                    raise VerificationError(f"{here}: '{join.path}' reads what is added at turns {turns} of {count} alone")
                waiting += join.outputs
            if not joins and turns != list(range(count)):
                raise VerificationError(f"{here}: only what is added at turns {turns} of {count} is in it")

    def _summands(self, tensor: PTensor) -> list[PTensor]:
        """What the loop's carries leave that is added up to ``tensor``; nothing else is in it."""
        join = self.step.graph.producer.get(tensor)
        if tensor in self.turns or join is None or not adds_all(_body(join)):
            return [tensor] if tensor in self.turns else []
        return [final for t in join.inputs for final in self._summands(t)]

    def _check_start(self, carry: Carry, combiner: Combiner, here: str) -> None:
        maker = self._maker(carry.init)
        if maker is None or maker.op.inputs:
            raise VerificationError(f"{here}: it starts at '{carry.init.name}', which is not known to be nothing")
        wanted = 0 if combiner == "add" else neutral(combiner, carry.init.dtype)
        start = filled_with(maker.jaxpr)
        if start is None:
            (start,) = evaluate(maker.jaxpr, [])
        if not (np.asarray(start) == np.asarray(wanted)).all():
            raise VerificationError(f"{here}: it starts at {np.asarray(start).ravel()[:1]}, not at nothing")

    # -- the body

    def _tasks(self, tasks: Sequence[Task], states: States, around: tuple[Loop, ...]) -> None:
        for task in tasks:
            if isinstance(task, Compute):
                given = [states.get(t, WHOLE) for t in task.op.inputs]
                self.read += [s.carry for s in given if isinstance(s, SoFar)]
                states.update(zip(task.op.outputs, self._compute(task, given, around), strict=True))
            elif isinstance(task, Repeat):
                self._repeat(task, states, around)

    def _compute(self, task: Compute, given: Sequence[State], around: tuple[Loop, ...]) -> Sequence[State]:
        op = task.op
        if op.anywhere == "fence":
            return given
        source = self._source(op)
        if source is not None:
            return self._of_whole(op, source, given, around)
        if INDEX in given:
            return self._sliced(task, given)
        return [self._of_our_own(op, given)] * len(op.outputs)

    def _source(self, op: Op) -> Op | None:
        """The whole op that ``op`` does a part of; None of pieces, and of what stands between the ops."""
        found = self.step.source.by_path.get((op.again or op).whole)
        if found is None or found.body is None or len(found.outputs) != len(op.outputs):
            return None
        return found if len(found.inputs) <= len(op.inputs) else None

    def _of_whole(self, op: Op, source: Op, given: Sequence[State], around: tuple[Loop, ...]) -> Sequence[State]:
        """What ``op`` makes, by the rule of the whole op and the shapes of its part."""
        rule = self.step.source.rule(source)
        tensors = [*zip((*rule.operands, *rule.results), (*op.inputs[: len(source.inputs)], *op.outputs), strict=True)]
        wholes = [t.shape for t in (*source.inputs, *source.outputs)]
        if alone := (source.forward or source).path in self.step.plan.alone:  # the rows of its gradients are its forward's
            tensors = tensors[: len(source.inputs)]
        found: list[Sequence[State]] = []
        for dealt in itertools.product((None, *rule.factors), repeat=len(around)):
            cut = [(f, loop.parts) for f, loop in zip(dealt, around, strict=True) if f is not None]
            if all(_shape(rule, dims, cut, whole) == t.shape for (dims, t), whole in zip(tensors, wholes, strict=False)):
                factor = dealt[around.index(self.task.loop)]
                made = self._by_factor(source, rule, factor, given[: len(source.inputs)], len(cut) == 1)
                if made is not None and alone:  # what loops within cut, too, is as large as it would be without this one
                    within = [(f, x.parts) for f, x in zip(dealt, around, strict=True) if f and x is not self.task.loop]
                    full = [_shape(rule, d, within, t.shape) for d, t in zip(rule.results, source.outputs, strict=True)]
                    made = [_of_shape(s, n, t.shape) for s, n, t in zip(made, full, op.outputs, strict=True)]
                found += [made] if made is not None and made not in found else []
        if not found:
            reads = ", ".join(f"'{t.name}' {list(t.shape)} ({_text(s)})" for t, s in zip(op.inputs, given, strict=True))
            raise VerificationError(
                f"{self._here()}, op '{op.path}': no factor of {rule} has {' x '.join(str(x.parts) for x in around)} "
                f"parts of which it takes one in each iteration; it reads {reads}"
            )
        return [states[0] if len(set(states)) == 1 else UNKNOWN for states in zip(*found, strict=True)]

    def _by_factor(
        self, source: Op, rule: Rule, factor: str | None, given: Sequence[State], one_cut: bool
    ) -> Sequence[State] | None:
        """What is made of ``given``, if the iterations take ``factor`` part by part; None where that cannot be."""
        given = [UNKNOWN if s == OPEN else s for s in given]
        if INDEX in given or any(isinstance(s, SoFar) for s in given):
            return [UNKNOWN] * len(source.outputs)
        if factor is None:
            if any(isinstance(s, VisitedPart) for s in given):
                return None
            if UNKNOWN in given or not any(isinstance(s, Sum) for s in given):
                return [UNKNOWN if UNKNOWN in given else WHOLE] * len(source.outputs)
            book = self.step.source.rules
            assert isinstance(book, RuleBook)
            made = book.passes(source, [s.combiner if isinstance(s, Sum) else None for s in given])
            return [Sum(c) if c is not None else WHOLE for c in made] if made is not None else None
        blocks: set[int] = set()
        for dims, state in zip(rule.operands, given, strict=True):
            place = rule.dim_of(dims, factor)
            if isinstance(state, Sum) or ((state == WHOLE) != (place is None) and state != UNKNOWN):
                return None
            if isinstance(state, VisitedPart) and place is not None:
                dim, outer, _ = place
                if state.dim not in (None, dim):
                    return None
                if state.blocks is not None and one_cut:
                    if state.blocks % outer:
                        return None
                    blocks.add(state.blocks // outer)
        if len(blocks) > 1:
            return None
        of_factor = blocks.pop() if blocks else None
        return [self._made(rule, factor, i, dims, of_factor) for i, dims in enumerate(rule.results)]

    def _made(self, rule: Rule, factor: str, index: int, dims: TensorFactors, blocks: int | None) -> State:
        if (factor, index) in rule.shares:
            return Sum(rule.shares[factor, index])
        place = rule.dim_of(dims, factor)
        if place is None:
            return UNKNOWN if rule.factors[factor].kind == "blocked" else WHOLE
        dim, outer, inner = place
        if blocks is None:
            return VisitedPart(dim)
        return VisitedPart(dim, blocks * outer, rule.factors[factor].size * inner // (blocks * self.task.loop.parts))

    def _sliced(self, task: Compute, given: Sequence[State]) -> Sequence[State]:
        """A part that is cut off by the iteration's number: of all iterations together, each element once."""
        op, count = task.op, self.task.loop.parts
        rest = [s for s in given if s != INDEX]
        if len(rest) != 1 or not only_moves(_body(op)):
            return [UNKNOWN] * len(op.outputs)
        number, where = given.index(rest[0]), f"{self._here()}, '{op.outputs[0].name}'"
        if isinstance(rest[0], VisitedPart | Sum | SoFar):
            raise VerificationError(f"{where}: a part is cut off {_text(rest[0])}")
        args: list[np.ndarray | None] = [np.arange(count, dtype=np.int32)] * len(op.inputs)
        args[number] = None
        local = each_once(task.jaxpr, args, count, [who.size for who in task.parts], where)
        moved = each_once(_body(op), args, count, [], where)
        if local is None or moved is None:
            self.left_out.append(op.outputs[0].name)
        if moved is None:
            return [VisitedPart()]
        whole = op.inputs[number].shape
        dims = [d for d, (a, b) in enumerate(zip(whole, moved.shape, strict=True)) if a != b]
        for blocks in range(1, moved.shape[dims[0]] + 1) if len(dims) == 1 else ():
            rows = moved.shape[dims[0]] // blocks
            if moved.are_parts(whole, dims[0], blocks, count, rows):
                return [VisitedPart(dims[0], blocks, rows)]
        raise VerificationError(f"{where}: the parts of the iterations do not follow each other")

    def _of_our_own(self, op: Op, given: Sequence[State]) -> State:
        """What an op between the ops makes: joins, casts, and what only moves elements."""
        jaxpr = _body(op)
        data = [s for s, t in zip(given, op.inputs, strict=True) if s != WHOLE or t.shape]
        if all(s == WHOLE for s in given):
            return WHOLE
        combiner = joins(jaxpr)
        if combiner is not None:
            return self._joined(op, combiner, given)
        if len(data) == 1 and only_moves(jaxpr):
            return VisitedPart() if isinstance(data[0], VisitedPart) else UNKNOWN if isinstance(data[0], SoFar) else data[0]
        return UNKNOWN

    def _joined(self, op: Op, combiner: Combiner, given: Sequence[State]) -> State:
        one, other = given
        for a, b in ((one, other), (other, one)):
            if isinstance(a, SoFar):
                if op.turn in a.turns or isinstance(b, SoFar) or a.joined not in (None, (combiner, b)):
                    raise VerificationError(f"{self._here()}, op '{op.path}': '{a.carry.name}' is joined twice")
                return SoFar(a.carry, (combiner, b), (*a.turns, op.turn))
        if one == other or OPEN in given:
            return other if one == OPEN else one
        summand = next((s for s in given if isinstance(s, Sum)), None)
        if summand is not None and WHOLE in given:  # a loop within starts its sum at nothing
            return summand
        return VisitedPart() if all(isinstance(s, VisitedPart) for s in given) else UNKNOWN

    def _repeat(self, task: Repeat, states: States, around: tuple[Loop, ...]) -> None:
        """A loop in the body: what its carries are does not change from iteration to iteration."""
        loop = task.loop
        inner = (*around, loop) if loop.time and loop.parts > 1 else around
        starts = [states.get(c.init, WHOLE) for c in loop.carries]
        self.read += [s.carry for s in starts if isinstance(s, SoFar)]
        starts = [UNKNOWN if isinstance(s, SoFar) else s for s in starts]
        guess = [OPEN if s == WHOLE else s for s in starts]
        for _ in range(len(guess) + 2):
            env = {**states, **dict(zip((c.inside for c in loop.carries), guess, strict=True))}
            for x in loop.xs:
                state = states.get(x.stack, WHOLE)
                env[x.slice] = state.shifted(-1) if isinstance(state, VisitedPart) else state
            before = len(self.read)
            self._tasks(task.tasks, env, inner)
            ends = [env.get(c.out, WHOLE) for c in loop.carries]
            after = [_steady(*pair) for pair in zip(starts, ends, strict=True)]
            if after == guess:
                break
            guess = [a if g in (OPEN, a) else UNKNOWN for g, a in zip(guess, after, strict=True)]
            del self.read[before:]
        states.update(env)
        states.update(zip((c.final for c in loop.carries), guess, strict=True))
        for y in loop.ys:
            state = env.get(y.slice, WHOLE)
            states[y.stack] = state.shifted(1) if isinstance(state, VisitedPart) else state


def _of_shape(state: State, whole: tuple[int, ...] | None, made: tuple[int, ...]) -> State:
    """What an op that runs alone makes: a part, if its shape is a part's; what else is its own is not followed."""
    cut = [d for d, (a, b) in enumerate(zip(whole or made, made, strict=True)) if a != b]
    if not cut:
        return UNKNOWN if state == WHOLE or isinstance(state, VisitedPart) else state
    return state if isinstance(state, VisitedPart) and state.dim == cut[0] else VisitedPart(cut[0])


def _steady(before: State, after: State) -> State:
    """What a carry is that starts as one thing and is left as another: a sum may start at nothing."""
    if after == OPEN:
        return before
    return after if before in (WHOLE, after) else UNKNOWN


def _body(op: Op) -> core.Jaxpr:
    assert op.body is not None
    return op.body.jaxpr


def _shape(
    rule: Rule, dims: TensorFactors, cut: Sequence[tuple[str, int]], whole: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The shape of a part of a tensor; None where a factor does not divide."""
    found = []
    for names, size in zip(dims, whole, strict=True):
        for name in names:
            parts = math.prod(n for f, n in cut if f == name)
            if rule.factors[name].size % parts:
                return None
            size //= parts
        found.append(size)
    return tuple(found)


def _text(state: State) -> str:
    if isinstance(state, VisitedPart):
        where = "" if state.dim is None else f" of dim {state.dim}"
        return f"one part{where}" + (f" in {state.blocks} blocks" if (state.blocks or 1) > 1 else "")
    if isinstance(state, Sum):
        return f"a summand, joined by {state.combiner}"
    if isinstance(state, SoFar):
        return "what was joined so far"
    return (UNKNOWN if state == OPEN else state).value
