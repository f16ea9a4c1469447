"""In which order kernels run, as far as memory depends on it.

Without collectives XLA's order needs about as much memory as the program's own: a gradient of a weight is computed as
soon as it can be. To hide collectives behind other work, XLA puts off what no other device waits for; what it then comes to
is near to depth first from the results, operands with the most other readers first.
"""

import dataclasses
from collections.abc import Sequence

from jscaler.clusters.transition_kinds import sends
from jscaler.ir.walk import dependents, operands_first
from jscaler.xla_model.block import BlockStep, Kernel, Value

SMALL = 1 << 16  # bytes


def ordered(kernels: Sequence[Kernel], outputs: Sequence[Value], fenced: bool) -> tuple[Kernel, ...]:
    """``kernels`` of one block in the order that XLA is expected to run them in.

    Args:
        fenced: whether the block has fences: what is behind one stays there, as in the program.
    """
    if fenced or not any(sends(kernel.step.name) for kernel in kernels):
        return tuple(kernels)
    return tuple(kernels[i] for i in _most_read_first(kernels, outputs))


def siblings_together(kernels: Sequence[Kernel], steps: Sequence[BlockStep] = ()) -> tuple[Kernel, ...]:
    """``kernels`` with elementwise ones that read one large operand next to each other, as XLA makes them one kernel.

    The earlier waits for the other's operands, and what reads its result waits with it: an activation function, computed
    again for a weight's gradient, and its derivative times the cotangent. One kernel with two results writes over no
    operand.

    Args:
        steps: of the block. What a fence stands between are no siblings, or all that is computed again were one with what
            it is a clone of.
    """
    fences = _fences_before(steps)
    order, made = list(range(len(kernels))), list(kernels)
    place = list(order)  # of a kernel in the order
    readers: dict[Value, list[int]] = {}
    for second, kernel in enumerate(kernels):
        if not _elementwise(kernel):
            continue
        shared = [v for v in kernel.reads if v.nbytes >= kernel.writes[0].nbytes]
        for first in sorted({i for v in shared for i in readers.get(v, ())}, key=place.__getitem__):
            apart = fences.get(id(kernels[first].step)) != fences.get(id(kernel.step))
            if apart or kernels[first].writes[0].nbytes != kernel.writes[0].nbytes:
                continue
            start, end = place[first], place[second]
            # the first, and those that need it
            late = dependents(order[start:end], {first}, lambda i: kernels[i].reads, lambda i: kernels[i].writes)
            if any(v in kernel.reads for i in late for v in kernels[i].writes):
                continue  # the second needs the first
            waiting = set(late)
            order[start : end + 1] = [i for i in order[start:end] if i not in waiting] + [first, second] + late[1:]
            for position in range(start, end + 1):
                place[order[position]] = position
            for i in (first, second):
                made[i] = dataclasses.replace(kernels[i], over=())
            break
        for value in shared:
            readers.setdefault(value, []).append(second)
    return tuple(made[i] for i in order)


def _fences_before(steps: Sequence[BlockStep]) -> dict[int, int]:
    """By identity of a step how many fences stand before it."""
    found, count = dict[int, int](), 0
    for step in steps:
        count += step.is_fence
        found[id(step)] = count
    return found


def _elementwise(kernel: Kernel) -> bool:
    return kernel.step.kind == "fused" and len(kernel.writes) == 1 and kernel.writes[0].nbytes > SMALL


def _most_read_first(kernels: Sequence[Kernel], outputs: Sequence[Value]) -> list[int]:
    maker = {v: i for i, kernel in enumerate(kernels) for v in kernel.writes}
    operands = [tuple(dict.fromkeys(maker[v] for v in kernel.reads if v in maker)) for kernel in kernels]
    readers: list[list[int]] = [[] for _ in kernels]
    for i, before in enumerate(operands):
        for j in before:
            readers[j].append(i)
    extra, sizes = [0] * len(kernels), [0] * len(kernels)  # of a kernel and all that it needs
    for i, before in enumerate(operands):
        extra[i] = max(0, len(readers[i]) - 1) + sum(extra[j] for j in before)
        sizes[i] = sum(v.nbytes for v in kernels[i].writes) + sum(sizes[j] for j in before)

    def ranked(some: Sequence[int]) -> list[int]:
        return sorted(some, key=lambda j: (-extra[j], -sizes[j], j))

    made = [maker[v] for v in outputs if v in maker]
    roots = dict.fromkeys([*made, *(i for i, found in enumerate(readers) if not found)])
    early = [_frees(kernel) for kernel in kernels]
    found: dict[int, None] = {}
    for i in operands_first(ranked(list(roots)), lambda i: ranked(operands[i])):
        if i in found:
            continue
        found[i] = None
        for j in readers[i]:
            needed = operands_first([j], operands.__getitem__, found)
            if all(early[k] for k in needed):
                found.update(dict.fromkeys(needed))
    return list(found)


def _frees(kernel: Kernel) -> bool:
    """Whether it leaves far less than it reads, or next to nothing: it does not wait."""
    if sends(kernel.step.name) or kernel.step.inner or kernel.step.is_product:
        return False
    written = sum(v.nbytes for v in kernel.writes)
    return written <= SMALL or 8 * written <= sum(kernel.reads.values())
