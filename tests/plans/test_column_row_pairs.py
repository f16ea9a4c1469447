"""Pairs of kernels are found in models whose names say nothing."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from losing import losing

import jscaler
from jscaler import plans


class Dense(nn.Module):
    """Layers one behind the other; the last has no partner."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number, width in enumerate((12, 8, 8, 8, 5)):
            x = nn.Dense(width, name=f"n{number}")(nn.relu(x))
        return x


class Encoder(nn.Module):
    """Attention and a gated feed-forward layer behind norms; a fused projection in the second layer."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(24, 8, name="words")(tokens)
        for i in range(2):
            h = nn.LayerNorm(name=f"first{i}")(x)
            if i:
                q, k, v = jnp.split(nn.Dense(24, name="fused")(h), 3, -1)
            else:
                q, k, v = (nn.Dense(8, name=name)(h) for name in ("left", "middle", "right"))
            q, k, v = (t.reshape(*t.shape[:2], 4, 2) for t in (q, k, v))
            scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
            x = x + nn.Dense(8, name=f"back{i}")(jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape))
            h = nn.LayerNorm(name=f"second{i}")(x)
            x = x + nn.Dense(8, name=f"narrow{i}")(nn.silu(nn.Dense(16, name=f"a{i}")(h)) * nn.Dense(16, name=f"b{i}")(h))
        return nn.Dense(5, name="labels")(x[:, 0])


class Residual(nn.Module):
    """Convolutions with statistics of channels between."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(8, (3, 3), name="stem")(x)
        for i in range(2):
            y = nn.Conv(8, (3, 3), name=f"one{i}")(x)
            y = nn.relu(nn.BatchNorm(use_running_average=False, name=f"norm{i}")(y))
            x = nn.relu(x + nn.Conv(8, (3, 3), name=f"two{i}")(y))
        return nn.Dense(5, name="labels")(x.mean((1, 2)))


class Recurrent(nn.Module):
    """Gates read a state that is made of them."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.RNN(nn.GRUCell(8), name="cells")(nn.Embed(24, 8, name="words")(tokens))
        return nn.Dense(5, name="labels")(x[:, -1])


class Stacked(nn.Module):
    """Layers that are one loop."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
                h = nn.LayerNorm(name="norm")(x)
                return x + nn.Dense(8, name="second")(nn.gelu(nn.Dense(16, name="first")(h))), None

        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = layers(name="layers")(nn.Dense(8, name="enter")(x), None)
        return nn.Dense(5, name="labels")(x)


class Numbered(nn.Module):
    """A Python loop that takes the layers of stacked kernels by their numbers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(8, name="enter")(x)
        first = self.param("first_kernel", nn.initializers.normal(0.5), (3, 8, 16))
        second = self.param("second_kernel", nn.initializers.normal(0.5), (3, 16, 8))
        for i in range(3):
            x = x + nn.gelu(nn.LayerNorm(name=f"norm{i}")(x) @ first[i]) @ second[i]
        return nn.Dense(5, name="labels")(x)


class States(nn.Module):
    """A diagonal state space: one op makes the first kernel, and the rates of decay that the second product reads."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        rates = self.param("rates", nn.initializers.normal(1.0), (8,))
        enter = self.param("enter_kernel", nn.initializers.lecun_normal(), (8, x.shape[-1]))
        leave = self.param("leave_kernel", nn.initializers.lecun_normal(), (5, 8))
        with jax.named_scope("discretized"):
            decay = jnp.exp(-jnp.exp(rates))
            enter = (1 - decay)[:, None] * enter

        def join(first: Any, second: Any) -> Any:
            return first[0] * second[0], second[0] * first[1] + second[1]

        driven = x @ enter.T
        _, states = jax.lax.associative_scan(join, (decay * jnp.ones_like(driven), driven), axis=1)
        return (states @ leave.T)[:, -1]


TOKENS = jax.random.randint(jax.random.key(0), (8, 4), 0, 24)
ROWS = jax.random.normal(jax.random.key(0), (8, 6))
IMAGES = jax.random.normal(jax.random.key(0), (8, 4, 4, 3))
SERIES = jax.random.normal(jax.random.key(0), (8, 4, 6))
MODELS: dict[str, tuple[nn.Module, jax.Array, set[str]]] = {  # and what has no partner
    "dense": (Dense(), ROWS, {"n4"}),
    "encoder": (Encoder(), TOKENS, {"words", "labels"}),
    "residual": (Residual(), IMAGES, set()),
    "recurrent": (Recurrent(), TOKENS, {"words"}),
    "stacked": (Stacked(), ROWS, {"enter", "labels"}),
    "numbered": (Numbered(), ROWS, {"enter", "labels"}),
    "states": (States(), SERIES, set()),
}


