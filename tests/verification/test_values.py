"""Values of dots are known in either order of their operands, and told apart where a dim goes elsewhere."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jscaler.verification.local_programs import Local, trace_local
from jscaler.verification.values import Values, content_key, numbered

SQUARE = jax.ShapeDtypeStruct((4, 4, 4), jnp.float32)
FREE, BATCHED = (((2,), (0,)), ((), ())), (((2,), (1,)), ((0,), (0,)))
HIGH, LOW = lax.Precision.HIGHEST, lax.Precision.DEFAULT


def plain(a: Any, b: Any) -> jax.Array:
    return lax.dot_general(a, b, FREE)


def traced(fun: Any) -> Local:
    return trace_local(lambda a, b: [fun(a, b)], {}, [SQUARE] * 2)


def of_two_arguments(values: Values, local: Local) -> list[int]:
    return values.results(local, [values.argument(0), values.argument(1)])


def same(one: Any, other: Any) -> bool:
    """Whether two functions of ``a`` and ``b`` are known to compute the same value."""
    values = Values()
    return of_two_arguments(values, traced(one)) == of_two_arguments(values, traced(other))


EQUAL = {
    "swapped": (
        lambda a, b: plain(a, b).transpose(2, 3, 0, 1),
        lambda a, b: lax.dot_general(b, a, (((0,), (2,)), ((), ()))),
    ),
    "batched": (
        lambda a, b: lax.dot_general(a, b, BATCHED).transpose(0, 2, 1),
        lambda a, b: lax.dot_general(b, a, (((1,), (2,)), ((0,), (0,)))),
    ),
    "twice": (lambda a, b: plain(a, b).transpose(1, 2, 3, 0).transpose(3, 0, 1, 2), plain),
    "precision": (
        lambda a, b: lax.dot_general(a, b, FREE, precision=(HIGH, LOW)).transpose(2, 3, 0, 1),
        lambda a, b: lax.dot_general(b, a, (((0,), (2,)), ((), ())), precision=(LOW, HIGH)),
    ),
}
DIFFERENT = {
    "not transposed": (plain, lambda a, b: lax.dot_general(b, a, (((0,), (2,)), ((), ())))),
    "transposed otherwise": (
        lambda a, b: plain(a, b).transpose(1, 0, 2, 3),
        lambda a, b: plain(a, b).transpose(0, 1, 3, 2),
    ),
    "another dim is summed": (plain, lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ())))),
    "another pairing": (
        lambda a, b: lax.dot_general(a, b, (((1, 2), (0, 1)), ((), ()))),
        lambda a, b: lax.dot_general(a, b, (((1, 2), (1, 0)), ((), ()))),
    ),
    "operands": (plain, lambda a, b: plain(b, a)),
    "precision": (plain, lambda a, b: lax.dot_general(a, b, FREE, precision=HIGH)),
}


@pytest.mark.parametrize("case", EQUAL)
def test_a_transposed_dot_is_the_dot_of_swapped_operands(case: str) -> None:
    assert same(*EQUAL[case])


@pytest.mark.parametrize("case", DIFFERENT)
def test_other_dots_are_other_values(case: str) -> None:
    assert not same(*DIFFERENT[case])


def test_a_reshape_that_undoes_another_is_nothing() -> None:
    assert same(lambda a, b: a.reshape(16, 4).reshape(4, 4, 4) + b, lambda a, b: a + b)
    assert same(lambda a, b: a.reshape(16, 4).reshape(64), lambda a, b: a.reshape(16, 4).reshape(64))
    assert not same(lambda a, b: a.reshape(16, 4).reshape(64), lambda a, b: a.reshape(4, 16))


def delayed(grow: float, length: int = 4, nested: bool = False) -> Any:
    """What stands at the end of a shift register whose front ``a * grow ** iteration`` enters: told apart late."""

    def register(a: Any, b: Any) -> Any:
        def shift(carry: Any, _: Any) -> Any:
            front, *rest = carry
            return (front * grow, front, *rest[:-1]), None

        return lax.scan(shift, (a, *[b] * length), None, length=9)[0][-1]

    def around(a: Any, b: Any) -> Any:
        return lax.scan(lambda c, _: ((c[1], register(c[0], c[1])), None), (a, b), None, length=3)[0][0]

    return around if nested else register


def proven(one: Any, other: Any) -> bool:
    first, second = numbered(lambda values: [of_two_arguments(values, traced(fun)) for fun in (one, other)], 99)
    return first == second


@pytest.mark.parametrize("nested", [False, True])
def test_loops_whose_carries_differ_late_are_told_apart(nested: bool) -> None:
    assert proven(delayed(2.0, nested=nested), delayed(2.0, nested=nested))
    assert not proven(delayed(2.0, nested=nested), delayed(3.0, nested=nested))
    assert not proven(delayed(2.0, nested=nested), delayed(2.0, 3, nested=nested))


def test_one_round_more_is_asked_for_until_no_carries_part() -> None:
    one, other = (traced(delayed(growth)) for growth in (2.0, 3.0))
    early, late = Values(1), Values(8)
    assert of_two_arguments(early, one) == of_two_arguments(early, other)
    assert not early.settled
    assert of_two_arguments(late, one) != of_two_arguments(late, other)
    assert late.settled


def test_loops_in_loops_are_numbered_in_a_few_rounds() -> None:
    """Gone through as often as there are carries, four loops within each other would be run millions of times."""

    def nest(depth: int) -> Any:
        def run(a: Any, b: Any) -> Any:
            inner = nest(depth - 1) if depth else plain_product

            def body(carry: Any, _: Any) -> Any:
                x, *sums = carry
                x = inner(x, b)
                return (x, *(s + i * x for i, s in enumerate(sums))), None

            return lax.scan(body, (a, *[jnp.zeros_like(a)] * 20), None, length=2)[0][0]

        return run

    def plain_product(a: Any, b: Any) -> Any:
        return a * jnp.tanh(b)

    local = traced(nest(3))
    runs = Counter[str]()

    class Counting(Values):
        def _equation(self, eqn: Any, args: list[int]) -> list[int]:
            runs[eqn.primitive.name] += 1
            return super()._equation(eqn, args)

    values = Counting(2)
    of_two_arguments(values, local)
    assert values.settled
    assert runs["tanh"] < 300


def scanned(fun: Any, again: Any = lambda x: x) -> Any:
    """A loop with a carry that it does not change, and stacks of what it is given; hidden from JAX by ``again``."""

    def run(a: Any, b: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            moved, kept, x = again((*carry, x))
            return (fun(moved, kept), kept), (x, moved)

        (first, same), (given, left) = lax.scan(body, (a, b), a)
        return first + same + given.sum() + left.sum()

    return run


@pytest.mark.smoke
def test_carries_that_stay_and_stacks_that_are_handed_on() -> None:
    """JAX takes them out of a loop where it sees them, and numbers are the same wherever it does."""
    hidden = jax.jit(lambda x: x)
    assert proven(scanned(lambda m, k: m * k), scanned(lambda m, k: m * k, hidden))
    assert not proven(scanned(lambda m, k: m * k), scanned(lambda m, k: m + k, hidden))
    swapped = lambda a, b: lax.scan(lambda c, _: ((c[1], c[0]), None), (a, b), None, length=3)[0][0]  # noqa: E731
    assert not proven(swapped, lambda a, b: a)
    shifted = lambda a, b: lax.scan(lambda c, _: ((c[1], c[1] * 2), None), (a, a), None, length=3)[0][0]  # noqa: E731
    assert not proven(shifted, lambda a, b: a)


def test_reshapes_of_turned_dims_and_casts() -> None:
    assert not same(lambda a, b: lax.reshape(a, (4, 4, 4), dimensions=(2, 1, 0)), lambda a, b: a)
    flat = lambda x: x.reshape(16, 4)  # noqa: E731
    assert same(
        lambda a, b: flat(a).reshape(4, 4, 4).astype(jnp.bfloat16),
        lambda a, b: flat(a).astype(jnp.bfloat16).reshape(4, 4, 4),
    )


def test_numbers_of_few_bits_are_told_apart() -> None:
    for kind, one, other in (("float8_e4m3fn", 1.0, 0.0625), ("int4", -1, 1)):
        assert content_key(jnp.asarray(one, kind)) != content_key(jnp.asarray(other, kind))
    assert content_key(jnp.asarray(-1, "int4")) != content_key(jnp.asarray(15, "uint4"))
