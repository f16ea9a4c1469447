"""``ExplainedPlan``: a planned step that says what its plan makes of it."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

from jscaler.estimate.lost_parallelism import LostParallelism
from jscaler.ir import Op, PTensor
from jscaler.ir.overview import FoldingTable, Overview, Shown
from jscaler.lower.step_plan import StepPlan
from jscaler.primitives import Plan
from jscaler.report.explain import SECTIONS, Section, explain, meshes_text
from jscaler.report.leaves import local_bytes
from jscaler.report.moved_tensors import all_moved, moved_text
from jscaler.report.plan_shardings import CallTrees, PlanShardings, plan_shardings
from jscaler.report.step_report import StepReport, memory_rows, memory_text, step_report
from jscaler.text.units import counted, readable_bytes


class Explains(Shown):
    """What says what a plan makes of a step: its tables, as text.

    Attributes:
        plan: the decisions.
        report: what they make of every group of ops and of state leaves, as data; ``report.as_json()`` for programs.
        proof: what was proven of it when it was lowered; empty where nothing was.
    """

    plan: Plan
    report: Any
    proof: str

    @property
    def lost(self) -> LostParallelism:
        """What runs whole on every device though it carries what the plan splits, and why: ``lost.ops`` as data."""
        return self.report.lost

    def explain(self, sections: Iterable[Section] = SECTIONS) -> str:
        """Tables: how every group of ops is split, who decided, and which collectives with how many bytes follow; how the
        leaves of the arguments lie; bytes by kind of tensor. What was proven of the plan stands behind them.

        Args:
            sections: which of ``"ops"``, ``"leaves"``, ``"memory"``; all by default.
        """
        return "\n".join([explain(self.report, sections), *([self.proof] if self.proof else [])])

    def __str__(self) -> str:
        return self.explain()


@dataclass(frozen=True, repr=False)
class LoadedPlan(Explains):
    """What a pickle has of an `ExplainedPlan`: all that it says, and the decisions. Its programs are of JAX's own objects,
    which are not pickled: lower the step under this plan for these."""

    plan: Plan
    report: StepReport
    proof: str
    lines: tuple[str, ...]

    def overview(self) -> Overview:
        return Overview(self.lines)


@dataclass(frozen=True, repr=False)
class ExplainedPlan(Explains, StepPlan):
    """What ``lowered.plan`` is: a `StepPlan`, its report and its tables. Pickled, it is a `LoadedPlan`."""

    proof: str = field(default="", compare=False)
    trees: CallTrees | None = field(default=None, compare=False)

    @staticmethod
    def of(step: StepPlan, trees: CallTrees | None = None) -> "ExplainedPlan":
        return ExplainedPlan(**{f.name: getattr(step, f.name) for f in dataclasses.fields(step)}, trees=trees)

    def as_shardings(self, devices: Sequence[Any] | None = None) -> PlanShardings:
        """The plan for plain ``jax.jit``: shardings of arguments and results, and constraints on values in between.

        Args:
            devices: which; by default those that the step was lowered for. If these are not at hand, the mesh is abstract:
                the step can be traced and lowered for ``jax.ShapeDtypeStruct`` objects.

        Raises:
            PlanError: the plan has several device groups (a pipeline), which no one mesh holds.
            DeviceError: there are more or fewer devices than the plan is for.
        """
        at_hand = self.trees.devices if self.trees is not None else ()
        return plan_shardings(self, at_hand if devices is None else devices, self.trees)

    @cached_property
    def report(self) -> StepReport:
        """What the plan makes of every group of ops and of state leaves, as data; ``report.as_json()`` for programs."""
        return step_report(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadedPlan, (self.plan, self.report, self.proof, tuple(self._lines))

    def __copy__(self) -> "ExplainedPlan":
        return self

    def __deepcopy__(self, memo: Any) -> "ExplainedPlan":
        return self

    def overview(self) -> Overview:
        """The plan in a few lines; in a notebook how each op is split and each leaf lies, by module."""
        return Overview(self._lines, self._tables)

    @cached_property
    def _lines(self) -> list[str]:
        graph, completed = self.graph, self.completed
        mesh = meshes_text(dict(group.axes) for group in completed.groups)
        crossings = f"; {len(self.sent)} tensors cross between device groups" if self.sent else ""
        return [
            f"plan {self.name} on {counted(self.plan.num_devices, 'device')}, {mesh}, {len(self.plan.decisions)} decisions",
            f"{len(graph.ops)} ops in {counted(len(self.blocks), 'block')}, {len(graph.inputs)} leaves of arguments",
            f"per device: {memory_text(memory_rows(graph, completed))}",
            f"a device sends: {moved_text(all_moved(self.segments)) or 'nothing'}{crossings}",
            "print(lowered.plan.explain()) shows every group of ops and of leaves, lowered.plan.report is the same as data",
        ]

    def _tables(self) -> list[FoldingTable]:
        laid, lies = self.completed.ops, self.completed.inputs

        def of_op(op: Op) -> tuple[str, ...]:
            left = [layout.counts for layout in laid[op.path].outputs[:1]]
            return op.kind, laid[op.path].placement.describe(), *(left or [""])

        def of_leaf(leaf: PTensor) -> tuple[str, ...]:
            return leaf.type, lies[leaf].counts, readable_bytes(local_bytes(leaf, lies[leaf]))

        more = "print(lowered.plan.explain())"
        ops, leaves = self.graph.ops, self.graph.inputs
        return [
            FoldingTable("ops", ("kind", "split", "leaves its result"), ops, attrgetter("path"), of_op, more),
            FoldingTable(
                "leaves of arguments", ("type", "lies", "bytes per device"), leaves, attrgetter("name"), of_leaf, more
            ),
        ]
