"""Parallelism that is lost: ops that carry what a plan splits and are copied all the same, and tensors that are put
together for an op that nobody has placed.

Where a plan cuts a dim of an activation along a mesh axis, the dim is followed on through the dataflow. An op that reads it
and does not use the axis is copied along it, and what it leaves carries the dim on, now whole:

    x: D(8,1) ─► dot, a:8 ─► h: D(8,1) ─► sort, copy ─► tanh, copy ─► dot, a:8
                                          └─ lost ───── and behind it

A loop that takes slice after slice along the dim has all of it on each device, and so have the ops inside.

What the policy has placed is as it was asked for, and the backward of that, unless it cannot be split at all, or where rows
of the batch meet rows of the batch (every sentence with every picture): one operand of that is put together. Parameters,
their gradients and their updates do not count: where these lie whole says `report.replicated`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property

from jscaler.clusters.transition_kinds import sends
from jscaler.errors import LEAST, factor_name
from jscaler.estimate.traffic import moved_by_reader
from jscaler.estimate.works import works
from jscaler.ir import Factor, Graph, Op, PTensor, Rule
from jscaler.ir.kinds import tensor_kinds
from jscaler.ir.loop import chain_of
from jscaler.ir.walk import closure, grouped
from jscaler.lower.program import Adapt
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize.completed import OpLayouts
from jscaler.materialize.mesh import DeviceMesh
from jscaler.materialize.placement import Placement
from jscaler.materialize.stored import stored_inputs
from jscaler.primitives.remedies import blocked
from jscaler.rules.reached_factors import all_reached_factors
from jscaler.text.folding import folded
from jscaler.text.units import readable_bytes, readable_count

HANDFUL = 256  # bytes that a device may gather without a word
PER_SENT = 10  # bytes that pass through memory in the time of one over a link
MOST_TOLD = 4
NOTHING = "no parallelism is lost"


@dataclass(frozen=True)
class _Cut:
    """Dim ``dim`` of ``tensor`` is what a plan splits along ``axis`` of ``mesh``. ``behind``: the op that left it whole."""

    tensor: PTensor
    dim: int
    mesh: DeviceMesh
    axis: str
    behind: str = ""


@dataclass
class _Found:
    """An op that is met by a cut, first by this one, and does not go along; with the axes of all that it was met by."""

    op: Op
    cut: _Cut
    factor: Factor | None
    copied: bool
    axes: set[str] = field(default_factory=set)
    meets: bool = False  # other rows of the batch
    walked: str = ""  # the loop that takes slices along the cut

    @property
    def parts(self) -> int:
        return self.cut.mesh.size(tuple(self.axes))


@dataclass(frozen=True)
class LostOp:
    """An op that runs whole on each of ``parts`` devices that could share its work; or that has a tensor gathered.

    Attributes:
        tensor: what it reads, whose dim ``dim`` lies in parts, or would.
        why: what keeps it from being split; with the remedy.
        behind: the path of the op that is copied in front of it, and so hands it a whole tensor; empty for the first.
        copied: whether it is copied; else it is split in another way, and its operand gathered.
        flops: of its products, that a device would not do.
        nbytes: that a device would not read and write for it.
        gathered: bytes that each device sends to put its operands together.
        source: ``file:line``.
    """

    path: str
    tensor: str
    dim: int
    parts: int
    why: str
    behind: str = ""
    copied: bool = True
    flops: float = 0.0
    nbytes: float = 0.0
    gathered: float = 0.0
    source: str = ""


@dataclass(frozen=True)
class LostParallelism:
    """All of a step, and what a device does in it.

    Attributes:
        ops: in the order of the program.
        flops, nbytes: of products, and through memory, of one device in the whole step.
    """

    ops: tuple[LostOp, ...] = ()
    flops: float = 0.0
    nbytes: float = 0.0

    @property
    def copied_flops(self) -> float:
        """The share of a device's FLOPs that another device does as well."""
        return sum(op.flops for op in self.ops) / self.flops if self.flops else 0.0

    @property
    def lines(self) -> list[str]:
        """What is lost: a line for each of the first ops (like ones together), the dearest first."""
        first = grouped(((folded(op.path), folded(op.tensor), op.dim, op.why), op) for op in self.ops if not op.behind)
        with_what_follows = [(own, [*own, *self._behind({op.path for op in own})]) for own in first.values()]
        with_what_follows.sort(key=lambda pair: -sum(map(_weight, pair[1])))
        return [_told(own, every) for own, every in with_what_follows]

    def __str__(self) -> str:
        lines = self.lines
        if not lines:
            return self.summary
        more = f"\n  and {len(lines) - MOST_TOLD} more, in explain()" if len(lines) > MOST_TOLD else ""
        return f"{self.summary}:" + "".join(f"\n  {line}" for line in lines[:MOST_TOLD]) + more

    @property
    def summary(self) -> str:
        """The sum of it, in a sentence."""
        if not self.ops:
            return NOTHING
        count = sum(op.copied for op in self.ops)
        flops, nbytes, gathered = (sum(getattr(op, name) for op in self.ops) for name in ("flops", "nbytes", "gathered"))
        of_flops = f" ({flops / self.flops:.1%} of a device's)" if self.flops else ""
        said = []
        if count:
            ops = (
                "1 op carries what the plan splits and runs"
                if count == 1
                else f"{count} ops carry what the plan splits and run"
            )
            shared = f"{readable_count(flops)}FLOP{of_flops} and {readable_bytes(nbytes)} through memory"
            said.append(f"{ops} whole on every device, {shared} that devices could share")
        if gathered or not count:
            said.append(f"{readable_bytes(gathered)} are gathered that no decision asked for")
        return "parallelism is lost: " + "; ".join(said)

    def _behind(self, paths: set[str]) -> list[LostOp]:
        found: list[LostOp] = []
        for op in self.ops:  # an op stands behind what it reads
            if op.behind in paths:
                found.append(op)
                paths.add(op.path)
        return found


