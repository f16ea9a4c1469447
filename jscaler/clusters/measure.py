"""Collectives measured on the devices at hand: what ``jscaler bench-comm`` runs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jscaler.clusters.calibration import MEASURED, LinkClass, Sample
from jscaler.clusters.timing import interleaved
from jscaler.errors import DeviceError, divisors
from jscaler.ir.walk import grouped

SMALLEST = 1 << 10  # bytes of the smallest message
WARM_UP = 2  # collectives of the short program
_ITEM = 4  # bytes of a float32
_DEVICES = PartitionSpec(("groups", "members"))
Device = Any  # jax.Device, which type checkers take for a variable


class Trial(NamedTuple):
    """A measurement to make; ``groups`` is an array (groups, members) of devices, ``nbytes`` a wish."""

    link: LinkClass
    kind: str
    groups: np.ndarray
    sharing: int
    nbytes: int


def by_host(devices: Sequence[Device], of_each: int | None = None) -> np.ndarray:
    """Devices as an array (hosts, devices of each host); the devices of one process are a host.

    Args:
        devices: of all hosts.
        of_each: take this many of each host; all by default.

    Raises:
        DeviceError: there are fewer than two devices, or the hosts have too few or unequal numbers of them.
    """
    hosts = grouped((device.process_index, device) for device in sorted(devices, key=lambda d: (d.process_index, d.id)))
    counts = {process: len(mine) for process, mine in hosts.items()}
    shown = ", ".join(f"{count} of process {process}" for process, count in counts.items())
    if of_each is not None and of_each > min(counts.values()):
        raise DeviceError(f"{of_each} devices of each process are asked for and at hand are {shown}; ask for fewer")
    if of_each is None and len(set(counts.values())) > 1:
        raise DeviceError(f"hosts must have equal numbers of devices and at hand are {shown}; choose with --devices")
    rows = [mine[:of_each] for mine in hosts.values()]
    if sum(map(len, rows)) < 2:
        raise DeviceError(
            f"a collective needs 2 devices and 1 is at hand ({devices[0].platform}); use a machine with more of them, "
            "or make virtual ones with --platform cpu --devices 8"
        )
    array = np.empty((len(rows), len(rows[0])), object)
    array[:] = rows
    return array


def sizes_up_to(largest: int, factor: int = 4) -> list[int]:
    """Bytes from 1 KiB to ``largest``, each ``factor`` times the one before."""
    sizes = [SMALLEST]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes


def trials(hosts: np.ndarray, sizes: Sequence[int]) -> list[Trial]:
    """Every collective in groups of every size that divides: inside hosts, then of one device of each of several hosts.

    All devices take part at once, so between hosts as many groups share a host's network as it has devices.
    """
    across = np.ascontiguousarray(hosts.T)
    classes: tuple[tuple[LinkClass, np.ndarray, int], ...] = (("inside", hosts, 1), ("between", across, hosts.shape[1]))
    return [
        Trial(link, kind, devices.reshape(-1, members), sharing, size)
        for link, devices, sharing in classes
        for members in divisors(devices.shape[1])[1:]
        for kind in MEASURED
        for size in sizes
    ]


def measure(trial: Trial, rounds: int) -> Sample:
    """Seconds of one collective inside a compiled program, the least of ``rounds``.

    Two programs that differ in their number of collectives run in turn, warmed up; the difference of their times is
    free of dispatch and of what the programs allocate and copy.
    """
    members = trial.groups.shape[1]
    sent = MEASURED[trial.kind].sent(members)
    elements = members * max(1, round(trial.nbytes / sent / _ITEM / members))
    repeats = max(4, min(32, (8 << 20) // trial.nbytes))
    mesh = Mesh(trial.groups, ("groups", "members"))
    zeros = jax.jit(lambda: jnp.zeros(elements * trial.groups.size), out_shardings=NamedSharding(mesh, _DEVICES))()
    short, long = (program(mesh, trial.kind, count) for count in (WARM_UP, WARM_UP + repeats))
    times = interleaved([lambda: short(zeros), lambda: long(zeros)], rounds)
    seconds = (min(times[1]) - min(times[0])) / repeats
    if seconds <= 0:  # noise: what the long program took in all is an upper bound
        seconds = min(times[1]) / (WARM_UP + repeats)
    return Sample(trial.link, trial.kind, members, trial.sharing, sent * elements * _ITEM, seconds)


def program(mesh: Mesh, kind: str, repeats: int) -> Any:
    """A jitted function that runs a collective ``repeats`` times; each reads an element of the one before."""

    run = MEASURED[kind].alone
    assert run is not None, kind

    def local(x: Array) -> Array:
        def once(_: Any, x: Array) -> Array:
            return x.at[0].set(run(x, mesh.shape["members"])[-1])

        return lax.fori_loop(0, repeats, once, x)[:1]

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=_DEVICES, out_specs=_DEVICES, check_vma=False))


def device_memory(device: Device) -> int:
    """Bytes that JAX may use on a device; 0 where it does not say."""
    return int((device.memory_stats() or {}).get("bytes_limit", 0))
