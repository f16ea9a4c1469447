"""The ladder of memory plans: what to try when a step does not fit, from the cheapest to the most drastic.

A rung is a way to spread the step over devices (``SPREAD``) with a way to save memory on each (``SAVED``), both written as
on the command line, with names in braces for what is filled in. Both tables are in the order of what they cost beside
computing the step once: ``SAVED`` in FLOPs, ``SPREAD`` in bytes between devices; ties in launches.

``{dp}``, ``{tp}``: every grid of the devices with several columns; ``{microbatches}``: 2, 4, … of what each row of devices
has of the batch, ``{most}`` as many as there are; ``{parts}``: 4, 8, 16, 32.
"""

import itertools
import re
from collections.abc import Mapping, Sequence

from jscaler.errors import divisors

ONE_DEVICE = ("single",)
SPREAD = (
    "data_parallel",
    "zero1",
    "zero2",
    "zero3",
    "megatron(dp={dp}, tp={tp})",
    "megatron(dp={dp}, tp={tp}, sequence=True)",
    "megatron(dp={dp}, tp={tp}, sequence=True, zero=3)",
)
SAVED = (
    "{plan}",
    "accumulate({microbatches}, {plan})",
    "selective_recompute({plan})",
    "recompute_layers({plan})",
    "co_shard({parts}, plan={plan})",
    "accumulate({most}, recompute_layers({plan}))",
    "accumulate({most}, co_shard(8, plan={plan}))",
    "accumulate({most}, co_shard(32, plan={plan}))",
)
ONLY_IN = {"zero2": "accumulate"}  # with one micro-batch it is ZeRO-1
_NAMES = re.compile(r"{(\w+)}")
_ROWS = re.compile(r"dp=(\d+)")
_DEFAULT = re.compile(r"(?<=\()single\(\)|, (plan=)?single\(\)")  # what plans take where nobody says another


def ladder(num_devices: int, batch: int = 1) -> tuple[str, ...]:
    """The rungs for so many devices and sequences, the cheapest first; not all need be legal for a model.

    Example:
        >>> ladder(1)[:4]
        ('single', 'selective_recompute', 'recompute_layers', 'co_shard(4)')
        >>> ladder(2)[:4]
        ('data_parallel', 'zero1', 'zero3', 'megatron(dp=1, tp=2)')
    """
    grids = {"tp": [n for n in divisors(num_devices) if n > 1], "devices": [num_devices]}
    spread = [plan for row in (SPREAD if num_devices > 1 else ONE_DEVICE) for plan in _filled(row, grids)]
    pairs = [(row, plan) for row in SAVED for plan in spread if ONLY_IN.get(plan, row) in row]
    rungs = [rung for row, plan in pairs for rung in _filled(row, _choices(row, plan, num_devices, batch))]
    return tuple(re.sub(r"^(\w+)\(\)$", r"\1", _DEFAULT.sub("", rung)) for rung in rungs)


def _choices(row: str, plan: str, num_devices: int, batch: int) -> dict[str, Sequence[int | str]]:
    """What a name in braces stands for, with ``plan`` inside."""
    grid = _ROWS.search(plan)
    local = batch // (int(grid[1]) if grid else num_devices)
    parts = [n for n in divisors(max(1, local)) if n > 1 and n & (n - 1) == 0]
    return {"microbatches": parts, "most": parts[-1:], "parts": [4, 8, 16, 32], "plan": [_inner(row, plan)]}


def _inner(row: str, plan: str) -> str:
    """A plan as another's argument has parentheses."""
    return plan if row == "{plan}" or plan.endswith(")") else f"{plan}()"


def _filled(row: str, choices: Mapping[str, Sequence[int | str]]) -> list[str]:
    """The row once for each choice of the names in it; ``dp`` is what ``tp`` leaves."""
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