def _weight(op: LostOp) -> float:
    return op.flops / 100 + op.nbytes + op.gathered


def _told(own: list[LostOp], every: list[LostOp]) -> str:
    op, count = own[0], len(own)
    name = f"'{folded(op.path)}' ×{count}" if count > 1 else f"'{op.path}'"
    does = f"is copied {op.parts} times" if op.copied else "is split otherwise"
    more = f"; {len(every) - count} ops behind it are copied, too" if len(every) > count else ""
    lost = [
        f"{readable_count(flops)}FLOP" if (flops := sum(one.flops for one in every)) else "",
        readable_bytes(sum(one.nbytes for one in every)),
        f"{readable_bytes(sent)} gathered" if (sent := sum(one.gathered for one in every)) else "",
    ]
    where = f" ({op.source})" if op.source else ""
    read = f"dim {op.dim} of '{folded(op.tensor)}' lies in {op.parts} parts"
    return f"{name}{where} {does}, where {read}: {op.why}{more}; {', '.join(filter(None, lost))}"


def lost_parallelism(step: StepPlan) -> LostParallelism:
    """What a planned step computes on several devices though its plan splits what the ops carry.

    Nothing, where all of it together is less than a thousandth of what a device does: of its FLOPs, of its bytes through
    memory, and of its time on the links, as far as that is more than a thousandth of its time in memory.
    """
    found = _Finder(step).run()
    if not found:
        return LostParallelism()
    work = {op.path: (times * one.flops, float(times * (one.read + one.written))) for op, times, one in works(step)}
    gathers, sent = _gathers(step)
    found = [one for one in found if one.copied or not one.walked or (one.op.path, one.cut.tensor.name) in gathers]
    ops = tuple(_priced(step.graph, one, work.get(one.op.path, (0.0, 0.0)), gathers) for one in found)
    flops, nbytes = (sum(one[i] for one in work.values()) for i in (0, 1))
    total = LostParallelism(ops, flops, nbytes)
    gathered = sum(op.gathered for op in ops)
    lost = sum(op.nbytes for op in ops) + gathered
    least = max(HANDFUL, LEAST * sent, LEAST * nbytes / PER_SENT)
    told = total.copied_flops > LEAST or lost > LEAST * nbytes or gathered > least
    return total if told else LostParallelism()


