"""Asking a graph: ops by path and pattern, inputs by path, and what errors say."""

import copy
import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import CaptureError, UnknownNameError
from jscaler.ir import Graph


def step(state: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        h = batch["x"]
        for i in range(2):
            with jax.named_scope(f"block_{i}"), jax.named_scope("mlp"):
                h = jnp.tanh(h @ p[f"w{i}"])
        with jax.named_scope("head"):
            return (h**2).mean()

    value, grads = jscaler.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - g, state, grads), value


def graph_of(fun: Any, *args: Any) -> Graph:
    return jscaler.parallelize("single", devices=1)(fun).graph(*args)


@pytest.fixture(scope="module")
def graph() -> Graph:
    ones = np.ones((4, 4), np.float32)
    return graph_of(step, {"w0": ones, "w1": ones}, {"x": ones})


def paths(ops: Any) -> list[str]:
    return [op.path for op in ops]


@pytest.mark.smoke
def test_select_takes_shell_patterns(graph: Graph) -> None:
    assert paths(graph.select("block_*/mlp/dot")) == ["block_0/mlp/dot", "block_1/mlp/dot"]
    assert paths(graph.select("block_1/mlp/dot")) == ["block_1/mlp/dot"]
    assert {op.kind for op in graph.select("*")} == {"forward"}


def test_select_by_kind(graph: Graph) -> None:
    assert "block_0/mlp/dot@backward" in paths(graph.select("block_0/*", kind="backward"))
    assert graph.select("*", kind=None) == graph.ops
    assert graph.select("*", kind="update") == graph.update()


def test_a_name_that_nothing_carries_is_met_with_the_near_one(graph: Graph) -> None:
    with pytest.raises(UnknownNameError, match="no op named 'block_0/mlp/dott'; did you mean 'block_0/mlp/dot'"):
        graph.select("block_0/mlp/dott")
    with pytest.raises(UnknownNameError, match="no op named 'head/reduce_summ'; did you mean 'head/"):
        graph["head/reduce_summ"]
    with pytest.raises(UnknownNameError, match="no input named 'state/w2'; did you mean 'state/w"):
        graph.input("state/w2")


def test_inputs_by_path_and_by_pattern(graph: Graph) -> None:
    assert graph.input("batch/x").shape == (4, 4)
    assert [t.name for t in graph.select_inputs("state")] == ["state/w0", "state/w1"]
    assert [t.name for t in graph.select_inputs("*/w1")] == ["state/w1"]
    assert [t.name for t in graph.select_inputs("batch/x")] == ["batch/x"]


def test_producers_and_consumers_are_each_others_inverse(graph: Graph) -> None:
    for tensor, op in graph.producer.items():
        assert tensor in op.outputs
    for tensor, ops in graph.consumers.items():
        assert all(tensor in op.inputs for op in ops)
    assert {op.path for op in graph.consumers[graph.input("state/w0")]} >= {"block_0/mlp/dot", "block_0/mlp/dot@backward"}
    assert graph.input("state/w0") not in graph.producer


def test_kinds_partition_the_ops(graph: Graph) -> None:
    assert sorted(paths((*graph.forward(), *graph.backward(), *graph.update()))) == sorted(paths(graph.ops))


def test_an_op_is_found_by_its_path(graph: Graph) -> None:
    assert all(graph[op.path] is op for op in graph.ops)
    assert graph["block_1/mlp/dot"].name == "dot"


def test_factor_of(graph: Graph) -> None:
    reached = graph.factor_of("batch/x", 0)
    assert [reached[op] for op in graph.select("block_*/mlp/dot")] == ["a", "a"]


def test_a_rule_prints_as_an_einsum(graph: Graph) -> None:
    rule = graph.rule(graph["block_0/mlp/dot"])
    assert str(rule) == "a b, b c -> a c"
    with pytest.raises(UnknownNameError, match="no factor named 'z' in op 'block_0/mlp/dot'"):
        rule.factor("z", "block_0/mlp/dot")


def test_it_prints_one_line_per_op(graph: Graph) -> None:
    lines = str(graph).splitlines()
    assert len(lines) == 1 + len(graph.ops) - len(graph.of_kind("backward"))
    (line,) = [line for line in lines if line.startswith("block_0/mlp/dot")]
    assert "a b, b c -> a c" in line
    assert "f32[4,4], f32[4,4] -> f32[4,4]" in line
    assert "test_graph.py:" in line


def test_state_that_comes_back(graph: Graph) -> None:
    assert graph.next_version == {0: 0, 1: 1}
    assert not graph_of(lambda state: {"other": state["w"]}, {"w": np.ones(3, np.float32)}).next_version


def test_a_step_without_a_gradient_says_so() -> None:
    graph = graph_of(lambda x: x * 2, np.ones(3, np.float32))
    with pytest.raises(CaptureError, match=r"use jscaler.value_and_grad"):
        graph.require_gradient()


def test_a_tensor_is_its_name(graph: Graph) -> None:
    tensor = graph.inputs[0]
    assert graph.consumers[tensor] == graph.consumers[tensor.name]
    assert dataclasses.replace(tensor, role="activation") == tensor != dataclasses.replace(tensor, name="another")
    for same in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert (same, same.shape, same.role) == (tensor, (4, 4), "input")
    assert f"{tensor}" == f"{tensor.name}: f32[4,4]"


def test_tables_that_are_let_go_are_made_again(graph: Graph) -> None:
    before = {
        name: getattr(graph, name) for name in ("by_path", "producer", "consumers", "position", "homes", "flow", "tree")
    }
    graph.memo["own"] = 1
    graph.forget()
    assert not graph.memo
    for name, table in before.items():
        assert name not in vars(graph)
        assert getattr(graph, name) == table
