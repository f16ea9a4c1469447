"""Layers are found in models whose names say nothing."""

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jscaler
from jscaler import plans
from jscaler.ir import Op
from jscaler.plans.layers import find_layers
from jscaler.plans.repeats import EqualRows, Parser, innermost


def spelled(text: str) -> str:
    rows = [(row_of(text, run), run.count) for run in innermost(text)]
    return " ".join(f"({row}){count}" if count > 1 else row for row, count in rows)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("eAFAFAFn", "e (AF)3 n"),
        ("AFAFAAFAAF", "(AF)2 (AAF)2"),  # an encoder; self-attention and cross-attention of a decoder
        ("AFAFMAFAFM", "(AF)2 M (AF)2 M"),  # stages with something between
        ("FACFFACF", "(FACF)2"),
        ("ddd", "(d)3"),
        ("ab", "a b"),
        ("", ""),
    ],
)
def test_runs_of_rows(text: str, found: str) -> None:
    assert spelled(text) == found


@functools.cache
def fewest_words(text: str, top: bool) -> int:
    """All ways to write ``text``, tried."""
    if not text:
        return 0
    ways = [1 + fewest_words(text[1:], top)]
    for length, count in itertools.product(range(1, len(text)), range(2, len(text) + 1)):
        row = text[:length]
        words = 1 + fewest_words(row, False)
        if text.startswith(row * count) and (top or words < length * count):
            ways.append(words + fewest_words(text[length * count :], top))
    return min(ways)


def test_no_text_is_shorter() -> None:
    for letters in itertools.chain.from_iterable(itertools.product("ab", repeat=n) for n in range(1, 10)):
        text = "".join(letters)
        words, runs = Parser().shortest(tuple(text), top=True)
        assert words == fewest_words(text, True)
        assert words == sum(1 if run.count == 1 else 1 + fewest_words(row_of(text, run), False) for run in runs)
        for found in (runs, innermost(text)):
            assert [i for run in found for row in run.rows for i in row] == list(range(len(text)))
            assert all(text[run.start :].startswith(row_of(text, run) * run.count) for run in found)


def row_of(text: str, run: EqualRows) -> str:
    return text[run.start : run.start + run.length]


def test_a_long_text() -> None:
    runs = innermost("e" + "AF" * 300 + "n")
    assert runs == (EqualRows(0), EqualRows(1, 2, 300), EqualRows(601))


class Chain(nn.Module):
    """Dense layers of any widths."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (12, 8, 16, 8):
            x = nn.tanh(nn.Dense(width)(x))
        return nn.LayerNorm(name="last")(x)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, to: jax.Array, bias: jax.Array) -> jax.Array:
        q, k, v = nn.DenseGeneral((2, 4))(x), nn.DenseGeneral((2, 4))(to), nn.DenseGeneral((2, 4))(to)
        weights = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
        return nn.DenseGeneral(8, (-2, -1))(jnp.einsum("bhqk,bkhd->bqhd", weights, v))


class Sum(nn.Module):
    """A bias of positions that all layers read, norms in front; the layers may share their weights."""

    shared: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        bias = self.param("slopes", nn.initializers.ones, (2, 1, 1)) * jnp.abs(jnp.arange(4)[:, None] - jnp.arange(4))
        x = nn.Embed(24, 8, name="words")(tokens)
        one = [Attention(name="u"), nn.Dense(16, name="v"), nn.Dense(8, name="w")]
        for i in range(3):
            look, up, down = one if self.shared else (Attention(name=f"p{i}q"), nn.Dense(16), nn.Dense(8))
            h = nn.LayerNorm()(x)
            x = x + look(h, h, bias)
            x = x + down(nn.gelu(up(nn.LayerNorm()(x))))
        return nn.LayerNorm(name="last")(x)


class Translate(nn.Module):
    """An encoder, whose result all layers of a decoder read; norms behind."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        source, y = nn.Embed(24, 8, name="words")(tokens), nn.Embed(24, 8, name="other_words")(tokens[::-1])
        none = jnp.zeros(())
        for i in range(2):
            source = nn.LayerNorm()(source + Attention(name=f"s{i}")(source, source, none))
            source = nn.LayerNorm()(source + nn.Dense(8)(nn.relu(nn.Dense(16)(source))))
        for i in range(2):
            y = nn.LayerNorm()(y + Attention(name=f"own{i}")(y, y, none))
            y = nn.LayerNorm()(y + Attention(name=f"other{i}")(y, source, none))
            y = nn.LayerNorm()(y + nn.Dense(8)(nn.relu(nn.Dense(16)(y))))
        return nn.Dense(4, name="labels")(y)