def step_of(model: nn.Module, value_and_grad: Any) -> Callable[..., Any]:
    def train(variables: Any, inputs: jax.Array) -> Any:
        def loss_of(params: Any) -> Any:
            logits, _ = model.apply({**variables, "params": params}, inputs, mutable=["batch_stats"])
            return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[:, 0])

        loss, grads = value_and_grad(loss_of)(variables["params"])
        return {**variables, "params": jax.tree.map(lambda p, g: p - 0.5 * g, variables["params"], grads)}, loss

    return train


def whole_kernels(params: Any) -> set[str]:
    """The modules whose kernels or tables every device has whole."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
    tables = [(name, leaf) for name, leaf in named if name.endswith(("kernel", "embedding"))]
    return {name.split("/")[0] for name, leaf in tables if leaf.addressable_shards[0].data.size == leaf.size}


@pytest.mark.one_day_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_with_a_partner_is_split(name: str) -> None:
    model, inputs, alone = MODELS[name]
    variables = model.init(jax.random.key(1), inputs)
    train = jscaler.parallelize(plans.tensor_parallel(), devices=2)(step_of(model, jscaler.value_and_grad))
    lowered = train.lower(variables, inputs)
    got = lowered.compile()(variables, inputs)
    want = jax.jit(step_of(model, jax.value_and_grad))(variables, inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)
    assert {leaf.split("/")[2] for leaf in lowered.plan.plan.shards} == alone  # put together where they are read
    assert not whole_kernels(got[0]["params"])


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("plan", ["megatron(dp=2, tp=2)", "co_shard(2)"])
def test_other_plans_find_them_too(plan: str) -> None:
    model, inputs, _ = MODELS["encoder"]
    variables = model.init(jax.random.key(1), inputs)
    train = jscaler.parallelize(plan, devices=4 if "megatron" in plan else 1)(step_of(model, jscaler.value_and_grad))
    want = jax.jit(step_of(model, jax.value_and_grad))(variables, inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), train(variables, inputs), want)


class Language(nn.Module):
    """Words by a name of its own; the head's own table, or the same."""

    tied: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        words = nn.Embed(24, 8, name="pieces")
        x = words(tokens) + nn.Embed(4, 8, name="places")(jnp.arange(4))
        x = x + nn.Dense(8, name="second")(nn.relu(nn.Dense(16, name="first")(x)))
        return words.attend(x)[:, 0] if self.tied else nn.Dense(24, name="guess")(x)[:, 0]


@losing
@pytest.mark.parametrize("tied", [True, False])
def test_words_are_what_is_looked_up_and_makes_logits(tied: bool) -> None:
    model = Language(tied)
    variables = model.init(jax.random.key(1), TOKENS)
    want = jax.jit(step_of(model, jax.value_and_grad))(variables, TOKENS)
    for plan, alone in ((plans.vocab_parallel(), {"first", "second", "places"}), (plans.megatron(tp=2), {"places"})):
        got = jscaler.parallelize(plan, devices=2)(step_of(model, jscaler.value_and_grad))(variables, TOKENS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)
        assert whole_kernels(got[0]["params"]) == alone


def test_a_teacher_that_follows_is_split_like_its_student() -> None:
    """Its kernels are state that a loss reads, and are no parameters."""

    def step_by(value_and_grad: Any) -> Callable[..., Any]:
        def train(state: Any, x: jax.Array) -> Any:
            def net(params: Any) -> jax.Array:
                return jnp.tanh(x @ params["in"]) @ params["out"]

            loss, grads = value_and_grad(lambda p: jnp.mean((net(p) - net(state["teacher"])) ** 2))(state["student"])
            student = jax.tree.map(lambda p, g: p - 0.1 * g, state["student"], grads)
            teacher = jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, state["teacher"], student)
            return {"student": student, "teacher": teacher}, loss

        return train

    draws = np.random.default_rng(0)
    student = {"in": draws.normal(size=(6, 8)), "out": draws.normal(size=(8, 6))}
    state = {"student": student, "teacher": jax.tree.map(lambda p: 1.5 * p, student)}
    got, loss = jscaler.parallelize(plans.tensor_parallel(), devices=2)(step_by(jscaler.value_and_grad))(state, ROWS)
    want = jax.jit(step_by(jax.value_and_grad))(state, ROWS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (got, loss), want)
    for kernels in got.values():
        assert {name: kernel.sharding.shard_shape(kernel.shape) for name, kernel in kernels.items()} == {
            "in": (6, 4), "out": (4, 6),
        }  # fmt: skip


