"""``train_step.init``: a state that is made in its layout has the values of one that is made on one device."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import jscaler
from jscaler.runtime.training_state import pieces_of, trace_state


class KeyedState(TrainState):
    """With a key, as dropout wants one."""

    key: jax.Array


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4, name="down")(nn.gelu(nn.Dense(64, name="up")(x)))


def make_state(model: nn.Module, key: jax.Array, rate: float, features: int = 16) -> KeyedState:
    params = model.init(key, jnp.zeros((1, features)))["params"]
    return KeyedState.create(apply_fn=model.apply, params=params, tx=optax.adam(rate), key=key)


def net_step(state: KeyedState, batch: dict[str, jax.Array]) -> tuple[KeyedState, jax.Array]:
    def loss(params: Any) -> jax.Array:
        return ((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()

    value, grads = jscaler.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def columns_then_rows(graph: Any, devices: np.ndarray) -> None:
    """Megatron's split of the two layers."""
    for path, dim in (("up/dot", 1), ("down/dot", 0)):
        graph.op_assign(graph.op_trans(graph[path], jscaler.Split(("kernel", dim), devices.size)), devices)


def net_batch(rows: int = 8) -> dict[str, np.ndarray]:
    return {"x": np.linspace(0, 1, rows * 16, dtype=np.float32).reshape(rows, 16), "y": np.ones((rows, 4), np.float32)}


def net_train_step() -> jscaler.Parallelized:
    return jscaler.parallelize(columns_then_rows, devices=4, donate_argnames="state")(net_step)


