"""Every primitive of the table, at several shapes and dimension numbers: the parts make the whole, forward and backward."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
from of_the_day import of_the_day
from parts import check_both, fragment, primitives_in, why_blocked

from jscaler.lax_primitives import elementwise
from jscaler.verification.rules import verify_rules

rng = np.random.default_rng(0)


def real(*shape: int, low: float = 0.1, high: float = 0.9, dtype: Any = np.float64) -> np.ndarray:
    return rng.uniform(low, high, shape).astype(dtype)


def whole(*shape: int, low: int = 0, high: int = 6, dtype: Any = np.int32) -> np.ndarray:
    return rng.integers(low, high, shape).astype(dtype)


def flags(*shape: int) -> np.ndarray:
    return rng.random(shape) < 0.5


def keys(*shape: int, impl: str = "threefry2x32") -> jax.Array:
    return jax.random.split(jax.random.key(4, impl=impl), shape) if shape else jax.random.key(4, impl=impl)


def words(*shape: int) -> np.ndarray:
    return rng.integers(0, 2**32, shape, dtype=np.uint32)


# Operands that elementwise primitives take, where two real ones in (0, 1) will not do.
S = (2, 3)
OPERANDS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "acosh": lambda: (real(*S, low=1.1, high=3),),
    "zeta": lambda: (real(*S, low=1.5, high=3), real(*S)),
    "polygamma": lambda: (whole(*S, low=1, high=3), real(*S)),
    "regularized_incomplete_beta": lambda: (whole(*S, low=1, high=3), whole(*S, low=1, high=3), real(*S)),
    "clamp": lambda: (real(*S, high=0.3), real(*S), real(*S, low=0.6)),
    "threefry2x32": lambda: tuple(words(*S) for _ in range(4)),
    "random_fold_in": lambda: (keys(*S), words(*S)),
    **{n: lambda: (whole(*S), whole(*S)) for n in ("and", "or", "xor", "mulhi")},
    **{n: lambda: (whole(*S),) for n in ("not", "clz", "population_count")},
    **{n: lambda: (whole(*S), whole(*S, high=3)) for n in ("shift_left", "shift_right_arithmetic", "shift_right_logical")},
}  # fmt: skip
ROUNDED = frozenset(
    ["cbrt", "cos", "exp", "exp2", "expm1", "log", "log1p", "log2", "logistic", "rsqrt", "sin", "sqrt", "tan", "tanh"]
)
PARAMS: dict[str, dict[str, Any]] = {
    "integer_pow": {"y": 3},
    "bitcast_convert_type": {"new_dtype": np.dtype(np.int64)},
    "reduce_precision": {"exponent_bits": 5, "mantissa_bits": 7},
    "round": {"rounding_method": lax.RoundingMethod.TO_NEAREST_EVEN},
    **{n: {"accuracy": None} for n in ROUNDED},
}
BINARY = frozenset(
    [
        "atan2",
        "eq",
        "eq_to",
        "ge",
        "gt",
        "igamma",
        "igamma_grad_a",
        "igammac",
        "le",
        "le_to",
        "lt",
        "lt_to",
        "max",
        "min",
        "ne",
        "nextafter",
        "pow",
        "rem",
    ]
)
PRIMITIVES = {p.name: p for p in vars(primitives).values() if hasattr(p, "bind")}


OF_THEIR_OWN = frozenset(  # those with cases below
    ["add", "add_any", "complex", "conj", "convert_element_type", "copy", "div", "imag", "mul", "name", "neg", "real",
     "select_n", "stop_gradient", "sub"]
)  # fmt: skip
ELEMENTWISE = [one.name for one in elementwise.RECORDS if one.name not in OF_THEIR_OWN and one.by_row]
ELEMENTWISE_HERE = [n for n in ELEMENTWISE if n in PRIMITIVES]


def elementwise_call(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function that binds an elementwise primitive, and operands that it takes."""
    operands = OPERANDS.get(name, lambda: tuple(real(*S) for _ in range(1 + (name in BINARY))))()

    def call(*xs: Any) -> Any:
        if name in ("polygamma", "regularized_incomplete_beta"):  # JAX knows no derivative of all but the last
            xs = tuple(x.astype(np.float64) for x in xs)
        return PRIMITIVES[name].bind(*xs, **PARAMS.get(name, {}))

    return call, operands


