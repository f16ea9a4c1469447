"""jscaler: expert-written parallel plans for Flax train steps, on JAX and XLA."""

from jscaler import plans
from jscaler.api import Compiled, Lowered, Parallelized, parallelize
from jscaler.capture.gradient import grad, value_and_grad
from jscaler.errors import (
    CaptureError,
    DataError,
    DeviceError,
    JscalerError,
    OrderError,
    PlanError,
    SplitError,
    UnknownNameError,
    UnknownPrimitiveWarning,
    VerificationError,
)
from jscaler.primitives import Plan, Replicate, Split
from jscaler.verification import verify

__version__ = "0.1.0"

__all__ = [
    "CaptureError", "Compiled", "DataError", "DeviceError", "JscalerError", "Lowered", "OrderError", "Parallelized",
    "Plan", "PlanError", "Replicate", "Split", "SplitError", "UnknownNameError", "UnknownPrimitiveWarning",
    "VerificationError", "grad", "parallelize", "plans", "value_and_grad", "verify",
]  # fmt: skip
