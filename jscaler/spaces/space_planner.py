"""A planner that takes holes where a primitive's argument stands: what a policy with holes runs on."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jscaler.capture.bodies import BodyTable
from jscaler.errors import PlanError, UnknownNameError, divisors
from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.kinds import tensor_kinds
from jscaler.ir.op import matches
from jscaler.plans.batch import BATCH
from jscaler.primitives import Algorithm, Planner, Replicate, Split, TimeSplit
from jscaler.primitives.algorithms import grid_axis
from jscaler.primitives.grid import Grid
from jscaler.primitives.recompute_regions import selected
from jscaler.spaces.allowed import Allowed, Options, options_text
from jscaler.spaces.dims import Dims
from jscaler.spaces.holes import AnySplit, Maybe
from jscaler.spaces.numbers import OneOf
from jscaler.spaces.ties import Where, names_of, tied

MODES = {None: 0, "zero1": 1, "zero2": 2, "zero3": 3}


@dataclass(frozen=True)
class OpenGrid:
    """The cells of an op whose split is open: they lie on the devices of the mesh, one each."""

    op: Op


class SpacePlanner(Planner):
    """Reads like a `Planner`; takes holes, and keeps what they leave open as `Allowed`."""

    def __init__(
        self, graph: Graph, mesh: tuple[int, ...], bodies: BodyTable | None = None, cluster: Any = None, batch: str = BATCH
    ):
        super().__init__(graph, math.prod(mesh), bodies, cluster=cluster)
        self.space = Allowed(mesh)
        self.dims = Dims(self, batch)

    def op_trans(self, op: Any, *algorithms: Any) -> Any:
        """As `Planner.op_trans`, on the axes of the mesh in their order; an algorithm may be `any_split` or `one_of`.

        Raises:
            PlanError: a hole leaves nothing; it says what would be legal.
        """
        if isinstance(op, Grid | OpenGrid):
            raise PlanError(f"'{op.op.path}': a space splits an op in one go: give all algorithms to one op_trans")
        target = self._named("op_trans", op)
        options: list[Options | None] = [None] * len(self.space.mesh)
        axis = 0
        for algorithm in algorithms:
            if isinstance(algorithm, AnySplit):
                numbers = tuple(range(len(options))) if algorithm.axes is None else algorithm.axes
                for number in numbers:
                    self._meet(target, options, number, self._any(target, algorithm, number), str(algorithm))
                self._count(target, algorithm, numbers)
                axis = max(axis, 1 + max(numbers, default=-1))
                continue
            if isinstance(algorithm, TimeSplit):
                raise PlanError(f"'{target.path}': micro-batches are an argument of a search, and no part of its space")
            every = algorithm.options if isinstance(algorithm, OneOf) else (algorithm,)
            axes, names = self._given(target, axis, every)
            for number in axes:
                self._meet(target, options, number, frozenset(names), str(algorithm))
            axis += len(axes)
        known = self.space.splits.get(target.path)
        whole = [self._able(target, number) if own is None else own for number, own in enumerate(options)]
        for number, own in enumerate(known or ()):
            both = whole[number] & own
            if not both:
                raise PlanError(
                    f"'{target.path}': holes leave nothing in common on axis {number} of {self.space.mesh}: "
                    f"{options_text(own)} before, and now {options_text(whole[number])}; open one of these in both"
                )
            whole[number] = both
        self.space.splits[target.path] = tuple(whole)
        return OpenGrid(target)

    def op_assign(self, cells: Any, devices: Any, *, any_order: bool = False) -> None:
        """Cells of an op lie on the mesh; another array is an error. Or ops lie as other ops do.

        Args:
            cells: of an op; where ``devices`` is a constraint, an op, a path or pattern, or several.
            devices: an array of the mesh; or `same_as`, `together`, `apart`, `on_all`.

        Raises:
            UnknownNameError: a pattern matches nothing.
            PlanError: the devices are not those of the mesh; the ops share no dim; or nothing is left.
        """
        if isinstance(devices, Where):
            ops, others = (selected(self.graph, () if some is None else some) for some in (cells, devices.others))
            dims = devices.dims
            wanted = None if dims is None else lambda path: self.dims.factors(self.graph[path], dims)
            if devices.kind != "on_all":
                self.space.ties.append(tied(self.graph, devices, ops, others, wanted))
            for op in ops if devices.kind == "on_all" else ():
                self.op_trans(op, AnySplit(None, None, (), "never", said=str(devices)))
            return
        if not isinstance(cells, OpenGrid):
            cells = self.op_trans(cells, *map(Replicate, self.space.mesh))
        if np.asarray(devices).size != self.num_devices:
            raise PlanError(f"'{cells.op.path}' is assigned to {np.asarray(devices).size} devices; a mesh has all of them")

    def shard(self, leaf: Any, dim: Any, devices: Any = None, **options: Any) -> None:
        """``graph.shard("*", one_of(None, "zero1"))``: the ZeRO modes that parameters may have, by path or pattern.

        Raises:
            UnknownNameError: no parameter matches, or there is no such mode.
        """
        if not isinstance(dim, OneOf):
            raise PlanError("shard: a space takes one_of(None, 'zero1', 'zero2', 'zero3') in place of a dim")
        for mode in dim.options:
            if mode not in MODES:
                raise UnknownNameError("ZeRO mode", str(mode), [str(m) for m in MODES])
        parameters = [t for t, kind in tensor_kinds(self.graph).items() if kind == "parameter"]
        own = [t for t in parameters if t is leaf or (not isinstance(leaf, PTensor) and matches(t.name, leaf))]
        if not own:
            raise UnknownNameError("parameter", str(leaf), [t.name for t in parameters])
        modes = frozenset(MODES[mode] for mode in dim.options)
        for tensor in own:
            known = self.space.zeros.get(tensor.name, modes) & modes
            if not known:
                raise PlanError(f"shard: holes leave no ZeRO mode for '{tensor.name}': {dim} meets what was said before")
            self.space.zeros[tensor.name] = known

    def recompute(self, selection: Any, keep: Any = (), instead: bool = False) -> None:
        """``graph.recompute(ops, maybe())``: ops that may run again, each by itself; with ``together()`` all or none."""
        as_one = isinstance(keep, Where) and keep.kind == "together"
        if not isinstance(keep, Maybe) and not as_one:
            raise PlanError(
                "recompute: a space says what may run again: graph.recompute(ops, maybe()), or together() for all or none"
            )
        ops = selected(self.graph, selection)
        self.space.again.update(ops)
        if as_one:
            self.space.as_one[f"recompute({names_of(ops)}, {keep})"] = ops

    def op_order(self, before: Any, after: Any) -> None:
        """As `Planner.op_order`, of whole ops: what is found has it, whatever fills the holes."""
        ends = [end.op if isinstance(end, OpenGrid) else end for end in (before, after)]
        self.space.orders.append((self._named("op_order", ends[0]).path, self._named("op_order", ends[1]).path))

    def _able(self, op: Op, axis: int) -> Options:
        """All that a mesh axis can do."""
        factors = self.graph.rule(op).factors.values()
        size = self.space.mesh[axis]
        return frozenset([None, *(f.name for f in factors if f.splittable and f.size > 1 and f.size % size == 0)])

    def _any(self, op: Op, hole: AnySplit, axis: int) -> Options:
        """The options of a hole on one axis."""
        if not 0 <= axis < len(self.space.mesh):
            raise PlanError(
                f"'{op.path}': {hole} names axis {axis}, and a mesh of {self.space.mesh} has {len(self.space.mesh)}"
            )
        able = self._able(op, axis)
        wanted = None if hole.dims is None else self.dims.factors(op, hole.dims)
        never = self.dims.factors(op, hole.never)
        factors: set[str | None] = {f for f in able if f is not None and (wanted is None or f in wanted) and f not in never}
        if hole.copies == "any" or (hole.copies == "needed" and not factors):
            factors.add(None)
        if not factors:
            raise PlanError(
                f"'{op.path}': {hole} leaves nothing on axis {axis} of a mesh of {self.space.mesh}{self._near(op, hole)}"
            )
        return frozenset(factors)

    def _count(self, op: Op, hole: AnySplit, axes: tuple[int, ...]) -> None:
        """Note into how many parts some axes may split an op."""
        if hole.least == 1 and hole.most is None:
            return
        sizes = [self.space.mesh[axis] for axis in axes]
        able = {math.prod(some) for n in range(len(sizes) + 1) for some in itertools.combinations(sizes, n)}
        legal = frozenset(n for n in able if hole.least <= n <= (hole.most or n))
        if not legal:
            raise PlanError(
                f"'{op.path}': {hole} leaves no number of parts on a mesh of {self.space.mesh}; the nearest that is legal: "
                f"{min(able, key=lambda n: abs(n - hole.least))}"
            )
        self.space.parts.setdefault(op.path, []).append((axes, legal))

    def _near(self, op: Op, hole: AnySplit) -> str:
        """What would be legal instead."""
        rule = self.graph.rule(op)
        names = sorted(self.dims.factors(op, hole.dims)) if hole.dims else list(rule.factors)
        sizes = {name: rule.factors[name].size for name in names if rule.factors[name].splittable}
        told = [f"{name} of {size} divides into {', '.join(map(str, divisors(size)))}" for name, size in sizes.items()]
        return f": {'; '.join(told)}" if told else ": none of its factors is so; copies='needed' copies it"

    def _given(self, op: Op, axis: int, options: Sequence[Algorithm]) -> tuple[range, list[str | None]]:
        """The mesh axes that algorithms are for, from ``axis`` on, and the factor of each."""
        names: list[str | None] = []
        counts: set[int] = set()
        for algorithm in options:
            if not isinstance(algorithm, Split | Replicate):
                raise PlanError(f"'{op.path}': a space takes Split, Replicate, any_split and one_of, not {algorithm!r}")
            counts.add(algorithm.copies if isinstance(algorithm, Replicate) else algorithm.parts or 0)
            names.append(grid_axis(op, self.graph.rule(op), algorithm).factor)
        ends = list(itertools.accumulate(self.space.mesh[axis:], lambda a, b: a * b))
        if len(counts) > 1 or counts.isdisjoint(ends):
            told = ", ".join(map(str, ends)) or "no axis is left"
            raise PlanError(
                f"'{op.path}' is split {sorted(counts)} ways from axis {axis} of a mesh of {self.space.mesh}: legal: {told}"
            )
        return range(axis, axis + 1 + ends.index(counts.pop())), names

    def _meet(self, op: Op, options: list[Options | None], axis: int, own: Options, said: str) -> None:
        before = options[axis]
        options[axis] = own if before is None else before & own
        if not options[axis]:
            raise PlanError(
                f"'{op.path}': {said} leaves {options_text(own)} on axis {axis}, and what stands before it "
                f"{options_text(before or own)}; open one of these in both"
            )


def space_of(
    policy: Callable[..., None] | None, graph: Graph, mesh: tuple[int, ...], bodies: BodyTable | None = None,
    cluster: Any = None, batch: str = BATCH,
) -> Allowed | None:  # fmt: skip
    """What a policy with holes leaves open; None where there is none, and all is.

    Args:
        batch: path or pattern of the batch among the inputs.

    Raises:
        PlanError: what the policy says leaves nothing.
    """
    if policy is None:
        return None
    planner = SpacePlanner(graph, mesh, bodies, cluster, batch)
    policy(planner, np.arange(planner.num_devices).reshape(mesh))
    return planner.space
