"""The sequence is found in models whose names say nothing."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from of_the_day import of_the_day
from plan_steps import COLUMNS, collectives, gpt, mlp, planned

import jscaler
from jscaler import plans
from jscaler.errors import PlanError, SplitError, UnknownNameError


def mix(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention: b q h d, b k h d, b k h d -> b q h d."""
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1), v)


class Layer(nn.Module):
    core: Callable[..., jax.Array] = mix

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm(name="before")(x)
        q, k, v = (nn.Dense(8, name=name)(h).reshape(*x.shape[:2], 4, 2) for name in ("left", "middle", "right"))
        x = x + nn.Dense(8, name="back")(self.core(q, k, v).reshape(x.shape))
        return x + nn.Dense(8, name="narrow")(nn.gelu(nn.Dense(16, name="wide")(nn.LayerNorm(name="behind")(x))))


class Words(nn.Module):
    """Tokens, and a number for each."""

    core: Callable[..., jax.Array] = mix

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(24, 8, name="words")(ids) + nn.Embed(8, 8, name="places")(jnp.arange(8))
        return nn.Dense(5, name="answer")(Layer(self.core, name="layer")(x).mean(1))


class Readings(nn.Module):
    """Vectors, whose answer is made of all positions in one row."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = Layer(name="layer")(nn.Dense(8, name="enter")(x))
        return nn.Dense(5, name="answer")(x.reshape(len(x), -1))


class Patches(nn.Module):
    """Images, whose rows of patches are rows of the positions."""

    token: bool = False

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(8, (2, 2), (2, 2), name="cut")(images).reshape(len(images), -1, 8)
        if self.token:
            x = jnp.concatenate([self.param("first", nn.initializers.ones, (1, 1, 8)).repeat(len(x), 0), x], 1)
        return nn.Dense(5, name="answer")(Layer(name="layer")(x).mean(1))


class Axes(nn.Module):
    """Attention along one dim, then along the other."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for name in ("rows", "columns"):
            h = nn.Dense(8, name=name)(x)
            x = x + jnp.einsum("rbij,rbjd->rbid", jax.nn.softmax(jnp.einsum("rbid,rbjd->rbij", h, h), -1), h)
            x = jnp.swapaxes(x, 1, 2)
        x = nn.Dense(8, name="narrow")(nn.gelu(nn.Dense(16, name="wide")(x)))
        return nn.Dense(5, name="answer")(x.mean((1, 2)))


fused = jscaler.op("b q h d, b k h d, b k h d -> b q h d")(mix)
draws = np.random.default_rng(0)
TOKENS = draws.integers(0, 24, (8, 8), np.int32)
VECTORS = draws.normal(size=(8, 8, 6)).astype(np.float32)
IMAGES = draws.normal(size=(8, 4, 4, 3)).astype(np.float32)
MODELS: dict[str, tuple[nn.Module, np.ndarray]] = {
    "words": (Words(), TOKENS),
    "a fused attention": (Words(fused), TOKENS),
    "readings": (Readings(), VECTORS),
    "patches": (Patches(), IMAGES),
}


def step_of(model: nn.Module, value_and_grad: Any) -> Callable[..., Any]:
    def train(variables: Any, given: jax.Array) -> Any:
        def loss_of(variables: Any) -> Any:
            logits: Any = model.apply(variables, given)
            return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[:, 0])

        loss, grads = value_and_grad(loss_of)(variables)
        return jax.tree.map(lambda p, g: p - 0.5 * g, variables, grads), loss

    return train


def lowered(plan: Any, model: nn.Module, data: np.ndarray, devices: int) -> tuple[Any, Any]:
    variables = model.init(jax.random.key(1), data)
    return jscaler.parallelize(plan, devices=devices)(step_of(model, jscaler.value_and_grad)).lower(
        variables, data
    ), variables


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_found(name: str) -> None:
    """What one layer reduces and gathers between heads or units and positions: two and two in each direction."""
    model, data = MODELS[name]
    ours, variables = lowered(plans.sequence_parallel(), model, data, 2)
    got = ours.compile()(variables, data)
    want = jax.jit(step_of(model, jax.value_and_grad))(variables, data)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)
    moved = Counter(kind for kind, t in collectives(ours.plan) if len(t.shape) == 3)
    assert moved == {"reduce_scatter": 4, "all_gather": 4}