def _priced(graph: Graph, found: _Found, work: tuple[float, float], gathers: Mapping[tuple[str, str], float]) -> LostOp:
    op, cut, parts = found.op, found.cut, found.parts
    unshared = 1 - 1 / parts if found.copied else 0.0
    return LostOp(
        op.path, cut.tensor.name, cut.dim, parts, _why(graph, found), cut.behind, found.copied,
        work[0] * unshared, work[1] * unshared, gathers.get((op.path, cut.tensor.name), 0.0), op.source,
    )  # fmt: skip


def _gathers(step: StepPlan) -> tuple[dict[tuple[str, str], float], float]:
    """Op path, and tensor that it reads -> the bytes that each device sends to have more of it than it had; and of all."""
    found: dict[tuple[str, str], float] = {}
    total = 0.0
    for path, moved in moved_by_reader(step.segments).items():
        for task, itemsize, times in moved:
            sent = sum(times * nbytes for kind, nbytes in task.sent(itemsize) if sends(kind))
            total += sent
            if isinstance(task, Adapt) and _grows(task):
                found[path, task.tensor.name] = found.get((path, task.tensor.name), 0.0) + sent
    return found, total


def _grows(task: Adapt) -> bool:
    """Whether a device has more of the tensor behind the adapter than before."""
    return math.prod(task.adapter.target.local_shape) > math.prod(task.adapter.source.local_shape)