def assert_equal(ours: Any, theirs: Any, rtol: float = 0) -> None:
    """Equal in every bit, or up to the last bits: XLA does not compile arithmetic on parts as it does on the whole."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=rtol, err_msg=str(path))


@pytest.mark.smoke
def test_a_state_is_made_in_its_layout() -> None:
    step, model = net_train_step(), Net()
    state = step.init(make_state, model, jax.random.key(0), 1e-2, batch=net_batch())
    assert_equal(state, jax.jit(lambda key: make_state(model, key, 1e-2))(jax.random.key(0)), rtol=1e-6)
    assert state.apply_fn == model.apply
    assert state.params["up"]["kernel"].addressable_shards[0].data.shape == (16, 16)
    assert state.opt_state[0].mu["down"]["kernel"].addressable_shards[0].data.shape == (16, 4)
    kept = jax.tree.map(lambda x: x.sharding, state)
    after, _ = step(state, net_batch())
    assert jax.tree.map(lambda x: x.sharding, after) == kept
    assert len(step._compiled) == len(step._lowered) == 1


def largest_array(hlo: str) -> int:
    """The number of elements of the largest array that a compiled program names."""
    return max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d+\[(\d[\d,]*)\]", hlo))


def test_no_device_holds_a_whole_leaf_on_the_way() -> None:
    traced = trace_state(["state"], make_state, (Net(), jax.random.key(0), 1e-2, 1024))
    mesh = jax.sharding.Mesh(jax.devices(), "x")

    def split(struct: Any) -> jax.sharding.NamedSharding:
        spec = (
            (None, "x") if len(struct.shape) == 2 and struct.shape[1] % 8 == 0 else ("x",) if len(struct.shape) == 2 else ()
        )
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    pieces = [piece for i, s in enumerate(traced.structs()) for piece in pieces_of(i, split(s))]
    jitted, arguments = traced.program(pieces)
    compiled = jitted.lower(*arguments).compile()
    assert largest_array(jax.jit(lambda: jnp.ones((1024, 64)) + 1).lower().compile().as_text()) == 1024 * 64
    assert largest_array(compiled.as_text()) == 1024 * 64 // 8
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 1024 * 64


def linear(params: Any, rate: float = 0.1, **batch: jax.Array) -> tuple[Any, jax.Array]:
    loss, grads = jscaler.value_and_grad(lambda p: ((batch["x"] @ p["w"] + p["b"]) ** 2).mean())(params)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss


def make_linear(scale: jax.Array) -> dict[str, jax.Array]:
    return {"w": scale * jax.random.normal(jax.random.key(1), (16, 4)), "b": jnp.zeros(4)}


def in_columns(graph: Any, devices: np.ndarray) -> None:
    for op, factor in graph.factor_of("params/w", 0).items():
        if op.kind == "forward" and factor in graph.rule(op).factors and graph.rule(op).factors[factor].kind != "blocked":
            graph.op_assign(graph.op_trans(op, jscaler.Split(factor, devices.size)), devices)


def test_a_plain_tree_and_an_operand_that_lies_on_another_device() -> None:
    step = jscaler.parallelize(in_columns, devices=jax.devices()[4:])(linear)
    scale = jax.device_put(jnp.float32(3), jax.devices()[0])
    params = step.init(make_linear, scale, x=jax.ShapeDtypeStruct((8, 16), jnp.float32))
    assert_equal(params, jax.jit(make_linear)(scale), rtol=1e-6)
    assert params["w"].sharding.device_set == set(jax.devices()[4:])
    assert params["w"].addressable_shards[0].data.shape == (4, 4)


def test_the_abstract_state_has_the_layout_and_no_arrays() -> None:
    step = net_train_step()
    arguments = (Net(), jax.random.key(0), 1e-2)
    abstract = step.abstract_state(make_state, *arguments, batch=net_batch())
    real = step.init(make_state, *arguments, batch=net_batch())
    assert jax.tree.structure(abstract.params) == jax.tree.structure(real.params)
    for struct, array in zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True):
        assert isinstance(struct, jax.ShapeDtypeStruct)
        assert (struct.shape, struct.dtype, struct.sharding) == (array.shape, array.dtype, array.sharding)


def test_random_bits_are_those_of_one_device() -> None:
    def draw(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jax.random.bits(key, (16, 4)), "b": jax.random.uniform(key, (4,))}

    traced = trace_state(["params"], draw, (jax.random.key(5),))
    mesh = jax.sharding.Mesh(jax.devices(), "x")
    shardings = [jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*s)) for s in ((), ("x",))]
    made = traced.assemble(traced.fill(shardings))["params"]
    assert made["w"].addressable_shards[0].data.shape == (2, 4)
    assert_equal(made, draw(jax.random.key(5)))


class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


def make_nnx(seed: int) -> tuple[Layers, nnx.Optimizer]:
    model = Layers(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def nnx_step(model: Layers, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    loss, grads = jscaler.nnx.value_and_grad(lambda m: ((m(batch["x"]) - batch["y"]) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def test_nnx_objects_are_made_in_their_layout() -> None:
    step = jscaler.parallelize(columns_then_rows, devices=4)(nnx_step)
    model, optimizer = step.init(make_nnx, 0, batch=net_batch())
    theirs, its = make_nnx(0)
    assert_equal(nnx.state(model), nnx.state(theirs), rtol=1e-6)
    assert model.up.kernel[...].addressable_shards[0].data.shape == (16, 16)
    assert optimizer.opt_state[0].mu["up"]["kernel"][...].addressable_shards[0].data.shape == (16, 16)
    held = nnx.to_pure_dict(nnx.state(model))["up"]["kernel"].sharding
    loss = step(model, optimizer, net_batch())
    np.testing.assert_allclose(loss, nnx.jit(nnx_step)(theirs, its, net_batch()), rtol=1e-5)
    np.testing.assert_allclose(model.up.kernel[...], theirs.up.kernel[...], atol=1e-5)
    assert model.up.kernel[...].sharding == held
    assert len(step._compiled) == len(step._lowered) == 1
    abstract, _ = step.abstract_state(make_nnx, 0, batch=net_batch())
    assert isinstance(abstract.up.kernel.get_raw_value(), jax.ShapeDtypeStruct)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"batch": 1.0, "bath": 2.0}, jscaler.UnknownNameError, "bath"),
        ({}, jscaler.CaptureError, "the 2 arguments of the step that are not given, state, batch, and returned a dict"),
        ({"state": 1.0, "batch": 1.0}, jscaler.CaptureError, "all are: state, batch"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], error: type[Exception], message: str) -> None:
    step = jscaler.parallelize("single", devices=1)(net_step)
    with pytest.raises(error, match=message):
        step.init(make_linear, jnp.float32(1), **given)


def test_what_makes_a_state_is_a_function() -> None:
    step = jscaler.parallelize("single", devices=1)(linear)
    with pytest.raises(jscaler.CaptureError, match=r"make_state is a function .* not a dict; .* passed to the step itself"):
        step.init({"w": jnp.ones(2)}, x=jnp.ones(2))


def test_a_state_that_is_no_tree_of_arrays() -> None:
    step = jscaler.parallelize("single", devices=1, static_argnames="rate")(linear)
    with pytest.raises(jscaler.CaptureError, match=r"'params/name' a str.*pytree_node=False"):
        step.init(lambda: {"name": "net"}, x=jnp.ones(2))

    @jscaler.parallelize("single", devices=1, static_argnames="power")
    def powers(state: Any, power: int) -> Any:
        return state**power

    with pytest.raises(jscaler.CaptureError, match="static argument 'power'"):
        powers.init(lambda: jnp.ones(2))
