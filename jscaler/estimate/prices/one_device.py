"""A step on one device, as rows that a plan scales: its kernels op by op, and its buffers with the moments at which each
is held.

A plan splits ops, and puts exchanges between them. It changes neither what they do nor, but for what it computes again,
their order. So what a device does under a plan is what one device does, with each kernel and each buffer as small as the
parts of its op and of its tensor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from jscaler.capture.jaxprs import shape
from jscaler.clusters.device import DeviceKind
from jscaler.estimate.live import HeldKind, LiveTensors
from jscaler.estimate.memory import in_place
from jscaler.estimate.prices.folded import Folded
from jscaler.estimate.works import with_ops
from jscaler.ir import Graph, Op
from jscaler.ir.rule import TensorFactors
from jscaler.ir.walk import grouped
from jscaler.lower.block_cuts import with_origins
from jscaler.lower.flat_program import FlatLoop, FlatProgram, Item, all_items, reads, results
from jscaler.lower.kept_values import Cuttable, saved_or_again
from jscaler.lower.step_plan import StepPlan
from jscaler.rules.analysed import Analysis
from jscaler.rules.factor_states import Leaves
from jscaler.rules.rule_book import RuleBook
from jscaler.xla_model.block import Value
from jscaler.xla_model.flops import NO_PRODUCTS, Flops, flops_of
from jscaler.xla_model.lifetimes import Span, lifetimes
from jscaler.xla_model.to_block import Blocks
from jscaler.xla_model.work import KernelWork, Moves, Work, work_of_block

Parts = tuple[tuple[str, int], ...]  # factor -> into how many parts it is split, in whatever way
SOME = ""  # in place of a factor: of all that an op reads and leaves one part
Roles = Mapping[str, int]  # factor -> which of the sizes of a product it is a part of
TURNED = (0, 2, 1, 3)  # a pass over the program may swap the operands of a product
Place = tuple[str, int]  # ("operand", 0), ("result", 0) of the op itself; ("tensor", n) of others; ("inside", 0)


class Buffer(NamedTuple):
    """What is held from one moment of the program to another.

    Attributes:
        tensor: name of the graph's tensor that it is; "" where it is none.
        op: path of the op that made it, or that runs when it is first held.
        nbytes: on one device; ``wide`` where it must be what it is a tensor of, and is only what that is cast from.
        kind: what it is for.
        in_loop: whether an iteration of a loop has its own, and no stack of all.
    """

    tensor: str
    op: str
    nbytes: int
    wide: int
    first: int
    last: int
    kind: HeldKind
    in_loop: bool


class Kernel(NamedTuple):
    """What scales a kernel: ``moved`` has bytes by what they are bytes of."""

    flops: tuple[Flops, ...]
    moved: tuple[tuple[Place, int], ...]
    times: int
    row: int


@dataclass(frozen=True)
class OpKernels:
    """The kernels of an op.

    Attributes:
        number: equal of ops that do the same, of equal layers, say.
        count: for how many ops it stands.
        tensors: names of tensors beside its own that its kernels read or leave.
    """

    op: Op
    number: int
    count: int
    kernels: tuple[Kernel, ...]
    tensors: tuple[str, ...]

    @property
    def flops(self) -> float:
        """Operations of products."""
        every = ((kernel.times, one) for kernel in self.kernels for one in kernel.flops)
        return math.fsum(times * one.count for times, one in every if one.unit not in NO_PRODUCTS)


@dataclass(frozen=True)
class OneDevice:
    """A step on one device.

    Attributes:
        graph: its ops, what is computed again among them.
        kernels: by path of the op that they belong to.
        buffers: of all that is held beside the step's arguments.
        scratch: bytes of workspace at each moment.
        ops: the path of the op that runs at each moment.
        folded: what of the graph stands for how many.
    """

    graph: Graph
    book: RuleBook
    device: DeviceKind
    kernels: Mapping[str, OpKernels]
    buffers: tuple[Buffer, ...]
    scratch: np.ndarray
    ops: tuple[str, ...]
    folded: Folded
    _products: dict[Any, list[tuple[tuple[int, ...], Roles]]] = field(default_factory=dict)
    _seconds: dict[tuple[int, Parts, tuple[float, ...]], float] = field(default_factory=dict)

    @staticmethod
    def of(step: StepPlan, device: DeviceKind, folded: Folded, cut: bool) -> "OneDevice":
        """Of a step on one device; ``cut`` into a forward and a backward, as on several device groups."""
        graph, flat = step.graph, step.blocks[0].flat
        assert isinstance(graph.rules, RuleBook)
        assert len(step.blocks) == 1
        rows = _Rows(step)
        for part in _forward_and_backward(flat, graph) if cut else (flat,):
            rows.add(part, device)
        kernels = _op_kernels(graph, with_ops(Work(tuple(rows.kernels))).kernels, rows.tensor_of, folded)
        return OneDevice(graph, graph.rules, device, kernels, *rows.buffers(), folded)

    @cached_property
    def first(self) -> np.ndarray:
        """The first moment of each buffer."""
        return np.array([one.first for one in self.buffers], int)

    @cached_property
    def last(self) -> np.ndarray:
        """The last moment of each buffer."""
        return np.array([one.last for one in self.buffers], int)

    @cached_property
    def is_stack(self) -> np.ndarray:
        """Of each buffer whether a loop stacks it up; to a sum over parts in time its slices are added, one by one."""
        stacks = {y.stack.name for loop in self.graph.loops.values() for y in loop.ys}
        return np.array([one.tensor in stacks and not one.in_loop for one in self.buffers], bool)

    def count(self, path: str) -> int:
        """For how many ops one stands."""
        op = self.graph.by_path.get(path)
        return 1 if op is None else self.folded.count(op)

    @cached_property
    def equal_layers(self) -> list[tuple[int, int, int, int]]:
        """Buffers that the layers have, too, for which one stands: number, first and last moment, how many layers.

        Between these moments all of them have it. What a forward leaves all have until the backward of that layer begins,
        and gradients from its end on. In between a layer after the other loses the one and gets the other.
        """
        backward: dict[int, list[int]] = {}  # moments of each run of layers
        for moment, path in enumerate(self.ops):
            op = self.graph.by_path.get(path)
            run = self.folded.run(op) if op is not None and op.kind == "backward" else None
            if run is not None:
                backward.setdefault(run, []).append(moment)
        found = []
        for n, one in enumerate(self.buffers):
            op = self.graph.by_path.get(one.op)
            run = self.folded.run(op) if op is not None and not one.in_loop else None
            if op is None or run not in backward:
                continue
            begin, end = backward[run][0], backward[run][-1]
            if op.kind == "forward" and op.again is None and one.first < self.front and one.last >= begin:
                found.append((n, one.first, begin - 1, self.folded.count(op) - 1))
            elif one.kind == "gradient" and one.last > end:
                found.append((n, end + 1, one.last, self.folded.count(op) - 1))
        return found

    @cached_property
    def moments(self) -> dict[str, tuple[int, int]]:
        """The first and the last moment of each op."""
        first = {path: n for n, path in reversed([*enumerate(self.ops)])}
        last = {path: n for n, path in enumerate(self.ops)}
        return {path: (n, last[path]) for path, n in first.items()}

    @cached_property
    def front(self) -> int:
        """The first moment of a backward op."""
        backward = {op.path for op in self.graph.ops if op.kind == "backward"}
        return next((moment for moment, path in enumerate(self.ops) if path in backward), len(self.ops))

    @cached_property
    def update(self) -> int:
        """The moment behind the last backward op."""
        return _behind_backward(self.graph, self.ops)

    def seconds(self, own: OpKernels, parts: Parts, held: Mapping[str, float]) -> float:
        """Of one run of an op's kernels, all iterations of loops together, where the op is split into ``parts``.

        Args:
            held: by name of a tensor the part of it that lies on a device at a time.
        """
        key = own.number, parts, tuple([held.get(name, 1.0) for name in own.tensors])
        if key not in self._seconds:
            self._seconds[key] = self._scaled(own, dict(parts), key[2])
        return self._seconds[key]

    def products(self, own: OpKernels) -> float:
        """Of the products among an op's kernels, on one device, as if nothing were read or written."""
        kernels = (kernel for kernel in own.kernels if any(one.sizes for one in kernel.flops))
        return sum(kernel.times * self.device.kernel_seconds(kernel.flops, 0, kernel.row) for kernel in kernels)

    def _scaled(self, own: OpKernels, parts: Mapping[str, int], others: Sequence[float]) -> float:
        op, rule = own.op, self.book.rule(own.op)
        every = math.prod(parts.values())
        one = 1 / parts.get(SOME, 1)
        share: dict[Place, float] = {("inside", 0): 1 / every}
        share.update({("operand", i): one * _part(dims, parts) for i, dims in enumerate(rule.operands)})
        share.update({("result", i): one * _part(dims, parts) for i, dims in enumerate(rule.results)})
        share.update({("tensor", i): part for i, part in enumerate(others)})
        total = 0.0
        for kernel in own.kernels:
            flops = [self._flops(op, one, parts, every) for one in kernel.flops]
            moved = sum(nbytes * share[place] for place, nbytes in kernel.moved)
            total += kernel.times * self.device.kernel_seconds(flops, moved, kernel.row)
        return total

    def _flops(self, op: Op, one: Flops, parts: Mapping[str, int], every: int) -> Flops:
        known = () if one.unit in NO_PRODUCTS or not one.sizes else self._products_of(op)
        roles = next((roles for sizes, roles in known if sizes == one.sizes), None)
        if roles is None:
            return one._replace(count=one.count / every)
        sizes = [*one.sizes]
        for factor, count in parts.items():
            if factor in roles:
                sizes[roles[factor]] = max(1, sizes[roles[factor]] // count)
        return Flops(one.count * math.prod(sizes) / max(1, math.prod(one.sizes)), one.unit, tuple(sizes))

    def _products_of(self, op: Op) -> list[tuple[tuple[int, ...], Roles]]:
        """The sizes of each product of an op's body, and what its factors are to it."""
        assert op.body is not None
        key = op.body, self.book.rule(op).key
        if key not in self._products:
            analysis, groups = self.book.analysis(op), self.book.groups(op)
            dots = [eqn for eqn in analysis.jaxpr.eqns if eqn.primitive.name == "dot_general"]
            found = [(flops_of(eqn).sizes, _roles(eqn, analysis, groups)) for eqn in dots]
            turned = [((b, n, m, k), {f: TURNED[role] for f, role in roles.items()}) for (b, m, n, k), roles in found]
            self._products[key] = found + turned
        return self._products[key]


class _Rows:
    """The kernels and buffers of the parts of a program that run one after another."""

    def __init__(self, step: StepPlan):
        self.step, self.graph = step, step.graph
        self.names: dict[Value, str] = {}
        self.kernels: list[KernelWork] = []
        self.ops: list[str] = []
        self.scratch: list[int] = []
        self.spans: list[tuple[Span, core.Var | None, FlatProgram]] = []
        self.makers = {t.name: op.path for op in self.graph.ops for t in op.outputs}
        for loop in self.graph.loops.values():
            self.makers.update({y.stack.name: self.makers[y.slice.name] for y in loop.ys if y.slice.name in self.makers})

    def tensor_of(self, value: Value) -> str:
        """The name of the tensor that a value is; "" where it is none."""
        return self.names.get(value, "")

    def add(self, flat: FlatProgram, device: DeviceKind) -> None:
        """Add a part behind those that were added."""
        blocks = Blocks(flat.origins.op)
        block = blocks.program(flat)
        variables = {value: var for var, value in blocks.values.items()}
        names = _tensor_names(flat, self.graph)
        self.names.update({value: names[var] for value, var in variables.items() if var in names})
        self.kernels += map(self._with_maker, work_of_block(block, device.has_row_kernels).kernels)
        donated = frozenset(self.step.graph.next_version.values())
        pairs = in_place(self.step, 0, donated).items()
        over = {blocks.value(new): blocks.value(old) for new, old in pairs if new in blocks.values}
        found, start = lifetimes(block, over), len(self.ops)
        for span in found.spans:
            moved = span._replace(first=start + span.first, last=start + span.last)
            self.spans.append((moved, variables.get(span.value), flat))
        last = self.ops[-1] if self.ops else ""
        for moment in found.timeline:
            last = moment.op or last
            self.ops.append(last)
        self.scratch += [moment.nbytes for moment in found.timeline]

    def _with_maker(self, kernel: KernelWork) -> KernelWork:
        """``kernel``; one that fills or copies a stack and is of no op gets the op that makes what lies there."""
        if kernel.op:
            return kernel
        names = (self.tensor_of(value) for value, _ in (*kernel.moves[1], *kernel.moves[0]))
        return replace(kernel, op=next((self.makers[name] for name in names if name in self.makers), ""))

    def buffers(self) -> tuple[tuple[Buffer, ...], np.ndarray, tuple[str, ...]]:
        """All buffers, the workspace beside them at each moment, and the op that runs then."""
        live, homes = LiveTensors(self.graph), {t.name: loop for t, loop in self.graph.homes.items()}
        tensors = {t.name: t for op in self.graph.ops for t in op.outputs}
        scratch, found = np.array(self.scratch, float), []
        end = _behind_backward(self.graph, self.ops) - 1
        for span, var, flat in self.spans:
            scratch[span.first : span.last + 1] -= span.nbytes
            name = self.tensor_of(span.value)
            op = (
                (flat.origins.op.get(var, "") if var is not None else "")
                or self.makers.get(name, "")
                or self.ops[span.first]
            )
            tensor = tensors.get(name)
            kind = live.of_variable(flat, var, 0, "").kind if tensor is None else live.of_tensor(tensor, 0).kind
            home = homes[name] if name in homes else self.graph.by_path[op].loop if op in self.graph.by_path else None
            wide = span.nbytes if tensor is None else max(span.nbytes, math.prod(tensor.shape) * tensor.itemsize)
            handed_on = flat is not self.spans[-1][2] and var in flat.outputs
            last = max(span.last, end) if handed_on else span.last
            found.append(Buffer(name, op, span.nbytes, wide, span.first, last, kind, home is not None))
        return tuple(found), scratch, tuple(self.ops)


def _behind_backward(graph: Graph, ops: Sequence[str]) -> int:
    backward = {op.path for op in graph.ops if op.kind == "backward"}
    return 1 + max((moment for moment, path in enumerate(ops) if path in backward), default=-1)


def _forward_and_backward(flat: FlatProgram, graph: Graph) -> tuple[FlatProgram, ...]:
    """What the losses need, and all else: that reads what the first has kept for it, and makes the rest again."""
    losses = {call.loss for call in graph.calls}
    wanted = {var for var, tensor in flat.origins.tensor.items() if tensor in losses}
    front: list[Item] = []
    for item in reversed(flat.items):
        if not wanted.isdisjoint(results(item)):
            front.append(item)
            wanted.update(reads(item))
    front.reverse()
    inside = {id(item) for item in front}
    back = [item for item in flat.items if id(item) not in inside]
    if not front or not back:
        return (flat,)
    outputs = tuple(v for v in flat.outputs if isinstance(v, core.Var))
    made = {v for item in front for v in results(item)}
    early, late = (tuple(v for v in outputs if (v in made) is own) for own in (True, False))
    free = {*flat.inputs, *(v for _, v in flat.part_indices)}
    (front, back), originals = saved_or_again([Cuttable(tuple(front), early), Cuttable(tuple(back), late)], {}, free)
    flat = with_origins(flat, originals)
    kept = {v for item in back for v in reads(item)} & {v for item in front for v in results(item)}
    left = tuple(dict.fromkeys([*early, *(v for item in front for v in results(item) if v in kept)]))
    parts = ((front, flat.inputs, left), (back, (*flat.inputs, *left), late))
    return tuple(replace(flat, items=tuple(items), inputs=ins, outputs=outs) for items, ins, outs in parts)


def _tensor_names(flat: FlatProgram, graph: Graph) -> dict[Any, str]:
    """Of variables the names of their tensors.

    A slice has its stack's, where it has none, and a stack its slice's. What an op holds inside in the shape of a result
    has the result's: before a cast, say.
    """
    found = {var: tensor.name for var, tensor in flat.origins.tensor.items()}
    for var, path in flat.origins.op.items():
        op = graph.by_path.get(path)
        if var not in found and op is not None:
            like = next((t.name for t in op.outputs if t.shape and t.shape == shape(var)), "")
            if like:
                found[var] = like
    for loop in (item for item in all_items(flat.items) if isinstance(item, FlatLoop)):
        pairs = [(piece, stack) for stack, piece in loop.xs] + [(stack, piece) for piece, stack in loop.ys]
        for var, other in pairs:
            if var not in found and other in found:
                found[var] = found[other]
    return found


def _part(dims: TensorFactors, parts: Mapping[str, int]) -> float:
    return 1 / math.prod([parts.get(f, 1) for dim in dims for f in dim])


def _roles(eqn: core.JaxprEqn, analysis: Analysis, groups: Mapping[str, Leaves]) -> Roles:
    """Which factors are a product's batch (0), its rows (1), its columns (2), and what it contracts (3)."""
    (left_depth, right_depth), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = eqn.invars

    def free(atom: core.Var | core.Literal, *taken: Sequence[int]) -> list[int]:
        return [d for d in range(len(shape(atom))) if not any(d in dims for dims in taken)]

    sides = [(left, left_batch, 0), (left, free(left, left_batch, left_depth), 1), (left, left_depth, 3)]
    role: dict[int, int] = {}
    for atom, dims, which in (*sides, (right, free(right, right_batch, right_depth), 2)):
        if isinstance(atom, core.Var):
            leaves = analysis.leaves(atom)
            role.update({leaf: which for d in dims for leaf in leaves[d]})
    return {f: role[leaf] for f, leaves in groups.items() for leaf in leaves if leaf in role}


def _op_kernels(
    graph: Graph, kernels: Sequence[KernelWork], tensor_of: Callable[[Value], str], folded: Folded
) -> dict[str, OpKernels]:
    numbers: dict[object, int] = {}
    found = {}
    for path, own in grouped((kernel.op, kernel) for kernel in kernels).items():
        op = graph.by_path[path]
        ends: dict[str, Place] = {t.name: ("operand", i) for i, t in enumerate(op.inputs)}
        ends |= {t.name: ("result", i) for i, t in enumerate(op.outputs)}
        others: dict[str, int] = {}

        def place(value: Value, ends: Mapping[str, Place] = ends, others: dict[str, int] = others) -> Place:
            name = tensor_of(value)
            return ("inside", 0) if not name else ends.get(name) or ("tensor", others.setdefault(name, len(others)))

        scaled = []
        for kernel in own:
            moves: Moves = (*kernel.moves[0], *kernel.moves[1])
            moved = tuple((place(value), nbytes) for value, nbytes in moves)
            scaled.append(Kernel(kernel.flops, moved, kernel.times, kernel.row))
        key = (op.body, graph.rules.rule(op).key, tuple(scaled))
        found[path] = OpKernels(op, numbers.setdefault(key, len(numbers)), folded.count(op), tuple(scaled), tuple(others))
    return found
