"""Whether all processes of a job are about the same: asked before the first compile, since what differs would hang later.

In a job of many processes each runs the same script. A step's collectives meet only if plan, graph and versions are the
same everywhere; where they are not, JAX waits for partners that never come.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jscaler.errors import DeviceError, ProcessError
from jscaler.runtime.gathered import words_of

WIDTH = 160  # bytes of a fact that are compared and shown


def check_shares() -> None:
    """Raises DeviceError, on every process, where they have different numbers of devices, over which JAX asks nobody."""
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        told = ", ".join(f"process {process} has {count}" for process, count in sorted(counts.items()))
        raise DeviceError(f"{told} devices: all processes of a job need as many: --local-devices, or CUDA_VISIBLE_DEVICES")


def agree(facts: Mapping[str, str]) -> None:
    """Compare ``facts``, by name, with those of the other processes. Alone, there is nothing to compare.

    Raises:
        ProcessError: on every process, where one has another; it names the fact and both.
    """
    if jax.process_count() == 1:
        return
    own = np.zeros((len(facts), WIDTH), np.uint8)
    for row, text in zip(own, facts.values(), strict=True):
        letters = text.encode()
        if len(letters) > WIDTH:  # as much as goes, and what tells the rest
            letters = letters[: WIDTH - 13] + f"…{digest(text)}".encode()[-13:]
        row[: len(letters)] = list(letters)
    # first how many there are: arrays of two shapes would not meet
    counts = multihost_utils.process_allgather(np.array(len(facts)))
    if len(set(counts.tolist())) > 1:
        raise ProcessError(f"the processes compare {counts.tolist()} facts: they run different versions of jscaler")
    every = multihost_utils.process_allgather(own)
    for number, name in enumerate(facts):
        found = [bytes(one).rstrip(b"\0").decode(errors="replace") for one in every[:, number]]
        other = next((process for process, text in enumerate(found) if text != found[0]), None)
        if other is not None:
            raise ProcessError(
                f"process {other} has another {name} than process 0: '{found[other]}' and '{found[0]}'; start all "
                "processes with the same command, versions and files"
            )


def any_process(said: int) -> int:
    """The largest of what the processes say, below 2³¹: a signal that one has got ends them all behind the same step."""
    return largest(said)[0]


def largest(*said: int) -> list[int]:
    """The same of several numbers."""
    if jax.process_count() == 1:
        return list(said)
    return multihost_utils.process_allgather(np.array(said)).max(0).tolist()


def digest(*values: Any) -> str:
    """Of texts and arrays, in twelve letters."""
    found = hashlib.sha256()
    for value in values:
        array = None if isinstance(value, str) else np.asarray(words_of(value))
        found.update(value.encode() if array is None else f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return found.hexdigest()[:12]
