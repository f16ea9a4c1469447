"""What a choice costs: kernels of its ops by the tables of `jscaler.estimate.prices`, and what adapters bring."""

import dataclasses
import math

from jscaler.clusters import Cluster
from jscaler.clusters.transition_kinds import sends
from jscaler.estimate.prices.in_time import InTime, iterations
from jscaler.estimate.prices.one_device import SOME, OneDevice, OpKernels
from jscaler.ir import Op, PTensor
from jscaler.ir.rule import TensorFactors
from jscaler.materialize.adapter import find_adapter
from jscaler.materialize.bounds import bytes_at_least
from jscaler.materialize.layout import Layout, without_values
from jscaler.materialize.transitions import price_of
from jscaler.plan_search.program.choices import Choice, Node, Nodes

ROW_BYTES = 4  # of a sum over a row that is in parts
SUMS = 2  # that a cut op joins: the largest and the sum of a softmax, mean and variance of a norm


class Seconds:
    """Seconds of a step.

    Planning an adapter takes milliseconds, and a space has thousands. So what is brought is priced by the bytes that no
    adapter can save, until a solution takes it.

    Attributes:
        exact: whether adapters are planned.
        guessed: whether one was wanted that has not been.
    """

    def __init__(self, nodes: Nodes, program: OneDevice, time: InTime, cluster: Cluster):
        self.nodes, self.program, self.time, self.cluster = nodes, program, time, cluster
        self.graph = program.graph
        self.exact, self.guessed = False, False
        self._moved: dict[tuple[Layout, Layout, int, int], float] = {}
        self._stacks: dict[str, tuple[float, float]] = {}
        self._stack_of = {y.slice: y.stack.name for loop in self.graph.loops.values() for y in loop.ys if y.saved}
        self._elements: dict[tuple[Layout, Layout], float] = {}
        self._shapes = {t.name: t.shape for op in self.graph.ops for t in (*op.inputs, *op.outputs)}
        stacks = (s for loop in self.graph.loops.values() for s in (*loop.xs, *loop.ys))
        self._shapes |= {s.stack.name: s.slice.shape for s in stacks}

    def of(self, node: Node, choice: Choice) -> float:
        """All that a node computes, equal layers and iterations of loops and micro-batches together."""
        return math.fsum(self.of_op(op, self.nodes.parts(op, choice)) for op in node.all) + self._cut(node, choice)

    def of_op(self, op: Op, parts: dict[str, int]) -> float:
        """All runs of an op that is split so in space."""
        own = self.program.kernels.get(op.path)
        seconds = 0.0
        runs = self.time.runs.get(op.path, 1)
        if own is not None:
            cut = self.time.cuts.get(op.path, {})
            split = {f: parts.get(f, 1) * cut.get(f, 1) for f in {**parts, **cut}}
            held = {name: self._part(own, name, split) for name in own.tensors}
            seconds = own.count * runs * self.program.seconds(own, tuple(sorted(split.items())), held)
        for tensor in (t for t in op.outputs if t.name in self.time.summed.get(op.path, {})):
            index = op.outputs.index(tensor)
            part = _part(self.nodes.book.rule(op).results[index], parts)
            times = runs * iterations(op, self.graph) * self.program.count(op.path)
            seconds += times * self.program.device.kernel_seconds((), 3 * part * tensor.nbytes)
        return seconds

    def inside(self, op: Op, parts: dict[str, int]) -> float:
        """All that an op does beside its products: what its backward may need, and can work out from what it reads."""
        own = self.program.kernels.get(op.path)
        if own is None:
            return 0.0
        kernels = tuple(k for k in own.kernels if not any(one.sizes for one in k.flops))
        cut = self.time.cuts.get(op.path, {})
        split = {f: parts.get(f, 1) * cut.get(f, 1) for f in {**parts, **cut}}
        held = {name: self._part(own, name, split) for name in own.tensors}
        rest = dataclasses.replace(own, number=~own.number, kernels=kernels)
        runs = own.count * self.time.runs.get(op.path, 1)
        return runs * self.program.seconds(rest, tuple(sorted(split.items())), held)

    def _part(self, own: OpKernels, name: str, split: dict[str, int]) -> float:
        """The part of a tensor of another op that its kernels touch: that of its own tensor of the same shape."""
        rule, shape = self.nodes.book.rule(own.op), self._shapes.get(name)
        ends = (*zip(own.op.inputs, rule.operands, strict=True), *zip(own.op.outputs, rule.results, strict=True))
        for tensor, dims in ends:
            if tensor.shape == shape:
                return _part(dims, split) / split.get(SOME, 1)
        return 1 / math.prod(split.values())

    def moved(self, source: Layout, target: Layout, itemsize: int, part: int = 1, carried: bool = False) -> float:
        """Of bringing a tensor, or one of so many parts in time of it, from one layout to another, once.

        Args:
            carried: whether it goes by way of a loop's carry, in which value shares are joined.
        """
        if source == target:
            return 0.0
        if carried and source.values:
            plain = without_values(source)
            return self.moved(source, plain, itemsize, part) + self.moved(plain, target, itemsize, part)
        key = source, target, itemsize, part
        if key not in self._moved and not self.exact:
            least = self._least(source, target)
            self.guessed |= least > 0
            return self.cluster.floor(least * itemsize / part)
        if key not in self._moved:
            adapter, each = find_adapter(source, target, itemsize, self.cluster), itemsize / part
            sent = ((at, step) for at, step in adapter.walk if sends(step.kind))
            self._moved[key] = sum(price_of(at, step, each, self.cluster) for at, step in sent)  # type: ignore[arg-type]
        return self._moved[key]

    def saving(self, stack: str, slice: PTensor, part: float) -> float:
        """Of filling the stack of what a loop saves, of which a device has a part, and of writing each slice to it."""
        return self._of_bytes(sum(self._written(stack, slice)) * part)

    def without_saving(self, op: Op, parts: dict[str, int]) -> float:
        """All runs of an op that saves nothing: without copies of what it makes to stacks."""
        rule, seconds = self.nodes.book.rule(op), self.of_op(op, parts)
        for tensor, dims in zip(op.outputs, rule.results, strict=True):
            if tensor in self._stack_of:
                _, copied = self._written(self._stack_of[tensor], tensor)
                seconds -= self._of_bytes(copied * _part(dims, parts))
        return max(seconds, 0.0)

    def _of_bytes(self, nbytes: float) -> float:
        return self.program.device.kernel_seconds((), nbytes) if nbytes else 0.0

    def _written(self, stack: str, slice: PTensor) -> tuple[float, float]:
        """Bytes of a step, on one device, that fill a stack, and that copy slices for it."""
        if stack not in self._stacks:
            maker = self.graph.producer.get(slice)
            filled = copied = 0.0
            for path, own in self.program.kernels.items():
                if own.op.kind != "forward" or (stack not in own.tensors and own.op is not maker):
                    continue
                place = ("tensor", own.tensors.index(stack)) if stack in own.tensors else None
                as_result = ("result", own.op.outputs.index(slice)) if own.op is maker else None
                for kernel in (k for k in own.kernels if not k.flops):
                    runs = own.count * self.time.runs.get(path, 1) * kernel.times
                    filled += runs * sum(n for at, n in kernel.moved if at == place)
                    if [at for at, _ in kernel.moved] == [as_result] * 2:
                        copied += runs * sum(n for _, n in kernel.moved)
            share = self.time.shares.get(stack, 1)
            self._stacks[stack] = filled / share, copied / share
        return self._stacks[stack]

    def _least(self, source: Layout, target: Layout) -> float:
        """Elements that no way between two layouts can save."""
        key = source, target
        if key not in self._elements:
            self._elements[key] = bytes_at_least(source, target, 1)
        return self._elements[key]

    def _cut(self, node: Node, choice: Choice) -> float:
        """Of joining what parts of inner sums give, where an op is cut at them."""
        total = 0.0
        for op in node.all:
            rule = self.nodes.book.rule(op)
            axes = [
                a for f, own in self.nodes.factors(op, choice).items() if rule.factors[f].kind == "blocked" for a in own
            ]
            if not axes:
                continue
            shape = max((t.shape for t in (*op.inputs, *op.outputs)), key=math.prod)
            rows = math.prod(shape) // max(
                rule.factors[f].size for f in choice.factors if rule.factors[f].kind == "blocked"
            )
            rest = math.prod(n for f, n in self.nodes.parts(op, choice).items() if rule.factors[f].kind != "blocked")
            runs = self.time.runs.get(op.path, 1)
            size = max(1, rows // (rest * runs))
            shares = Layout(
                self.nodes.mesh, ((size,),), ((),), tuple((a, "add") for a in self.nodes.mesh.names if a in axes)
            )
            times = runs * iterations(op, self.graph) * self.program.count(op.path)
            total += SUMS * times * self.moved(shares, without_values(shares), ROW_BYTES)
        return total


def nbytes(layout: Layout, itemsize: float) -> float:
    """On one device."""
    return math.prod(layout.local_shape) * itemsize


def _part(dims: TensorFactors, parts: dict[str, int]) -> float:
    return 1 / math.prod([parts.get(f, 1) for dim in dims for f in dim])