class Blocks(nn.Module):
    """Residual blocks, some with a projection; their kernels differ in size."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.max_pool(nn.relu(nn.Conv(4, (3, 3), name="stem")(x)), (2, 2), (2, 2))
        for width, stride in ((4, 1), (4, 1), (8, 2)):
            y = nn.Conv(width, (3, 3), strides=stride)(x)
            y = nn.Conv(width, (3, 3))(nn.relu(nn.GroupNorm(2)(y)))
            x = nn.relu(y + (x if width == x.shape[-1] else nn.Conv(width, (1, 1), strides=stride)(x)))
        return x.mean((1, 2))


TOKENS = jax.random.randint(jax.random.key(0), (8, 4), 0, 24)
MODELS: dict[str, tuple[nn.Module, jax.Array, list[int]]] = {  # and how many contractions each layer has
    "chain": (Chain(), jnp.ones((8, 6)), [1, 1, 1, 1]),
    "sum": (Sum(), TOKENS, [8, 8, 8]),
    "shared": (Sum(shared=True), TOKENS, [8, 8, 8]),
    "translate": (Translate(), TOKENS, [8, 8, 14, 14]),
    "blocks": (Blocks(), jnp.ones((8, 8, 8, 3)), [2, 2, 3]),
}


def step_of(model: nn.Module, value_and_grad: Any) -> Callable[..., Any]:
    def train(params: Any, inputs: jax.Array) -> Any:
        def loss_of(params: Any) -> Any:
            made: Any = model.apply(params, inputs)
            return jnp.mean(jnp.sin(made))

        loss, grads = value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

    return train


def contractions(layer: Sequence[Op]) -> int:
    names = [eqn.primitive.name for op in layer if op.body is not None for eqn in op.body.jaxpr.eqns]
    return sum(name in ("dot_general", "conv_general_dilated") for name in names)


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_layers_are_what_repeats(name: str) -> None:
    model, inputs, want = MODELS[name]
    params = jax.jit(model.init)(jax.random.key(1), inputs)
    found: list[Any] = []

    def policy(graph: Any, devices: np.ndarray) -> None:
        found.extend(find_layers(graph))
        plans.recompute_layers(plans.data_parallel())(graph, devices)

    got = jscaler.parallelize(policy, devices=2)(step_of(model, jscaler.value_and_grad))(params, inputs)
    assert list(map(contractions, found)) == want
    assert not any("words" in op.path or "labels" in op.path or "last" in op.path for layer in found for op in layer)
    plain = jax.jit(step_of(model, jax.value_and_grad))(params, inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, plain)


def test_rows_of_layers_stay_within_a_tower() -> None:
    class Towers(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            left, right = (nn.Embed(24, 8, name=f"words{i}")(tokens) for i in range(2))
            for _ in range(3):
                left = left + nn.Dense(8)(nn.tanh(nn.Dense(16)(left)))
            for _ in range(3):
                right = right + nn.Dense(8)(nn.tanh(nn.Dense(16)(right)))
            return left.mean(1) @ right.mean(1).T

    found: list[Any] = []
    model = Towers()
    params = jax.jit(model.init)(jax.random.key(1), TOKENS)

    def policy(graph: Any, devices: np.ndarray) -> None:
        found.extend(find_layers(graph, every=2))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jscaler.parallelize(policy, devices=1)(step_of(model, jscaler.value_and_grad)).lower(params, TOKENS)
    assert list(map(contractions, found)) == [4, 2, 4, 2]
