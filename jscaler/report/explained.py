"""``ExplainedPlan``: a planned step that says what its plan makes of it."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from jscaler.estimate.lost_parallelism import LostParallelism
from jscaler.lower.step_plan import StepPlan
from jscaler.report.explain import SECTIONS, Section, explain
from jscaler.report.step_report import StepReport, step_report


@dataclass(frozen=True)
class ExplainedPlan(StepPlan):
    """What ``lowered.plan`` is: a `StepPlan`, its report and its tables."""

    @staticmethod
    def of(step: StepPlan) -> "ExplainedPlan":
        return ExplainedPlan(**{f.name: getattr(step, f.name) for f in dataclasses.fields(step)})

    @cached_property
    def report(self) -> StepReport:
        """What the plan makes of every group of ops and of state leaves, as data; ``report.as_json()`` for programs."""
        return step_report(self)

    @property
    def lost(self) -> LostParallelism:
        """What runs whole on every device though it carries what the plan splits, and why: ``lost.ops`` as data."""
        return self.report.lost

    def explain(self, sections: Iterable[Section] = SECTIONS) -> str:
        """Tables: how every group of ops is split, who decided, and which collectives with how many bytes follow; how the
        leaves of the arguments lie; bytes by kind of tensor.

        Args:
            sections: which of ``"ops"``, ``"leaves"``, ``"memory"``; all by default.
        """
        return explain(self.report, sections)

    def __str__(self) -> str:
        return self.explain()
