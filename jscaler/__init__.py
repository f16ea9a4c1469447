"""jscaler: expert-written parallel plans for Flax train steps, on JAX and XLA."""

from jscaler import nnx, plans
from jscaler.api import Parallelized, parallelize
from jscaler.capture.gradient import grad, value_and_grad
from jscaler.capture.op_rule import OpRule
from jscaler.capture.user_op import op
from jscaler.errors import (
    BlockError,
    CaptureError,
    CaptureWarning,
    DataError,
    DeletedArgumentError,
    DeviceError,
    JscalerError,
    NotFiniteError,
    OrderError,
    PlanError,
    PlanFileError,
    PlanFitError,
    PlanWarning,
    RuleError,
    SplitError,
    StateLostError,
    UnknownNameError,
    UnknownPrimitiveWarning,
    VerificationError,
)
from jscaler.estimate.fitting import Fit, fit
from jscaler.estimate.query import Cost, cost
from jscaler.primitives import Chunk, Plan, Prefix, Replicate, Split, TimeSplit
from jscaler.rules.user_rules import register_rule
from jscaler.runtime.compiled import Compiled, Lowered
from jscaler.verification import verify, verify_rule

__version__ = "0.1.0"

__all__ = [
    "BlockError", "CaptureError", "CaptureWarning", "Chunk", "Compiled", "Cost", "DataError", "DeletedArgumentError",
    "DeviceError", "Fit", "JscalerError", "Lowered", "NotFiniteError", "OpRule", "OrderError", "Parallelized", "Plan",
    "PlanError", "PlanFileError", "PlanFitError", "PlanWarning", "Prefix", "Replicate", "RuleError", "Split", "SplitError",
    "StateLostError", "TimeSplit", "UnknownNameError", "UnknownPrimitiveWarning", "VerificationError", "cost", "fit",
    "grad", "nnx", "op", "parallelize", "plans", "register_rule", "value_and_grad", "verify", "verify_rule",
]  # fmt: skip
