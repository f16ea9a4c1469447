"""``jscaler.cost``: totals that add up, bytes per link, what is worked out again after a change, and inside a policy."""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losing import losing
from lower.steps import MOMENTUM, make_batch, make_state, make_step, split, tensor_parallel

import jscaler
from jscaler import Split
from jscaler.clusters import Cluster, Link, find_cluster
from jscaler.errors import DeviceError, PlanError
from jscaler.estimate.query import Cost
from jscaler.estimate.traffic import traffic_of
from jscaler.lower.program import Compute, walk
from jscaler.report.moved_tensors import moves_by_reader

H100 = find_cluster("8xH100-80GB")
TWO_HOSTS = Cluster("two hosts", 2, 2, Link(1e-6, 100e9), Link(5e-6, 10e9), device=H100.device)


@pytest.fixture(scope="module")
def graph() -> Any:
    step = jscaler.parallelize("single", devices=1)(make_step())
    return step.graph(make_state(MOMENTUM), make_batch())


def lowered(plan: Any, devices: int, **options: Any) -> Any:
    step = jscaler.parallelize(plan, devices=devices, donate_argnames="state", **options)(make_step())
    return step.lower(make_state(MOMENTUM), make_batch())


@pytest.mark.parametrize(("plan", "devices"), [("single", 1), ("data_parallel", 4), (tensor_parallel, 4)])
def test_the_parts_of_a_cost_add_up(graph: Any, plan: Any, devices: int) -> None:
    found = jscaler.cost(graph, plan, H100, devices=devices)
    assert found.num_devices == devices
    assert found.seconds.compute is not None
    assert found.seconds.compute == pytest.approx(sum(op.seconds or 0.0 for op in found.by_op.values()))
    assert found.seconds.compute > 0
    assert found.seconds.total == found.seconds.compute + found.seconds.communication
    assert (found.seconds.communication > 0) == (found.sent.total > 0) == (devices > 1)
    memory = found.memory
    assert memory.arguments + memory.gradients + memory.activations + memory.temporaries == memory.peak
    assert max(m.nbytes for m in found.held.timeline) == memory.peak
    assert memory.at in found.step.graph.by_path
    assert set(found.by_op) == set(found.step.graph.by_path)
    assert json.loads(json.dumps(found.as_json()))["memory"]["peak"] == memory.peak
    assert found.fits
    for line in ("seconds:", "sent per device:", "memory per device:", memory.at):
        assert line in str(found)


def finished() -> dict[str, Any]:
    one = lowered("data_parallel", 4)
    return {"lowered": one, "its plan": one.plan, "compiled": one.compile()}


def test_what_is_asked_of_a_step_takes_it_lowered_or_compiled_and_its_plan(graph: Any) -> None:
    """Then the cluster; behind a graph a plan stands between."""
    wanted = jscaler.cost(graph, "data_parallel", H100, devices=4).as_json()
    for name, one in finished().items():
        cost, timeline, fit = (f(one, "4xH100-80GB") for f in (jscaler.cost, jscaler.simulate, jscaler.fit))
        assert cost.by_op == jscaler.cost(one, None, "4xH100-80GB").by_op == jscaler.cost(one, cluster="4xH100-80GB").by_op
        assert cost.as_json()["flops"] == wanted["flops"], name
        assert timeline.makespan == jscaler.simulate(graph, "data_parallel", "4xH100-80GB").makespan
        assert fit.chosen.text == jscaler.fit(graph, "4xH100-80GB").chosen.text
        assert jscaler.simulate(one, seconds=[1.0]).makespan == 1.0


@pytest.mark.one_day_in(2)
def test_a_plan_is_taken_as_what_it_has_become(graph: Any) -> None:
    one = lowered(tensor_parallel, 4)
    for plan in (one, one.plan, one.plan.plan):
        assert jscaler.cost(graph, plan, H100).step.digest == one.plan.digest
        assert jscaler.simulate(graph, plan, "8xH100-80GB").makespan > 0
        again = jscaler.parallelize(plan)(make_step()).lower(make_state(MOMENTUM), make_batch())
        assert again.plan.digest == one.plan.digest
    given = make_state(MOMENTUM), make_batch()
    for step in (one, one.compile()):
        found = jscaler.compare(step, *given, steps=1, rounds=1, beside=one.plan)
        assert found.ours.digest == found.gspmd.digest == one.plan.digest


def test_products_are_divided_among_the_devices(graph: Any) -> None:
    whole = jscaler.cost(graph, "single", H100, devices=1).flops
    # x @ up, h @ down; three gradients (none of x)
    assert whole == 5 * 2 * 16 * 8 * 16
    for plan in ("data_parallel", tensor_parallel):
        assert jscaler.cost(graph, plan, H100, devices=4).flops == whole / 4


