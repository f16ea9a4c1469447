"""``Graph``: the captured program as ops over PTensors, in an order that respects data dependencies. Immutable."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, Protocol, TypeVar, get_args

import jax.numpy as jnp

from jscaler.errors import CaptureError, PlanError, UnknownNameError, check_dim, shown
from jscaler.ir.flow import Flow
from jscaler.ir.loop import Item, Loop, nested
from jscaler.ir.op import Op, OpKind, matches
from jscaler.ir.overview import FoldingTable, Overview, Shown, count_text
from jscaler.ir.rule import Rule
from jscaler.ir.tensor import PTensor
from jscaler.text.units import readable_bytes, readable_count

T = TypeVar("T")

MOST_LOOPS = 6  # that are told of, and gradient calls
WIDEST = 100  # characters of a column; a norm over all leaves reads hundreds


class RuleSource(Protocol):
    """Whoever knows rules. Rules are derived on demand, once per body."""

    def rule(self, op: Op) -> Rule: ...

    def factor_of(self, graph: "Graph", tensor: PTensor, dim: int) -> Mapping[Op, str]: ...

    def named_factors(self, graph: "Graph") -> Mapping[str, Mapping[str, str]]: ...

    def pieces(self, op: Op, factors: tuple[str, ...]) -> tuple[str, ...]: ...

    def expansion(self, op: Op, factor: str, parts: int, algorithm: Any) -> Sequence[Any] | None: ...


@dataclass(frozen=True)
class GradientCall:
    """One ``value_and_grad`` of the step: what it differentiates, with respect to what, and the gradients."""

    loss: PTensor
    wrt: tuple[PTensor, ...]
    gradients: tuple[PTensor, ...]


@dataclass(frozen=True, repr=False)
class Graph(Shown):
    """The captured step.

    Attributes:
        ops: in a valid execution order; backward ops are handles (``body is None``) until the policy has run.
        inputs: one PTensor per leaf of the step's arguments, named by argument and tree path (``batch/tokens``).
        constants: arrays the step closes over, with their values.
        outputs: one PTensor per leaf of the step's result.
        output_names: tree paths of the outputs.
        next_version: output index -> input index where an output is the next version of a state leaf.
        calls: the step's gradient calls; an op's ``call`` is an index into them.
        rules: derives the ops' rules.
        loops: the loops that some of the ops stand in, by name.
        leaf_parts, result_parts: how many consecutive inputs each leaf of the arguments is, and outputs each of the result;
            empty where each is one.
        copy_of: inputs that are others once more, for another device group -> those; they stand behind these, as the same
            leaf.
        memo: what others work out of this very graph, by keys of their own.
    """

    ops: tuple[Op, ...]
    inputs: tuple[PTensor, ...]
    constants: tuple[tuple[PTensor, Any], ...]
    outputs: tuple[PTensor, ...]
    output_names: tuple[str, ...]
    next_version: Mapping[int, int]
    calls: tuple[GradientCall, ...]
    rules: RuleSource
    loops: Mapping[str, Loop] = field(default_factory=dict)
    leaf_parts: tuple[int, ...] = ()
    result_parts: tuple[int, ...] = ()
    copy_of: Mapping[PTensor, PTensor] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        made = [*self.inputs, *(t for t, _ in self.constants), *(t for op in self.ops for t in op.outputs)]
        made += [t for loop in self.loops.values() for t in (*loop.inner, *loop.results)]
        assert len(set(made)) == len(made), "two PTensors share a name"
        assert len({op.path for op in self.ops}) == len(self.ops), "two ops share a path"

    def forget(self) -> None:
        """Let go of tables and of what others have worked out, which are made again when they are wanted."""
        for name in ("by_path", "_inputs", "position", "tree", "flow", "homes", "producer", "consumers"):
            vars(self).pop(name, None)
        self.memo.clear()

    @cached_property
    def by_path(self) -> dict[str, Op]:
        return {op.path: op for op in self.ops}

    @cached_property
    def _inputs(self) -> dict[str, PTensor]:
        return {t.name: t for t in self.inputs}

    @cached_property
    def position(self) -> dict[str, int]:
        """The place of every op, by path, in the order of the program."""
        return {op.path: i for i, op in enumerate(self.ops)}

    @cached_property
    def tree(self) -> tuple[Item, ...]:
        """Ops and loops in order; the ops of a loop stand in it."""
        return nested(self.ops, self.loops)

    @cached_property
    def flow(self) -> Flow:
        """Where tensors come from and where they go, also through loops."""
        return Flow(self.loops, self.producer, self.consumers, self.position)

    @cached_property
    def homes(self) -> dict[PTensor, str | None]:
        """Tensor -> the loop in whose body it is made; None for the program."""
        found = {t: op.loop for op in self.ops for t in op.outputs}
        for loop in self.loops.values():
            found.update(dict.fromkeys(loop.inner, loop.name))
            found.update(dict.fromkeys(loop.results, loop.parent))
        return found

    @cached_property
    def producer(self) -> dict[PTensor, Op]:
        return {t: op for op in self.ops for t in op.outputs}

    @cached_property
    def consumers(self) -> dict[PTensor, tuple[Op, ...]]:
        table: dict[PTensor, tuple[Op, ...]] = {}
        several: dict[PTensor, list[Op]] = {}
        for op in self.ops:
            alone = (op,)  # one for all that it alone reads: every pass leaves a graph
            for tensor in dict.fromkeys(op.inputs):
                if tensor in table:
                    several.setdefault(tensor, [*table[tensor]]).append(op)
                else:
                    table[tensor] = alone
        return table | {t: tuple(ops) for t, ops in several.items()}

    def __getitem__(self, path: str) -> Op:
        """The op at ``path``; raises UnknownNameError with the near one."""
        if not isinstance(path, str) or path not in self.by_path:
            raise UnknownNameError("op", path, self.by_path)
        return self.by_path[path]

    def of_kind(self, kind: OpKind) -> tuple[Op, ...]:
        if not isinstance(kind, str) or kind not in get_args(OpKind):
            raise UnknownNameError("kind of op", shown(kind), get_args(OpKind))
        return tuple(op for op in self.ops if op.kind == kind)

    def forward(self) -> tuple[Op, ...]:
        """The forward ops, in order."""
        return self.of_kind("forward")

    def backward(self) -> tuple[Op, ...]:
        """The backward handles, in order; raises CaptureError where the step takes no gradient."""
        self.require_gradient()
        return self.of_kind("backward")

    def update(self) -> tuple[Op, ...]:
        """What the step does with gradients: clipping, optimizer, metrics."""
        return self.of_kind("update")

    def select(self, pattern: str, kind: OpKind | None = "forward") -> tuple[Op, ...]:
        """Ops whose path matches a shell pattern, e.g. ``"block_*/mlp/*"``; ``kind=None`` takes every kind.

        Raises:
            UnknownNameError: nothing matches.
        """
        ops = self.ops if kind is None else self.of_kind(kind)
        found = tuple(op for op in ops if matches(op.path, _pattern("select", pattern)))
        if not found:
            raise UnknownNameError("op", pattern, [op.path for op in ops])
        return found

    def input(self, path: str) -> PTensor:
        """The input leaf at ``path``."""
        if not isinstance(path, str) or path not in self._inputs:
            raise UnknownNameError("input", path, self._inputs)
        return self._inputs[path]

    def select_inputs(self, pattern: str) -> tuple[PTensor, ...]:
        """Input leaves whose path is ``pattern``, lies below it, or matches it as a shell pattern."""
        pattern = _pattern("select_inputs", pattern)
        return tuple(t for t in self.inputs if t.name.startswith(pattern + "/") or matches(t.name, pattern))

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What ``make`` works out of this graph, once for each ``key``; not to be changed."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def rule(self, op: Op) -> Rule:
        """The factors of ``op``."""
        return self.rules.rule(op)

    def factor_of(self, path: PTensor | str, dim: int) -> Mapping[Op, str]:
        """For every op that a dim of a tensor, or of input ``path``, reaches through the dataflow: the factor it is there.

        Where a dim reaches an op as two factors (query and key positions of self-attention), the one that comes first
        in the op's rule is given. Ops it does not reach are absent.
        """
        tensor = path if isinstance(path, PTensor) else self.input(path)
        dim = check_dim(tensor.name, tensor.shape, dim)
        return self.once(("reached", tensor.name, dim), lambda: self.rules.factor_of(self, tensor, dim))

    @cached_property
    def named_factors(self) -> Mapping[str, Mapping[str, str]]:
        """By op path and factor what it is: the dim of the argument, or of the parameter, that it comes from."""
        return self.rules.named_factors(self)

    def factor_names(self, op: Op) -> Mapping[str, str]:
        """What the factors of ``op`` are: by factor the dim of the argument, else of the parameter, that it comes from."""
        return self.named_factors.get(op.path, {})

    def factors_text(self, op: Op, factors: Iterable[str] | None = None) -> str:
        """``a=tokens[0] d=up.kernel[1]``: what the factors of ``op`` (or these of them) are, if known."""
        named = self.factor_names(op)
        return " ".join(f"{f}={named[f]}" for f in (named if factors is None else factors) if f in named)

    def require_gradient(self) -> None:
        """Raises CaptureError unless the step has a gradient call that plans can see."""
        if self.calls:
            return
        parts = " of real leaves (a complex one as two, put together in the loss by jax.lax.complex)"
        of_real = parts if any(jnp.issubdtype(t.dtype, jnp.complexfloating) for t in self.inputs) else ""
        raise CaptureError(
            "the captured step has no gradient, and this plan needs one: use jscaler.value_and_grad (or jscaler.grad) "
            f"in the step instead of jax.value_and_grad{of_real}, so that the forward program arrives whole; an evaluation "
            "follows its train step: train_step.follow(evaluate)"
        )

    def overview(self) -> Overview:
        """The graph in a few lines; in a notebook its ops and inputs by module."""
        lines = [f"Graph of {len(self.ops)} ops: {self._kinds}", f"inputs: {_size(self.inputs)}"]
        lines += [f"loop {loop}" for loop in list(self.loops.values())[:MOST_LOOPS]]
        lines += [f"and {len(self.loops) - MOST_LOOPS} loops more"] if len(self.loops) > MOST_LOOPS else []
        lines += [f"gradients of {_size(call.wrt)}" for call in self.calls[:MOST_LOOPS]]
        more = "print(graph) has a line for every op, with its factors; graph['path/of/op'] and graph.select('*') give ops"
        return Overview([*lines, more], self._tables)

    def _tables(self) -> list[FoldingTable]:
        def of_op(op: Op) -> tuple[str, ...]:
            return op.kind, op.shapes, op.source

        def of_input(tensor: PTensor) -> tuple[str, ...]:
            return tensor.type, readable_bytes(tensor.nbytes)

        return [
            FoldingTable("ops", ("kind", "shapes", "source"), self.ops, attrgetter("path"), of_op, "print(graph)"),
            FoldingTable("inputs", ("type", "bytes"), self.inputs, attrgetter("name"), of_input, "graph.inputs"),
        ]

    @property
    def _kinds(self) -> str:
        kinds: tuple[OpKind, ...] = ("forward", "backward", "update")
        return count_text({kind: len(self.of_kind(kind)) for kind in kinds})

    def __str__(self) -> str:
        """One line per op: path, rule, shapes, source line, factors. Backward handles are shown by their forward op's."""
        shown = [op for op in self.ops if op.kind != "backward"]
        rows = [(op.path, str(self.rule(op)), op.shapes, op.source, self.factors_text(op)) for op in shown]
        widths = [min(max((len(r[i]) for r in rows), default=0), WIDEST) for i in range(4)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, (*widths, 0), strict=True)).rstrip() for r in rows]
        return "\n".join([f"Graph: {len(self.ops)} ops ({self._kinds}), {len(self.inputs)} inputs", *lines])


def _size(tensors: Sequence[PTensor]) -> str:
    """``66 tensors, 1.3 G numbers, 4.9 GiB``."""
    numbers, nbytes = sum(math.prod(t.shape) for t in tensors), sum(t.nbytes for t in tensors)
    return f"{len(tensors)} tensors, {readable_count(numbers).strip()} numbers, {readable_bytes(nbytes)}"


def _pattern(function: str, pattern: Any) -> str:
    if isinstance(pattern, str):
        return pattern
    raise PlanError(f"{function} takes a path or a shell pattern, such as 'block_*/mlp/*', not {shown(pattern)}")
