"""Parts that go from device to device: within a process by ``jax.device_put``, between two by rounds of ``lax.ppermute``.

A round is a program over the devices of two processes that send to each other: both run it, in the one order that all
processes have for what a step does. ``device_put`` to another process's devices was the other way: it wants equal layouts
and sets of processes that differ, and on CPUs a socket of its own.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jscaler.materialize.rounds import color_rounds
from jscaler.runtime.absent import zeros
from jscaler.runtime.devices import Device, is_here

Pair = tuple[Device, Device]  # sender, receiver
Parts = Mapping[Device, jax.Array]  # by device, those of this process


def process_of(device: Device) -> int:
    """The process that runs a device."""
    return int(device.process_index)


def wait_on_cpus(made: Any, devices: Sequence[Device]) -> None:
    """Wait for what a program of several processes has made, where devices are CPUs.

    There nothing else keeps it in front of the next one: two that run at once take each other's numbers.
    """
    if devices[0].platform == "cpu":
        jax.block_until_ready(made)


class Messages:
    """``messages(parts) -> parts``: each receiver gets the part of its sender; what is given is kept.

    Args:
        pairs: sender and receiver of each; a device receives once at most.
        shape: of every part.
        known: rounds of other messages, of which equal ones are compiled once; filled here.
        process: that of a device.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        shape: tuple[int, ...],
        dtype: Any,
        known: dict[Any, "_Round"],
        process: Callable[[Device], int] = process_of,
    ) -> None:
        near = [(a, b) for a, b in pairs if process(a) == process(b) and is_here(a)]
        self._from, self._to = [a for a, _ in near], [b for _, b in near]
        far = [(a, b) for a, b in pairs if process(a) != process(b)]
        self._rounds = list[_Round]()
        for _, between in itertools.groupby(sorted(far, key=lambda p: _ends(p, process)), lambda p: _ends(p, process)):
            self._rounds += _rounds(list(between), shape, dtype, known)

    def __call__(self, parts: Parts) -> dict[Device, jax.Array]:
        """What came to the devices of this process."""
        sent = jax.device_put([parts[device] for device in self._from], self._to) if self._to else []
        came = dict(zip(self._to, sent, strict=True))
        for one in self._rounds:
            came.update(one(parts))
        return came


def _ends(pair: Pair, process: Callable[[Device], int]) -> tuple[int, int]:
    return process(pair[0]), process(pair[1])


def _rounds(pairs: Sequence[Pair], shape: tuple[int, ...], dtype: Any, known: dict[Any, "_Round"]) -> "list[_Round]":
    """Of what one process sends to another; none where this one is neither."""
    if not any(map(is_here, itertools.chain(*pairs))):
        return []
    found = []
    for numbers in color_rounds([(a.id, b.id) for a, b in pairs]):
        key = tuple(pairs[i] for i in numbers), shape, dtype
        if key not in known:
            known[key] = _Round(*key)
        found.append(known[key])
    return found


class _Round:
    """Messages in which every device sends once at most, as one program. Who sends nothing gives zeros."""

    def __init__(self, pairs: Sequence[Pair], shape: tuple[int, ...], dtype: Any) -> None:
        devices = sorted({d for pair in pairs for d in pair}, key=lambda d: d.id)
        place = {device: i for i, device in enumerate(devices)}
        ways = [(place[a], place[b]) for a, b in pairs]
        mesh = Mesh(np.array(devices), ("x",))
        # a part is an array of which each device has another one: so that of one number needs no other program
        self._sharding, self._shape = NamedSharding(mesh, P()), shape
        mapped = jax.shard_map(lambda x: _permuted(x, ways), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        part = jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)
        self._run = jax.jit(mapped).lower(part).compile()
        senders = {a for a, _ in pairs}
        self._own = [device for device in devices if is_here(device)]
        self._zeros = {d: jax.device_put(zeros(part), d) for d in self._own if d not in senders}
        self._receivers = {b for _, b in pairs}

    def __call__(self, parts: Parts) -> dict[Device, jax.Array]:
        given = [self._zeros.get(device, parts.get(device)) for device in self._own]
        made = self._run(jax.make_array_from_single_device_arrays(self._shape, self._sharding, given))
        wait_on_cpus(made, self._own)
        return {shard.device: shard.data for shard in made.addressable_shards if shard.device in self._receivers}


def _permuted(part: Any, ways: Sequence[tuple[int, int]]) -> Any:
    if not jax.dtypes.issubdtype(part.dtype, jax.dtypes.prng_key):
        return lax.ppermute(part, "x", ways)
    data = lax.ppermute(jax.random.key_data(part), "x", ways)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(part))
