"""jscaler: expert-written parallel plans for Flax train steps, on JAX and XLA."""

from jscaler import nnx, plans, spaces
from jscaler.api import Parallelized, parallelize
from jscaler.capture.gradient import grad, value_and_grad
from jscaler.capture.op_rule import OpRule
from jscaler.capture.user_op import op
from jscaler.comparison import Comparison, compare
from jscaler.errors import (
    BlockError,
    CaptureError,
    CaptureWarning,
    CheckpointWarning,
    DataError,
    DeletedArgumentError,
    DeviceError,
    GradientError,
    JobError,
    JscalerError,
    NotFiniteError,
    OrderError,
    OutOfMemoryError,
    OutputError,
    PlanError,
    PlanFileError,
    PlanFitError,
    PlanWarning,
    ProcessError,
    RuleError,
    ScheduleWarning,
    SplitError,
    StateLostError,
    UnknownNameError,
    UnknownPrimitiveWarning,
    VerificationError,
)
from jscaler.estimate.difference import Difference, diff
from jscaler.estimate.found_schedule import find_schedule
from jscaler.estimate.query import Cost, cost
from jscaler.estimate.simulation import simulate
from jscaler.padding import pad_batch
from jscaler.plan_search.auto import Auto
from jscaler.plan_search.fit import fit
from jscaler.plan_search.query import Found, search
from jscaler.primitives import Chunk, Plan, Prefix, Replicate, Split, TimeSplit
from jscaler.report.draw_timeline import draw_timelines
from jscaler.report.plan_shardings import PlanShardings
from jscaler.report.trace_file import write_trace
from jscaler.rules.user_rules import register_rule
from jscaler.runtime.chunked_array import ChunkedArray
from jscaler.runtime.compiled import Compiled, Lowered
from jscaler.runtime.fetching import fetch
from jscaler.tables import SCHEDULES, Table
from jscaler.tables.timeline import Timeline
from jscaler.training.batches import Batches
from jscaler.training.evaluation import Evaluation
from jscaler.training.job import Job
from jscaler.training.records import Speed, StepRecord
from jscaler.training.trackers import JsonLines, Profile, TensorBoard, Tracker
from jscaler.training.train import train
from jscaler.verification import verify, verify_rule

__version__ = "0.1.0"

__all__ = [
    "SCHEDULES",
    "Auto",
    "Batches",
    "BlockError",
    "CaptureError",
    "CaptureWarning",
    "CheckpointWarning",
    "Chunk",
    "ChunkedArray",
    "Comparison",
    "Compiled",
    "Cost",
    "DataError",
    "DeletedArgumentError",
    "DeviceError",
    "Difference",
    "Evaluation",
    "Found",
    "GradientError",
    "Job",
    "JobError",
    "JscalerError",
    "JsonLines",
    "Lowered",
    "NotFiniteError",
    "OpRule",
    "OrderError",
    "OutOfMemoryError",
    "OutputError",
    "Parallelized",
    "Plan",
    "PlanError",
    "PlanFileError",
    "PlanFitError",
    "PlanShardings",
    "PlanWarning",
    "Prefix",
    "ProcessError",
    "Profile",
    "Replicate",
    "RuleError",
    "ScheduleWarning",
    "Speed",
    "Split",
    "SplitError",
    "StateLostError",
    "StepRecord",
    "Table",
    "TensorBoard",
    "TimeSplit",
    "Timeline",
    "Tracker",
    "UnknownNameError",
    "UnknownPrimitiveWarning",
    "VerificationError",
    "compare",
    "cost",
    "diff",
    "draw_timelines",
    "fetch",
    "find_schedule",
    "fit",
    "grad",
    "nnx",
    "op",
    "pad_batch",
    "parallelize",
    "plans",
    "register_rule",
    "search",
    "simulate",
    "spaces",
    "train",
    "value_and_grad",
    "verify",
    "verify_rule",
    "write_trace",
]  # fmt: skip
