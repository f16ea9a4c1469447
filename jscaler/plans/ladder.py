"""The ladder of memory plans: what to try when a step does not fit, from the cheapest to the most drastic.

A rung is a way to spread the step over devices (``SPREAD``) with a way to save memory on each (``SAVED``), both written as
on the command line, with names in braces for what is filled in. Both tables are in the order of what they cost beside
computing the step once: ``SAVED`` in FLOPs, ``SPREAD`` in bytes between devices; ties in launches.

``{dp}``, ``{tp}``: every grid of the devices with several columns; ``{microbatches}``: 2, 4, … of what each row of devices
has of the batch, ``{most}`` as many as there are; ``{parts}``: 4, 8, 16, 32. Stages (``STAGED``, ``{stages}``) wait for
each other, and hold several micro-batches: they stand behind what computes a step once on all devices.
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
STAGED = {  # behind which row of ``SAVED`` they stand
    "accumulate({microbatches}, {plan})": (
        "pipeline({stages}, {most}, plan=data_parallel())",
        "megatron(dp={dp}, tp={tp}, pp={stages}, microbatches={most})",
    ),
    "accumulate({most}, recompute_layers({plan}))": (
        "pipeline({stages}, {most}, plan=recompute_layers(data_parallel()))",
        "pipeline({stages}, {most}, plan=recompute_layers(megatron(dp={dp}, tp={tp})))",
    ),
}
STAGES = (2, 4, 8)
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
    spread = [plan for row in (SPREAD if num_devices > 1 else ONE_DEVICE) for plan in _filled(row, _grids(num_devices))]
    rungs: list[str] = []
    for row in SAVED:
        chosen = (plan for plan in spread if ONLY_IN.get(plan, row) in row)
        rungs += [rung for plan in chosen for rung in _filled(row, _choices(row, plan, num_devices, batch))]
        rungs += [rung for one in STAGED.get(row, ()) for rung in _staged(one, num_devices, batch)]
    return tuple(re.sub(r"^(\w+)\(\)$", r"\1", _DEFAULT.sub("", rung)) for rung in rungs)


def _grids(num_devices: int) -> dict[str, Sequence[int | str]]:
    return {"tp": [n for n in divisors(num_devices) if n > 1], "devices": [num_devices]}


def _staged(row: str, num_devices: int, batch: int) -> list[str]:
    """A row of `STAGED`, for every number of stages that divides the devices."""
    found = []
    for stages in (n for n in STAGES if num_devices % n == 0):
        for plan in _filled(row.replace("{stages}", str(stages)), _grids(num_devices // stages) | {"most": ["{most}"]}):
            rows = int(grid[1]) if (grid := _ROWS.search(plan)) else num_devices // stages
            found += [plan.replace("{most}", str(most)) for most in _micro_batches(batch // rows)[-1:]]
    return found


def _micro_batches(local: int) -> list[int]:
    """Into how many parts a batch of ``local`` rows may go."""
    return [n for n in divisors(max(1, local)) if n > 1 and n & (n - 1) == 0]


def _choices(row: str, plan: str, num_devices: int, batch: int) -> dict[str, Sequence[int | str]]:
    """What a name in braces stands for, with ``plan`` inside."""
    grid = _ROWS.search(plan)
    local = batch // (int(grid[1]) if grid else num_devices)
    parts = _micro_batches(local)
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
