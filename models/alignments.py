"""Synthetic alignments for `models.evoformer`: sequences of one random profile each, with masked tokens, along a chain that
is a random walk. What is masked is mostly what stands elsewhere in its column; what is near in the chain is near in space.
"""

import numpy as np

AMINO_ACIDS, UNKNOWN, GAP, MASKED = 20, 20, 21, 22
KEPT = 0.8  # of a column that is what its profile says
MASKED_SHARE = 0.15
STEP, NEAREST, FARTHEST = 3.8, 2.0, 22.0  # Å


def alignment_at(step: int, batch: int, sequences: int, residues: int, bins: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The batch of step ``step``, as `models.training.evoformer_loss` reads it: a function of its arguments alone."""
    draws = np.random.default_rng((seed, step))
    shape = (batch, sequences, residues)
    common = 1 / np.arange(1, AMINO_ACIDS + 1)  # some amino acids are found more often
    drawn = draws.choice(AMINO_ACIDS, (batch, 1 + sequences, residues), p=common / common.sum())
    labels = np.where(draws.random(shape) < KEPT, drawn[:, :1], drawn[:, 1:])
    labels = np.where(draws.random(shape) < 0.05, GAP, labels)
    labels[:, 0] = drawn[:, 0]  # the target has no gaps
    count = max(1, round(MASKED_SHARE * sequences * residues))  # of each alignment, so that a mean needs no other's count
    order = draws.random((batch, sequences * residues)).argsort(-1).argsort(-1)
    masked = (order < count).reshape(shape)
    chain = np.cumsum(STEP / np.sqrt(3) * draws.normal(size=(batch, residues, 3)), 1)
    apart = np.linalg.norm(chain[:, :, None] - chain[:, None], axis=-1)
    edges = np.linspace(NEAREST, FARTHEST, bins - 1)
    return {
        "msa": np.where(masked, MASKED, labels).astype(np.int32),
        "target": drawn[:, 0].astype(np.int32),
        "labels": labels.astype(np.int32),
        "weights": (masked * (sequences * residues / count)).astype(np.float32),
        "distances": np.digitize(apart, edges).astype(np.int32),
    }
