"""3F1B: a model that goes over its own output, pass after pass, with a gradient in the last pass alone: the forwards of all
passes, and the last one's backward, of each micro-batch over stages. (Lin et al., nnScaler, OSDI 2024; the model is
AlphaFold2, which recycles.)

::

    pass 0     stage 0 ──► stage 1 ─┐                     F F
    pass 1     stage 0 ──► stage 1 ─┤  stop_gradient      F F
    last       stage 0 ──► stage 1 ─┴► loss ──► back      F F, B B

Every pass has its stages on the same groups of devices, where its parameters are, once. Only the last pass keeps
activations: as many micro-batches of one pass as in 1F1B. It is `pipeline` with the schedule ``"3f1b"``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jscaler.errors import PlanError, check_count
from jscaler.plans.argument_types import checked
from jscaler.plans.data_parallel import data_parallel
from jscaler.plans.find_stages import passes_of
from jscaler.plans.pipeline import pipeline
from jscaler.primitives import Planner

SCHEDULE = "3f1b"


@checked
def three_f_one_b(
    stages: int,
    microbatches: int,
    passes: int | None = None,
    plan: Callable[..., Any] | None = None,
    at: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    batch: str = "batch",
    accumulate_dtype: Any = None,
) -> Callable[..., None]:
    """``plan`` on the devices of each stage, and the passes of micro-batches that follow each other through the stages.

    Args:
        stages, microbatches: as for `pipeline`.
        passes: how often the model goes over its own output, the last time included; by default how often most of its
            parameters are read.
        plan: the policy for the devices of one stage; `single` by default.
        at, layers: where stages begin in a pass, as for `pipeline`.
        batch, accumulate_dtype: as for `accumulate`.

    Raises (when the plan is made):
        PlanError: the model's passes are not ``passes``, or not through all stages; or as for `pipeline`.

    Example:
        >>> policy = plans.three_f_one_b(stages=2, microbatches=4, plan=plans.dap())
        >>> policy.__name__
        'three_f_one_b'
    """
    for name, count in (("stages", stages), ("microbatches", microbatches), ("passes", passes)):
        if count is not None:
            check_count(f"three_f_one_b: {name}", count)

    def policy(graph: Planner, devices: np.ndarray) -> None:
        chunks = passes or passes_of(graph, batch)
        if chunks == 1:
            raise PlanError(
                "three_f_one_b is for models that go over their own output, and this one reads its parameters once: "
                f"pipeline({stages}, {microbatches}) is for others; or say passes=, if it does"
            )
        staged = pipeline(stages, microbatches, SCHEDULE, plan, at, layers, batch, accumulate_dtype, chunks=chunks)
        staged(graph, devices)

    policy.without_stages = plan or data_parallel()  # what `jscaler.compare` puts beside it
    return policy
