"""From a trace to a graph: names are Flax module paths, equal layers share their Body, inputs and outputs have paths."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import check_graph, graph_of

import jscaler
from jscaler.ir import Graph

x = np.linspace(0, 1, 2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)


class Mlp(nn.Module):
    activation: Any = nn.gelu

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4, name="down")(self.activation(nn.Dense(8, name="up")(x)))


class Net(nn.Module):
    activation: Any = nn.gelu
    depth: int = 3

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.depth):
            x = x + Block(self.activation, name=f"block_{i}")(x)
        return nn.Dense(2, name="head")(x)


class Block(nn.Module):
    activation: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Mlp(self.activation, name="mlp")(nn.LayerNorm(name="norm")(x))


def net_graph(activation: Any = nn.gelu) -> Graph:
    net = Net(activation)

    def step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            return (net.apply({"params": p}, batch["x"]) ** 2).mean()

        value, grads = jscaler.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value}

    return check_graph(step, jax.jit(net.init)(jax.random.key(0), x)["params"], {"x": x})


@pytest.fixture(scope="module")
def graph() -> Graph:
    return net_graph()


@pytest.mark.smoke
def test_module_paths_name_the_ops(graph: Graph) -> None:
    paths = {op.path for op in graph.forward()}
    assert {f"block_{i}/mlp/{name}/dot" for i in range(3) for name in ("up", "down")} <= paths
    assert "head/dot" in paths
    assert {op.path.split("/")[1] for op in graph.select("block_*")} >= {"mlp", "norm"}
    assert len(graph.select("block_*/mlp/*")) % 3 == 0
    assert all(op.path.startswith("loss/") for op in graph.forward()[-1:])


def test_paths_and_tensor_names_are_unique(graph: Graph) -> None:
    assert len({op.path for op in graph.ops}) == len(graph.ops)
    written = [t.name for op in graph.ops for t in op.outputs]
    assert len(set(written)) == len(written)


@pytest.mark.parametrize("activation", [nn.gelu, nn.relu, nn.silu, jnp.tanh], ids=["gelu", "relu", "silu", "tanh"])
def test_equal_layers_share_their_bodies(activation: Any) -> None:
    graph = net_graph(activation)
    for one in graph.select("block_1/*"):
        assert graph[one.path.replace("block_1", "block_2")].body is one.body, one.path


def test_the_layer_that_reads_the_batch_is_equal_to_the_others(graph: Graph) -> None:
    assert [op.name for op in graph.select("block_0/*")] == [op.name for op in graph.select("block_1/*")]
    assert graph.select("block_0/norm/*")[0].body is graph.select("block_1/norm/*")[0].body


def test_an_activation_is_named_by_what_it_does() -> None:
    assert "jit" not in {op.name for op in net_graph(nn.relu).forward()}


def test_inputs_and_outputs_are_named_by_their_tree_path(graph: Graph) -> None:
    assert graph.input("params/block_1/mlp/up/kernel").shape == (4, 8)
    assert graph.input("batch/x").role == "input"
    assert "1/loss" in graph.output_names
    assert "0/head/kernel" in graph.output_names


def test_a_parameter_that_comes_back_is_its_next_version(graph: Graph) -> None:
    for output, number in graph.next_version.items():
        assert graph.output_names[output].split("/", 1)[1] == graph.inputs[number].name.split("/", 1)[1]
    assert len(graph.next_version) == len(graph.inputs) - 1


def test_updates_are_named_by_the_leaf_they_update(graph: Graph) -> None:
    assert graph.select("update/params/head/kernel/*", kind="update")


def test_every_forward_op_knows_its_backward(graph: Graph) -> None:
    for op in graph.forward():
        assert op.backward is None or op.backward.forward is not None
    assert graph["head/dot"].backward is graph["head/dot@backward"]
    assert graph["head/dot@backward"].forward.path == "head/dot"


def test_an_op_knows_the_users_line(graph: Graph) -> None:
    assert graph.select("loss/*")[0].source.split(":")[0].endswith("test_build.py")


def test_an_input_free_equation_is_copied_into_each_reader() -> None:
    def step(x: jax.Array) -> Any:
        mask = jnp.arange(4) > 1
        with jax.named_scope("a"):
            y = jnp.where(mask, x, 0)
        with jax.named_scope("b"):
            return jnp.where(mask, y @ y.swapaxes(1, 2) @ x, 1)

    graph = check_graph(step, x)
    holders = [op.path for op in graph.ops if "iota" in {e.primitive.name for e in op.body.jaxpr.eqns}]
    assert len(holders) == 2
    assert all(op.inputs for op in graph.ops)


def test_a_constant_result_gets_an_op_of_its_own() -> None:
    graph = check_graph(lambda x: (x, jnp.zeros(3), jnp.arange(2)), x)
    assert [op.path for op in graph.ops] == ["output/1/constant", "output/2/constant"]


def test_what_the_step_closes_over_is_a_constant() -> None:
    held = jnp.arange(4.0)
    graph = check_graph(lambda x: x * held, x)
    ((tensor, value),) = graph.constants
    assert (tensor.role, value is held) == ("constant", True)


def test_scopes_of_einsum_are_no_modules() -> None:
    graph = graph_of(lambda x: jnp.einsum("bsd,bsd->bs", x, x), x)
    assert [op.path for op in graph.ops] == ["loss/dot"]