def test_an_update_that_reduces_a_gradient_says_nothing_of_columns() -> None:
    """Of a stack it keeps the layers alone, as a contraction would."""

    def step_by(value_and_grad: Any) -> Callable[..., Any]:
        def train(params: Any, x: jax.Array) -> Any:
            def loss_of(params: Any) -> jax.Array:
                return jnp.mean(jax.lax.scan(lambda x, k: (jnp.tanh(x @ k["in"]) @ k["out"], None), x, params)[0] ** 2)

            loss, grads = value_and_grad(loss_of)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * (g - g.mean((1, 2), keepdims=True)), params, grads), loss

        return train

    draws = np.random.default_rng(0)
    params = {"in": draws.normal(size=(2, 6, 8)), "out": draws.normal(size=(2, 8, 6))}
    got, loss = jscaler.parallelize(plans.tensor_parallel(), devices=2)(step_by(jscaler.value_and_grad))(params, ROWS)
    want = jax.jit(step_by(jax.value_and_grad))(params, ROWS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (got, loss), want)
    assert got["in"].sharding.shard_shape(got["in"].shape) == (2, 6, 4)


def test_kernels_that_do_not_divide_are_named() -> None:
    model, inputs, _ = MODELS["dense"]
    variables = model.init(jax.random.key(1), inputs)
    train = jscaler.parallelize(plans.tensor_parallel(), devices=8)(step_of(model, jscaler.value_and_grad))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lowered = train.lower(variables, inputs)
    told = "\n".join(str(one.message) for one in said if issubclass(one.category, jscaler.PlanWarning))
    assert "into 8 parts are not split, and what they make is copied: 'variables/params/n0/kernel (12)'" in told
    assert "no dim divides into 8 parts stay whole: 'variables/params/n0/kernel (6, 12)'" in told
    assert lowered.plan is not None


def test_kernels_of_less_than_a_thousandth_are_not_named() -> None:
    def told(width: int) -> list[str]:
        def step(params: Any, x: jax.Array) -> Any:
            def loss(params: Any) -> jax.Array:
                x2 = x + jnp.tanh(x @ params["up"]) @ params["down"]
                return ((x2[:, :3] @ params["odd"]) ** 2).mean()

            value, grads = jscaler.value_and_grad(loss)(params)
            return jax.tree.map(jnp.subtract, params, grads), value

        shapes = {"up": (8, width), "down": (width, 8), "odd": (3, 5)}
        params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            plan = plans.tensor_parallel()
            jscaler.parallelize(plan, devices=4)(step).lower(params, jax.ShapeDtypeStruct((4, 8), np.float32))
        return [str(one.message) for one in said]

    assert told(16) == ["kernels of which no dim divides into 4 parts stay whole: 'params/odd (3, 5)'"]
    assert told(1024) == []


def test_a_string_is_one_pattern() -> None:
    model, inputs, _ = MODELS["dense"]
    variables = model.init(jax.random.key(1), inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train = jscaler.parallelize(plans.tensor_parallel("*/n1/kernel"), devices=2)(step_of(model, jscaler.value_and_grad))
        got, _ = train(variables, inputs)
    assert whole_kernels(got["params"]) == {"n0", "n3", "n4"}


def test_a_model_without_pairs() -> None:
    def train(w: jax.Array, batch: jax.Array) -> Any:
        return jscaler.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)

    with pytest.raises(
        jscaler.PlanError, match=r"no kernel's columns reach the rows of another.*pass tensor_parallel\(col"
    ):
        jscaler.parallelize(plans.tensor_parallel(), devices=2)(train)(jnp.ones((4, 4)), jnp.ones((8, 4)))
