"""The interlaced pipeline: a large table of words on all devices, and the layers in stages of a few. (Lin et al.,
SuperScaler, 2023, and nnScaler, OSDI 2024, section 6, of an mBART with a vocabulary of hundreds of thousands of words.)

::

                 all devices        group 0     group 1      all devices
    tokens ──► look-up, a part ──► [ layers ──► layers ] ──► logits, a part ──► loss
               of the words each                             of the words each

    all      0F0  .   .  3F0 3B0 0F1  .   .  3F1 3B1 0F2  .   .  ..       time ──►
    group 0      1F0  .               1F1  .              1F2 1B0 ..
    group 1       .  2F0              2B0 2F1             2B1 2F2 ..

In a pipeline the stages with the table would do more than others, and hold more. Here each of n devices has an n-th of
its words, of their updates and optimizer state, and does an n-th of the look-ups, the logits and the cross entropy. Nothing
of the size of the table, or of the logits, is sent or copied. Of a micro-batch (b sequences, s tokens, d dims) there go

    of each look-up  its n parts, which are added up (an all-reduce of b·s·d); backward a gradient of b·s·d to all devices
    of the logits    their input of b·s·d to all devices; backward its gradient, in n parts, which are added up; and three
                     all-reduces of b·s numbers: a maximum, and two sums

Where the ends are, the dataflow says (`jscaler.plans.find_ends`): look-ups of an encoder and of a decoder, and the logits
with all that stands behind them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jscaler.plans.argument_types import checked
from jscaler.plans.factors import Dims
from jscaler.plans.pipeline import pipeline
from jscaler.plans.vocab_parallel import vocab_parallel


@checked
def interlaced(
    stages: int,
    microbatches: int,
    plan: Callable[..., Any] | None = None,
    recompute: bool = False,
    vocabulary: Dims | None = None,
    at: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    batch: str = "batch",
    accumulate_dtype: Any = None,
    per_microbatch: Any = None,
) -> Callable[..., None]:
    """The vocabulary over all devices at both ends of the model, and its layers in stages between them.

    Args:
        stages: how many groups of devices have layers; must divide the number of devices.
        microbatches: how many follow each other; must divide each device's part of the batch.
        plan: the policy for the layers of one stage on its devices; `single` by default.
        recompute: whether each stage but the last computes its layers again, in blocks of their own that run while it would
            wait for a gradient. The paper's *interlaced blocks*, where that is a part of backward blocks, and layer by
            layer, are ``plan=recompute_layers(plan)`` instead.
        vocabulary: ``{pattern: dim}`` of tables of words, as for `vocab_parallel`; by default they are found.
        at: shell patterns of the modules with which the second stage between the ends begins, the third, and so on; by
            default stages are balanced.
        layers: of a model whose layers are one loop, how many each stage takes.
        batch, accumulate_dtype, per_microbatch: as for `accumulate`.

    Raises (when the plan is made):
        PlanError: no layers lie between look-ups and logits of words, or too few; stages do not divide the devices.
        UnknownNameError: no module, or no input, is called so.
        SplitError: the batch does not divide by the number of micro-batches.

    Example:
        >>> planned = train_step.under(plans.interlaced(2, 2)).lower(state, batch).plan
        >>> print(planned.instructions.table)  # two groups of two devices; the first row is that of all four
        0F0 3F0 3B0 0F1 3F1 3B1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2B0 2F1 2B1
    """
    ends = vocab_parallel(vocabulary)
    policy = pipeline(
        stages, microbatches, "interlaced+R" if recompute else "interlaced", plan, at, layers, batch, accumulate_dtype,
        per_microbatch,
        ends=ends, vocabulary=vocabulary,
    )  # fmt: skip
    policy.without_stages = ends
    return policy
