"""Real text as bytes: a file, a folder, or by default the text of Python's own documentation."""

import pydoc_data.topics
from pathlib import Path

import numpy as np

from jscaler.errors import DataError


def load_bytes(path: str | Path | None = None) -> np.ndarray:
    """The bytes of a file, or of all files below a folder in name order, as uint8.

    Without a path it is the text that ships with Python in ``pydoc_data.topics`` (about 700 kB).

    Raises:
        DataError: nothing is there, it cannot be read, or it is empty.
    """
    if path is None:
        texts = (pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
        return np.frombuffer("\n".join(texts).encode(), np.uint8)
    source = Path(path)
    if not source.exists():
        raise DataError(f"no training data at '{path}': give a text file or a folder, or leave --data out")
    files = sorted(f for f in source.rglob("*") if f.is_file()) if source.is_dir() else [source]
    try:
        data = b"\n".join(f.read_bytes() for f in files)
    except OSError as error:
        raise DataError(f"the data at '{path}' cannot be read: {error}; give another file or folder") from None
    if not data:
        raise DataError(f"'{path}' holds no text ({len(files)} files, 0 bytes)")
    return np.frombuffer(data, np.uint8)


def held_out(data: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """``data`` without its last twentieth (or sequence, if that is longer), and that.

    Raises:
        DataError: less than one sequence is left to train on.
    """
    size = max(len(data) // 20, sequence + 1)
    if len(data) - size < sequence + 1:
        raise DataError(
            f"the data has {len(data)} bytes; a sequence to train on and one to evaluate need {2 * (sequence + 1)}"
        )
    return data[:-size], data[-size:]


def batch_at(data: np.ndarray, step: int, batch: int, sequence: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The batch of step ``step``: ``tokens`` and ``labels`` (the next bytes), each ``batch × sequence`` int32.

    A function of its arguments alone, so that every process and every plan sees the same data.

    Raises:
        DataError: the data is shorter than one sequence.
    """
    if len(data) < sequence + 1:
        raise DataError(f"the data has {len(data)} bytes; one sequence needs {sequence + 1}")
    starts = np.random.default_rng((seed, step)).integers(0, len(data) - sequence, batch)
    windows = np.stack([data[s : s + sequence + 1] for s in starts]).astype(np.int32)
    return {"tokens": windows[:, :-1], "labels": windows[:, 1:]}


def pair_at(data: np.ndarray, step: int, batch: int, sequence: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The batch of step ``step`` for an encoder and a decoder, as of `batch_at`: ``source`` are ``tokens``.

    So the decoder says what follows, byte by byte, of a text that the encoder has read but for its last byte.
    """
    windows = batch_at(data, step, batch, sequence, seed)
    return {"source": windows["tokens"], **windows}
