"""``explain`` says how each group of ops is split, who decided, and what is sent."""

import copy
import json
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import Split
from jscaler.clusters import FEW_STEPS
from jscaler.plans import by_name
from tests.lower.steps import batch_and_hidden, planned, tensor_parallel
from tests.plans.plan_steps import mlp


@pytest.mark.smoke
def test_explain_names_splits_deciders_and_bytes() -> None:
    def step(state: jax.Array, batch: jax.Array) -> jax.Array:
        with jax.named_scope("layer_0"):
            pass
        return state - jscaler.grad(lambda w: jnp.tanh(batch @ w).mean())(state)

    compiled = jscaler.parallelize("data_parallel", devices=4, donate_argnums=0)(step)
    text = compiled.lower(jnp.ones((8, 8)), jnp.ones((4, 8))).plan.explain()
    lines = text.splitlines()
    assert lines[0].startswith("plan data_parallel (")
    assert "on 4 devices, mesh x0=4" in lines[0]
    assert any("loss/dot" in line and "a:4" in line and "policy" in line for line in lines)
    assert any("loss/dot@backward" in line and "mirrored" in line for line in lines)
    gradient = 2 * (4 - 1) / 4 * 8 * 8 * 4  # what each device sends in one all-reduce of the weights' gradient
    assert f"1× all_reduce {gradient:.0f} B" in text


def test_explain_says_why_and_which_tensor_in_which_layouts() -> None:
    def step(state: dict[str, jax.Array], batch: jax.Array) -> dict[str, jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            with jax.named_scope("layer_0"):
                x = jnp.tanh(batch @ params["up"])
            with jax.named_scope("layer_1"):
                return jnp.square(x @ params["down"] - 1).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jscaler.grad(loss)(state))

    state = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}
    plan = jscaler.parallelize(jscaler.plans.tensor_parallel({"*/up": 1}), devices=4, donate_argnums=0)(step)
    lines = plan.lower(state, jnp.ones((2, 4))).plan.explain().splitlines()
    moved = [i for i, line in enumerate(lines) if "└" in line]
    assert len(moved) == 1  # the sum after the second kernel: x has no gradient
    sent = 2 * 3 / 4 * 2 * 4 * 4
    assert lines[moved[0]].strip() == f"└ layer_*/dot:0: R1 V4 D(1,1) → R4 V1 D(1,1), 1× all_reduce {sent:.0f} B"
    reader = lines[moved[0] - 1]
    assert "filled: " in reader
    assert any("layer_*/dot " in line and "policy" in line and "R1 V1 D(1,4)" in line for line in lines)


def test_leaves_and_bytes_follow_the_ops_and_sections_can_be_chosen() -> None:
    plan = planned(tensor_parallel, 4)
    lines = plan.explain().splitlines()
    assert any(
        line.split()[:5] == ["parameter", "state/params/up/kernel", "1", "512", "B"] and "R1 V1 D(1,4)" in line
        for line in lines
    )
    assert any(line.startswith("2 leaves of state stay whole on every device, 64 B in all: state/") for line in lines)
    memory = plan.explain(sections=["memory"]).splitlines()
    table = {line.split()[0]: line.split()[1:] for line in memory[2:-2]}
    assert memory[-2].startswith("peak per device, as estimated: ")
    peak = plan.report.estimate
    assert peak.activations > 0
    assert peak.peak == peak.arguments + peak.gradients + peak.activations + peak.temporaries
    assert peak.arguments == sum(r.nbytes_per_device for r in plan.report.memory if r.kind != "gradient")
    assert table["parameter"] == ["4", "1.1", "KiB", "304", "B"]
    assert table["gradient"] == table["parameter"]
    assert table["optimizer"] == table["parameter"]
    assert table["input"][-2:] == ["1.1", "KiB"]
    legends = [line for line in lines if "value shares, " in line]
    assert legends == ["R1 V1 D(1,4): no replicas, no value shares, dim 0 whole, dim 1 in 4 parts"]
    assert sum("value shares, " in line for line in plan.explain(sections=["leaves"]).splitlines()) == 1
    assert memory[0] == lines[0]
    assert memory[-1] == lines[-1]
    assert not any(line.startswith(("forward", "parameter ", "leaf")) for line in memory[1:] if "state/" in line)


def test_the_report_is_plain_data() -> None:
    report = planned(batch_and_hidden, 4).report
    data = json.loads(json.dumps(report.as_json()))
    assert data["plan"] == "batch_and_hidden"
    assert data["groups"] == [{"x0": 2, "x1": 2}]
    assert {row["kind"] for row in data["ops"]} == {"forward", "backward", "update"}
    sent = sum(nbytes for _, nbytes in data["total"].values())
    assert sent == sum(n for row in data["ops"] for move in row["moves"] for _, n in move["moved"].values())
    assert sum(row["count"] for row in data["ops"]) == len(planned(batch_and_hidden, 4).graph.ops)


