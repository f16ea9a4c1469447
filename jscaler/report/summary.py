"""``summary``: a plan in five lines, where ``explain`` has a line for every group of ops."""

from jscaler.report.explain import heading, total
from jscaler.report.step_report import StepReport, memory_text
from jscaler.text.units import readable_bytes


def summary(report: StepReport) -> str:
    """The plan; what is split; bytes on each device, of how many whole; collectives; what parallelism is lost."""
    return "\n".join([heading(report), _split(report), _memory(report), total(report), _lost(report)])


def _split(report: StepReport) -> str:
    kinds = [kind for kind in ("forward", "backward", "update") if any(row.kind == kind for row in report.ops)]
    counts = [
        (kind, [sum(row.count for row in report.ops if row.kind == kind and row.split != out) for out in ("copy", None)])
        for kind in kinds
    ]
    return "split: " + ", ".join(f"{parts} of {whole} {kind} ops" for kind, (parts, whole) in counts)


def _memory(report: StepReport) -> str:
    return f"per device: {memory_text(report.memory)}; peak, as estimated, {readable_bytes(report.estimate.peak)}"


def _lost(report: StepReport) -> str:
    return f"lost: {report.lost.summary if report.lost.ops else 'no parallelism'}"