class _Finder:
    """Follows what is cut to where it is not."""

    def __init__(self, step: StepPlan):
        self.completed = step.completed
        self.graph = step.graph
        self.given = {store.leaf for store in stored_inputs(step.plan)} | step.plan.shards.keys()  # where another plan says
        self.aside = _of_parameters(step.graph, self.given)
        self.found: dict[str, _Found] = {}

    def run(self) -> list[_Found]:
        """In the order of the program."""
        for _ in closure(self._sources(), self._onward):
            pass
        for one in self.found.values():
            forward = one.op.forward
            if forward is not None and forward.path in self.found:  # it mirrors what was copied
                one.cut = dataclasses.replace(one.cut, behind=forward.path)
        return sorted(self.found.values(), key=lambda one: self.graph.position[one.op.path])

    def _sources(self) -> Iterator[_Cut]:
        """What lies cut: inputs, and what ops have made so."""
        laid = [*self.completed.inputs.items()]
        for op in self.graph.ops:
            laid += zip(op.outputs, self.completed.ops[op.path].outputs, strict=True)
        for tensor, layout in laid:
            if tensor not in self.aside:
                for dim, cuts in enumerate(layout.by_dim):
                    yield from (_Cut(tensor, dim, layout.mesh, axis) for axes in cuts for axis in axes)

    def _onward(self, cut: _Cut) -> Iterator[_Cut]:
        for op in self.graph.consumers.get(cut.tensor, ()):
            if not op.anywhere:
                yield from self._through(op, cut)
        for name, inside in self.walks.get(cut.tensor, ()) if not cut.dim else ():
            yield from self._walked(name, inside, cut)
        for other, shift in self.graph.flow.linked.get(cut.tensor, ()) if cut.behind else ():
            if cut.dim + shift >= 0 and other not in self.aside:
                yield _Cut(other, cut.dim + shift, cut.mesh, cut.axis, cut.behind)

    def _through(self, op: Op, cut: _Cut) -> Iterator[_Cut]:
        laid = self.completed.ops[op.path]
        place = laid.placement
        if place.group.unordered != cut.mesh.unordered or place.as_it_lies(op):
            return
        if cut.axis in place.shares or any(cut.axis in axes for axes in place.factors.values()):
            index = None if cut.behind else self._gathered(op, laid, cut)
            if index is not None:
                factor = self._factor(op, cut, index)
                meets = place.origin == "policy" and self._meets_rows(op, place, cut, factor)
                if meets or place.origin == "filled":
                    self._note(op, cut, factor, copied=False, meets=meets)
            return
        factor = self._factor(op, cut, op.inputs.index(cut.tensor))
        if factor is None or self._as_asked(op, laid, factor, cut):
            return
        self._note(op, cut, factor, copied=True)
        for tensor, dim in _carried(op, self.graph.rule(op), factor, cut):
            yield _Cut(tensor, dim, cut.mesh, cut.axis, op.path)

    def _walked(self, name: str, inside: PTensor, cut: _Cut) -> Iterator[_Cut]:
        """What loop ``name`` computes of a slice, if dim 0 of the stack lies cut."""

        def made(tensor: PTensor) -> list[PTensor]:
            readers = self.graph.consumers.get(tensor, ())
            return [t for op in readers if name in chain_of(op.loop, self.graph.loops) for t in op.outputs]

        first = cut.behind
        ops = {self.graph.producer[t].path: self.graph.producer[t] for t in closure(made(inside), made)}
        for op in sorted(ops.values(), key=lambda op: self.graph.position[op.path]):
            place = self.completed.ops[op.path].placement
            if op.anywhere or place.origin == "policy" or place.group.unordered != cut.mesh.unordered:
                continue
            used = cut.axis in place.shares or any(cut.axis in axes for axes in place.factors.values())
            self._note(op, dataclasses.replace(cut, behind=first), None, copied=not used, walked=name)
            first = first or op.path
        for y in self.graph.loops[name].ys if first else ():
            yield dataclasses.replace(cut, tensor=y.stack, behind=first)

    @cached_property
    def walks(self) -> Mapping[PTensor, list[tuple[str, PTensor]]]:
        """Stack -> the loops that take slices of it, and the slice in each."""
        return grouped((x.stack, (name, x.slice)) for name, loop in self.graph.loops.items() for x in loop.xs)

    def _gathered(self, op: Op, laid: OpLayouts, cut: _Cut) -> int | None:
        """The first operand that lies cut and is read whole along the axis."""
        for index, (tensor, layout) in enumerate(zip(op.inputs, laid.inputs, strict=True)):
            used = {*itertools.chain(*layout.cuts), *dict(layout.values)}
            if tensor == cut.tensor and cut.axis not in used:
                return index
        return None

    def _meets_rows(self, op: Op, place: Placement, cut: _Cut, factor: Factor | None) -> bool:
        """Whether what lies cut are rows of the batch, and the axis splits other rows of it in ``op``."""
        if cut.axis not in self.row_axes:
            return False
        rows = self.rows.get(op, ())
        return factor is not None and factor.name in rows and any(cut.axis in place.factors.get(f, ()) for f in rows)

    @cached_property
    def row_axes(self) -> set[str]:
        """The axes that cut dim 0 of the batch."""
        return {axis for t in self._batch() for axes in self.completed.inputs[t].by_dim[0] for axis in axes}

    @cached_property
    def rows(self) -> Mapping[Op, Set[str]]:
        """The factors that dim 0 of the batch is in each op."""
        return all_reached_factors(self.graph, [(t, 0) for t in self._batch()])

    def _batch(self) -> list[PTensor]:
        return [t for t in self.graph.inputs if t.shape and t not in self.aside and t.name not in self.given]

    def _factor(self, op: Op, cut: _Cut, index: int) -> Factor | None:
        """The factor of ``op`` that the dim of its operand ``index`` is; of several the first that can be split."""
        rule = self.graph.rule(op)
        names = rule.operands[index][cut.dim]
        every = [rule.factors[name] for name in names]
        return next((one for one in every if one.splittable), every[0]) if every else None

    def _as_asked(self, op: Op, laid: OpLayouts, factor: Factor, cut: _Cut) -> bool:
        """Whether the policy has left the axis to copies, though the op can be split, or its forward could."""
        place = laid.placement
        possible = factor.splittable and factor.size % (place.parts.get(factor.name, 1) * cut.mesh.size((cut.axis,))) == 0
        if place.origin == "policy":
            return possible
        if op.forward is None or op.forward.path not in self.completed.ops or op.forward.path in self.found:
            return False
        forward = self.completed.ops[op.forward.path].placement
        used = {axis for axes in forward.factors.values() for axis in axes}
        here = forward.group.unordered == cut.mesh.unordered
        return forward.origin == "policy" and here and cut.axis not in used

    def _note(self, op: Op, cut: _Cut, factor: Factor | None, copied: bool, meets: bool = False, walked: str = "") -> None:
        found = self.found.setdefault(op.path, _Found(op, cut, factor, copied, meets=meets, walked=walked))
        found.axes.add(cut.axis)