@pytest.mark.parametrize(
    "names", of_the_day([ELEMENTWISE_HERE[i : i + 10] for i in range(0, len(ELEMENTWISE_HERE), 10)], 6), ids=" ".join
)
def test_elementwise(names: Sequence[str]) -> None:
    """Ten primitives in one compilation."""
    calls = [elementwise_call(n) for n in names]
    for name, (fun, args), report in zip(names, calls, verify_rules(calls), strict=True):
        made = fragment(fun, *args)
        assert name in primitives_in(made)
        assert sorted(made.open.values()) == sorted(S)
        forward = [(c.size, c.parts) for c in report.checks if c.direction == "forward"]
        assert sorted(forward) == [(2, 2), (3, 3)]


def cases() -> dict[str, list[tuple[Callable[..., Any], tuple[Any, ...]]]]:
    """For each other primitive, functions that trace to it."""
    x, y, z = real(4, 6), real(4, 6), real(2, 3, 4)
    n = whole(4, 6)
    c = real(4, 6) + 1j * real(4, 6)
    row, one = real(6), real(1, 6)
    words8 = words(4, 6)
    return {
        # linear in all, in each, in the first
        "add": [(jnp.add, (x, y)), (jnp.add, (x, row)), (jnp.add, (x, one)), (lambda x: x + 1.5, (x,)), (jnp.add, (n, n))],
        "sub": [(jnp.subtract, (x, y)), (lambda x, y: x.sum(0) - y.sum(0), (x, y)), (lambda x: x.sum(0) - 1, (x,))],
        "add_any": [(primitives.add_jaxvals_p.bind, (x, y))],
        "mul": [
            (jnp.multiply, (x, y)),
            (lambda x, y: x.sum(0) * y.sum(1), (x, real(6, 3))),
            (lambda x: x.sum(0) * x.sum(0), (x,)),
            (lambda n: n.sum(0) * 3, (n,)),
        ],
        "neg": [(lambda x: -x, (x,)), (lambda x: -x.sum(1), (x,)), (lambda x: -x.max(1), (x,))],
        "div": [
            (jnp.divide, (x, y)),
            (lambda x, r: x.sum(0) / r, (x, row)),
            (lambda x, r: r / x.sum(0), (x, row)),
            (lambda n: lax.div(n.sum(0), jnp.int64(3)), (n,)),
        ],
        "conj": [(jnp.conj, (c,)), (lambda c: jnp.conj(c.sum(0)), (c,))],
        "complex": [(lax.complex, (x, y)), (lambda x, y: lax.complex(x.sum(0), y.sum(0)), (x, y))],
        "real": [(jnp.real, (c,)), (lambda c: jnp.real(c.sum(0)), (c,))],
        "imag": [(jnp.imag, (c,)), (lambda c: jnp.imag(c.sum(0)), (c,))],
        "copy_p": [(jnp.copy, (x,)), (lambda x: jnp.copy(x.max(0)), (x,))],
        "copy": [(jnp.copy, (x,)), (lambda x: primitives.copy_p.bind(x.sum(1)), (x,))],
        "stop_gradient": [(lax.stop_gradient, (x,))],
        "select_n": [
            (lax.select_n, (flags(4, 6), x, y)),
            (lax.select_n, (whole(4, 6, high=3), x, y, x * y)),
            (lax.select_n, (np.bool_(True), x, y)),
            (lambda p, x, y: jnp.where(p, x.sum(0), y.sum(0)), (flags(6), x, y)),
            (lambda p, x: jnp.where(p, x.sum(0), 0.0), (flags(6), x)),
            (lambda p, x: jnp.where(p, x.sum(0), 1.0), (flags(6), x)),
            (lambda x: jnp.where(x.sum(0) > 2, 1.0, x.max(0)), (x,)),
        ],
        "convert_element_type": [
            (lambda x: x.astype(jnp.float32), (x,)),
            (lambda x: x.sum(0).astype(jnp.float64), (whole(4, 6).astype(np.float32),)),
            (lambda x: x.max(0).astype(jnp.float32), (x,)),
            (lambda x: x.sum(0).astype(jnp.float32), (x,)),
            (lambda x: x.sum(0).astype(jnp.int32), (x,)),
            (lambda n: n.sum(0).astype(jnp.int8), (n * 50,)),
        ],
        # movements
        "broadcast_in_dim": [
            (lambda r: jnp.broadcast_to(r, (4, 6)), (row,)),
            (lambda o: jnp.broadcast_to(o, (4, 6)), (one,)),
            (lambda x: x[:, None, :, None], (x,)),
            (lambda x: x.sum(0)[:, None] + jnp.zeros((6, 3)), (x,)),
            (lambda x: jnp.broadcast_to(x.max(0), (3, 6)), (x,)),
            (lambda s, x: jnp.full((4, 6), s) * x, (np.float64(2), x)),
        ],
        "reshape": [
            (lambda z: z.reshape(6, 4), (z,)),
            (lambda z: z.reshape(2, 12), (z,)),
            (lambda z: z.reshape(24), (z,)),
            (lambda x: x.reshape(4, 2, 3), (x,)),
            (lambda x: x.reshape(2, 2, 3, 2), (x,)),
            (lambda x: x.reshape(1, 4, 1, 6, 1), (x,)),
            (lambda x: x.reshape(3, 8), (x,)),
            (lambda x: x.reshape(6, 4), (x,)),
            (lambda w: w.reshape(6, 6), (real(4, 9),)),
            (lambda w: w.reshape(4, 3, 4), (real(6, 2, 4),)),
            (lambda w: w.reshape(10, 18), (real(6, 15, 2),)),
            (lambda x: x.sum(0).reshape(2, 3), (x,)),
            (lambda w: w.reshape(3, 4), (real(12),)),
            (lambda x: lax.reshape(x, (6, 4), dimensions=(1, 0)), (x,)),
            (lambda z: lax.reshape(z, (6, 4), dimensions=(1, 0, 2)), (z,)),
            (lambda z: lax.reshape(z, (8, 3), dimensions=(2, 0, 1)), (z,)),
            (lambda z: lax.reshape(z, (3, 8), dimensions=(2, 0, 1)), (z,)),
            (lambda w: w.reshape(4, 6) + w.reshape(6, 4).T, (real(24),)),
            (lambda w: w.reshape(4, 6) @ w.reshape(6, 4), (real(24),)),
        ],
        "transpose": [
            *((lambda z, p=p: z.transpose(p), (z,)) for p in list(itertools.permutations(range(3)))[1:]),
            (lambda z: z.sum(0).T, (z,)),
            (lambda x: x @ x.T, (x,)),
            (lambda w: w + w.T, (real(6, 6),)),
        ],
        "squeeze": [
            (lambda o: o[0], (one,)),
            (lambda w: jnp.squeeze(w), (real(1, 4, 1, 6),)),
            (lambda w: w.sum(1)[0], (real(1, 4, 6),)),
        ],
        "tile": [
            (lambda w: jnp.tile(w, (4, 1, 1)), (real(1, 3, 2),)),
            (lambda w: jnp.tile(w, (2, 2)), (real(4, 3),)),
            (lambda x: jnp.tile(x, (2, 1)).sum(1), (x,)),
            (lambda x: jnp.tile(x.sum(0), 2), (x,)),
            (lambda x: jnp.tile(x, (1, 3)).reshape(4, 3, 6), (x,)),
        ],
        "expand_dims": [(lambda x: jnp.expand_dims(x, (0, 2)), (x,))],
        "optimization_barrier": [
            (lax.optimization_barrier, (x,)),
            (lambda x, y: lax.optimization_barrier((x, y)), (x, row)),
            (lambda x, y: lax.optimization_barrier((x.sum(0), y)), (x, real(3))),
        ],
        # reductions
        "reduce_sum": [
            *((lambda z, a=a: z.sum(a), (z,)) for a in (0, 1, (0, 2), None)),
            (lambda z: z.sum(0).sum(1), (z,)),
            (lambda z: z.max(0).sum(0), (z,)),
            (lambda n: n.sum(1), (n,)),
            (lambda x: x.mean(), (x,)),
        ],
        "reduce_max": [
            *((lambda z, a=a: z.max(a), (z,)) for a in (0, (1, 2), None)),
            (lambda n: n.max(0), (n,)),
            (lambda z: z.sum(1).max(0), (z,)),
            (lambda x, y: jnp.maximum(x.max(0), y.max(0)), (x, y)),
            (lambda x, y: jnp.maximum(x.max(0), y), (x, row)),
        ],
        "reduce_min": [
            *((lambda z, a=a: z.min(a), (z,)) for a in (0, (1, 2), None)),
            (lambda n: n.min(0), (n,)),
            (lambda x: -x.min(0), (x,)),
            (lambda x, y: jnp.minimum(x.min(0), y.min(0)), (x, y)),
        ],
        "reduce_prod": [(lambda z: z.prod(1), (z,)), (lambda z: z.prod((0, 2)), (z,))],
        "reduce_or": [(lambda p: p.any(0), (flags(4, 6),)), (lambda n: primitives.reduce_or_p.bind(n, axes=(0,)), (n,))],
        "reduce_and": [
            (lambda p: p.all(0), (flags(4, 6),)),
            (lambda n: primitives.reduce_and_p.bind(n, axes=(0,)), (n + 1,)),
        ],
        "reduce_xor": [(lambda n: primitives.reduce_xor_p.bind(n, axes=(0,)), (n,))],
        "argmax": [
            (lambda x: x.argmax(0), (x,)),
            (lambda x: x.argmax(1), (x,)),
            (lambda z: lax.argmax(z, 1, jnp.int8), (z,)),
        ],
        "argmin": [(lambda x: x.argmin(0), (x,)), (lambda z: z.argmin(2), (z,))],
        # contractions
        "dot_general": [
            (jnp.dot, (x, real(6, 3))),
            (jnp.dot, (row, row)),
            (jnp.dot, (z, real(4, 6))),
            (lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (z, real(2, 6, 4))),
            (lambda a, b: jnp.einsum("ibj,kjb->bki", a, b), (z, real(6, 4, 3))),
            (lambda a, b: jnp.einsum("bij,bij->b", a, b), (z, z)),
            (lambda a, b: jnp.einsum("bqhd,bkhd->bhqk", a, b), (real(2, 3, 4, 2), real(2, 6, 4, 2))),
            (lambda a, b: jnp.einsum("ij,kl->ikjl", a, b), (x, real(3, 2))),
            (lambda a, b, c: (a @ b) @ c, (x, real(6, 3), real(3, 2))),
            (lambda a, b: (a @ b).reshape(4, 3, 2, 4), (x, real(6, 24))),
            (lambda a, b: a.reshape(4, 6) @ b, (real(4, 2, 3), real(6, 3))),
            (lambda a: a.reshape(2, 2, 6) @ a.T, (x,)),
        ],
        # walked in order
        "cumsum": [
            (lambda x: jnp.cumsum(x, 0), (x,)),
            (lambda x: lax.cumsum(x, 1, reverse=True), (x,)),
            (lambda z: jnp.cumsum(z.sum(0), 1), (z,)),
        ],
        "cumprod": [(lambda x: jnp.cumprod(x, 1), (x,))],
        "cummax": [(lambda x: lax.cummax(x, 1), (x,))],
        "cummin": [(lambda x: lax.cummin(x, 0), (x,))],
        "cumlogsumexp": [(lambda x: lax.cumlogsumexp(x, 1), (x,))],
        "sort": [
            (lambda x: jnp.sort(x, 0), (x,)),
            (lambda x: jnp.argsort(x, 1), (x,)),
            (lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), (x, y)),
        ],
        "top_k": [
            (lambda x: lax.top_k(x, 2), (x,)),
            (lambda x: lax.top_k(x, 6), (x,)),
            (lambda z: lax.top_k(z, 1)[0], (z,)),
        ],
        "rev": [(lambda x: x[::-1], (x,)), (lambda z: jnp.flip(z, (0, 2)), (z,)), (lambda z: jnp.flip(z.max(0), 1), (z,))],
        # parts of tensors
        "slice": [
            (lambda x: x[1:3], (x,)),
            (lambda x: x[:, 1:5:2], (x,)),
            (lambda z: z[:, 1:, :2], (z,)),
            (lambda x: x[:, :1] + x[:, 5:], (x,)),
            (lambda z: z.sum(0)[1:], (z,)),
        ],
        "dynamic_slice": [
            (lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 6)), (x, np.int64(1))),
            (lambda x, i: lax.dynamic_slice(x, (i, i), (4, 3)), (x, np.int32(2))),
            (lambda x, i: lax.dynamic_slice(x.sum(0), (i,), (2,)), (x, np.int32(2))),
            (lambda x, n: lax.dynamic_slice(x, (n.sum(), 0), (2, 6)), (x, whole(4, high=1, dtype=np.int64))),
        ],
        "pad": [
            (lambda x: jnp.pad(x, ((1, 2), (0, 0))), (x,)),
            (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 0, 2))), (x,)),
            (lambda x: lax.pad(x.sum(0), 0.0, ((1, 1, 0),)), (x,)),
            (lambda x: lax.pad(x.sum(0), 1.0, ((1, 1, 0),)), (x,)),
            (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-1, -2, 0))), (x,)),
            (lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))), (x,)),
        ],
        "concatenate": [
            (lambda x, y: jnp.concatenate([x, y], 0), (x, real(3, 6))),
            (lambda x, y: jnp.concatenate([x, y], 1), (x, real(4, 1))),
            (lambda x, y: jnp.concatenate([x.sum(0), y.sum(0)]), (x, y)),
            (lambda x: jnp.concatenate([x[:, 3:], x[:, :3]], 1), (x,)),
        ],
        "split": [
            (lambda x: jnp.split(x, 3, 1), (x,)),
            (lambda x: jnp.split(x, [1], 0), (x,)),
            (lambda z: jnp.split(z.sum(0), 2, 1), (z,)),
        ],
        # made from nothing
        "iota": [
            (lambda x: x * jnp.arange(6), (x,)),
            (lambda x: x * jnp.arange(4)[:, None], (x,)),
            (
                lambda x: jnp.where(
                    lax.broadcasted_iota(jnp.int32, (4, 6), 0) > lax.broadcasted_iota(jnp.int32, (4, 6), 1), x, 0
                ),
                (x,),
            ),
            (lambda x: (x * jnp.arange(6.0)).sum(1), (x,)),
            (lambda x: x.reshape(24) * jnp.arange(24), (x,)),
            (lambda x: x + jnp.arange(24).reshape(4, 6), (x,)),
            (lambda x: x.reshape(4, 2, 3) + jnp.arange(12).reshape(4, 3)[:, None], (x,)),
            (lambda x: x + lax.iota(jnp.uint8, 6), (n,)),
        ],
        # keys
        "random_bits": [
            *((lambda k, b=b: jax.random.bits(k, (4, 6), jnp.dtype(f"uint{b}")), (keys(),)) for b in (8, 16, 32, 64)),
            *(
                (lambda k, b=b: jax.vmap(lambda k: jax.random.bits(k, (3, 2), jnp.dtype(f"uint{b}")))(k), (keys(4),))
                for b in (8, 64)
            ),
            (lambda k: jax.random.bits(k, (24,)).reshape(4, 6), (keys(),)),
            (lambda k: jax.random.bits(k, (4, 6), jnp.uint32), (keys(impl="rbg"),)),
            (lambda k: jax.vmap(lambda k: jax.random.bits(k, (6,), jnp.uint32))(k), (keys(4, impl="rbg"),)),
        ],
        "stack": [(lambda x, y: jnp.stack([x, y], 1), (x, y)), (lambda x, y: jnp.stack([x.sum(0), y.sum(0)]), (x, y))],
        "unstack": [(lambda x: sum(jnp.tanh(row) for row in x), (x,))],
        "dynamic_update_slice": [
            (lambda x, y: lax.dynamic_update_slice(x, y[:2], (1, 0)), (x, y)),
            (lambda x, y: lax.dynamic_update_slice(jnp.zeros(4), y.sum(1)[:2], (1,)), (x, y)),
        ],
        "random_fold_in": [
            (
                lambda k, n: jax.random.key_data(jax.vmap(jax.random.fold_in)(k, n)),
                (keys(4), np.arange(4, dtype=np.uint32)),
            ),
        ],
        "random_split": [
            (lambda k: jax.random.key_data(jax.vmap(lambda one: jax.random.split(one, 3))(k)), (keys(4),)),
        ],
        "name": [(lambda x: checkpoint_name(x.max(0), "kept"), (x,))],
        "platform_index": [(lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), (x,))],
        "empty": [(lambda x: x + 0 * jnp.where(True, 0, lax.empty((4, 6), jnp.int32)), (x,))],
        "random_clone": [(lambda k: jax.random.key_data(jax.random.clone(k)), (keys(4),))],
        "random_seed": [(lambda n: jax.random.key_data(jax.vmap(jax.random.key)(n)), (np.arange(4),))],
        "random_wrap": [(jax.random.wrap_key_data, (words(4, 2),)), (jax.random.wrap_key_data, (words(4, 3, 2),))],
        "random_unwrap": [(jax.random.key_data, (keys(4),)), (jax.random.key_data, (keys(2, 3),))],
        "bitcast_convert_type": [
            (lambda x: lax.bitcast_convert_type(x, jnp.uint32), (x,)),
            (lambda w: lax.bitcast_convert_type(w, jnp.uint8), (words8,)),
            (lambda w: lax.bitcast_convert_type(w, jnp.float64), (words(4, 2),)),
        ],
        "clamp": [(lambda x: lax.clamp(0.2, x, 0.7), (x,)), (lax.clamp, (x * 0.5, y, x))],
        "integer_pow": [(lambda x: x**3, (x,)), (lambda x: x.sum(0) ** 2, (x,))],
        "tanh": [(lambda x: jnp.tanh(x.sum(0)), (x,)), (lambda x: jnp.tanh(x.max(0)), (x,))],
    }


