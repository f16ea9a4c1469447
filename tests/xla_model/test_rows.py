"""Kernels that hold whole rows: those that XLA makes for GPUs, read from its HLO (JAX 0.10.2, compiled for an H200), and
that nothing is lost or read twice on the way."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jscaler.capture.jaxprs import trace_flat
from jscaler.xla_model.block import Block, BlockStep, Kernel, Value
from jscaler.xla_model.kernels import kernels_of
from jscaler.xla_model.rows import LONGEST, in_rows
from jscaler.xla_model.to_block import Blocks
from jscaler.xla_model.work import work_of_block

KEY = jax.eval_shape(lambda: jax.random.key(0))


def rows_of(length: int, count: int = 64) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count, length), jnp.bfloat16)


def block_of(fun: Any, *avals: Any) -> Block:
    return Blocks().jaxpr(trace_flat(lambda *xs: jax.tree.leaves(fun(*xs)), avals))


def in_units(fun: Any, *avals: Any) -> list[tuple[int, int]]:
    """What each kernel reads and writes, in arrays of the first operand's size; small ones count nothing."""
    block = block_of(fun, *avals)
    size = avals[0].size * 2
    kernels = in_rows(block, kernels_of(block))
    return [(round(sum(k.reads.values()) / size), round(sum(v.nbytes for v in k.writes) / size)) for k in kernels]


def softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x.astype(jnp.float32), -1).astype(x.dtype)


