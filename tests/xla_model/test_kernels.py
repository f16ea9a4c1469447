"""What is fused and what is stored, case by case."""

import random

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jscaler.capture.jaxprs import trace_flat
from jscaler.xla_model.block import Block, BlockStep, Kernel, Value
from jscaler.xla_model.kernels import kernels_of
from jscaler.xla_model.to_block import Blocks

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def kernels(fun, *avals) -> tuple[Kernel, ...]:
    return kernels_of(Blocks().jaxpr(trace_flat(lambda *xs: [fun(*xs)], avals)))


def shown(fun, *avals) -> list[str]:
    return [k.step.name for k in kernels(fun, *avals)]


def test_elementwise_work_is_one_kernel_and_a_dot_wants_a_buffer() -> None:
    assert shown(lambda x: jnp.exp(x) + jnp.sin(x) * 2, X) == ["add"]
    assert shown(lambda x: jnp.tanh(x + 1) @ x, X) == ["tanh", "dot_general"]


def test_a_reduction_takes_in_what_is_made_for_it() -> None:
    assert shown(lambda x: jnp.sum(x * x, 1), X) == ["reduce_sum"]


def test_a_softmax_stores_its_two_sums_and_its_result() -> None:
    found = kernels(lambda x: jax.nn.softmax(x, -1), X)
    assert [k.step.name for k in found] == ["reduce_max", "reduce_sum", "div"]
    sizes = [sorted(v.nbytes for v in k.reads) for k in found]
    assert sizes == [[64 * 64 * 4], [256, 64 * 64 * 4], [256, 256, 64 * 64 * 4]]


def test_what_many_read_is_stored_where_that_moves_less() -> None:
    """A sum of two arrays with three readers; of one array it is computed three times."""

    def three(y: jax.Array) -> jax.Array:
        return jnp.sum(y, 0) + jnp.sum(y, 1) + jnp.max(y, 1)

    assert shown(lambda a, b: three(a + b), X, X)[0] == "add"
    assert "exp" not in shown(lambda a: three(jnp.exp(a)), X)


def test_a_mask_of_random_bits_is_drawn_once_and_stored_as_booleans() -> None:
    def fun(x: jax.Array, key: jax.Array) -> jax.Array:
        keep = jax.random.uniform(key, x.shape) < 0.9
        return jnp.sum(jnp.where(keep, x, 0), 0) + jnp.max(jnp.where(keep, 1 / x, 0), 1)

    stored = [v for k in kernels(fun, X, KEY) for v in k.writes if v.nbytes >= 64 * 64]
    assert [v.is_flag for v in stored] == [True]


def test_a_fence_keeps_what_is_on_both_sides_apart() -> None:
    assert shown(lambda x: lax.optimization_barrier(jnp.exp(x)) + 1, X) == ["exp", "add"]


def test_zeros_that_two_scatters_add_to_are_filled_twice_and_written_over() -> None:
    def fun(x: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        zeros = jnp.zeros((64, 64))
        return zeros.at[i].add(x, mode="clip") @ zeros.at[j].add(x, mode="clip")

    rows = jax.ShapeDtypeStruct((64,), jnp.int32)
    found = kernels(fun, X, rows, rows)
    sums = [k for k in found if k.step.name == "scatter-add"]
    filled = [{v for v in k.reads if any(v in f.writes and not f.reads for f in found)} for k in sums]
    assert [len(own) for own in filled] == [1, 1]
    assert filled[0].isdisjoint(filled[1])


def test_dots_read_a_transposed_matrix_as_it_lies() -> None:
    found = kernels(lambda x, y: x @ y.T, X, X)
    assert [k.step.name for k in found] == ["dot_general"]
    both = shown(lambda x, y: (turned := y.T) + x @ turned, X, X)
    assert both == ["turn", "dot_general", "add"]


def test_a_lookup_reads_no_more_than_it_gives() -> None:
    (kernel,) = kernels(lambda x, i: jnp.take(x, i, 0, mode="clip"), X, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert sorted(kernel.reads.values())[-1] == 4 * 64 * 4


@pytest.mark.parametrize("seed", range(20))
def test_kernels_read_only_buffers(seed: int) -> None:
    """In random programs of all kinds of steps: what a kernel reads was given, or written by a kernel before."""
    draw = random.Random(seed)
    values = [Value(draw.choice((4, 64, 256)), f"in{i}") for i in range(3)]
    steps, given = [], tuple(values)
    for number in range(30):
        kind = draw.choice(("alias", "fused", "fused", "drawn", "reduced", "call"))
        count = 1 if kind == "alias" else draw.randint(1, 3)
        made = Value(draw.choice((4, 64, 256)), f"v{number}", draw.random() < 0.2)
        steps.append(BlockStep(kind, kind, tuple(draw.sample(values, count)), (made,)))
        values.append(made)
    block = Block(given, tuple(steps), (values[-1], values[-2]))
    written = set(given)
    for kernel in kernels_of(block):
        assert set(kernel.reads) <= written
        written.update(kernel.writes)
    aliases = {s.writes[0]: s.reads[0] for s in steps if s.kind == "alias"}
    for value in block.outputs:
        while value in aliases:
            value = aliases[value]
        assert value in written
