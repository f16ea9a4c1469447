"""What the ops of a planned step compute on each device, and what a step computes whatever its plan."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jscaler.clusters.transition_kinds import sends
from jscaler.ir import Graph, Op
from jscaler.ir.loop import chain_of
from jscaler.lower.flat_program import FlatProgram
from jscaler.lower.program import Compute, walk
from jscaler.lower.segment import Segment
from jscaler.lower.step_plan import StepPlan
from jscaler.xla_model.block import Block
from jscaler.xla_model.to_block import Blocks
from jscaler.xla_model.work import KernelWork, Work, work_of, work_of_block


def translated(step: StepPlan, number: int) -> tuple[Blocks, Block]:
    """One of a step's blocks as values and kernels; worked out once for its seconds and for its memory."""
    memo, key = step.graph.memo, ("translated", number)
    if key not in memo:
        flat = step.blocks[number].flat
        blocks = Blocks(flat.origins.op)
        memo[key] = blocks, blocks.program(flat)
    return memo[key]


def block_work(step: StepPlan, number: int, row_kernels: bool) -> Work:
    """The kernels of one run of a block, each with the path of an op: what belongs to none goes with the one before it.

    Collectives are none: their time is that of the links.
    """
    return with_ops(work_of_block(translated(step, number)[1], row_kernels))


def with_ops(work: Work) -> Work:
    """``work`` without its collectives, each kernel with the path of an op, as `block_work` has them."""
    found: list[KernelWork] = []
    op = ""
    kernels = [kernel for kernel in work.kernels if not sends(kernel.name)]
    for kernel in reversed(kernels):  # what stands in front of the first op goes with it
        op = kernel.op or op
    for kernel in kernels:
        op = kernel.op or op
        found.append(kernel if kernel.op else replace(kernel, op=op))
    return Work(tuple(found))


def works(step: StepPlan) -> Iterator[tuple[Op, int, Work]]:
    """Each op of each device group by itself, how often it runs in a step, and its work each time."""
    for segment, task, times in computed(step):
        yield task.op, times, _work(step, segment.flat, task)


def computed(step: StepPlan) -> Iterator[tuple[Segment, Compute, int]]:
    """What each device group computes, and how often in a step."""
    for segment in step.segments:
        for task, times in walk(segment.program.tasks, segment.program.times):
            if isinstance(task, Compute):
                yield segment, task, times


def _work(step: StepPlan, flat: FlatProgram, task: Compute) -> Work:
    """Worked out once for all ops of one body, one placement, and one share of what others have done before."""
    book: Any = step.graph.rules
    done = flat.origins.done[task.op.path]
    key = ("work", task.jaxpr, done)
    if key not in book.memo:
        book.memo[key] = work_of(task.jaxpr, done)
    return book.memo[key]


def model_flops(graph: Graph) -> dict[str, float]:
    """Floating-point operations of the products of a captured step, by the dtype of their operands.

    Each counts once, however often a plan or ``jax.checkpoint`` computes it (Chowdhery et al., PaLM, 2022, appendix B), and
    in the backward once more for each operand that has a gradient.
    """
    book: Any = graph.rules
    found: dict[str, float] = {}
    for op in graph.ops:
        if op.body is None:
            continue
        key = ("products", op.body.jaxpr)
        if key not in book.memo:
            book.memo[key] = work_of(op.body.jaxpr).products
        loops = chain_of(op.loop, graph.loops)
        times = math.prod(graph.loops[name].length for name in loops) * (1 + _operands_with_gradients(op))
        for dtype, count in book.memo[key].items():
            found[dtype] = found.get(dtype, 0.0) + times * count
    return found


def _operands_with_gradients(op: Op) -> int:
    """Of the two of a product in it; they may be one tensor."""
    if op.backward is None or not op.backward.gradients:
        return 0
    return 2 if len(op.backward.gradients) >= min(2, len(op.inputs)) else 1
