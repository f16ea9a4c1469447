"""The ladder of memory plans: what to try when a step does not fit, from the cheapest to the most drastic.

A rung is a way to spread the step over devices (``SPREAD``) with a way to save memory on each (``SAVED``), which are
written as on the command line, with names in braces for what is filled in. Both tables are in the order of what they cost
beside computing the step once: ``SAVED`` in FLOPs, ``SPREAD`` in bytes between devices; ties in launches.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jscaler.errors import divisors


@dataclass(frozen=True)
class Saved:
    """How memory is saved on each device.

    Attributes:
        plan: a plan's text; ``{plan}`` is one of ``SPREAD``.
        remat: whether the model is to compute its layers again itself (its own ``nn.remat``).
    """

    plan: str
    remat: bool = False


@dataclass(frozen=True)
class Rung:
    """One plan to try; ``remat`` as in `Saved`."""

    plan: str
    remat: bool = False

    def __str__(self) -> str:
        return f"{self.plan} + remat" if self.remat else self.plan


ONE_DEVICE = ("single",)
SPREAD = (
    "data_parallel",
    "zero1",
    "zero3",
    "megatron(dp={dp}, tp={tp})",
    "megatron(dp={dp}, tp={tp}, sequence=True)",
    "megatron(dp={dp}, tp={tp}, sequence=True, zero=1)",
    "megatron(dp={dp}, tp={tp}, sequence=True, zero=3)",
)
SAVED = (
    Saved("{plan}"),
    Saved("{plan}", remat=True),
)
_NAMES = re.compile(r"{(\w+)}")


def ladder(num_devices: int, batch: int = 1) -> tuple[Rung, ...]:
    """The rungs for so many devices and sequences, the cheapest first; not all need be legal for a model.

    Example:
        >>> [str(rung) for rung in ladder(1)]
        ['single', 'single + remat']
    """
    choices = _choices(num_devices, batch)
    spread = [text for row in (SPREAD if num_devices > 1 else ONE_DEVICE) for text in _filled(row, choices)]
    rows = [(saved, plan) for saved in SAVED for plan in spread]
    made = [Rung(text, saved.remat) for saved, plan in rows for text in _filled(saved.plan, {**choices, "plan": [plan]})]
    return tuple(dict.fromkeys(made))


def _choices(num_devices: int, batch: int) -> dict[str, Sequence[object]]:
    """What a name in braces stands for. ``dp`` is what ``tp`` leaves, and is filled in with it."""
    return {
        "tp": [n for n in divisors(num_devices) if n > 1],
        "microbatches": [n for n in divisors(batch) if n > 1 and n & (n - 1) == 0],
        "parts": [4, 8, 16, 32],
        "devices": [num_devices],
    }


def _filled(row: str, choices: Mapping[str, Sequence[object]]) -> list[str]:
    """The row once for each choice of the names in it."""
    names = [name for name in dict.fromkeys(_NAMES.findall(row)) if name != "dp"]
    found = []
    for values in itertools.product(*(choices[name] for name in names)):
        said = dict(zip(names, values, strict=True))
        if "tp" in said:
            (devices,) = choices["devices"]
            said["dp"] = int(str(devices)) // int(str(said["tp"]))
            if said["dp"] == 1 and "zero=" in row:
                continue  # nothing is copied that it could split
        found.append(_NAMES.sub(lambda match, said=said: str(said[match[1]]), row))
    return found
