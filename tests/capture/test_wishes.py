"""What a model or its caller says of meshes and shardings is left out, with one warning that names it."""

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from losing import losing

import jscaler

PARAMS = {"a": jnp.eye(8) * 0.3, "b": jnp.ones((8, 8)) * 0.1}
X = jax.random.normal(jax.random.key(0), (8, 8))


def wish(x: jax.Array, *spec: str) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def plain(params: Any, batch: jax.Array) -> jax.Array:
    return wish(jnp.tanh(batch @ params["a"]), "data", "model") @ params["b"]


def layers(params: Any, batch: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return wish(jnp.tanh(h @ w), "data", "model"), None

    return jax.lax.scan(jax.checkpoint(layer), batch, jnp.stack([params["a"], params["b"]]))[0]


def branch(params: Any, batch: jax.Array) -> jax.Array:
    def step(i: jax.Array, h: jax.Array) -> jax.Array:
        return jax.lax.cond(i > 0, lambda h: wish(2 * h, "data"), lambda h: h, h)

    return jax.lax.stop_gradient(jax.lax.fori_loop(0, 3, step, batch @ params["a"])) * (batch @ params["b"])


def step_of(model: Callable[..., jax.Array], value_and_grad: Any) -> Any:
    def train(params: Any, batch: jax.Array) -> Any:
        loss, grads = value_and_grad(lambda p: jnp.mean(model(p, batch) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return train


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:the schedule '1f1b' has 0B:jscaler.PlanWarning")
@pytest.mark.parametrize("plan", ["single()", "data_parallel()", "pipeline(2, 2)"])
@pytest.mark.parametrize("model", [plain, layers, branch])
def test_wishes_are_left_out(model: Callable[..., jax.Array], plan: str) -> None:
    want = jax.jit(step_of(model, jax.value_and_grad))(PARAMS, X)
    train = jscaler.parallelize(plan, devices=2)(step_of(model, jscaler.value_and_grad))
    with pytest.warns(
        jscaler.CaptureWarning, match=r"sharding constraints are left out.*P\('data'.* at .*test_wishes.py:\d+"
    ):
        got = train(PARAMS, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"), axis_types=(kind,) * 2)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit])
def in_mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    with jax.set_mesh(mesh(request.param)):
        yield request.param


def named(x: jax.Array, *spec: str) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def in_context(params: Any, batch: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        kept = jax.random.bernoulli(jax.random.key(3), 0.9, h.shape)
        h = jax.lax.cond(h.sum() > 0, lambda h: named(2 * h, "data"), lambda h: h, h @ w)
        return jnp.where(kept, jax.nn.relu(h), 0.1 * jnp.arange(8.0)), None

    return jax.lax.scan(jax.checkpoint(layer), batch, jnp.stack([params["a"], params["b"]]))[0]


@jax.custom_vjp
def sine(x: jax.Array) -> jax.Array:
    return named(jnp.sin(x), "data")


sine.defvjp(lambda x: (named(jnp.sin(x), "data"), x), lambda x, g: (named(jnp.cos(x) * g, "model"),))


def own_derivative(params: Any, batch: jax.Array) -> jax.Array:
    return sine(batch @ params["a"]) @ params["b"]


def put(params: Any, batch: jax.Array) -> jax.Array:
    return jax.device_put(batch @ params["a"], NamedSharding(mesh(), PartitionSpec("data"))) @ params["b"]


def meshed(model: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def inside(params: Any, batch: jax.Array) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh().abstract_mesh):
            return model(params, batch)

    return inside


def wanted(model: Callable[..., jax.Array]) -> Any:
    with jax.set_mesh(mesh()):
        return jax.jit(step_of(model, jax.value_and_grad))(PARAMS, X)


@pytest.mark.smoke
@losing
@pytest.mark.parametrize("plan", ["single()", "data_parallel()", "zero3()", "pipeline(2, 2)"])
@pytest.mark.parametrize("model", [in_context, own_derivative, put])
def test_a_mesh_around_the_step_is_left_out(in_mesh: AxisType, model: Callable[..., jax.Array], plan: str) -> None:
    del in_mesh
    train = jscaler.parallelize(plan, devices=2)(step_of(model, jscaler.value_and_grad))
    with pytest.warns(jscaler.CaptureWarning, match=r"own mesh {'data': 2, 'model': 2} and sharding.*P\('data'.*\.py:\d+"):
        got = train(PARAMS, X)
    again = train(*jax.tree.map(jnp.copy, (PARAMS, X)))
    with jax.set_mesh(Mesh(np.empty((), object), ())):
        want = wanted(model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    jax.tree.map(np.testing.assert_array_equal, again, got)


@pytest.mark.smoke
def test_a_step_in_a_mesh_is_proven(in_mesh: AxisType) -> None:
    del in_mesh
    train = jscaler.parallelize("zero3()", devices=4)(step_of(in_context, jscaler.value_and_grad))
    with pytest.warns(jscaler.CaptureWarning, match="own mesh"):
        jscaler.verify(train.lower(PARAMS, X))


@pytest.mark.parametrize("model", [in_context, own_derivative])
def test_a_mesh_inside_the_model_is_left_out(model: Callable[..., jax.Array]) -> None:
    train = jscaler.parallelize("data_parallel()", devices=2)(step_of(meshed(model), jscaler.value_and_grad))
    with pytest.warns(jscaler.CaptureWarning, match="own mesh {'data': 2, 'model': 2} and sharding"):
        got = train(PARAMS, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted(model))


def test_what_explicit_axes_alone_allow_is_refused_with_a_reason() -> None:
    def resharded(params: Any, batch: jax.Array) -> jax.Array:
        return jax.sharding.reshard(batch @ params["a"], PartitionSpec("data"))

    train = jscaler.parallelize("data_parallel()", devices=2)(step_of(resharded, jscaler.value_and_grad))
    with jax.set_mesh(mesh(AxisType.Explicit)), pytest.raises(ValueError, match="reshard") as raised:
        train(PARAMS, X)
    assert any("leave out jax.sharding.reshard" in note for note in raised.value.__notes__)


def test_a_shard_map_is_refused() -> None:
    def mapped(params: Any, batch: jax.Array) -> jax.Array:
        spec = PartitionSpec("data")
        return jax.shard_map(jnp.tanh, mesh=mesh(), in_specs=spec, out_specs=spec)(batch @ params["a"])

    train = jscaler.parallelize("data_parallel()", devices=2)(step_of(mapped, jscaler.value_and_grad))
    with pytest.raises(jscaler.CaptureError, match=r"mesh {'data': 2, 'model': 2} itself.*wishes.py:\d+.*whole arrays"):
        train(PARAMS, X)


RULES = (("batch", "data"), ("embed", None), ("mlp", "model"))


def boxed(features: int, *axes: str, name: str) -> nn.Dense:
    return nn.Dense(
        features,
        name=name,
        kernel_init=nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros, axes[-1:]),
    )


class Logical(nn.Module):
    """Parameters in boxes, and constraints by names of axes, as MaxText writes them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.gelu(boxed(16, "embed", "mlp", name="up")(nn.LayerNorm()(x)))
        h = nn.with_logical_constraint(nn.Dropout(0.1, deterministic=False)(h), ("batch", "mlp"))
        return x + boxed(8, "mlp", "embed", name="down")(h)


def make_state(key: jax.Array) -> TrainState:
    params = Logical().init({"params": key, "dropout": key}, X)["params"]
    return TrainState.create(apply_fn=Logical().apply, params=params, tx=optax.adamw(1e-2))


def train_logical(value_and_grad: Any) -> Any:
    def train(state: TrainState, batch: jax.Array, key: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean(state.apply_fn({"params": params}, batch, rngs={"dropout": key}) ** 2)

        value, grads = value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return train


@pytest.mark.parametrize("plan", ["data_parallel()", "zero3()", "tensor_parallel()", "pipeline(2, 2)"])
def test_logical_axes_of_linen(plan: str) -> None:
    key = jax.random.key(7)
    want, losses = two_steps(jax.jit(train_logical(jax.value_and_grad)), jax.jit(make_state)(key), key)
    train = jscaler.parallelize(plan, devices=2, donate_argnames="state")(train_logical(jscaler.value_and_grad))
    with jax.set_mesh(mesh()), nn.logical_axis_rules(RULES):
        with pytest.warns(jscaler.CaptureWarning, match="own mesh.*P"):
            state = train.init(make_state, key, batch=X, key=key)
        got, found = two_steps(train, state, key)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got.params, want.params)


def two_steps(train: Any, state: TrainState, key: jax.Array) -> tuple[TrainState, list[float]]:
    losses = []
    for _ in range(2):
        state, loss = train(state, X, key)
        losses.append(float(loss))
    return state, losses