CASES = cases()


def traced_names() -> set[str]:
    """Names that primitives of this JAX have: those it exports, and those that their own cases trace to."""
    rest = {name: several[0] for name, several in CASES.items() if name not in PRIMITIVES}
    return set(PRIMITIVES) | {name for name, (fun, args) in rest.items() if name in primitives_in(fragment(fun, *args))}


KNOWN = traced_names()
SEEN_TO = frozenset(ELEMENTWISE_HERE) | (CASES.keys() & KNOWN)


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("name", of_the_day(sorted(CASES.keys() & KNOWN), 6))
def test_parts_make_the_whole(name: str) -> None:
    """All cases of a primitive in one compilation: forward and backward, in 2, 3 and 4 parts."""
    verify_rules(CASES[name])
    assert all(name in primitives_in(fragment(fun, *args)) for fun, args in CASES[name])


def test_the_gradient_of_one_row_needs_no_warning() -> None:
    assert check_both(lambda x, i: x[i], real(4, 6), np.int64(2)).open == {"a": 4, "b": 6}


def test_stack_needs_no_warning() -> None:
    x, y = real(4, 6), real(4, 6)
    assert check_both(lambda x: jnp.stack([x, 2 * x], 1), x).open == {"a": 4, "b": 6}
    check_both(lambda x, y: jnp.stack([x.sum(0), y.sum(0)]), x, y)