@pytest.mark.parametrize("plan", ["data_parallel", "pipeline(2, 2)"])
def test_a_plan_goes_through_a_pickle_with_all_that_it_says(plan: str) -> None:
    step = jscaler.parallelize(plan, devices=2)(two_stages).lower({"a": jnp.eye(8), "b": jnp.eye(8)}, jnp.ones((4, 8)))
    loaded = pickle.loads(pickle.dumps(step.plan))
    assert (str(loaded), repr(loaded)) == (str(step.plan), repr(step.plan))
    assert (loaded.plan, loaded.report, loaded.lost) == (step.plan.plan, step.plan.report, step.plan.lost)
    assert loaded.explain(["memory"]) == step.plan.explain(["memory"])
    assert str(pickle.loads(pickle.dumps(loaded))) == str(loaded)
    assert jscaler.parallelize(loaded)(two_stages).plan_name == step.plan.name
    assert copy.deepcopy(step.plan) is copy.copy(step.plan) is step.plan


def two_stages(params: dict[str, jax.Array], batch: jax.Array) -> Any:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        with jax.named_scope("block_0"):
            x = jnp.tanh(batch @ params["a"])
        with jax.named_scope("block_1"):
            return (jnp.tanh(x @ params["b"]) ** 2).mean()

    value, grads = jscaler.value_and_grad(loss)(params)
    return jax.tree.map(jnp.subtract, params, grads), value


def test_whatever_was_filled_in_by_price_says_what_it_cost_more() -> None:
    """Per axis of a two-dim grid; never cheaper than what was taken."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        cells = graph.op_trans("one/dot", Split("a", 2), Split("c", 4))
        graph.op_assign(cells, devices.reshape(2, 4))

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("one"):
            y = x @ w
        with jax.named_scope("two"):
            return jnp.tanh(y)

    plan = jscaler.parallelize(policy, devices=8)(step).lower(jnp.ones((8, 8)), jnp.ones((8, 8))).plan
    first, second = plan.report.ops
    assert (first.origin, first.runners_up) == ("policy", ())
    assert second.decided == "filled: the split of its inputs"
    assert [(found.axis, found.what) for found in second.runners_up] == [("x0", "copy"), ("x1", "a:2")]
    along_x1 = FEW_STEPS.launch + 3 / 4 * (8 * 8 * 4) / 2  # gather the half of y that a row of devices holds
    assert second.runners_up[1].more == pytest.approx(along_x1, abs=1)
    assert second.runners_up[0].more > 0
    assert f"x1: a:2 (+cost {along_x1:.0f})" in plan.explain()


def test_update_ops_of_like_leaves_are_one_line() -> None:
    def step(state: dict[str, jax.Array], batch: jax.Array) -> dict[str, jax.Array]:
        def loss(p: dict[str, jax.Array]) -> jax.Array:
            return sum(jnp.tanh(batch @ p[name]).sum() for name in p)  # type: ignore[return-value]

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jscaler.grad(loss)(state))

    state = {name: jnp.ones((4, 4)) for name in ("key", "query", "value")}
    text = jscaler.parallelize("data_parallel", devices=2)(step).lower(state, jnp.ones((2, 4))).plan.explain()
    assert "update/state/{key,query,value}/" in text
    assert "state/{key,query,value} " in text


def test_time_axes_are_shown_and_what_they_are_cut_and_joined_with_is_not() -> None:
    step, arguments = mlp()
    plan = by_name("accumulate(4, co_shard(2, on={'*/layer_0/kernel': 1}, loss=False))")
    lines = jscaler.parallelize(plan, devices=1)(step).lower(*arguments).plan.explain(["ops"]).splitlines()
    in_parts = [line for line in lines if "copy in time microbatch:4 co_shard:2" in line and line.startswith("forward")]
    assert any(line.split()[1:3] == ["max", "8"] for line in in_parts), lines  # four micro-batches of two parts
    assert any("microbatch:4 " in line and "co_shard" not in line for line in lines)
    assert not [line for line in lines if "@cut" in line or "@start" in line]


def test_where_ops_run_and_why_is_said_if_there_are_several_groups() -> None:
    def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        def loss(p: dict[str, jax.Array]) -> jax.Array:
            with jax.named_scope("one"):
                h = x @ p["a"]
            with jax.named_scope("two"):
                y = h @ p["b"]
            with jax.named_scope("open"):
                return jnp.sum(h) + jnp.sum(jnp.tanh(y))

        return jax.tree.map(lambda p, g: p - g, params, jscaler.grad(loss)(params))

    def policy(graph: Any, devices: np.ndarray) -> None:
        for scope, device in (("one", 0), ("two", 1)):
            for op in graph.select(f"*{scope}/*"):
                graph.op_assign(op, device)

    params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 16))}
    plan = jscaler.parallelize(policy, devices=2)(step).lower(params, jnp.ones((2, 4))).plan
    homes = {row.path: (row.devices, row.home) for row in plan.report.ops}
    assert homes["two/dot"] == ((1,), "")
    assert homes["two/dot@backward"] == ((1,), "as its forward")
    assert homes["open/tanh"] == ((1,), "by its operands")
    assert homes["open/reduce_sum"] == ((0,), "by its operands"), "of h, which lies there"
    assert homes["update/params/b/sub"] == ((1,), "by its operands")
    text = plan.explain(["ops"])
    assert "[1] as its forward" in text
    assert "runs on" not in planned(batch_and_hidden, 4).explain(["ops"])