@pytest.mark.parametrize("name", ["words", "patches"])
def test_megatron_finds_it_too(name: str) -> None:
    model, data = MODELS[name]
    ours, _ = lowered(plans.megatron(dp=2, tp=2, sequence=True, vocab=False), model, data, 4)
    moved = Counter(kind for kind, t in collectives(ours.plan) if len(t.shape) == 3)
    assert moved == {"reduce_scatter": 4, "all_gather": 4}


def test_one_row_of_the_batch_has_a_sequence() -> None:
    """A long one: nothing else is to be split."""
    model, data = MODELS["words"]
    ours, variables = lowered(plans.sequence_parallel(), model, data[:1], 2)
    want = jax.jit(step_of(model, jax.value_and_grad))(variables, data[:1])
    got = ours.compile()(variables, data[:1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)
    assert Counter(kind for kind, t in collectives(ours.plan) if len(t.shape) == 3)["reduce_scatter"] == 4


def test_it_is_what_was_named_before() -> None:
    found, named = (planned(plans.sequence_parallel(None, given), gpt(), 4) for given in (None, {"batch/tokens": 1}))
    assert found.digest == named.digest


MISTAKES: dict[str, tuple[nn.Module, np.ndarray, Any, type[Exception], str]] = {
    "arises inside": (
        Patches(token=True), IMAGES, True, PlanError,
        r"no dim of the data is a sequence.* mixes; where positions arise inside .*data: given: f32\[8,4,4,3\]",
    ),
    "two of them": (
        Axes(), draws.normal(size=(4, 4, 4, 8)).astype(np.float32), True, PlanError,
        r"dims 1 and 2 of 'given' may each be the sequence; pass megatron\(sequence={'given': 1}\) for one of them",
    ),
    "another name": (Words(), TOKENS, {"batch/tokens": 1}, UnknownNameError, "no input named 'batch/tokens'"),
}  # fmt: skip


# How queries and keys [b, s, h, k] are turned by the cosines and sines of positions [s, 1, k / 2]
def halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    turned = jnp.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * jnp.concatenate([cos, cos], -1) + turned * jnp.concatenate([sin, sin], -1)


def pairs(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = x[..., ::2], x[..., 1::2]
    return jnp.stack([first * cos - second * sin, second * cos + first * sin], -1).reshape(x.shape)


def complex_numbers(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    turned = jax.lax.complex(*jnp.split(x, 2, -1)) * jax.lax.complex(cos, sin)
    return jnp.concatenate([turned.real, turned.imag], -1)


def unturned(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return x


def normed(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


# What is added to scores [b, h, q, t]
def nothing(positions: jax.Array) -> Any:
    return 0.0


def linear_biases(positions: jax.Array) -> Any:
    """ALiBi, whose queries and keys count one range."""
    return 2.0 ** -jnp.arange(4)[:, None, None] * (positions[None] - positions[:, None])


def relative(positions: jax.Array) -> Any:
    """T5's: a number of each head for each bucket of distances."""
    distance = jnp.maximum(positions[:, None] - positions[None], 0)
    buckets = jnp.minimum(jnp.log2(distance + 1.0).astype(int), 3)
    return jnp.asarray(np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4))[buckets].transpose(2, 0, 1)


@dataclass(frozen=True)
class Turned:
    """Words whose queries and keys are turned by one table of their positions: a function, without modules.

    Attributes:
        frequencies: whether the table is cut from one of 32 positions, or is made of ``batch["positions"]``.
        softmax: whether it has one; without, keys and values meet first.
    """

    turn: Callable[..., jax.Array] = halves
    bias: Callable[[jax.Array], Any] = nothing
    table: Literal["made", "cut", "given"] = "made"
    softmax: bool = True

    def init(self) -> Any:
        draws = np.random.default_rng(0)
        shapes = {**dict.fromkeys(["q", "k", "v", "up"], (8, 16)), "o": (16, 8), "down": (16, 8)}
        layer = {name: draws.normal(size=shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}
        return {"words": draws.normal(size=(24, 8)).astype(np.float32) * 0.3, "layer": layer}

    def __call__(self, p: Any, tokens: jax.Array, batch: Any) -> jax.Array:
        x, s, own = p["words"][tokens], tokens.shape[1], p["layer"]
        positions = {"made": jnp.arange(s), "cut": jnp.arange(32), "given": batch.get("positions")}[self.table]
        angles = (positions[:, None] * 10.0 ** -jnp.arange(2))[:s, None]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        q, k, v = ((normed(x) @ own[name]).reshape(len(x), s, 4, 4) for name in "qkv")
        q, k = self.turn(q, cos, sin), self.turn(k, cos, sin)
        if self.softmax:
            scores = jnp.einsum("bqhk,bthk->bhqt", q, k) + self.bias(positions[:s])
            mixed = jnp.einsum("bhqt,bthk->bqhk", jax.nn.softmax(scores, -1), v)
        else:
            mixed = jnp.einsum("bqhk,bhkj->bqhj", q, jnp.einsum("bthk,bthj->bhkj", k, v))
        x = x + mixed.reshape(len(x), s, 16) @ own["o"]
        return normed(x + jax.nn.gelu(normed(x) @ own["up"]) @ own["down"]) @ p["words"].T


def words_step(model: Turned, pair: Callable[..., Any], value_and_grad: Any) -> Callable[..., Any]:
    """A step whose tokens and targets are what ``pair`` makes of the batch; only as many logits count as targets."""

    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            tokens, targets = pair(**batch)
            logits = model(params, tokens, batch)[:, : targets.shape[1]]
            return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]).mean()

        loss, grads = value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


WORDS = np.random.default_rng(1).integers(0, 24, (4, 9), np.int32)
EVEN = {"tokens": WORDS[:, :-1], "labels": WORDS[:, 1:]}


def beside(tokens: Any, labels: Any, positions: Any = None) -> Any:
    return tokens, labels


PAIRS: dict[str, Callable[..., Any]] = {
    "both sliced": lambda tokens: (tokens[:, :-1], tokens[:, 1:]),
    "sliced twice": lambda tokens: (jax.lax.dynamic_slice_in_dim(tokens, 0, 8, 1), jnp.take(tokens, jnp.arange(1, 9), 1)),
    "rolled": lambda tokens: (tokens, jnp.roll(tokens, -1, 1)),
    "shifted": lambda tokens: (jnp.pad(tokens[:, :-1], ((0, 0), (1, 0))), tokens),
    "cut behind": lambda tokens: (tokens, tokens[:, 1:]),
}


def equal_steps(plan: Any, model: Turned, pair: Callable[..., Any], batch: Any, devices: int) -> Any:
    """The plan, whose step has the numbers of ``jax.jit``."""
    params = model.init()
    step = words_step(model, pair, jscaler.value_and_grad)
    lowered = jscaler.parallelize(plan, devices=devices)(step).lower(params, batch)
    got, want = lowered.compile()(params, batch), jax.jit(words_step(model, pair, jax.value_and_grad))(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)
    return lowered.plan


FORMS = {
    "halves": Turned(),
    "halves of a longer table": Turned(table="cut"),
    "halves of given positions": Turned(table="given"),
    "rotated": Turned(rotated),
    "pairs": Turned(pairs),
    "complex numbers": Turned(complex_numbers),
    "linear biases": Turned(unturned, linear_biases),
    "relative biases": Turned(unturned, relative),
    "both": Turned(pairs, relative, "cut"),
}


@pytest.mark.parametrize("name", of_the_day(list(FORMS), 3))
def test_queries_and_keys_read_one_table_of_positions(name: str) -> None:
    model = FORMS[name]
    batch = EVEN | ({"positions": np.arange(8)} if model.table == "given" else {})
    plan = equal_steps(plans.sequence_parallel(), model, beside, batch, 2)
    assert {"reduce_scatter", "all_gather"} <= {kind for kind, t in collectives(plan) if len(t.shape) == 3}


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "cut behind"])
def test_tokens_and_targets_are_slices_of_one_argument(name: str) -> None:
    batch = {"tokens": WORDS if "sliced" in name else WORDS[:, :-1]}
    plan = equal_steps(plans.megatron(dp=2, tp=2, sequence=True), Turned(), PAIRS[name], batch, 4)
    assert {"reduce_scatter", "all_gather"} <= {kind for kind, t in collectives(plan) if len(t.shape) == 3}
    if "sliced" in name:
        (layout,) = (layout for t, layout in plan.completed.inputs.items() if t.name == "batch/tokens")
        assert [len(cuts) for cuts in layout.cuts] == [1, 0], "its rows are split, and its positions are not"
        said = plans.megatron(dp=2, tp=2, sequence={"batch/tokens": 1})
        step = words_step(Turned(), PAIRS[name], jscaler.value_and_grad)
        assert plan.digest == jscaler.parallelize(said, devices=4)(step).lower(Turned().init(), batch).plan.digest


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("both sliced", 7, "size 6 into 4 parts; legal: 1, 2, 3, 6; its 7 are sliced to these"),
        ("cut behind", 9, "size 9 into 4 parts; legal: 1, 3, 9; its slices of 8 divide: give the model one of these"),
    ],
)
def test_slices_that_do_not_divide(name: str, length: int, message: str) -> None:
    step, batch = words_step(Turned(), PAIRS[name], jscaler.value_and_grad), {"tokens": WORDS[:, :length]}
    with pytest.raises(SplitError, match="'batch/tokens' cannot split factor 'dim 1' of " + message):
        jscaler.parallelize(plans.sequence_parallel(), devices=4)(step).lower(Turned().init(), batch)


