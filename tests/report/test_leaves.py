"""State leaf by state leaf: how it lies, its bytes on each device, who decided, and what another layout would cost."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler.clusters import FEW_STEPS
from jscaler.ir.kinds import tensor_kinds
from jscaler.lower.step_plan import StepPlan
from jscaler.primitives import Plan, Store
from jscaler.report.leaves import LeafRow
from tests.lower.steps import MOMENTUM, Policy, batch_and_hidden, make_batch, make_state, make_step, split, tensor_parallel


def make_chain_state(layers: int) -> list[jax.Array]:
    return [jnp.eye(6) for _ in range(layers)]


def make_chain_step(layers: int) -> Any:
    def step(params: list[jax.Array], batch: jax.Array) -> Any:
        def loss_fn(params: list[jax.Array]) -> jax.Array:
            x = batch
            for i in range(layers):
                with jax.named_scope(f"block_{i}"):
                    x = jnp.tanh(x @ params[i])
            return (x**2).mean()

        loss, grads = jscaler.value_and_grad(loss_fn)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], loss

    return step


def plan_of(policy: Policy | Plan | str, devices: int = 4) -> StepPlan:
    return jscaler.parallelize(policy, devices=devices)(make_step()).lower(make_state(MOMENTUM), make_batch()).plan


def rows_of(plan: StepPlan) -> dict[str, LeafRow]:
    return {row.name: row for row in plan.report.leaves}


@pytest.mark.smoke
def test_every_leaf_lies_in_the_bytes_that_its_arrays_have() -> None:
    """Kind by kind, against the shards of the step's own arrays."""
    step = jscaler.parallelize(batch_and_hidden, devices=4)(make_step())
    lowered = step.lower(make_state(MOMENTUM), make_batch())
    report = lowered.plan.report
    held: dict[str, int] = {}
    for tensor, sharding in zip(lowered.graph.inputs, lowered.executable.in_shardings, strict=True):
        local = int(np.prod(sharding.shard_shape(tensor.shape))) * tensor.itemsize
        kind = tensor_kinds(lowered.graph)[tensor]
        held[kind] = held.get(kind, 0) + local
    by_kind = {row.kind: row for row in report.memory}
    for kind, nbytes in held.items():
        assert sum(row.nbytes_per_device for row in report.leaves if row.kind == kind) == nbytes
        assert by_kind[kind].nbytes_per_device == nbytes
        assert sum(row.nbytes for row in report.leaves if row.kind == kind) == by_kind[kind].nbytes
    assert held["parameter"] == held["optimizer"] == 4 * (8 * 16 // 2 + 16 // 2 + 16 * 8 // 2 + 8)
    assert sum(row.count for row in report.leaves) == len(lowered.graph.inputs)


def test_of_a_pipeline_a_device_holds_what_its_stage_does() -> None:
    """That of the fullest stage, kind by kind; each leaf stands with the devices that hold it."""
    step = jscaler.parallelize("pipeline(4, 2)", devices=4)(make_chain_step(4))
    state, batch = make_chain_state(4), jnp.ones((8, 6))
    lowered = step.lower(state, batch)
    report = lowered.plan.report
    held: dict[int, dict[str, int]] = {device: {} for device in range(4)}
    kinds = tensor_kinds(lowered.graph)
    for tensor in lowered.graph.inputs:
        for device in lowered.plan.completed.inputs[tensor].mesh.devices:
            held[device][kinds[tensor]] = held[device].get(kinds[tensor], 0) + tensor.nbytes
    fullest = max(held.values(), key=lambda one: sum(one.values()))
    by_kind = {row.kind: row for row in report.memory}
    assert {kind: by_kind[kind].nbytes_per_device for kind in fullest} == fullest
    assert by_kind["parameter"].nbytes_per_device == by_kind["gradient"].nbytes_per_device == 6 * 6 * 4
    assert by_kind["parameter"].nbytes == 4 * 6 * 6 * 4
    kernels = {row.devices: row.nbytes_per_device for row in report.leaves if row.kind == "parameter"}
    assert kernels == {(device,): 6 * 6 * 4 for device in range(4)}
    assert "per device: parameter 144 B of 576 B, gradient 144 B of 576 B" in repr(lowered.plan)
    rows = [line.split() for line in str(lowered.plan).splitlines() if line.startswith("parameter  params/*")]
    assert [row[3] for row in rows] == ["[0]", "[1]", "[2]", "[3]"]


def test_who_decided_and_for_whom() -> None:
    rows = rows_of(plan_of(tensor_parallel))
    assert rows["state/params/up/kernel"].decided == "policy: as up/dot reads it"
    assert rows["state/params/up/kernel"].layout == "R1 V1 D(1,4)"
    assert rows["state/params/down/bias"].decided == "filled: as down/add reads it"
    moment = rows["state/opt/*/trace/up/kernel"]  # nobody said so: it follows its parameter's update
    assert moment.decided == "filled: as its update reads it"
    assert (moment.layout, moment.kind) == ("R1 V1 D(1,4)", "optimizer")
    assert rows["batch/labels"].decided == "whole: no op reads it"


def test_an_input_that_the_plan_stores_says_so_whatever_its_readers_want() -> None:
    plan = plan_of(tensor_parallel).plan
    store = Store("state/params/up/kernel", (4,), (0, 1, 2, 3), ((), ()))
    row = rows_of(plan_of(dataclasses.replace(plan, decisions=(store, *plan.decisions))))["state/params/up/kernel"]
    assert (row.decided, row.layout) == ("stored so by the plan", "R4 V1 D(1,1)")


def test_parameters_that_the_plan_stores_in_parts_say_so() -> None:
    rows = rows_of(plan_of("zero3"))
    kernel, moment = rows["state/params/up/kernel"], rows["state/opt/*/trace/up/kernel"]
    assert kernel.decided == "policy: stored in parts"
    assert moment.decided == "filled: as its update reads it"
    assert kernel.nbytes_per_device == moment.nbytes_per_device == 8 * 16 * 4 // 4


def test_what_stays_whole_though_others_are_split_is_listed() -> None:
    report = plan_of(tensor_parallel).report
    assert {row.name for row in report.replicated} == {"state/params/down/bias", "state/opt/*/trace/down/bias"}
    assert plan_of("data_parallel").report.replicated == ()  # all parameters are whole


def test_the_runner_up_is_the_price_of_another_layout() -> None:
    """Two readers want different cuts of one kernel: the first has it, and the second brings it over."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        split(graph, "one/dot", ("w", 1), devices)
        split(graph, "two/dot", ("w", 0), devices)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("one"):
            y = x @ w
        with jax.named_scope("two"):
            return y @ w

    plan = jscaler.parallelize(policy, devices=4)(step).lower(jnp.ones((8, 8)), jnp.ones((4, 8))).plan
    row = rows_of(plan)["w"]
    assert (row.layout, row.decided) == ("R1 V1 D(1,4)", "policy: as one/dot reads it")
    whole = 8 * 8 * 4
    exchange = FEW_STEPS.launch + whole / 4 * 3 / 4  # one all-to-all; from a whole copy both readers just slice
    assert row.runner_up is not None
    assert row.runner_up.what == "R4 V1 D(1,1)"
    assert row.runner_up.more == pytest.approx(-exchange, abs=1)


def test_the_runner_up_pays_for_what_its_update_makes() -> None:
    """Columns are read and made as columns: a whole copy would be gathered again after each update."""
    row = rows_of(plan_of(tensor_parallel))["state/params/up/kernel"]
    assert row.runner_up is not None
    assert (row.layout, row.runner_up.what) == ("R1 V1 D(1,4)", "R4 V1 D(1,1)")
    gathered = FEW_STEPS.launch + 8 * 16 * 4 / 4 * 3
    assert row.runner_up.more == pytest.approx(gathered, abs=1)


def test_leaves_of_stacked_layers_are_those_of_the_loop() -> None:
    def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            def layer(c: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                with jax.named_scope("up"):
                    return jnp.tanh(c @ w), None

            return jax.lax.scan(layer, x, params["w"])[0].sum()

        return jax.tree.map(lambda p, g: p - g, params, jscaler.grad(loss)(params))

    def policy(graph: Any, devices: np.ndarray) -> None:
        op = next(op for op in graph.forward() if op.loop and op.name == "dot")
        cells = graph.op_trans(op, jscaler.Split("c", devices.size))
        graph.op_assign(cells, devices)

    decorated = jscaler.parallelize(policy, devices=2, donate_argnums=0)(step)
    plan = decorated.lower({"w": jnp.ones((3, 8, 8))}, jnp.ones((4, 8))).plan
    row = rows_of(plan)["params/w"]
    assert row.kind == "parameter"
    assert row.layout == "R1 V1 D(1,1,2)"
    assert row.decided.startswith("policy: as ")
    assert row.nbytes_per_device == 3 * 8 * 8 * 4 // 2