def layer_norm(x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    spread = jnp.square(y).mean(-1, keepdims=True) - jnp.square(mean)
    return ((y - mean) * jax.lax.rsqrt(spread + 1e-6)).astype(x.dtype)


def rms_norm(x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def backward(x: jax.Array, g: jax.Array) -> jax.Array:
    return jax.vjp(softmax, x)[1](g)[0]


LONG, TOO_LONG = rows_of(LONGEST, 4), rows_of(2 * LONGEST, 4)
XLA = {  # what XLA makes of it, in arrays read and written
    "softmax": (softmax, [rows_of(1024)], [(1, 1)]),
    "of few": (softmax, [rows_of(256)], [(1, 1)]),
    "of the longest": (softmax, [LONG], [(1, 1)]),
    "of longer ones": (softmax, [TOO_LONG], [(1, 0), (1, 0), (1, 1)]),
    "its backward": (backward, [rows_of(1024)] * 2, [(2, 1)]),
    "its backward, longer": (backward, [TOO_LONG] * 2, [(1, 0), (1, 0), (2, 0), (2, 1)]),
    "rms norm": (rms_norm, [rows_of(1024)], [(1, 1)]),
    "layer norm": (layer_norm, [rows_of(1024)], [(1, 0), (1, 0), (1, 1)]),
    "logsumexp": (lambda x: jax.nn.logsumexp(x.astype(jnp.float32), -1), [rows_of(1024)], [(1, 0), (1, 0)]),
    "along columns": (lambda x: jax.nn.softmax(x, 0), [rows_of(1024)], [(1, 0), (1, 0), (1, 1)]),
}


@pytest.mark.parametrize("name", XLA)
def test_a_kernel_holds_a_row_where_xla_s_does(name: str) -> None:
    fun, avals, kernels = XLA[name]
    assert [one for one in in_units(fun, *avals) if one != (0, 0)] == kernels


def test_a_maximum_is_taken_again_by_each_kernel_that_reads_its_rows_and_a_sum_is_not() -> None:
    """A softmax that is read by a product, and again by its gradient: recompute."""

    def twice(x: jax.Array, g: jax.Array, w: jax.Array) -> Any:
        made, back = jax.vjp(softmax, x)
        return made @ w, back(g)[0] @ w

    weights = jax.ShapeDtypeStruct((1024, 8), jnp.bfloat16)
    found = [one for one in in_units(twice, rows_of(1024), rows_of(1024), weights) if one != (0, 0)]
    assert found == [(1, 0), (1, 1), (1, 0), (2, 1), (1, 0)]  # the sum; what the product reads; it; the gradient; it


def test_random_bits_are_drawn_behind_the_rows() -> None:
    def dropped(x: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), softmax(x), 0)

    assert in_units(dropped, rows_of(1024), KEY)[-2:] == [(1, 1), (1, 1)]
    block = block_of(dropped, rows_of(1024), KEY)
    before, behind = in_rows(block, kernels_of(block))[-2:]
    assert (before.row, behind.row) == (1024, 0)
    assert {s.kind for s in before.fused} == {"fused", "reduced"}
    assert "drawn" in {s.kind for s in behind.fused}


def test_what_is_fused_counts_with_the_kernel_that_it_is_fused_into() -> None:
    def fun(x: jax.Array, key: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x @ w, jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)

    weights = jax.ShapeDtypeStruct((1024, 8), jnp.bfloat16)
    found = work_of_block(block_of(fun, rows_of(1024), KEY, weights)).kernels
    drawn = [k for k in found if any(one.unit == "integer" for one in k.flops)]
    assert len(drawn) == 1
    assert not any(one.unit == "bfloat16" for one in drawn[0].flops)
    assert sum(one.count for one in drawn[0].flops if one.unit == "integer") == 86 * 64 * 1024


def test_stacks_that_a_loop_writes_are_filled_with_zeros_and_written_slice_by_slice() -> None:
    def fun(x: jax.Array) -> Any:
        return jax.lax.scan(lambda c, _: (c @ c, c), x, None, length=5)

    size = 64 * 64 * 4
    found = work_of_block(block_of(fun, jax.ShapeDtypeStruct((64, 64), jnp.float32))).kernels
    assert [(k.times, k.read, k.written) for k in found] == [(1, 0, 5 * size), (5, size, size), (5, size, size)]


@pytest.mark.parametrize("seed", range(30))
def test_in_random_programs_no_result_is_lost_and_nothing_is_read_that_is_not_there(seed: int) -> None:
    draw = random.Random(seed)
    values = [Value(4096, f"in{i}") for i in range(2)]
    small: list[Value] = []
    steps, given = [], tuple(values)
    for number in range(25):
        kind = draw.choice(("fused", "fused", "drawn", "reduced", "reduced", "call", "small"))
        operands = tuple(draw.sample(values, draw.randint(1, min(2, len(values)))))
        if kind == "reduced":
            made = Value(16, f"r{number}")
            steps.append(BlockStep("reduced", "reduce_sum", operands, (made,), row=draw.choice((256, 256, 0))))
            small.append(made)
        elif kind == "small" and small:
            made = Value(16, f"s{number}")
            steps.append(BlockStep("fused", "mul", tuple(draw.sample(small, 1)), (made,)))
            small.append(made)
        else:
            made = Value(4096, f"v{number}", draw.random() < 0.2)
            more = (draw.choice(small),) if small and draw.random() < 0.6 else ()
            steps.append(
                BlockStep(
                    "call" if kind == "call" else "drawn" if kind == "drawn" else "fused", kind, operands + more, (made,)
                )
            )
            values.append(made)
    block = Block(given, tuple(steps), (values[-1], values[-2], *small[-1:]))
    plain = kernels_of(block)
    found = in_rows(block, plain)
    written = set(given)
    for kernel in found:
        assert set(kernel.reads) <= written
        written.update(kernel.writes)
    assert set(block.outputs) <= written
    assert bytes_of(found) <= bytes_of(plain) + sum(2 * v.nbytes for k in found if k.row for v in k.writes)
    done = {id(step) for kernel in found for step in (*kernel.fused, kernel.step)}
    before = {id(step) for kernel in plain for step in (*kernel.fused, kernel.step)}
    assert before - done <= {
        id(k.step) for k in plain
    }  # of a row kernel in two, whose first half bears the last step's name


def bytes_of(kernels: Any) -> int:
    return sum(sum(k.reads.values()) + sum(v.nbytes for v in k.writes) for k in kernels)


def test_of_random_programs_many_have_kernels_of_rows() -> None:
    def makes(kernels: list[Kernel]) -> bool:
        return any(kernel.row for kernel in kernels)

    blocks = [block_of(fun, *avals) for fun, avals, _ in XLA.values()]
    assert sum(makes(in_rows(block, kernels_of(block))) for block in blocks) == 5
