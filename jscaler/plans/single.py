"""Everything on one device, or copied on several: the step as it was written."""

from collections.abc import Callable

import numpy as np

from jscaler.plans.argument_types import checked
from jscaler.primitives import Planner


@checked
def single() -> Callable[..., None]:
    """No splits. On more than one device every op is replicated.

    Example:
        >>> train_step.under(plans.single()).lower(state, batch).plan.report.total
        {}
    """

    def policy(graph: Planner, devices: np.ndarray) -> None:
        pass  # what a policy does not say is filled in: nothing is split, so every op is copied

    return policy
