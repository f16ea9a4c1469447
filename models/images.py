"""Synthetic images: stripes, whose class is how often they repeat."""

import numpy as np


def stripes_at(step: int, batch: int, image: int, classes: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The batch of step ``step``: ``images`` (b image image 3) and ``labels`` (b). A function of its arguments alone.

    Images are views of one row each, so that those of a large model take no memory before they are used.
    """
    draws = np.random.default_rng((seed, step))
    labels = draws.integers(0, min(classes, image // 4), batch)
    turns = (1 + labels[:, None]) * np.arange(image) / image + draws.random((batch, 1))
    rows = np.cos(2 * np.pi * turns).astype(np.float32)
    return {
        "images": np.broadcast_to(rows[:, None, :, None], (batch, image, image, 3)),
        "labels": labels.astype(np.int32),
    }