@pytest.mark.parametrize(("pair", "batch"), [(beside, EVEN), (PAIRS["both sliced"], {"tokens": WORDS})])
def test_what_is_not_found_can_be_given_as_the_error_says(pair: Callable[..., Any], batch: Any) -> None:
    model = Turned(softmax=False)
    step = words_step(model, pair, jscaler.value_and_grad)
    halves = jscaler.parallelize(plans.megatron(tp=2, sequence=True), devices=2)(step)
    with pytest.raises(PlanError, match=r"no dim of the data is a sequence.* splits 7 of 7 products of kernels") as refused:
        halves.lower(model.init(), batch)
    found = re.search(r"pass (megatron\(sequence=.*?\))", str(refused.value))
    assert found is not None
    plan = equal_steps(found[1], model, pair, batch, 2)
    assert {"reduce_scatter", "all_gather"} <= {kind for kind, t in collectives(plan) if len(t.shape) == 3}
    thirds = jscaler.parallelize(plans.sequence_parallel({"*/down": 1}), devices=3)(step)
    with pytest.raises(PlanError, match="attention mixes; where positions arise inside"):  # of eight no third can be given
        thirds.lower(model.init(), batch)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    model, data, sequence, error, message = MISTAKES[name]
    with pytest.raises(error, match=message):
        lowered(plans.megatron(tp=2, sequence=sequence), model, data, 2)


def test_data_without_positions_are_listed() -> None:
    with pytest.raises(PlanError, match=re.escape("data: batch/labels: i") + ".*" + re.escape("batch/x: f32[24,8]")):
        planned(plans.sequence_parallel(COLUMNS), mlp(), 4)
