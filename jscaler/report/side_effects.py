"""Side effects (``jax.debug.print``, host callbacks) that happen on several devices, though the program has them once."""

import math

from jscaler.lower.step_plan import StepPlan
from jscaler.materialize.placement import Placement


def repeated_effects(step: StepPlan) -> str:
    """A sentence that names the ops whose effects every copy has; empty where there are none."""
    found = []
    for op in step.graph.ops:
        copies = _copies(step.completed.ops[op.path].placement) if op.body is not None and op.body.jaxpr.effects else 1
        if copies > 1:
            effects = ", ".join(sorted(map(str, op.body.jaxpr.effects if op.body is not None else ())))
            found.append(f"'{op.path}' ({op.source}) {copies} times ({effects})")
    if not found:
        return ""
    return (
        f"side effects of ops that are copied happen on every device: {'; '.join(found)}; to have them once, return "
        "from the step what they show"
    )


def _copies(placement: Placement) -> int:
    """How many devices do the same."""
    devices = len(placement.group.devices)
    return devices // math.prod(placement.parts.values()) if devices else 1
