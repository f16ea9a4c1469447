"""What the stages of a step are called, as in JAX: ``Lowered`` has been planned, ``Compiled`` can be run."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import jax

from jscaler.capture.wishes import no_mesh
from jscaler.clusters import FEW_STEPS, CostModel
from jscaler.errors import CaptureError, PlanError, check_count
from jscaler.ir import Graph
from jscaler.ir.overview import Overview, Shown
from jscaler.ir.passes import Passes
from jscaler.lower.segment import only
from jscaler.lower.step_plan import StepPlan
from jscaler.report.block_rows import instructions_text
from jscaler.report.explained import ExplainedPlan
from jscaler.report.target_report import Inspectable, TargetReport
from jscaler.runtime import graph_nodes
from jscaler.runtime.arguments import BoundCall, difference
from jscaler.runtime.devices import Device, resolve_devices
from jscaler.runtime.dispatch import KnownArguments
from jscaler.runtime.executable import Executable, executable, lowered
from jscaler.runtime.failures import asked_for, place_of, tell_lost
from jscaler.runtime.out_of_memory import told_of_memory
from jscaler.runtime.step_capture import NodeChanges
from jscaler.runtime.target import Target, compile_for, find_target
from jscaler.runtime.tracing import Measured, Tracer
from jscaler.stages import Captured
from jscaler.tables.timeline import Timeline
from jscaler.text.units import counted


@dataclass(frozen=True, repr=False)
class Lowered(Shown):
    """A planned step, lowered to StableHLO. Like ``jax.stages.Lowered``; prints as the instructions of each device group.

    Attributes:
        plan: the plan, what was filled in, and the programs; ``plan.explain()`` is all that as text.
        captured: the graph before the plan.
        executable: how the blocks are run.
        call: the arguments it was lowered for: their tree, shapes, dtypes and static values.
        out_tree: the tree of the results.
        segments: a ``jax.stages.Lowered`` for each device group.
        devices: those it was lowered for; none where as many as the plan has are not at hand.
        cost: the prices by which adapters were chosen.
        changes: what the step changes in nnx objects.
        planned: the plan for another number of devices; None where ``parallelize`` was told which to use.
        step: the `Parallelized` that was lowered.

    Example:
        >>> lowered.plan.report.total  # kind of collective -> how many, bytes that a device sends
        {'all_reduce': (6, 21510.0)}
        >>> lowered.leaf_names[-1], lowered.graph.inputs[-1].shape
        ('batch/tokens', (8, 8))
        >>> "all_reduce" in lowered.as_text(), lowered.as_text() == lowered.lowered.as_text()
        (True, True)
    """

    plan: ExplainedPlan
    captured: Captured
    executable: Executable
    call: BoundCall
    out_tree: Any
    segments: tuple[Any, ...]
    devices: tuple[Device, ...]
    cost: CostModel = FEW_STEPS
    changes: NodeChanges | None = None
    planned: Callable[[int], StepPlan] | None = field(default=None, compare=False)
    step: Any = field(default=None, compare=False)

    @property
    def graph(self) -> Graph:
        """The graph that is laid out on the devices: cut, with loops, with all backward programs."""
        return self.plan.graph

    @property
    def leaf_names(self) -> list[str]:
        """Of the leaves of its arguments."""
        return [t.name for t in self.captured.graph.inputs]

    @property
    def passes(self) -> Passes:
        """What was done to the graph, and then to the program of a device, pass by pass; prints as a table.

        Example:
            >>> lowered.passes.runs[0].name
            'fused_ops'
        """
        return self.plan.passes

    @overload
    def compile(self, target: None = None) -> "Compiled": ...
    @overload
    def compile(self, target: Target) -> TargetReport: ...
    @no_mesh()
    def compile(self, target: Target | None = None) -> "Compiled | TargetReport":
        """Compile for the devices it was lowered for, or for a cluster that need not be there.

        Args:
            target: a CUDA cluster, ``"8xH100-80GB"`` or ``"4x8xV100-32GB"`` (hosts × devices × kind), a built-in cluster's
                name, a TOML file or a `Cluster`. Needs ``pip install "jscaler[aot]"`` and no GPU.

        Returns:
            What runs; of a target a report: memory of a device by kind, whether it fits, collectives, XLA's text.

        Raises:
            OutOfMemoryError: XLA finds no way to run it in a device's memory.
            DeviceError: the devices are not at hand; the target has another number of devices than ``parallelize`` was
                given (given none, the step is planned for the target's); the plugin is missing.

        Example:
            >>> compiled = lowered.compile()
            >>> new, loss = compiled(state, batch)
        """
        if target is not None:
            cluster = find_target(target)
            step = self.planned(cluster.num_devices) if self.planned is not None else self.plan
            return compile_for(step, cluster, self.executable.donated)
        if not self.devices:
            resolve_devices(self.plan.plan.num_devices)
        blocks = zip(self.segments, self.executable.blocks, strict=True)
        with told_of_memory(self.plan, "compiling the step"):
            return Compiled(self, tuple(one.compile() if block.here else None for one, block in blocks))

    @property
    def lowered(self) -> Any:
        """What JAX lowered, of a step that runs on one group."""
        return only(self.segments, "what JAX lowered")

    def as_text(self, block: int | None = None) -> str:
        """StableHLO: of all blocks, each behind a line that says which it is, or of one.

        Args:
            block: its number; None for all.

        Raises:
            IndexError: there is no such block.
        """
        if block is not None:
            if not isinstance(block, int) or not 0 <= block < len(self.segments):
                raise PlanError(
                    f"the step has {len(self.segments)} blocks, 0 to {len(self.segments) - 1}, and no {block!r}"
                )
            return self.segments[block].as_text()
        if len(self.segments) == 1:
            return self.segments[0].as_text()
        names = (f"// {number}: {place_of(self.plan, number)}" for number in range(len(self.segments)))
        return "\n".join(f"{name}\n{one.as_text()}" for name, one in zip(names, self.segments, strict=True))

    def overview(self) -> Overview:
        plan = self.plan.overview()
        return Overview(["Lowered; print(lowered) lists the instructions of each device group", *plan.lines], plan.tables)

    def __repr__(self) -> str:
        blocks, devices = counted(len(self.segments), "block"), counted(self.plan.plan.num_devices, "device")
        return f"Lowered({self.plan.name}, {blocks} on {devices}); see .plan"

    def __str__(self) -> str:
        """What each device group does, one instruction after another."""
        return instructions_text(self.plan)


@dataclass(frozen=True, repr=False)
class Compiled(Shown, Inspectable):
    """A compiled step: call it with arguments of the shapes and tree it was lowered for.

    Attributes:
        lowered: what was compiled.
        segments: a ``jax.stages.Compiled`` for each block; None for what other processes alone run.

    Example:
        >>> new, loss = compiled(state, batch)
        >>> compiled.plan is lowered.plan, compiled.graph is lowered.graph
        (True, True)
        >>> "all-reduce" in compiled.as_text(), compiled.compiled is compiled.segments[0]  # XLA's text; JAX's executable
        (True, True)
        >>> compiled.memory_analysis().temp_size_in_bytes > 0, compiled.cost_analysis()["flops"] > 0
        (True, True)
    """

    lowered: Lowered
    segments: tuple[Any, ...]
    known: KnownArguments = field(init=False, compare=False)

    def __post_init__(self) -> None:
        made = self.lowered.executable
        made.steps  # noqa: B018  (what runs between blocks is compiled now, not in the first step)
        object.__setattr__(
            self,
            "known",
            KnownArguments(made.in_shardings, made.untouched, made.donated, self.lowered.leaf_names),
        )

    def overview(self) -> Overview:
        plan = self.plan.overview()
        return Overview(
            ["Compiled; memory_analysis(), as_text() and trace(…) say what XLA made of it", *plan.lines], plan.tables
        )

    @property
    def plan(self) -> ExplainedPlan:
        """The plan, with its report."""
        return self.lowered.plan

    @property
    def graph(self) -> Graph:
        """The graph that is laid out on the devices."""
        return self.lowered.graph

    @property
    def compiled(self) -> Any:
        """What XLA compiled, of a step that runs on one group."""
        return only(self.segments, "what XLA compiled")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        placed = self.known.placed(args, kwargs)
        if placed is not None:
            return self.result(placed)
        call = self.lowered.call.arguments.bind(args, kwargs)
        if call.key != self.lowered.call.key:
            raise CaptureError(
                "this compiled step was lowered for arguments of another tree, shape, dtype or static value: "
                f"{difference(self.lowered.call, call)}; call the decorated function, which compiles for each"
            )
        return self.run_call(call, args, kwargs)

    @functools.cached_property
    def calls(self) -> tuple[Callable[..., Sequence[Any]], ...]:
        """What runs each block."""
        return self.lowered.executable.calls(self.segments)

    @functools.cached_property
    def _keeping(self) -> tuple[Executable, tuple[Callable[..., Sequence[Any]], ...]]:
        """The step, compiled once more so that no block gives away what it reads: to be waited for, or run again."""
        with no_mesh():
            made = executable(self.plan, self.lowered.devices, (), reuse=False)
            blocks = zip(lowered(self.plan, made), made.blocks, strict=True)
            return made, made.calls([one.compile() if block.here else None for one, block in blocks])

    @functools.cached_property
    def tracer(self) -> Tracer:
        """What watches its blocks."""
        return Tracer(self.plan, *self._keeping)

    def trace(self, *args: Any, **kwargs: Any) -> tuple[Any, Timeline]:
        """Run a step, and see when each block ran on its devices, in the order in which it runs anyway.

        Nothing is donated: the arguments stay. The first trace compiles.

        Times are those of the host, in seconds from the first start. A block, or a send, ends when the host has seen all
        that it makes, or its first reader's end where that was seen earlier. It begins when it was started, all that it
        reads had ended, and so had what ran before it on its devices. Ends are late by what a thread of the host takes to
        wake, so small blocks seem longer than they are, or end where their readers do.

        Args:
            args: the step's arguments by position.
            kwargs: those by name.

        Returns:
            The step's result, and its timeline: ``print`` it, ``jscaler.write_trace`` it for Perfetto, or draw it.

        Raises:
            CaptureError: the arguments are not of the tree, shapes and dtypes that it was lowered for.

        Example:
            >>> (new, loss), timeline = compiled.trace(state, batch)
            >>> timeline.devices, timeline.makespan > 0  # seconds
            ([0, 1, 2, 3], True)
        """
        outputs, timeline = self.tracer.trace(self._placed(args, kwargs))
        return jax.tree.unflatten(self.lowered.out_tree, outputs[: self.lowered.out_tree.num_leaves]), timeline

    def measure(self, *args: Any, rounds: int = 5, **kwargs: Any) -> Measured:
        """Seconds of each block and each transfer when nothing else runs: what ``jscaler.simulate`` takes.

        Args:
            args: the step's arguments by position.
            rounds: how often each is run; the median counts.
            kwargs: the step's arguments by name.

        Raises:
            CaptureError: the arguments are not of the tree, shapes and dtypes that it was lowered for.

        Example:
            >>> alone = compiled.measure(state, batch, rounds=2)
            >>> jscaler.simulate(compiled, seconds=alone.blocks, hops=alone.hops).makespan > 0
            True
        """
        return self.tracer.measure(self._placed(args, kwargs), check_count("measure: rounds", rounds))

    def _placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        call = self.lowered.call.arguments.bind(args, kwargs)
        if call.key != self.lowered.call.key:
            raise CaptureError(
                f"this compiled step was lowered for other arguments: {difference(self.lowered.call, call)}; "
                "lower for these"
            )
        return self.place(call.leaves)

    def run(self, leaves: Sequence[Any], nodes: Mapping[str, Any] | None = None) -> Any:
        """Run on flat leaves, which are moved to the plan's layout where they do not have it.

        ``nodes`` are the nnx objects to which leaves belong: what changed is set in them, in the plan's layout.
        """
        return self.result(self.place(leaves), leaves, nodes)

    def run_call(self, call: BoundCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run on the arguments that were bound as ``call``; a next call of the same form is bound faster."""
        placed = self.place(call.leaves)
        self.known.learn(args, kwargs, call, placed)
        return self.result(placed, call.leaves, call.nodes)

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """``leaves`` in the plan's layout."""
        return self.known.place(leaves)

    def flat(self, *placed: Any) -> Sequence[Any]:
        """The step's flat results, of leaves that lie as the plan wants them.

        Where JAX looks for what is not finite, nothing is donated: a block that fails runs again, to see which op it was.
        """
        made, calls = self.lowered.executable, self.calls
        if made.gives_away and asked_for():
            made, calls = self._keeping
        return made.run(calls, placed)

    def result(self, placed: list[Any], given: Sequence[Any] = (), nodes: Mapping[str, Any] | None = None) -> Any:
        """Run on leaves that lie as the plan wants them; ``given`` are those of the caller's ``nodes``."""
        try:
            outputs = self.flat(*placed)
        except BaseException as error:
            tell_lost(error, self.lowered.leaf_names, placed, self.lowered.executable.donated)
            raise
        tree = self.lowered.out_tree
        if nodes and self.lowered.changes is not None:
            graph_nodes.update(nodes, self.lowered.changes.arrays(given, placed, outputs[tree.num_leaves :]))
        return jax.tree.unflatten(tree, outputs[: tree.num_leaves])
