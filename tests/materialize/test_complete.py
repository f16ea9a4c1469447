"""Completing a plan: whatever a policy says, and however little, the numbers are one device's."""

import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower.steps import (
    ADAMW,
    assert_same_numbers,
    batch_and_hidden,
    collectives,
    mlp_loss,
    planned,
    split,
    tensor_parallel,
    tied_loss,
)
from of_the_day import of_the_day

import jscaler
from jscaler import Replicate, Split, plans


def nothing(graph: Any, devices: np.ndarray) -> None:
    """All is filled in."""


def kernels_only(graph: Any, devices: np.ndarray) -> None:
    """Tensor parallel, with what lies between the kernels left open."""
    split(graph, "up/dot", ("kernel", 1), devices)
    split(graph, "down/dot", ("kernel", 0), devices)


def batch_of_the_loss(graph: Any, devices: np.ndarray) -> None:
    split(graph, "loss/reduce_sum", ("batch/y", 0), devices)


def crosswise(graph: Any, devices: np.ndarray) -> None:
    """Neighbours cut different dims, on a grid and on its transpose."""
    grid = devices.reshape(2, -1)
    rows, columns = grid.shape
    up = graph.op_trans(graph["up/dot"], Split(("batch/x", 1), rows), Split(("batch/x", 0), columns))
    down = graph.op_trans(graph["down/dot"], Split(("kernel", 1), columns), Split(("act/tanh:0", 0), rows))
    graph.op_assign(up, grid)
    graph.op_assign(down, grid.T)