@pytest.mark.smoke
def test_a_layer_in_one_piece() -> None:
    def layer(x: jax.Array, up: jax.Array, down: jax.Array, key: jax.Array) -> jax.Array:
        h = jax.nn.gelu(jnp.einsum("bsd,df->bsf", x, up))
        h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0)
        return jnp.einsum("bsf,fd->bsd", h, down)

    made = check_both(layer, real(2, 3, 4), real(4, 6), real(6, 4), keys())
    assert str(made.rule) == "a b c, c d, d e, · -> a b e"
    assert {f.name: f.kind for f in made.rule.factors.values()} == {
        "a": "parallel", "b": "parallel", "c": "blocked", "d": "reduction", "e": "parallel",
    }  # fmt: skip


def test_a_cast_that_narrows_a_partial_sum_blocks() -> None:
    x = real(4, 6).astype(jnp.bfloat16)
    mean = fragment(lambda x: x.mean(0), x)
    assert "a partial add of it meets 'convert_element_type'" in why_blocked(mean, 0, 0)
    assert fragment(lambda x: x.astype(jnp.float32).mean(0), x).rule.factors["a"].kind == "reduction"


@pytest.mark.parametrize(("source", "target"), [(jnp.float16, jnp.bfloat16), (jnp.bfloat16, jnp.float16)])
def test_a_cast_between_floats_of_equal_size_narrows_too(source: Any, target: Any) -> None:
    x = real(4, 6).astype(source)
    made = fragment(lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None).astype(target), x)
    assert "meets 'convert_element_type'" in why_blocked(made, 0, 0)


