"""The three primitives. A policy gets a ``Planner``: the graph to read, and a pen."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from jscaler.capture.bodies import BodyTable
from jscaler.errors import PlanError, SplitError, UnknownNameError, check_count, check_flag, shown
from jscaler.ir import Graph, Op, Place, PTensor, Rule
from jscaler.ir.kinds import tensor_kinds
from jscaler.ir.loop import chain_of
from jscaler.ir.name import range_mark
from jscaler.ir.op import RecomputeRegion, Residuals
from jscaler.primitives.algorithms import Algorithm, Chunk, GridAxis, Replicate, grid_axis
from jscaler.primitives.gradients import check_residuals, summing_dtype
from jscaler.primitives.graph_view import GraphView
from jscaler.primitives.grid import Grid, one_in_time
from jscaler.primitives.leaf_parts import leaves_in
from jscaler.primitives.made_for import MadeFor
from jscaler.primitives.per_microbatch import needing_the_whole, under
from jscaler.primitives.plan import (
    Accumulation,
    Assign,
    Decision,
    Fuse,
    Index,
    LeafParts,
    LoopRanges,
    OnDevices,
    Order,
    PerMicrobatch,
    Plan,
    Recompute,
    ReduceDtype,
    SaveResiduals,
    Schedule,
    Shard,
    Store,
    Trans,
    named_ops,
)
from jscaler.primitives.recompute_regions import named, selected, with_region, with_regions
from jscaler.primitives.restructured import restructured
from jscaler.primitives.said_of_stages import reduced_as_said, said_of_stages
from jscaler.primitives.shard_checks import check_shard
from jscaler.primitives.shards_on_stages import shards_on_stages
from jscaler.primitives.stage_checks import check_on_devices, check_stages
from jscaler.tables import Published, Table, find_schedule

OpPart = tuple[Op | str, int]  # an op, and the number of its part along its time axis


class Policy(Protocol):
    """A plan policy (sProgram): plain Python that calls the three primitives.

    ``graph`` is a `Planner`; ``devices`` is an array of logical device numbers, to be reshaped at will.
    """

    def __call__(self, graph: "Planner", devices: np.ndarray) -> None: ...


class Planner(GraphView):
    """A graph whose ops can be split, placed and ordered. Reads like the `Graph`; appends decisions to a plan.

    Example:
        >>> [op.path for op in graph.select("mlp/*")]
        ['mlp/dot', 'mlp/dot.1', 'mlp/add']
        >>> print(graph.rule(graph["mlp/dot"]))
        a b c, c d -> a b d
        >>> units = graph.factor_of("state/params/up", 1)  # the hidden units, wherever they go
        >>> units[graph["mlp/dot"]], units[graph["mlp/dot.1"]]
        ('d', 'c')
        >>> len(graph.forward()), len(graph.backward()), len(graph.update()), len(graph.of_kind("forward"))
        (16, 19, 5, 16)
        >>> graph.input("state/params/up").shape, [t.name for t in graph.select_inputs("batch")]
        ((16, 64), ['batch/next', 'batch/tokens'])
        >>> len(graph.ops), len(graph.inputs), len(graph.outputs), graph.output_names[-1], graph.next_version[0]
        (40, 12, 11, '1', 0)
        >>> words = graph.input("state/params/words")
        >>> [op.path for op in graph.consumers[words]][:2], graph.producer[graph.outputs[-1]].path
        (['loss/gather', 'head/dot'], 'loss/div')
        >>> graph.by_path["mlp/dot"] is graph.ops[graph.position["mlp/dot"]] is graph.tree[graph.position["mlp/dot"]]
        True
        >>> len(graph.calls), len(graph.constants), len(graph.loops), len(graph.linked)  # no layers in a scan
        (1, 0, 0, 0)
        >>> graph.require_gradient()
    """

    def __init__(
        self, graph: Graph, num_devices: int, bodies: BodyTable | None = None, stores: Sequence[Decision] = (),
        cluster: Any = None, price: Any = None,
    ):  # fmt: skip
        self.source = graph  # before any op was fused
        self.num_devices = num_devices
        self.cluster = cluster  # a `Cluster`, where one was said: what the devices are, and what links them
        self.price = price  # policy -> bytes beyond what devices have, and seconds; None where nobody knows
        self.stage_of: Mapping[str, int] = {}  # path -> stage, while a policy for stages runs (`on_stages`)
        self._whole = num_devices  # devices that the running policy was given
        self._bodies = bodies if bodies is not None else BodyTable()
        self.graph = restructured(graph, stores, self._bodies)
        # inputs whose layout is given, that of a step that is followed, and their devices
        self.stored = {s.leaf: frozenset(s.devices) for s in stores if isinstance(s, Store)}
        self._decisions: list[Decision] = list(stores)
        self._assigned: set[str] = set()
        self._grids: dict[str, Grid] = {}
        self._arrays: dict[Any, tuple[Place, ...]] = {}  # of devices, as places
        self.alone: set[str] = set()  # ops that run on each part in time alone
        self._sharded: set[str] = set()
        self.over = False  # whether the policy has returned
        self._regions: Graph | None = None  # the graph with what is to be computed again
        self._regions_of: Graph | None = None

    def op_trans(self, op: Op | Grid | str, *algorithms: Algorithm) -> Grid:
        """Replace ``op`` (or the op at a path) by a grid of cells, one axis per algorithm; on a whole grid, add axes.

        An op that has axes in time alone, and no devices yet, may be split again, which adds axes too: what runs one after
        another is one decision, and where it runs another.

        A factor that an inner reduction blocks (the vocabulary of a cross entropy, the channels of a layer norm) cuts the
        op there; the cells are then groups of ops, and ``op`` still stands for all of them.

        Args:
            op: an op, the path of one, or a whole grid.
            algorithms: `Split`, `TimeSplit`, `Replicate`, `Chunk`, `Prefix` or one of your own; each but `Chunk` makes an
                axis.

        Returns:
            The whole grid; indexing it gives cells or sub-grids.

        Raises:
            SplitError: a factor is blocked or does not divide.
            UnknownNameError: an op has no such factor.
            PlanError: the op was split before, or has its devices; or only part of a grid is split further.

        Example:
            >>> cells = graph.op_trans("mlp/dot", Split(("up", 1), 2), Split("a", 2))  # columns × rows of the batch
            >>> cells.shape
            (2, 2)
        """
        op = op if isinstance(op, Grid) else self._named("op_trans", op)
        target, axes, chunks = (op.op, op.axes, op.chunks) if isinstance(op, Grid) else (op, (), ())
        if isinstance(op, Grid) and not op.is_whole:
            raise PlanError(
                f"{op} is part of a grid: cells that are split differently from their neighbours need their own ops"
            )
        if isinstance(op, Grid) and target.path in self._assigned:
            raise PlanError(f"'{target.path}' is assigned to devices as {self._grids[target.path]}; split it before that")
        known = self._grids.get(target.path)
        if not isinstance(op, Grid) and known is not None and self._only_in_time(known):
            axes, chunks = known.axes, known.chunks
        elif not isinstance(op, Grid) and known is not None:
            raise PlanError(f"'{target.path}' was split before, into {self._grids[target.path]}; split that grid further")
        rule = self.graph.rule(target)
        for algorithm in algorithms:
            try:
                axis = grid_axis(target, rule, algorithm, (*axes, *chunks), target.path in self.alone)
            except SplitError as error:
                raise error.of(self.graph.factor_names(target).get(error.factor, "")) from None
            except UnknownNameError as error:
                error.args = (f"{error}{self._factors_of(target)}",)
                raise
            if not isinstance(algorithm, Chunk):
                axes = (*axes, axis)
            elif chunks:
                raise PlanError(f"'{target.path}' runs in chunks of {chunks[0]} already; an op is chunked along one factor")
            else:
                chunks = (axis,)
        grid = Grid.whole(target, axes, self._pieces(target, rule, axes), chunks, self.graph)
        self._decide(Trans(target.path, axes, chunks))
        self._grids[target.path] = grid
        return grid

    def _decide(self, decision: Decision) -> None:
        if self.over:
            raise PlanError(
                f"'{decision}' is decided when the policy has returned, and its plan is made; decide while it runs, and "
                "keep no graph for later"
            )
        self._decisions.append(decision)
        if isinstance(decision, Assign):
            self._assigned.add(decision.op)

    def _named(self, function: str, op: Any) -> Op:
        """The op of this graph, by itself or by its path; raises PlanError for anything else."""
        if isinstance(op, (Op, str)):
            return self.graph[op if isinstance(op, str) else op.path]
        path = self.graph.ops[0].path
        raise PlanError(f"{function} takes an op or the path of one, such as '{path}', not {shown(op)}")

    def _factors_of(self, op: Op) -> str:
        """The end of an error's sentence: what the letters of an op's factors stand for."""
        said = self.graph.factors_text(op)
        return f"; they are {said}" if said else ""

    def _only_in_time(self, grid: Grid) -> bool:
        return all(axis.time for axis in grid.axes) and not grid.chunks and grid.op.path not in self._assigned

    def _pieces(self, op: Op, rule: Rule, axes: Sequence[GridAxis]) -> tuple[str, ...]:
        """What the ops do that will stand for ``op``; none where it stays one op."""
        for axis in axes:
            if axis.algorithm is not None and axis.factor is not None and op.body is not None:
                steps = self.graph.rules.expansion(op, axis.factor, axis.parts, axis.algorithm)
                if steps is None:
                    factor = rule.factors[axis.factor]
                    why = f"{axis.algorithm} finds nothing in it that it could cut"
                    raise SplitError(op.path, factor.name, factor.size, axis.parts, why)
                return tuple(step.name for step in steps)
        cut = tuple(a.factor for a in axes if a.factor is not None and rule.factors[a.factor].reopens)
        return self.graph.rules.pieces(op, cut) if cut else ()

    def op_assign(
        self, cells: Op | Grid | str, devices: int | Sequence[Any] | np.ndarray, *, any_order: bool = False
    ) -> None:
        """Put cells on devices. An unsplit op on several devices is replicated on them.

        Args:
            cells: an op, a grid, a sub-grid or a cell.
            devices: one device (a number or a `Place`), or an array with as many devices as there are cells. Cells along a
                time axis share a device, and may be counted once; or they take turns on devices, each on its own (micro-
                batch 0 on one group, 1 on another, and so on): the more turns, the more is planned and compiled. Cells of
                a plain `Split` that share a device make its axis one in time, too.
            any_order: leave open which cell gets which of the devices: the order is taken that makes the op's inputs
                cheapest to bring. For a whole grid only.

        Raises:
            PlanError: the numbers differ, a device does not exist, or part of a grid is assigned in any order.

        Example:
            >>> graph.op_assign(graph.op_trans("mlp/dot", Split("d", 4)), devices)
            >>> graph.op_assign("mlp/dot.1", 3)  # whole, on one device
        """
        array = _device_array("op_assign", devices)
        cells = cells if isinstance(cells, Grid) else self._named("op_assign", cells)
        if isinstance(cells, Op):
            if cells.path in self._grids:
                raise PlanError(f"'{cells.path}' is {self._grids[cells.path]}: assign that grid or its cells, once each")
            cells = self.op_trans(cells, Replicate(array.size)) if array.size > 1 else self.op_trans(cells)
        array = one_in_time(cells, array)
        shape = cells.shape if array.size == int(np.prod(cells.shape, dtype=int)) else cells.space_shape
        count = int(np.prod(shape, dtype=int))
        if array.size != count:
            raise PlanError(f"{cells} has {count} cells and is assigned to {array.size} devices: {array.tolist()}")
        if array.size > 1 and array.ndim > 1 and _squeezed(array.shape) != _squeezed(shape):
            raise PlanError(f"{cells} has shape {shape} and its devices have shape {array.shape}")
        places = self._places(cells, array)
        if any_order and not (cells.is_whole and shape == cells.space_shape):
            raise PlanError(
                f"{cells} is part of a grid, or takes turns on devices, and cannot be assigned in any order; assign the "
                "whole grid, to as many devices as it has cells in space"
            )
        self._decide(Assign(cells.op.path, cells.index, places, any_order))

    def _places(self, cells: Grid, array: np.ndarray) -> tuple[Place, ...]:
        """The places of an array of devices. Equal arrays of numbers are one tuple, however many ops lie there."""
        key = (array.dtype, array.tobytes())
        known = self._arrays.get(key) if array.dtype != object else None
        if known is not None:
            return known
        places = tuple(_place(d) for d in array.flat)
        wrong = [p.device for p in places if not 0 <= p.device < self.num_devices]
        if wrong:
            raise PlanError(
                f"{cells} is assigned to devices {wrong}; there are {self.num_devices}: 0 to {self.num_devices - 1}"
            )
        return places if array.dtype == object else self._arrays.setdefault(key, places)

    def op_order(self, before: Op | Grid | str | OpPart, after: Op | Grid | str | OpPart) -> None:
        """Run ``before`` before ``after``: ops, or cells along a time axis, which are then pinned one by one.

        Where the time axis spans device groups, blocks run so; else the parts leave their loop.

        Args:
            before: an op or its path; a grid or a cell along its time axis; or a pair of an op and the number of a part
                along its time axis, of a backward op that of its forward op.
            after: the same.

        Raises:
            PlanError: a part of a grid is a part in space; an op has no time axis, or fewer parts.

        Example:
            >>> parts = graph.op_trans("mlp/dot", TimeSplit("a", 2))
            >>> graph.op_order(parts[1], parts[0])
            >>> graph.op_order("attention/dot", "attention/dot.1")
        """
        (first, cells), (second, others) = map(self._ordered, (before, after))
        self._decide(Order(first, second, cells, others))

    def _ordered(self, end: Op | Grid | str | OpPart) -> tuple[str, Index | None]:
        """The path of an op, and which of its cells are meant; None for all."""
        if isinstance(end, Grid):
            return end.op.path, None if end.is_whole else end.index
        if not isinstance(end, tuple):
            return self._named("op_order", end).path, None
        if len(end) != 2 or not isinstance(end[1], (int, np.integer)) or isinstance(end[1], bool):
            raise PlanError(f"op_order takes an op, or a pair of an op and the number of a part, not {end!r}")
        op = self._named("op_order", end[0])
        grid = self._grids.get(op.path) or (self._grids.get(op.forward.path) if op.forward is not None else None)
        times = [i for i, axis in enumerate(grid.axes) if axis.time] if grid is not None else []
        if grid is None or len(times) != 1 or not 0 <= end[1] < grid.axes[times[0]].parts:
            what = f"is {grid}" if grid is not None else "was not split"
            raise PlanError(
                f"part {end[1]} of '{op.path}' is to be ordered, and it {what}: give it one time axis with that part"
            )
        return op.path, tuple((end[1], end[1] + 1) if i in times else (0, a.parts) for i, a in enumerate(grid.axes))

    def fuse(self, *ops: Op | str, name: str | None = None) -> Op:
        """Make one op of neighbouring forward ops; their backward becomes one, which computes again what lies between.

        So that what only they read (the logits between a head and its cross entropy) is never handed on, and with
        `Chunk` never held whole. Fuse before splitting; ops got from the graph before are of the graph before.

        Args:
            ops: two or more forward ops of one gradient call, or their paths, in any order.
            name: path of the new op; by default that of the last op.

        Returns:
            The new op.

        Raises:
            PlanError: an op is split already, or they cannot be one op.

        Example:
            >>> loss = graph.fuse("head/dot", "loss/gather.1", name="loss")
            >>> graph.op_assign(graph.op_trans(loss, Split(("mlp/add:0", 0), 4), Chunk(("mlp/add:0", 1), 8)), devices)
        """
        if not isinstance(name, str | None):
            raise PlanError(f"fuse: name is the path of the new op, not {shown(name)}")
        paths = [self._named("fuse", op).path for op in ops]
        for path in paths:
            if path in self._grids:
                raise PlanError(f"'{path}' was split before, into {self._grids[path]}; fuse ops before they are split")
            named = [d for d in self._decisions if not isinstance(d, Fuse) and path in named_ops(d)]
            if named:
                raise PlanError(
                    f"'{path}' is named by a decision before, '{named[0]}'; fuse ops first, and name the fused op"
                )
        paths.sort(key=lambda path: self.graph.ops.index(self.graph[path]))
        decision = Fuse(tuple(dict.fromkeys(paths)), name or (paths[-1] if paths else ""))
        self._restructure(decision)
        return self.graph[decision.path]

    def _restructure(self, decision: Decision) -> None:
        self.graph = restructured(self.graph, [decision], self._bodies)
        self._decide(decision)

    def ranges(self, loop: str, sizes: Sequence[int], apart: bool = False) -> tuple[str, ...]:
        """Make of a loop over layers (``nn.scan``, ``lax.scan``) one for each range of them: what a stage takes.

        An op of a range is called as that of the whole loop, with its layers behind: ``layers/mlp/up/dot[4:8]``; a pattern
        without them means the ops of all. Say it before the loop's ops are split.

        Args:
            loop: its name; ``graph.loops`` has all.
            sizes: how many layers each range takes, in the order of the layers.
            apart: whether parameters that the loop takes slices of, and their optimizer's state, lie in parts, each where
                its range reads it. The step's caller has each leaf as one array: a ``jax.Array`` over all of these devices,
                or a `jscaler.ChunkedArray` where ranges share devices or are of several sizes.

        Returns:
            The names of the loops, in the order of the layers.

        Raises:
            UnknownNameError: no such loop.
            PlanError: the sizes do not add up to its length; it stands in another loop; a decision names one of its ops.

        Example:
            >>> stack = lambda w: jax.lax.scan(lambda x, k: (x @ k, None), jnp.ones((2, 4)), w)[0].sum()
            >>> policy = lambda graph, devices: print(graph.ranges("loss/scan", [2, 2]))
            >>> _ = jscaler.parallelize(policy, devices=1)(jscaler.grad(stack)).lower(jnp.ones((4, 4, 4)))
            ('loss/scan[0:2]', 'loss/scan[2:4]')
        """
        if not isinstance(loop, str):
            raise PlanError(f"ranges takes the name of a loop, of those in graph.loops, not {shown(loop)}")
        named = {path for d in self._decisions for path in named_ops(d)}
        inside = [op.path for op in self.graph.ops if loop in chain_of(op.loop, self.graph.loops)]
        for path in inside:
            if path in named:
                raise PlanError(f"'{path}' is named by a decision before; cut the loop '{loop}' into ranges first")
        if isinstance(sizes, str) or not isinstance(sizes, Iterable):
            raise PlanError(f"ranges: sizes are how many layers each range takes, not {shown(sizes)}")
        sizes = tuple(check_count("ranges: the number of layers", size) for size in sizes)
        if apart and len(sizes) > 1 and loop in self.graph.loops and sum(sizes) == self.graph.loops[loop].length:
            leaves = leaves_in(self.graph, [x.stack for x in self.graph.loops[loop].xs], sizes, self._bodies)
            self._restructure(LeafParts(leaves, sizes))
        self._restructure(LoopRanges(loop, sizes))
        bounds = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        return tuple(loop + range_mark(own) for own in bounds) if len(sizes) > 1 else (loop,)

    def on_devices(
        self,
        ops: Sequence[Op | str],
        devices: Any,
        turned: Any = None,
        axis: str = "microbatch",
        stage: int | None = None,
    ) -> None:
        """Run forward ops on a group of devices, split there as else is said, or else as is cheapest.

        Args:
            ops: forward ops, or their paths.
            devices: their numbers, an array of any shape.
            turned: the devices for every second part along a time axis, if other ones.
            axis: the name of that time axis.
            stage: the stage that the plan's schedule knows these ops as; by default the one behind all stages so far.

        Raises:
            PlanError: there is no such device, or one is named twice, or none at all; or ``stage`` is no number from 0 on.

        Example:
            >>> graph.on_devices(graph.select("attention/*"), devices[:2])
            >>> graph.on_devices([*graph.select("mlp/*"), *graph.select("head/*")], devices[2:])
        """
        if isinstance(ops, str) or not isinstance(ops, Iterable):
            raise PlanError(f"on_devices takes several ops, or their paths, not {shown(ops)}")
        given = (devices,) if turned is None else (devices, turned)
        groups = [_device_numbers("on_devices", own) for own in given]
        paths = tuple(self._named("on_devices", op).path for op in ops)
        same = groups[-1] == groups[0]
        if stage is None:
            stage = 1 + max((d.stage or 0 for d in self._decisions if isinstance(d, OnDevices)), default=-1)
        decision = OnDevices(paths, groups[0], *(("", ()) if same else (axis, groups[1])), stage)
        check_on_devices(decision, self.num_devices)
        self._decide(decision)

    def on_stages(
        self,
        policy: Policy | Sequence[Policy],
        stage_of: Mapping[str, int],
        devices: np.ndarray | Sequence[Any],
        turned: np.ndarray | Sequence[Any] | None = None,
        axis: str = "microbatch",
    ) -> None:
        """Run a policy that is written for the devices of one stage, and carry out what it says on those of each op's.

        Args:
            policy: the policy, which is given the numbers from 0 on; or one for each stage. Each sees the whole graph, and
                what it says of other stages' ops and parameters does not count.
            stage_of: path of an op, or of an input -> its stage; other ops have none, and are left open.
            devices: (stages, devices of each), or a list of rows of several lengths: the policy is run for each length.
            turned: the same for every second part along a time axis, where these lie elsewhere.
            axis: the name of that time axis.

        Raises:
            UnknownNameError: no op and no input has such a path.
            PlanError: devices are not a row for each stage, or there is no such stage.
            JscalerError: what the policy raises.

        Example:
            >>> stages = {op.path: int(not op.path.startswith("attention")) for op in graph.forward()}
            >>> graph.on_stages(plans.data_parallel(), stages, devices.reshape(2, 2))
        """
        rows = _device_rows("on_stages", devices)
        check_stages(self.graph, stage_of, rows)
        turns = None if turned is None else _device_rows("on_stages", turned)
        policies = [policy] * len(rows) if callable(policy) else list(policy)
        if len(policies) != len(rows):
            raise PlanError(f"on_stages takes a policy, or one for each of {len(rows)} stages, not {len(policies)}")
        runs = list(dict.fromkeys((id(own), len(row)) for own, row in zip(policies, rows, strict=True)))
        of_run = [runs.index((id(own), len(row))) for own, row in zip(policies, rows, strict=True)]
        for run in range(len(runs)):
            first = of_run.index(run)
            own = {path: stage for path, stage in stage_of.items() if of_run[stage] == run}
            others = stage_of.keys() - own.keys()
            try:
                start, before = len(self._decisions), self._accumulation
                self._on_rows(policies[first], len(rows[first]), own, others, run > 0, rows, turns, axis)
                if len({*map(id, policies)}) > 1:
                    self._decisions[start:] = reduced_as_said(self._decisions[start:], before)
            except SplitError as error:
                if len(runs) == 1:
                    raise
                where = ", ".join(str(list(row)) for stage, row in enumerate(rows) if of_run[stage] == run)
                sizes = " and ".join(map(str, dict.fromkeys(map(len, rows))))
                raise error.within(f"groups have {sizes} devices, and this is on {where}") from None

    def _on_rows(
        self, policy: Policy, size: int, stage_of: Mapping[str, int], others: Set[str], again: bool,
        devices: Sequence[Sequence[int]], turned: Sequence[Sequence[int]] | None, axis: str,
    ) -> None:  # fmt: skip
        """`on_stages` for those that have this policy and so many devices; ``others`` are of other stages.

        Args:
            again: whether a policy has run for other stages, and has said what is of no stage.
        """
        first, grids, sharded = len(self._decisions), dict(self._grids), set(self._sharded)

        def is_left(path: str, if_of_none: bool) -> bool:
            """Whether what is said of an op now is not for its stage."""
            return path not in stage_of and (again or path in others or if_of_none)

        # a policy for some stages does not meet what one for other stages has said
        elsewhere = {path for path, grid in grids.items() if is_left(path, not self._only_in_time(grid))}
        self._grids = {path: grid for path, grid in grids.items() if path not in elsewhere}
        self._assigned -= elsewhere
        self._sharded = sharded & stage_of.keys()
        self._whole, self.stage_of = size, stage_of
        policy(self, np.arange(size))
        self._whole, self.stage_of = self.num_devices, {}
        said = self._decisions[first:]
        open_ops = elsewhere | {
            d.op for d in said if isinstance(d, Trans | Assign) and is_left(d.op, isinstance(d, Assign))
        }
        self._grids = {path: grid for path, grid in self._grids.items() if path not in open_ops}
        self._grids |= {path: grid for path, grid in grids.items() if path in open_ops}
        self._sharded = sharded | (self._sharded & stage_of.keys())
        kept = [d for d in said if not (isinstance(d, Trans | Assign) and d.op in open_ops)]
        kept = [d for d in kept if not (isinstance(d, Shard | Store) and d.leaf not in stage_of)]
        if others or again:
            kept = [*said_of_stages(kept, lambda path: not is_left(path, if_of_none=False))]
            self._regions = None  # what it computes again in other stages is not
        axes = {d.op: d.axes for d in self._decisions if isinstance(d, Trans)} if turned is not None else {}
        move = _Moved(
            stage_of, devices, turned, {op: own for op, own in axes.items() if any(a.time == axis for a in own)}, axis
        )
        rows = [[row] for row in devices] if turned is None else [list(pair) for pair in zip(devices, turned, strict=True)]
        self._decisions[first:] = [move(decision) for decision in shards_on_stages(self.graph, kept, stage_of, rows)]
        self._assigned = {decision.op for decision in self._decisions if isinstance(decision, Assign)}

    def schedule(self, table: Published | Table | str) -> None:
        """Say in which order device groups run the micro-batches of a loop whose ops lie on several.

        Args:
            table: a table, its text or file; or a published schedule, or its name: ``"1f1b"``, ``"zb_h1"``.

        Raises:
            PlanError: neither a table nor a name; or, when the policy has returned, no op is split in time.

        Example:
            >>> graph.schedule("zb_h1")
            >>> graph.schedule(Table.parse("0F0 0F1 0B0 0B1" + chr(10) + "1F0 1B0 1F1 1B1"))
        """
        found = find_schedule(table)
        self._decide(Schedule(found.name if isinstance(found, Published) else str(found)))

    def reduce_dtype(self, dtype: Any) -> None:
        """Add gradients between devices in another dtype: fewer bits send less and lose digits, more bits the reverse.

        Args:
            dtype: a floating dtype, or its name.

        Raises:
            PlanError: not a floating dtype.

        Example:
            >>> graph.reduce_dtype("bfloat16")
        """
        self._decide(ReduceDtype(summing_dtype(dtype)))

    def accumulation(self, *, dtype: Any = None, each_time: bool | None = None, gather_once: bool | None = None) -> None:
        """Say how gradients add up over parts in time (micro-batches); a second call changes what it names.

        Args:
            dtype: of the sums, where gradients have fewer bits; by default the gradients' own.
            each_time: whether devices add theirs in every iteration, so that gradients of sharded parameters are held in
                parts (ZeRO's second stage); by default once, behind the last.
            gather_once: whether parameters that are stored in parts are put together once, in front of the first
                micro-batch, and whole until the last is done; by default in every iteration, while they are used.

        Raises:
            PlanError: not a floating dtype.

        Example:
            >>> graph.accumulation(dtype="float32", each_time=True)
        """
        before = self._accumulation
        for what, flag in (("each_time", each_time), ("gather_once", gather_once)):
            if flag is not None:
                check_flag(f"accumulation: {what}", flag)
        name = summing_dtype(dtype) if dtype is not None else before.dtype
        each_time = before.each_time if each_time is None else each_time
        gather_once = before.gather_once if gather_once is None else gather_once
        self._decide(Accumulation(name, each_time, gather_once))

    @property
    def _accumulation(self) -> Accumulation:
        """What was said last of how gradients add up."""
        return next((d for d in reversed(self._decisions) if isinstance(d, Accumulation)), Accumulation())

    def per_microbatch(self, selection: Any) -> None:
        """Let ops that need the whole batch (BatchNorm's statistics) run on each micro-batch alone.

        As if the op had been traced on a micro-batch: means are those of its rows, forward and backward. Running
        statistics, state that such an op reads and the step returns, go from micro-batch to micro-batch, as the carry of a
        ``lax.scan`` written by hand would. What the whole batch's ops alone read of it (a mixture of experts' auxiliary
        loss) is the mean over the micro-batches. Selected ops that need no whole are as they are without: a sum over rows
        is the whole batch's (`fuse` one with its reader to have it run alone, too). Say it before `TimeSplit`.

        Args:
            selection: ops, modules or parts of paths as shell patterns (``"BatchNorm*"``), or several of these.

        Raises:
            UnknownNameError: nothing is called so.
            PlanError: none of them needs the whole of anything that could be cut.

        Example:
            >>> graph.per_microbatch("BatchNorm*")
            Traceback (most recent call last):
            jscaler.errors.UnknownNameError: no op named 'BatchNorm*'; ...
        """
        ops = needing_the_whole(self.graph, under(self.graph, selection))
        self.alone.update(ops)
        self._decide(PerMicrobatch(ops))

    def shard(
        self, leaf: PTensor | str, dim: int, devices: Any, *, stored: bool = False, each_time: bool | None = None
    ) -> None:
        """Split the update of a parameter, and with it the optimizer's state, over devices that hold copies of it.

        Its gradients arrive in these parts (value shares are reduced and scattered in one step), and all that the step
        makes of them alone is left to be filled in, so the rest follows. What tensor parallelism cuts is cut further.

        Args:
            leaf: the parameter, or its path.
            dim: the dim to cut; a stack of layers is not cut along the layers, which its loop takes apart.
            devices: an array over all devices; its first axis counts the parts.
            stored: whether the parameter lies in parts too: it is then made whole in front of its use in the forward
                pass, and again in the backward pass, and the update leaves it as it came. Otherwise it lies whole, and
                the new one is put together once.
            each_time: whether its gradient is reduced and scattered for each micro-batch, and held in parts meanwhile, or
                once behind the last; by default as `accumulation` says for all.

        Raises:
            UnknownNameError: there is no such input.
            PlanError: it is sharded already, or not a parameter, has no such dim, or the devices are not all devices.
            SplitError: the dim does not divide.

        Example:
            >>> graph.shard("state/params/up", 0, devices, stored=True)  # a quarter of the rows on each
            >>> graph.shard("state/params/down", 1, devices.reshape(2, 2))  # halves of the columns, each on two devices
        """
        tensor = leaf if isinstance(leaf, PTensor) else self.graph.input(leaf)
        numbers, array = _device_numbers("shard", devices), np.asarray(devices)
        if tensor.name in self._sharded:
            raise PlanError(f"'{tensor.name}' was sharded before; an input is sharded once")
        parts = array.shape[0] if array.ndim else 0
        if each_time is not None:
            check_flag("shard: each_time", each_time)
        decision = Shard(tensor.name, dim, parts, numbers, stored, each_time)
        check_shard(self.graph, decision, [frozenset(range(self._whole))], tensor_kinds(self.graph))
        self._sharded.add(tensor.name)
        self._decide(decision)

    def residuals(self, op: Op | Grid | str, mode: Residuals) -> None:
        """Say what the backward of a forward op reads of it.

        Args:
            op: a forward op, its grid, or its path.
            mode: ``"inputs"``: what it needs is computed again from the forward's inputs, and merged with the forward
                where both run in one program; ``"saved"``: the forward hands it out. Where an op holds a ``custom_vjp``,
                saved is the default, for its forward would run twice.

        Raises:
            PlanError: no such mode, or no gradient flows through the op.

        Example:
            >>> graph.residuals("mlp/dot.1", "saved")  # the gelu in front of it is not computed again
        """
        known = self._named("residuals", op.op if isinstance(op, Grid) else op)
        if not isinstance(mode, str) or mode not in ("inputs", "saved"):
            raise PlanError(f"'{known.path}': residuals are 'inputs' or 'saved', not {shown(mode)}")
        check_residuals(known)
        self._decide(SaveResiduals(known.path, mode))

    def recompute(self, selection: Any, keep: Any = (), instead: bool = False) -> None:
        """Compute forward ops again for the backward pass, instead of saving what they make.

        The ops become one region: what enters it is saved, its ops run once more when the backward pass arrives, and their
        backwards read what these clones make. So a chain of ops in one selection keeps only what enters the first; layers
        that shall keep one activation each are one call each. Clones are placed as the originals are, so collectives
        between them repeat, but for those of what is kept. A checkpointed region of the model's own inside the selection
        becomes part of it; a selection inside such a region is part of that, and changes nothing, unless it comes instead.

        Args:
            selection: ops, grids, paths or shell patterns: of one gradient call and one loop body, or with all of a loop.
            keep: of these, the ops whose results are saved (or single results, by name): what an all-reduce has made, say.
                What an op's own backward needs beyond its results is computed again from its inputs.
            instead: dissolve regions that hold any of these ops already (the model's own); what else they hold is saved.

        Raises:
            UnknownNameError: nothing is called so, or what is kept is not among the selected.
            PlanError: the ops cannot be one region: another op reads some and is read by others, or a region or a loop
                holds only some of them.

        Example:
            >>> graph.recompute("attention/*", keep="attention/dot.5")
        """
        if self.stored and not self.graph.calls:
            return  # an evaluation that follows a train step: it has no backward pass
        self.graph.require_gradient()
        ops = selected(self.graph, selection)
        decision = Recompute(ops, named(self.graph, ops, keep), instead)
        self._regions = with_region(self._marked(), decision)
        self._decide(decision)

    @property
    def regions(self) -> Mapping[str, tuple[RecomputeRegion, ...]]:
        """The regions of recompute, the model's and those so far, that each forward op is part of; outermost first.

        Example:
            >>> graph.recompute("attention/*")
            >>> len(graph.regions["attention/dot"])
            1
        """
        return {op.path: op.remat for op in self._marked().ops if op.kind == "forward"}

    def _marked(self) -> Graph:
        """The graph with the regions so far; ops that are named by a decision are not fused any more."""
        if self._regions is None or self._regions_of is not self.graph:
            self._regions, self._regions_of = with_regions(self.graph, self._decisions), self.graph
        return self._regions

    def plan(self, name: str) -> Plan:
        """The decisions so far, as a finished plan.

        Args:
            name: of the plan.

        Example:
            >>> graph.op_assign(graph.op_trans("mlp/dot", Split("d", 4)), devices)
            >>> graph.plan("columns").split_factors
            {'mlp/dot': ['d']}
        """
        named = {path for decision in self._decisions for path in named_ops(decision)}
        made_for = MadeFor.of(self.graph, named, self._grids)
        return Plan(name, self.num_devices, tuple(self._decisions), made_for)


def _device_array(function: str, devices: Any) -> np.ndarray:
    try:
        return np.asarray(devices)
    except ValueError:  # rows of several lengths
        raise PlanError(
            f"{function} takes an array of devices, whose rows are of one length, not {shown(devices)}"
        ) from None


def _device_rows(function: str, devices: Any) -> list[list[int]]:
    """A row of devices for each stage, of one length or of several."""
    rows = [_device_array(function, row) for row in devices]
    if not rows or any(row.ndim != 1 for row in rows):
        shape = _device_array(function, devices).shape
        raise PlanError(f"{function} takes an array of devices with a row for each stage, not one of shape {shape}")
    return [list(_device_numbers(function, row)) for row in rows]


def _device_numbers(function: str, devices: Any) -> tuple[int, ...]:
    """An array of devices in a row; raises PlanError where they are no whole numbers."""
    array = _device_array(function, devices)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise PlanError(f"{function} takes the numbers of devices, 0 and up, not {shown(devices)}")
    return tuple(map(int, array.ravel()))


def _place(device: Any) -> Place:
    number = device.device if isinstance(device, Place) else device
    if not isinstance(number, (int, np.integer)):
        raise PlanError(f"a device is a whole number or a Place, not {device!r}")
    if isinstance(device, Place):
        return device
    return Place(int(device))


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(s for s in shape if s != 1)


class _Moved:
    """Decisions for the devices of the stage that what they name is of; equal places stay one object, which is looked at
    once."""

    def __init__(
        self,
        stage_of: Mapping[str, int],
        devices: Sequence[Sequence[int]],
        turned: Sequence[Sequence[int]] | None,
        axes: Mapping[str, tuple[GridAxis, ...]],
        axis: str,
    ):
        self._stage_of, self._devices, self._turned = stage_of, devices, turned
        self._axes, self._axis = axes, axis
        self._places: dict[tuple[int, int], tuple[tuple[Place, ...], tuple[Place, ...]]] = {}

    def __call__(self, decision: Decision) -> Decision:
        if isinstance(decision, Assign):
            places = self._moved(decision.places, self._stage_of[decision.op])
            if self._turned is not None and decision.op in self._axes:
                places = self._in_turn(decision, places, self._axes[decision.op])
            return dataclasses.replace(decision, places=places)
        if isinstance(decision, Store):
            own = self._devices[self._stage_of[decision.leaf]]
            return dataclasses.replace(decision, devices=tuple(own[d] for d in decision.devices))
        return decision

    def _in_turn(self, decision: Assign, places: Sequence[Place], axes: Sequence[GridAxis]) -> tuple[Place, ...]:
        """The places of all cells, in time too: of every second part along the axis those for its own devices."""
        assert self._turned is not None
        own = self._turned[self._stage_of[decision.op]]
        other = [Place(own[p.device], p.space) for p in decision.places]
        in_space = [1 if a.time else a.parts for a in axes]
        cells = np.empty([a.parts for a in axes], object)
        at = next(i for i, a in enumerate(axes) if a.time == self._axis)
        for first, row in enumerate((places, other)):
            cut = tuple(slice(first, None, 2) if i == at else slice(None) for i in range(len(axes)))
            cells[cut] = np.array([*row, None], object)[:-1].reshape(in_space)
        return tuple(cells.flat)

    def _moved(self, places: tuple[Place, ...], stage: int) -> tuple[Place, ...]:
        key = id(places), stage
        if key not in self._places:
            own = self._devices[stage]
            self._places[key] = places, tuple(Place(own[p.device], p.space) for p in places)
        return self._places[key][1]
