"""What is said where a device's memory is full: what the estimate has in it, and what to try, which XLA cannot say."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jscaler.errors import OutOfMemoryError
from jscaler.estimate.memory import estimated_memory
from jscaler.lower.step_plan import StepPlan
from jscaler.plans.batch_size import batch_size
from jscaler.spaces import Setting
from jscaler.spaces import memory as memory_space
from jscaler.text.units import readable_bytes

MOST_TOLD = 5  # tensors, and plans


def is_out_of_memory(error: BaseException) -> bool:
    """Whether XLA, or the allocator below it, has refused to reserve memory. (A full disk says it in the same words.)"""
    return isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED")


@contextmanager
def told_of_memory(step: StepPlan, where: str) -> Iterator[None]:
    """What runs out of memory within is said as `out_of_memory` does."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(step, where, error) from error


def out_of_memory(step: StepPlan, where: str, error: Exception) -> OutOfMemoryError:
    """What is raised in place of ``error``: what a device holds by the estimate, and the plans that `jscaler.fit` tries.

    Args:
        where: the block, in a sentence, or what else wanted the memory.
    """
    found = estimated_memory(step)
    memory, sizes, times = found.memory, Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for one in found.live:  # of a pipeline each micro-batch has its own
        sizes[one.name, one.kind] += one.nbytes
        times[one.name, one.kind] += 1
    kinds = ", ".join(f"{kind} {readable_bytes(size)}" for kind, size in memory.by_kind.items() if size)
    largest = ", ".join(
        f"{f'{times[what]}× ' if times[what] > 1 else ''}'{what[0]}' ({what[1]}) {readable_bytes(size)}"
        for what, size in sizes.most_common(MOST_TOLD)
    )
    first = str(error).strip().splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ").rstrip(".")
    told = [
        f"{where} is out of memory: {first}. By the estimate a device of this plan ({step.name}) holds "
        f"{readable_bytes(memory.peak)} at the worst moment{f' ({memory.at})' if memory.at else ''}: {kinds}",
        *([f"largest beside the arguments: {largest}"] if largest else []),
        f"jscaler.fit tries plans for the fastest that fits, among them {', '.join(_plans(step))}",
    ]
    return OutOfMemoryError("; ".join(told))


def _plans(step: StepPlan) -> tuple[str, ...]:
    """Some plans of the space that `jscaler.fit` searches on so many devices, from its first to its last."""
    devices = step.plan.num_devices
    at = Setting(devices, devices, batch_size(step.graph))
    texts = [point.text.removesuffix("()") for space in memory_space() for point in space.points(at)]
    places = [round(i * (len(texts) - 1) / (MOST_TOLD - 1)) for i in range(MOST_TOLD)]
    return tuple(dict.fromkeys(texts[place] for place in places))