def _why(graph: Graph, found: _Found) -> str:
    """Why an op is not split along what cuts its operand, and the remedy."""
    factor, parts = found.factor, found.parts
    if found.walked:
        return f"the loop '{found.walked}' takes its slices one after another; let it run along a dim that is not split"
    if found.meets:
        return (
            "rows of the batch meet all its rows, so one side is put together; op_trans splits the other, or another factor"
        )
    if factor is None or not found.copied:
        return "its other operands are split along the same devices; op_trans says how it shall be split"
    if not factor.splittable:
        return blocked(factor, graph.rule(found.op), parts)
    named = factor_name(factor.name, graph.factor_names(found.op).get(factor.name, ""))
    asks = f"op_trans(op, Split({factor.name!r}, {parts}))"
    if factor.size % parts:
        return f"its factor {named} of size {factor.size} does not divide into {parts} parts"
    if factor.kind == "blocked":
        return f"its factor {named} is blocked: {factor.reason}; {asks} cuts the op there"
    return f"a copy was cheaper than to split its factor {named}; {asks} asks for that"


def _carried(op: Op, rule: Rule, factor: Factor, cut: _Cut) -> Iterator[tuple[PTensor, int]]:
    """The dims of results that are the factor; of a blocked one, which results may not have, those of its size."""
    found = [
        (tensor, dim)
        for tensor, dims in zip(op.outputs, rule.results, strict=True)
        for dim, names in enumerate(dims)
        if factor.name in names
    ]
    size = cut.tensor.shape[cut.dim]
    if not found and not factor.splittable:
        found = [(t, dim) for t in op.outputs for dim, mine in enumerate(t.shape) if mine == size]
    yield from found


def _of_parameters(graph: Graph, given: Set[str]) -> set[PTensor]:
    """State, gradients, what forward ops and loops make of parameters alone, and updates of any of it.

    Of an evaluation, which takes no gradient, state is what lies as the plan says that it follows: ``given``.
    """
    found = {t for t, kind in tensor_kinds(graph).items() if kind != "input"}
    found |= {t for t in graph.inputs if not graph.calls and t.name in given}

    found = set(closure(found, graph.flow.neighbours))
    for op in graph.ops:
        if op.anywhere == "fence":
            made = [out for out, given in zip(op.outputs, op.inputs, strict=False) if given in found]
        else:
            large = [t for t in op.inputs if t.shape]
            follows = {"forward": all, "update": any}.get(op.kind)
            made = list(op.outputs) if follows and large and follows(t in found for t in large) else []
        found.update(closure([t for t in made if t not in found], graph.flow.neighbours))
    return found
