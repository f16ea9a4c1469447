"""Vocabulary parallelism: the embedding, the logits and the cross entropy split over the vocabulary.
(Shoeybi et al., Megatron-LM, 2019, section 3, "input embedding" and "output embedding".)

::

    tokens ──► look-up in own rows, 0 elsewhere ──► Σ ──► …
    …  ──► logits [:, own words] ──► max, Σ exp, own label's logit ──► combined over devices ──► loss

The look-up ends in one all-reduce of activations; the cross entropy reduces one maximum and two sums per token, and never
gathers logits. The gradients of embedding and head stay with their rows.
"""

from collections.abc import Callable

import numpy as np

from jscaler.plans.factors import Dims, reached, required, split
from jscaler.primitives import Planner

# Tables of words: rows of an embedding, columns of an untied head.
VOCABULARY: Dims = {
    "*/embed/embedding": -2,
    "*/embedding/embedding": -2,
    "*/embed_tokens/embedding": -2,
    "*/wte/embedding": -2,
    "*/head/kernel": -1,
    "*/lm_head/kernel": -1,
    "*/logits/kernel": -1,
}


def vocab_parallel(vocabulary: Dims | None = None) -> Callable[..., None]:
    """Split the vocabulary of each table that matches, and all ops that it reaches, over all devices.

    Args:
        vocabulary: ``{pattern: dim}`` of embeddings and heads among the step's inputs; by default as Flax models name
            them, ``{"*/embed/embedding": -2, "*/lm_head/kernel": -1, …}``.

    Raises (when the plan is made):
        UnknownNameError: no table matches.
        SplitError: the vocabulary does not divide by the number of devices: pad it.
    """

    def policy(graph: Planner, devices: np.ndarray) -> None:
        words = VOCABULARY if vocabulary is None else vocabulary
        leaves = required(graph, words, "pass vocab_parallel(vocabulary=...)")
        split(graph, devices, reached(graph, leaves, devices.size))

    policy.__name__ = "vocab_parallel"
    return policy
