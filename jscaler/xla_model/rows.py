"""Row-wise kernels: a softmax is one, where XLA has Triton (on Ampere and later).

A row that a kernel holds as a whole is read once, however often it is reduced:

    reduce_max(x) → m      reduce_sum(exp(x - m)) → s      exp(x - m) / s          three kernels, or one

XLA begins such a kernel at a reduction along the last dims. Nothing but one chain reads its result, and leads back to rows:
a softmax's maximum, the mean of squares of an RMS norm, but not the two sums of a layer norm. Each kernel that reads the
result does the reduction again. The kernel takes in the reductions of these rows whose results are for it alone. Rows of
more than 16,384 elements stay in several kernels. Random bits are drawn behind it, in a kernel that reads what it leaves.
"""

import dataclasses
from collections.abc import Sequence

from jscaler.ir.walk import grouped
from jscaler.xla_model.block import Aliases, Block, BlockStep, Kernel, Value

LONGEST = 1 << 14  # elements of a row: seen in the HLO that XLA makes for an H200 (32,768 are in several kernels)


def in_rows(block: Block, kernels: Sequence[Kernel]) -> list[Kernel]:
    """``kernels`` with the reductions of a row, and what is computed of the row and of these, as one.

    Example:
        >>> x, m, y = Value(4096, "x"), Value(16, "m"), Value(4096, "y")
        >>> steps = BlockStep("reduced", "reduce_max", (x,), (m,), row=256), BlockStep("fused", "sub", (x, m), (y,))
        >>> block = Block((x,), steps, (y,))
        >>> [(k.step.name, dict(k.reads)) for k in in_rows(block, kernels_of(block))]
        [('sub', {x: 4096})]
    """
    reads, aliases = _readers(block)
    begins = [_row(k) > 0 and _leads_back(k.step, reads) for k in kernels]
    readers: dict[Value, list[int]] = {}
    for place, kernel in enumerate(kernels):
        for value in kernel.reads:
            readers.setdefault(value, []).append(place)
    left = set(aliases.all(block.outputs))
    into: list[tuple[int, ...]] = [
        (place,) for place in range(len(kernels))
    ]  # of each kernel those that it becomes part of
    for place in reversed(range(len(kernels))):
        kernel, row = kernels[place], _row(kernels[place])
        if not row or kernel.writes[0] in left:
            continue
        ends = tuple(dict.fromkeys(end for reader in readers.get(kernel.writes[0], ()) for end in into[reader]))
        if (len(ends) == 1 or begins[place]) and ends and all(_same_rows(kernel, kernels[end], row) for end in ends):
            into[place] = ends
    groups = grouped((end, place) for place, ends in enumerate(into) for end in ends)
    one = {end: group for end, group in groups.items() if len(group) > 1 and any(begins[i] for i in group)}
    found: list[Kernel] = []
    for place, kernel in enumerate(kernels):
        if place in one:
            found += _as_one([kernels[i] for i in one[place]], kernel)
        elif not all(end in one for end in into[place]):
            found.append(kernel)
    return found


def _as_one(group: Sequence[Kernel], last: Kernel) -> list[Kernel]:
    small = {v for kernel in group if kernel is not last for v in kernel.writes}
    row = max(_row(kernel) for kernel in group)
    reads: dict[Value, int] = {}
    for kernel in group:
        reads.update({v: max(n, reads.get(v, 0)) for v, n in kernel.reads.items() if v not in small})
    steps = {id(s): s for kernel in group for s in (*kernel.fused, kernel.step) if s is not last.step}
    drawn = tuple(s for s in steps.values() if s.kind == "drawn")
    if not drawn:
        return [dataclasses.replace(last, reads=reads, fused=tuple(steps.values()), row=row)]
    rows = Value(last.writes[0].nbytes, f"rows of {last.step.op}")
    before = dataclasses.replace(last.step, writes=(rows,))
    rest = tuple(s for s in steps.values() if s.kind != "drawn")
    behind = dataclasses.replace(last, reads={rows: rows.nbytes}, fused=drawn)
    return [Kernel(before, reads, (rows,), fused=rest, row=row), behind]


def _row(kernel: Kernel) -> int:
    """Of a reduction of rows that one kernel can hold their length; else 0."""
    return kernel.step.row if 1 < kernel.step.row <= LONGEST and len(kernel.writes) == 1 else 0


def _same_rows(kernel: Kernel, other: Kernel, row: int) -> bool:
    """Whether ``other`` reads the rows that ``kernel`` reduces, and reduces them or leaves as many elements."""
    if other.step.kind not in ("fused", "reduced") or (other.step.kind == "reduced" and _row(other) != row):
        return False
    rows = {v for v in kernel.reads if _is_large(v, kernel.writes[0], row)}
    fits = other.step.kind == "reduced" or _is_large(other.writes[0], kernel.writes[0], row)
    return fits and bool(rows) and rows <= other.reads.keys()


def _is_large(value: Value, result: Value, row: int) -> bool:
    """Whether it has about as many elements as the rows of which ``result`` has one each; types differ by up to 8 times."""
    return 8 * value.nbytes > result.nbytes * row


def _readers(block: Block) -> tuple[dict[Value, list[BlockStep]], Aliases]:
    """The steps that read each buffer."""
    aliases, found = Aliases(), dict[Value, list[BlockStep]]()
    for step in block.steps:
        if step.kind == "alias":
            aliases.add(step)
            continue
        for value in aliases.all(step.reads):
            found.setdefault(value, []).append(step)
    return found, aliases


def _leads_back(step: BlockStep, readers: dict[Value, list[BlockStep]]) -> bool:
    """Whether one chain reads a reduction's result, up to a step that leaves rows again; no other small value joins it."""
    value = result = step.writes[0]
    while len(ends := readers.get(value, ())) == 1 and ends[0].kind == "fused":
        value = ends[0].writes[0]
        if _is_large(value, result, step.row):
            return True
        if len({v for v in ends[0].reads if v.nbytes > 8}) > 1:
            return False
    return False