def test_a_sum_of_short_integers_wraps_around_before_it_is_cast() -> None:
    short = jnp.asarray(whole(4, 6)).astype(jnp.int4)
    made = fragment(lambda n: lax.reduce_sum_p.bind(n, axes=(0,), out_sharding=None).astype(jnp.float32), short)
    assert "meets 'convert_element_type'" in why_blocked(made, 0, 0)


@pytest.mark.parametrize(
    ("fun", "reason"),
    [
        (lambda x: jnp.sort(x, 1), "at sort it is sorted"),
        (lambda x: lax.top_k(x, 2), "at top_k its largest are taken"),
        (lambda x: jnp.cumsum(x, 1), "at cumsum it is summed along"),
        (lambda x: x[:, ::-1], "at rev it is reversed"),
        (lambda x: x[:, 1:], "at slice it is sliced: only equal blocks of it can be split"),
        (
            lambda x: jnp.concatenate([x, jnp.ones((4, 5))], 1),
            "at concatenate it is concatenated: only equal blocks of it can be split",
        ),
        (lambda x: x.argmax(1), "at argmax its reduction cannot be joined"),
        (lambda x: x.prod(1), "at reduce_prod its reduction cannot be joined"),
    ],
)
def test_blocked_factors_say_where_and_why(fun: Callable[..., Any], reason: str) -> None:
    made = fragment(fun, real(4, 6))
    assert why_blocked(made, 0, 1) == reason
    assert why_blocked(made, 0, 0) == ""
