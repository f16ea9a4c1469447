"""``Work``: what a device computes and moves through its memory for one op, and how long that takes at least.

A kernel takes as long as its arithmetic at the device's peak, or as its bytes at the memory's bandwidth, whichever is
longer (Williams, Waterman, Patterson: Roofline, 2009). What is fused counts with the kernel that it is fused into.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax.extend import core

from jscaler.capture.jaxprs import make_jaxpr
from jscaler.clusters.device import DeviceKind
from jscaler.xla_model.block import Block, BlockStep, Inner, Value
from jscaler.xla_model.kernels import kernels_of
from jscaler.xla_model.to_block import Blocks


@dataclass(frozen=True)
class KernelWork:
    """One kernel, and how often it runs.

    Attributes:
        flops: operations by unit: the dtype of a product's operands, or ``vector``.
        read, written: bytes.
    """

    flops: tuple[tuple[str, float], ...]
    read: int
    written: int
    times: int = 1

    def seconds(self, device: DeviceKind) -> float:
        """Once: at the device's peak, or as is reached of it where that is known."""
        return device.kernel_seconds(self.flops, self.read + self.written)


@dataclass(frozen=True)
class Work:
    """All kernels of an op's local body."""

    kernels: tuple[KernelWork, ...] = ()

    @property
    def products(self) -> dict[str, float]:
        """Operations of products, by the dtype of their operands."""
        found: dict[str, float] = {}
        for kernel in self.kernels:
            for unit, count in kernel.flops:
                if unit != "vector":
                    found[unit] = found.get(unit, 0.0) + kernel.times * count
        return found

    @property
    def flops(self) -> float:
        """Operations of products."""
        return sum(self.products.values())

    @property
    def launches(self) -> int:
        return sum(k.times for k in self.kernels)

    @property
    def read(self) -> int:
        return sum(k.times * k.read for k in self.kernels)

    @property
    def written(self) -> int:
        return sum(k.times * k.written for k in self.kernels)

    def seconds(self, device: DeviceKind) -> float:
        """One kernel after the other."""
        return sum(k.times * k.seconds(device) for k in self.kernels)


def work_of(jaxpr: core.Jaxpr, done: Sequence[bool] | None = None) -> Work:
    """The work of a local body.

    Args:
        done: which of its equations are done here; what others make is at hand (a forward made it).
    """
    if done is None or all(done):
        return Work(tuple(_kernels(Blocks().jaxpr(jaxpr), 1)))
    eqns = [eqn for eqn, here in zip(jaxpr.eqns, done, strict=True) if here]
    made = {v for eqn in eqns for v in eqn.outvars}
    at_hand = list(dict.fromkeys(v for e in eqns for v in e.invars if isinstance(v, core.Var) and v not in made))
    left = [v for v in jaxpr.outvars if v in made]
    return Work(tuple(_kernels(Blocks().jaxpr(make_jaxpr(eqns, at_hand, left, jaxpr)), 1)))


def _kernels(block: Block, times: int) -> Iterable[KernelWork]:
    waiting: dict[str, float] = {}  # of what is fused into the next kernel
    kernels = {id(kernel.step): kernel for kernel in kernels_of(block)}
    reduced: set[tuple[Value, ...]] = set()  # what reductions have read: several of one tensor are one kernel
    for step in block.steps:
        _add(waiting, step)
        kernel = kernels.get(id(step))
        if kernel is None:
            continue
        if step.inner:
            yield from _inside(step, times)
        else:
            siblings = step.kind == "reduced" and tuple(kernel.reads) in reduced
            if step.kind == "reduced":
                reduced.add(tuple(kernel.reads))
            written = sum(v.nbytes for v in step.writes)
            yield KernelWork(tuple(waiting.items()), 0 if siblings else sum(kernel.reads.values()), written, times)
        waiting = {}


def _inside(step: BlockStep, times: int) -> Iterable[KernelWork]:
    """A loop's iterations; of the branches of a ``cond`` the one that moves most."""

    def kernels(inner: Inner) -> list[KernelWork]:
        return list(_kernels(inner.block, times * inner.length))

    def size(found: list[KernelWork]) -> float:
        return sum(k.read + k.written + sum(n for _, n in k.flops) for k in found)

    return max(map(kernels, step.inner), key=size)


def _add(flops: dict[str, float], step: BlockStep) -> None:
    if step.flops.count:
        flops[step.flops.unit] = flops.get(step.flops.unit, 0.0) + step.flops.count
