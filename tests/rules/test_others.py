"""Batched matrices, ragged products, approximate top-k, callbacks; and that every primitive of JAX has been thought of."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend import core
from jax.extend.core import primitives
from parts import check, check_both, check_splits, fragment, primitives_in, why_blocked

from jscaler.lax_primitives import TABLE

rng = np.random.default_rng(8)


def real(*shape: int) -> np.ndarray:
    return rng.normal(size=shape)


def positive(count: int, size: int) -> np.ndarray:
    a = real(count, size, size)
    return a @ a.transpose(0, 2, 1) + 3 * np.eye(size)


GROUPS = np.array([2, 4])
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    # name: function, operands, its open factors
    "cholesky": (lambda a: lax.linalg.cholesky(a, symmetrize_input=False), (positive(2, 3),), "a"),
    "eigh": (lambda a: lax.linalg.eigh(a, symmetrize_input=False)[1], (positive(2, 3),), "a"),
    "triangular_solve": (
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        (positive(2, 3), real(2, 3, 4)),
        "a",
    ),
    "qr": (lambda a: lax.linalg.qr(a, full_matrices=False), (real(2, 4, 3),), "a"),
    "lu": (lambda a: lax.linalg.lu(a)[0], (real(2, 3, 3),), "a"),
    "svd": (lambda a: lax.linalg.svd(a, compute_uv=False), (real(2, 4, 3),), "a"),
    "fft": (lambda a: jnp.fft.fft(a), (real(2, 3, 4) + 0j,), "ab"),
    "approx_top_k": (lambda a: lax.approx_max_k(a, 2), (real(4, 8),), "a"),
    "device_put": (lambda x: jax.device_put(x) * 2, (real(4, 6),), "ab"),
}


@pytest.mark.parametrize("name", CASES)
def test_others(name: str) -> None:
    fun, args, factors = CASES[name]
    made = (check if name in ("svd", "lu", "eigh", "qr") else check_both)(fun, *args)
    assert name in primitives_in(made)
    assert "".join(made.open) == factors


RAGGED = (lax.ragged_dot, (real(6, 3), real(2, 3, 4), np.array([2, 4])))


def test_a_ragged_product_splits_as_a_dot_but_for_its_groups() -> None:
    args = (real(6, 3), real(2, 3, 4), np.array([2, 4]))
    backward_args = (*args, real(6, 4))
    made = fragment(lax.ragged_dot, *args)
    assert str(made.rule) == "a b, c b d, c -> a d"
    assert {n: made.rule.factors[n].kind for n in made.open} == {"b": "reduction", "d": "parallel"}
    check_splits(made, args, [{"b": 3}, {"d": 2}, {"d": 4, "b": 3}], one_by_one=True)
    made = fragment(lambda x, y, n, dz: jax.vjp(lambda x, y: lax.ragged_dot(x, y, n), x, y)[1](dz), *backward_args)
    check_splits(made, backward_args, [{n: made.open[n]} for n in made.open], one_by_one=True)
    assert {*made.open.values()} == {3, 4}


def host(x: Any) -> Any:
    return x


CALLBACKS: dict[str, Callable[[Any], Any]] = {
    "pure": lambda x: jax.pure_callback(host, x, x) + 1,
    "io": lambda x: io_callback(host, x, x) + 1,
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_say_who_they_are(name: str) -> None:
    made = fragment(CALLBACKS[name], jnp.ones((4, 6)))
    assert "the host callback 'host' of tests/rules/test_others.py:" in why_blocked(made, 0, 0)


def test_a_callback_of_a_partial_sum_blocks() -> None:
    def loud(x: jax.Array) -> jax.Array:
        jax.debug.print("sum {}", x.sum())
        return x * 2

    made = fragment(loud, jnp.ones((4, 6)))
    assert "the host callback 'sum {}' of tests/rules/test_others.py:" in why_blocked(made, 0, 0)
    assert why_blocked(made, 0, 0).endswith("has a side effect, which would happen once per part")


def test_every_public_primitive_is_in_the_table_or_unknown_on_purpose() -> None:
    public = {p.name for p in vars(primitives).values() if isinstance(p, core.Primitive)}
    ruled = {name for name, one in TABLE.items() if one.spec is not None or one.nested or one.opened}
    refused = {name for name, one in TABLE.items() if one.why}
    left = public - ruled - refused - {"call", "custom_lin", "eval_jaxpr", "polynomial"}
    assert not left, "give it a spec, or say why it has none"
    assert not ruled & refused
