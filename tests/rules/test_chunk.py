"""Chunks: the parts of an op one after another in a loop give the whole, and hold what is inside for one chunk only."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from of_the_day import of_the_day
from parts import backward, check_splits, fragment

from jscaler.errors import divisors
from jscaler.rules.chunk import Chunks
from jscaler.verification.whole_against_parts import FragmentInParts, Split

rng = np.random.default_rng(3)
x = rng.normal(size=(4, 6))
w = rng.normal(size=(6, 8))
ids = np.array([1, 0, 7, 3])


def cross_entropy(x: jax.Array, w: jax.Array, ids: jax.Array) -> jax.Array:
    logits = jax.nn.log_softmax(x @ w)
    return -jnp.take_along_axis(logits, ids[:, None], 1).sum()


def walked(made: FragmentInParts, factor: str, count: int) -> Callable[[Split], core.Jaxpr]:
    return lambda split: Chunks(made.analysis, *made.cuts(split), made.leaves[factor], count).run()


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "elementwise and sums": (lambda x: (jnp.tanh(x), x.sum(0), x.sum(1), x.max(0), x.min(1)), (x,)),
    "independent": (lambda x, y: (x.sum(0), jnp.exp(y)), (x, rng.normal(size=(3,)))),
    "dot": (lambda x, w: x @ w, (x, w)),
    "cross entropy": (cross_entropy, (x, w, ids)),
    "positions": (lambda x: x * jnp.arange(4)[:, None] + jnp.arange(6), (x,)),
    "refined": (lambda x, w: (x @ w).reshape(4, 4, 2).transpose(1, 0, 2).sum(2), (x, w)),
    "integers and booleans": (lambda i: (i.sum(0), (i > 0).any(1), i.max(1)), (np.arange(-12, 12).reshape(4, 6),)),
}  # fmt: skip


def check_chunks(fun: Callable[..., Any], args: Any) -> None:
    made = fragment(fun, *args)
    for factor, size in made.open.items():
        count = divisors(size)[1]
        nested = [{factor: 2}] if size % (2 * count) == 0 else []
        others = [{other: divisors(n)[1]} for other, n in made.open.items() if other != factor][:1]
        check_splits(made, args, [{}, *nested, *others], part=walked(made, factor, count))


@pytest.mark.parametrize("name", of_the_day(PROGRAMS, 2, ["positions"]))
def test_whole_against_chunks_of_parts(name: str) -> None:
    check_chunks(*PROGRAMS[name])


@pytest.mark.smoke
def test_the_backward_of_a_cross_entropy_in_chunks() -> None:
    pair = backward(cross_entropy, x, w, ids)
    assert pair is not None
    check_chunks(*pair)


def test_chunks_of_unequal_parts_of_another_factor() -> None:
    made = fragment(lambda x, w: x @ w, x, w)
    check_splits(made, (x, w), [{"a": (3, 1), "b": (1, 5)}], part=walked(made, "c", 4))


def test_chunks_of_parts_whose_windows_read_the_neighbours_rows() -> None:
    def smooth(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    args = rng.normal(size=(4, 8, 8, 2)), rng.normal(size=(3, 3, 2, 4))
    made = fragment(smooth, *args)
    (batch,) = (name for name, size in made.open.items() if size == 4 and name in made.rule.operands[0][0])
    (rows,) = made.rule.operands[0][1]
    check_splits(made, args, [{}, {rows: 2}, {rows: 4}, {rows: 2, batch: 2}], part=walked(made, batch, 2))


def test_chunks_draw_the_bits_of_the_whole() -> None:
    key = jax.random.key(5)
    made = fragment(lambda k: jax.random.bits(k, (4, 6), "uint32"), key)
    check_splits(made, (key,), [{}, {"a": 2}], exact=True, part=walked(made, "b", 3))


def test_what_is_inside_is_held_for_one_chunk() -> None:
    made = fragment(cross_entropy, x, w, ids)
    (loop,) = [e for e in walked(made, "a", 4)({}).eqns if e.primitive.name == "scan"]
    assert not any(v.aval.shape == (4, 8) for v in loop.outvars)
    inner = next(iter(core.jaxprs_in_params(loop.params)))
    inner = getattr(inner, "jaxpr", inner)
    assert {v.aval.shape for e in inner.eqns for v in e.outvars if len(v.aval.shape) == 2 and 8 in v.aval.shape} == {(1, 8)}


def test_sums_of_short_floats_are_added_up_in_float32() -> None:
    ones = jnp.ones((4096, 1), jnp.bfloat16)
    made = fragment(lambda a, b: a.T @ b, ones, ones)
    (total,) = jax.core.eval_jaxpr(walked(made, "a", 1024)({}), [], ones, ones)
    assert (total.dtype, float(total[0, 0])) == (jnp.bfloat16, 4096.0)  # in bfloat16, 256 + 1 is 256