def nested(graph: Any, devices: np.ndarray) -> None:
    """One factor split twice: major parts, then minor ones."""
    halves = graph.op_trans(graph["up/dot"], Split(("kernel", 1), 2))
    graph.op_assign(graph.op_trans(halves, Split(("kernel", 1), devices.size // 2)), devices.reshape(2, -1))


def nested_inside_out(graph: Any, devices: np.ndarray) -> None:
    """Minor parts on far devices."""
    quarters = graph.op_trans(graph["up/dot"], Split(("kernel", 1), devices.size // 2), Split(("kernel", 1), 2))
    graph.op_assign(quarters, devices.reshape(2, -1).T)


def backward_unlike_forward(graph: Any, devices: np.ndarray) -> None:
    """A forward cut along the batch; its backward along the hidden layer."""
    split(graph, "up/dot", ("batch/x", 0), devices)
    split(graph, "up/dot@backward", ("kernel", 1), devices)


def updates_split(graph: Any, devices: np.ndarray) -> None:
    """Data parallel, with the optimizer's work on the first kernel dealt out."""
    plans.data_parallel()(graph, devices)
    for op in graph.select("update/*/up/kernel/*", kind="update"):
        graph.op_assign(graph.op_trans(op, Split(graph.rule(op).results[0][0][0], devices.size)), devices)


def copies(graph: Any, devices: np.ndarray) -> None:
    for op in graph.forward():
        graph.op_assign(graph.op_trans(op, Replicate(devices.size)), devices)


def shuffled(graph: Any, devices: np.ndarray) -> None:
    batch_and_hidden(graph, np.random.default_rng(0).permutation(devices))


POLICIES = [
    nothing, tensor_parallel, kernels_only, batch_and_hidden, batch_of_the_loss, crosswise, nested, nested_inside_out,
    backward_unlike_forward, updates_split, copies, shuffled,
]  # fmt: skip


@pytest.mark.parametrize("policy", of_the_day(POLICIES), ids=lambda policy: policy.__name__)
@pytest.mark.filterwarnings("ignore:.*parallelism is lost:jscaler.PlanWarning")
def test_policies_give_one_devices_numbers(policy: Any) -> None:
    assert_same_numbers(policy, devices=8)


@pytest.mark.parametrize("policy", [batch_and_hidden, backward_unlike_forward, updates_split], ids=lambda p: p.__name__)
def test_policies_give_one_devices_numbers_with_clipping_and_adamw(policy: Any) -> None:
    assert_same_numbers(policy, devices=4, tx=ADAMW)


def random_policy(seed: int) -> Any:
    """Every op of every kind: left open, or split and copied at random over a transposed 2 × 2 × 2 cube."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        rng = random.Random(seed)
        for op in graph.ops:
            if not op.inputs or rng.random() < 0.3:
                continue
            grid = graph.op_trans(op)
            for _ in range(3):
                factors = graph.rule(op).factors.values()
                taken = {f.name: math.prod(a.parts for a in grid.axes if a.factor == f.name) for f in factors}
                legal = [f for f in factors if f.kind != "blocked" and f.size // taken[f.name] % 2 == 0]
                choice = rng.choice([None, *legal])
                grid = graph.op_trans(grid, Split(choice.name, 2) if choice else Replicate(2))
            cube = devices.reshape(2, 2, 2).transpose(rng.sample(range(3), 3))
            graph.op_assign(grid, cube)

    return policy


@pytest.mark.parametrize("seed", of_the_day(range(4)))
@pytest.mark.parametrize("loss_fn", [mlp_loss, tied_loss], ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:.*parallelism is lost:jscaler.PlanWarning")
def test_random_policies_give_one_devices_numbers(loss_fn: Any, seed: int) -> None:
    assert_same_numbers(random_policy(seed), 8, loss_fn)


# What is filled in


def uses(plan: Any) -> dict[str, tuple[str, str]]:
    """Op -> (how its axes are used, who decided)."""
    laid = plan.completed.ops
    return {path: (one.placement.describe(), one.placement.origin) for path, one in laid.items()}


@pytest.mark.smoke
def test_what_the_policy_says_stays_and_backwards_mirror_it() -> None:
    said = uses(planned("data_parallel", 8))
    assert said["up/dot"] == ("a:8", "policy")
    assert said["up/dot@backward"] == ("a:8", "mirrored")
    assert said["loss/div"][1] == "filled"


def test_a_policy_that_says_nothing_copies_everything() -> None:
    plan = planned(nothing, 8)
    assert {use for use, _ in uses(plan).values()} == {"copy"}
    assert collectives(plan) == []


def test_what_lies_between_two_split_ops_is_filled_in_with_the_same_split() -> None:
    """Column-parallel, then open, then row-parallel: nothing is gathered in between."""
    plan = planned(kernels_only, 4)
    said = uses(plan)
    assert said["up/add"] == ("a:4", "filled")
    assert said["act/tanh"] == ("b:4", "filled")
    made_forward = {t.name for op in plan.graph.forward() for t in op.outputs}
    assert [c for c in collectives(plan) if c.split()[1] in made_forward] == ["all_reduce down/dot:0"]


def test_reading_a_sum_late_joins_shares_once_they_are_smallest() -> None:
    """A row-parallel first kernel leaves sums; the wide one is joined before the tanh, which is not linear."""

    def row_parallel(graph: Any, devices: np.ndarray) -> None:
        split(graph, "up/dot", ("kernel", 0), devices)

    plan = planned(row_parallel, 4)
    assert plan.completed.ops["up/dot"].outputs[0].values == (("x0", "add"),)
    assert all(not layout.values for layout in plan.completed.ops["act/tanh"].inputs)
    assert_same_numbers(row_parallel, 4)


def test_shares_pass_through_linear_ops() -> None:
    """sum_i A_i -> 2 (sum_i A_i)^T: one reduction, behind the linear op or before it, and never two."""

    def step(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("dot"):
            y = x @ kernel
        with jax.named_scope("linear"):
            z = (2 * y).T
        with jax.named_scope("sum"):
            return z.sum(), jnp.cos(z.sum())

    def policy(graph: Any, devices: np.ndarray) -> None:
        split(graph, "dot/dot", ("kernel", 0), devices)

    x, kernel = jax.random.normal(jax.random.key(0), (4, 8)), jax.random.normal(jax.random.key(1), (8, 4))
    run = jscaler.parallelize(policy, devices=4)(step)
    plan = run.lower(x, kernel).plan
    assert sum(c.startswith(("all_reduce", "reduce_scatter")) for c in collectives(plan)) == 1
    for ours, theirs in zip(run(x, kernel), jax.jit(step)(x, kernel), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_inputs_lie_as_their_first_reader_wants_them() -> None:
    plan = planned("data_parallel", 8)
    local = {t.name: layout.local_shape for t, layout in plan.completed.inputs.items()}
    assert local["batch/x"] == (2, 8)
    assert local["state/params/up/kernel"] == (8, 16)


def test_an_input_cut_on_a_minor_sub_dim_is_stored_whole() -> None:
    """No jax.Array can lie so: it is replicated, and sliced inside the step."""

    def step(x: jax.Array, kernel: jax.Array) -> jax.Array:
        with jax.named_scope("qkv"):
            return jnp.einsum("bi,ikh->bkh", x, jnp.sin(kernel.reshape(8, 3, 4)))

    def policy(graph: Any, devices: np.ndarray) -> None:
        for op in graph.ops:
            rule = graph.rule(op)
            names = [f for tensor in (*rule.operands, *rule.results) for dim in tensor for f in dim]
            head = next(f for f in names if rule.factors[f].size == 4)
            graph.op_assign(graph.op_trans(op, Split(head, devices.size)), devices)

    x, kernel = jax.random.normal(jax.random.key(0), (2, 8)), jax.random.normal(jax.random.key(1), (8, 12))
    run = jscaler.parallelize(policy, devices=4)(step)
    plan = run.lower(x, kernel).plan
    assert {layout.local_shape for t, layout in plan.completed.inputs.items() if t.name == "kernel"} == {(8, 12)}
    assert collectives(plan) == []
    np.testing.assert_allclose(run(x, kernel), step(x, kernel), rtol=1e-5)


def test_state_leaves_as_it_came_and_results_without_shares() -> None:
    plan = planned("data_parallel", 8)
    for index, layout in enumerate(plan.completed.outputs):
        assert not layout.values
        if index in plan.graph.next_version:
            assert layout == plan.completed.inputs[plan.graph.inputs[plan.graph.next_version[index]]]


def two_towers(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """The same ops twice: a dot, and what follows it."""
    with jax.named_scope("turn"):
        turned = params["down"]["kernel"].T
    total = jnp.zeros(())
    for name, kernel in (("a", params["up"]["kernel"]), ("b", turned)):
        with jax.named_scope(name):
            total = total + (jnp.tanh(batch["x"] @ kernel) ** 2).sum()
    return total


def test_equal_ops_in_different_places() -> None:
    """One tower by columns, one by rows: equal ops do not share layouts, nor what is filled in behind them."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        split(graph, "a/dot", ("state/params/up/kernel", 1), devices)
        split(graph, "b/dot", ("batch/x", 0), devices)

    assert_same_numbers(policy, 4, two_towers)
    plan = planned(policy, 4, two_towers)
    assert plan.graph["a/dot"].body is plan.graph["b/dot"].body
    cuts = {path: [x.counts for x in plan.completed.ops[path].inputs] for path in plan.completed.ops}
    assert (cuts["a/tanh"], cuts["b/tanh"]) == (["R1 V1 D(1,4)"], ["R1 V1 D(4,1)"])


def test_completing_twice_gives_the_same() -> None:
    assert uses(planned(kernels_only, 8)) == uses(planned(kernels_only, 8))