def test_arguments_are_what_xla_says() -> None:
    made = lowered("data_parallel", 4)
    memory = jscaler.cost(made, None, H100).memory
    labels = 16 * 4  # which the loss does not read: they lie there, and the program does not take them
    assert memory.arguments - labels == made.compile().memory_analysis().argument_size_in_bytes
    kernels = (8 * 16 + 16 + 16 * 8 + 8) * 4
    assert (memory.parameters, memory.optimizer) == (kernels, kernels)  # a momentum for each
    assert memory.inputs == 2 * (16 // 4) * 8 * 4 + labels


@pytest.mark.parametrize("plan", ["data_parallel", tensor_parallel])
def test_bytes_are_those_that_explain_counts(graph: Any, plan: Any) -> None:
    found = jscaler.cost(graph, plan, BYTES_LIKE, devices=4)
    moves = [m.moved for every in moves_by_reader(found.step.segments).values() for m in every]
    sent = sum(nbytes for moved in moves for _, nbytes in moved.values())
    assert found.sent.total == pytest.approx(sent)
    assert sum(nbytes for _, nbytes in found.sent.kinds.values()) == pytest.approx(sent)
    by_op = sum(op.sent for op in found.by_op.values())
    assert 0 < by_op <= found.sent.total  # the rest is moved for the results


BYTES_LIKE = Cluster("one host", 1, 4, Link(1e-6, 1e9), Link(1e-6, 1e9))


def test_bytes_are_told_by_the_links_that_they_cross(graph: Any) -> None:
    one = jscaler.cost(graph, "data_parallel", BYTES_LIKE, devices=4)
    assert (one.sent.inside > 0, one.sent.between, one.sent.leaving) == (True, 0, 0)
    made = lowered("data_parallel", 4)
    two = jscaler.cost(made, None, TWO_HOSTS)
    assert (two.sent.inside, two.sent.between > 0) == (0, True)  # every group spans both hosts
    groups = np.arange(4)[None]
    crossing = TWO_HOSTS.crossing("all_reduce", groups)
    assert set(two.sent.kinds) == {"all_reduce"}
    assert two.sent.leaving == pytest.approx(crossing * two.sent.between)
    line = TWO_HOSTS.collective("all_reduce", groups)
    count, nbytes = two.sent.kinds["all_reduce"]
    assert two.seconds.communication == pytest.approx(count * line.fixed + line.per_byte * nbytes)


def test_groups_that_span_the_same_hosts_share_their_network(graph: Any) -> None:
    def across(graph: Any, devices: np.ndarray) -> None:
        """The batch over the two hosts, copied on the devices of each."""
        for path in ("up/dot", "up/add", "act/tanh", "down/dot", "down/add"):
            grid = graph.op_trans(graph[path], Split((graph[path].inputs[0].name, 0), 2), jscaler.Replicate(2))
            graph.op_assign(grid, devices.reshape(2, 2))

    sent = jscaler.cost(graph, across, TWO_HOSTS, devices=4).sent
    assert (sent.inside, sent.between > 0) == (0, True)
    assert sent.leaving == pytest.approx(2 * sent.between)


def test_sums_in_more_bits_send_more_bytes() -> None:
    adapt = next(task for task in lowered("data_parallel", 4).plan.program.adapters if task.adapter.adds)
    own, wide = (traffic_of(replace(adapt, reduce_dtype=kind), 4, 1, TWO_HOSTS) for kind in (None, "float64"))
    assert wide.total == 2 * own.total > 0
    assert wide.seconds > own.seconds


def test_groups_inside_a_host_send_nothing_between_hosts(graph: Any) -> None:
    def pairs(graph: Any, devices: np.ndarray) -> None:
        """The batch over the two devices of a host, copied on the hosts."""
        for path in ("up/dot", "up/add", "act/tanh", "down/dot", "down/add"):
            operand = graph[path].inputs[0].name
            grid = graph.op_trans(graph[path], jscaler.Replicate(2), Split((operand, 0), 2))
            graph.op_assign(grid, devices.reshape(2, 2))

    sent = jscaler.cost(graph, pairs, TWO_HOSTS, devices=4).sent
    assert (sent.inside > 0, sent.between) == (True, 0)


def test_a_cluster_without_a_kind_of_device_has_no_seconds_of_computing(graph: Any) -> None:
    found = jscaler.cost(graph, "data_parallel", BYTES_LIKE, devices=4)
    assert (found.seconds.compute, found.seconds.total, found.fits) == (None, None, None)
    assert found.seconds.communication > 0
    assert "unknown" in str(found)


def columns(**others: int) -> Any:
    """Tensor parallel, except that some ops are split in another dim."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        split(graph, "up/dot", ("kernel", 1), devices)
        split(graph, "up/add", ("bias", 0), devices)
        if others.get("tanh"):
            split(graph, "act/tanh", ("up/add:0", 0), devices)
        else:
            split(graph, "act/tanh", ("up/add:0", 1), devices)
        split(graph, "down/dot", ("kernel", 0), devices)

    return policy


def test_after_a_change_of_one_op_only_what_depends_on_it_costs_otherwise() -> None:
    step = jscaler.parallelize("single", devices=1)(make_step())
    graph = step.graph(make_state(MOMENTUM), make_batch())
    before = jscaler.cost(graph, columns(), H100, devices=4)
    assert jscaler.cost(graph, columns(), H100, devices=4).by_op == before.by_op
    after = jscaler.cost(graph, columns(tanh=1), H100, devices=4)
    differ = {path for path, op in after.by_op.items() if op != before.by_op[path]}
    # what they compute, and what is moved in front of them and of their readers
    assert differ <= {
        "act/tanh",
        "act/tanh@backward",
        "up/add",
        "down/dot",
        "down/dot@backward",
        "up/dot@backward",
        "up/add@backward",
    }
    assert {"act/tanh", "down/dot"} <= differ


def test_equal_layers_cost_alike() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for layer in range(6):
            with jax.named_scope(f"layer_{layer}"):
                x = jnp.tanh(x @ params[layer])
        return jnp.sum(x * x)

    def step(params: Any, x: jax.Array) -> Any:
        loss_, grads = jscaler.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss_

    params = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 6
    captured = jscaler.parallelize("single", devices=1)(step)
    graph = captured.graph(params, jax.ShapeDtypeStruct((4, 8), jnp.float32))
    cost = jscaler.cost(graph, 'data_parallel(batch="x")', H100, devices=2)
    assert len(cost.by_op) > 30
    dots = [op for path, op in cost.by_op.items() if path.endswith("dot")]
    assert len(dots) == 6
    assert len({(op.flops, op.read, op.written, op.seconds) for op in dots}) == 1


@losing
def test_inside_a_policy_the_decisions_so_far_are_priced() -> None:
    asked: list[Cost] = []

    def greedy(graph: Any, devices: np.ndarray) -> None:
        asked.append(jscaler.cost(graph, None, H100))
        split(graph, "up/dot", ("kernel", 1), devices)
        asked.append(jscaler.cost(graph, H100))

    made = lowered(greedy, 4, cluster=H100)
    assert asked[0].flops > asked[1].flops  # whole dots, then columns of one and what follows from them
    assert asked[1].step.program.outputs == made.plan.program.outputs
    assert jscaler.cost(made, None, H100).by_op == asked[1].by_op


def test_a_finished_step_has_its_plan() -> None:
    made = lowered("data_parallel", 2)
    found = jscaler.cost(made, None, H100)
    assert found.by_op == jscaler.cost(made.plan, None, "8xH100-80GB").by_op
    assert found.plan == made.plan.name
    with pytest.raises(PlanError, match="planned by 'data_parallel' already; give its graph"):
        jscaler.cost(made, "single", H100)


def test_refusals(graph: Any) -> None:
    with pytest.raises(PlanError, match="a graph costs nothing without a plan"):
        jscaler.cost(graph, None, H100)
    plan = lowered("data_parallel", 2).plan.plan
    with pytest.raises(DeviceError, match="is for 2 devices, and 4 are given"):
        jscaler.cost(graph, plan, H100, devices=4)
    assert jscaler.cost(graph, plan, H100).num_devices == 2


def test_state_that_is_not_donated_is_there_twice(graph: Any) -> None:
    once, twice = (jscaler.cost(graph, "single", H100, devices=1, donated=d).held for d in (True, False))
    state = once.memory.parameters + once.memory.optimizer
    assert twice.memory.arguments == once.memory.arguments
    # behind the last kernel: the new state beside the old
    assert twice.timeline[-1].nbytes - once.timeline[-1].nbytes == state


def test_work_is_counted_for_every_op(graph: Any) -> None:
    found = jscaler.cost(graph, "single", H100, devices=1)
    for task, _ in walk(found.step.program.tasks):
        assert isinstance(task, Compute)
        op = found.by_op[task.op.path]
        assert op.written >= 0
        if task.op.path in ("up/dot", "down/dot"):
            read = sum(t.nbytes for t in task.op.inputs)
            assert (op.read, op.written) == (read, task.op.outputs[0].nbytes)


def test_more_devices_hold_less_each_under_zero(graph: Any) -> None:
    one, two, four = (jscaler.cost(graph, "zero3", H100, devices=n).memory for n in (1, 2, 4))
    assert one.parameters > two.parameters > four.parameters
    assert one.optimizer > two.optimizer > four.optimizer
    assert one.arguments > two.arguments > four.arguments
