"""The ladder of memory plans: what to try when a step does not fit, from the cheapest to the most drastic.

A rung is a way to spread the step over devices (``SPREAD``) with a way to save memory on each (``SAVED``), both written as
on the command line, with names in braces for what is filled in. Both tables are in the order of what they cost beside
computing the step once: ``SAVED`` in FLOPs, ``SPREAD`` in bytes between devices; ties in launches.
"""

import itertools
import re
from collections.abc import Mapping, Sequence

from jscaler.errors import divisors

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
    "{plan}",
    "selective_recompute({plan})",
    "recompute_layers({plan})",
)
_NAMES = re.compile(r"{(\w+)}")


def ladder(num_devices: int, batch: int = 1) -> tuple[str, ...]:
    """The rungs for so many devices and sequences, the cheapest first; not all need be legal for a model.

    Example:
        >>> ladder(1)
        ('single', 'selective_recompute', 'recompute_layers')
        >>> ladder(2)[:5]
        ('data_parallel', 'zero1', 'zero3', 'megatron(dp=1, tp=2)', 'megatron(dp=1, tp=2, sequence=True)')
    """
    choices = _choices(num_devices, batch)
    spread = [plan for row in (SPREAD if num_devices > 1 else ONE_DEVICE) for plan in _filled(row, choices)]
    rungs = [rung for row in SAVED for plan in spread for rung in _filled(row, {**choices, "plan": [_inner(row, plan)]})]
    return tuple(rung.replace("(single())", "").replace(", single())", ")") for rung in rungs)  # what they take by default


def _choices(num_devices: int, batch: int) -> dict[str, Sequence[int | str]]:
    """What a name in braces stands for. ``dp`` is what ``tp`` leaves, and is filled in with it."""
    return {
        "tp": [n for n in divisors(num_devices) if n > 1],
        "microbatches": [n for n in divisors(batch) if n > 1 and n & (n - 1) == 0],
        "parts": [4, 8, 16, 32],
        "devices": [num_devices],
    }


def _inner(row: str, plan: str) -> str:
    """A plan as another's argument has parentheses."""
    return plan if row == "{plan}" or plan.endswith(")") else f"{plan}()"


def _filled(row: str, choices: Mapping[str, Sequence[int | str]]) -> list[str]:
    """The row once for each choice of the names in it."""
    names = [name for name in dict.fromkeys(_NAMES.findall(row)) if name != "dp"]
    found = []
    for values in itertools.product(*(choices[name] for name in names)):
        said = dict(zip(names, values, strict=True))
        if "tp" in said:
            said["dp"] = int(choices["devices"][0]) // int(said["tp"])
            if said["dp"] == 1 and "zero=" in row:
                continue  # nothing is copied that it could split
        found.append(_NAMES.sub(lambda match, said=said: str(said[match[1]]), row))
    return found
