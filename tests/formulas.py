"""What layers of networks have in common, in numpy, as their papers write it."""

from typing import Any

import jax
import numpy as np


def dense(own: Any, x: np.ndarray) -> np.ndarray:
    """Over the last dim of ``x``."""
    return np.tensordot(x, own["kernel"], 1) + own.get("bias", 0)


def norm(own: Any, x: np.ndarray) -> np.ndarray:
    """Layer normalisation."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * own["scale"] + own["bias"]


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def shaken(params: Any, seed: int = 0) -> Any:
    """``params`` with noise, so that none is zero."""
    draws = np.random.default_rng(seed)
    return jax.tree.map(lambda p: p + 0.3 * draws.normal(size=p.shape).astype(p.dtype), params)


def stacked(layers: list[Any]) -> Any:
    """Parameters of layers, as those of one scan."""
    return jax.tree.map(lambda *parts: np.stack(parts), *layers)
