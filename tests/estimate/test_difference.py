"""``jscaler.diff``: its lines add up to the difference of two costs, whatever the plans; which decisions it says differ."""

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower.steps import MOMENTUM, make_batch, make_state, make_step, split, tensor_parallel

import jscaler
from jscaler import Split
from jscaler.clusters import Cluster, Link, find_cluster
from jscaler.errors import DeviceError, PlanError, PlanFitError, UnknownNameError
from jscaler.estimate.difference import HIDDEN, WAITING, Difference, difference
from tests.policies import draw_groups_policy, draw_loops_policy, draw_policy, draw_timed_policy

H100 = find_cluster("8xH100-80GB")
LAYERS, WIDTH, ROWS = 4, 8, 16
PLANS = {
    "data parallel": "data_parallel",
    "columns": "tensor_parallel",
    "both": "megatron(dp=2, tp=2, zero=1)",
    "sharded": "zero3",
    "computed again": "recompute_layers(plan=zero1())",
    "parts of layers": "co_shard(2, plan=data_parallel())",
    "micro-batches": "accumulate(4, zero2())",
    "stages": "pipeline(2, 4, plan=zero2())",
    "four stages": "pipeline(4, 4)",
    "no bubbles": "pipeline(2, 4, 'zb_h1', plan=zero1())",
    "hidden sends": "pipeline(2, 4, 'dualpipe_v', plan=megatron(dp=1, tp=2))",
}


def net(stacked: bool) -> tuple[Any, Any, Any]:
    """A residual net of layers with hidden units, one ``lax.scan`` or one after another, and its arguments."""

    def layer(x: jax.Array, kernels: Any) -> tuple[jax.Array, None]:
        with jax.named_scope("mlp"):
            return x + jnp.tanh(x @ kernels[0]) @ kernels[1], None

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        if stacked:
            x = jax.lax.scan(layer, x, params)[0]
        else:
            for number, kernels in enumerate(zip(*params, strict=True)):
                with jax.named_scope(f"layer_{number}"):
                    x = layer(x, kernels)[0]
        return jnp.mean(x**2)

    def step(state: Any, batch: Any) -> Any:
        value, grads = jscaler.value_and_grad(loss)(state["params"], batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
        return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments), "moments": moments}, value

    def kernels(*shape: int) -> Any:
        one = jax.ShapeDtypeStruct(shape, "float32")
        return jax.ShapeDtypeStruct((LAYERS, *shape), "float32") if stacked else [one] * LAYERS

    params = [kernels(WIDTH, 4 * WIDTH), kernels(4 * WIDTH, WIDTH)]
    batch = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")}
    return step, {"params": params, "moments": params}, batch


@pytest.fixture(scope="module", params=[True, False], ids=["stacked", "a loop"])
def costs(request: pytest.FixtureRequest) -> dict[str, jscaler.Cost]:
    """What each plan costs on four devices."""
    step, *arguments = net(request.param)
    graph = jscaler.parallelize("single", devices=1)(step).graph(*arguments)
    return {name: jscaler.cost(graph, plan, H100, devices=4) for name, plan in PLANS.items()}


def assert_adds_up(found: Difference) -> None:
    """Every column of figures, and their sum."""
    a, b = found.a.seconds, found.b.seconds
    whole = max(a.total or 0.0, b.total or 0.0)
    assert whole > 0
    for of, want in (
        (lambda line: line.computing, b.compute - a.compute),
        (lambda line: line.sending, b.communication - a.communication),
        (lambda line: line.waiting, b.waiting - a.waiting),
        (lambda line: line.seconds, found.seconds),
    ):
        assert sum(map(of, found.lines)) == pytest.approx(want, rel=0, abs=1e-9 * whole)
    assert found.seconds == b.total - a.total
    assert sum(line.memory for line in found.lines) == found.memory == found.b.memory.peak - found.a.memory.peak
    assert found.memory == sum(other - own for own, other in found.memory_by_kind.values())


def test_lines_add_up_for_all_pairs_of_plans(costs: dict[str, jscaler.Cost]) -> None:
    for (a, one), (b, other) in itertools.permutations(costs.items(), 2):
        found = difference(one, other, (a, b))
        assert_adds_up(found)
        assert any(line.decided for line in found.lines), (a, b)
        effects = [abs(line.seconds) for line in found.lines]
        assert effects == sorted(effects, reverse=True)
    assert all(not difference(one, one, (name, name)).lines for name, one in costs.items())


def test_the_other_way_around_all_signs_turn(costs: dict[str, jscaler.Cost]) -> None:
    there, back = (difference(costs[a], costs[b], (a, b)) for a, b in (("both", "stages"), ("stages", "both")))
    other = {(line.what, line.b, line.a): line for line in back.lines}
    for line in there.lines:
        turned = other[line.what, line.a, line.b]
        assert (line.count, line.computing, line.memory) == (turned.count, -turned.computing, -turned.memory)


def test_waiting_and_what_hides_have_lines_of_their_own(costs: dict[str, jscaler.Cost]) -> None:
    found = difference(costs["stages"], costs["no bubbles"], ("a", "b"))
    (waiting,) = (line for line in found.lines if line.what == WAITING)
    assert (waiting.a, waiting.b) == ("2 groups, 1f1b", "2 groups, zb_h1")
    assert waiting.waiting == costs["no bubbles"].seconds.waiting - costs["stages"].seconds.waiting
    hides = difference(costs["stages"], costs["hidden sends"], ("a", "b"))
    hidden = [line for line in hides.lines if line.what == HIDDEN]
    assert sum(line.sending for line in hidden) == -costs["hidden sends"].busiest.hidden


def test_backward_ops_clones_and_equal_layers_are_of_their_forward_op(costs: dict[str, jscaler.Cost]) -> None:
    found = difference(costs["data parallel"], costs["computed again"], ("a", "b"))
    again = [line for line in found.lines if line.b.endswith("again in the backward")]
    assert again
    assert all(line.what.endswith("mlp") and line.b == f"{line.a}, again in the backward" for line in again)
    assert not any("@" in line.what or "backward" in line.what for line in found.lines)


def test_updates_and_moments_are_of_their_parameter(costs: dict[str, jscaler.Cost]) -> None:
    found = difference(costs["data parallel"], costs["sharded"], ("a", "b"))
    leaves = [line for line in found.lines if line.what.startswith("state/")]
    assert {line.a for line in leaves} == {"whole"}
    assert all(line.b.startswith("dim ") and line.b.endswith(":4") and line.decided for line in leaves)
    assert sum(line.memory for line in leaves if "moments" in line.what) == 0
    kernels = LAYERS * 2 * 4 * WIDTH * WIDTH * 4
    assert sum(line.memory for line in leaves) == 2 * (kernels // 4 - kernels)  # with a moment for each
    ops = [line for line in found.lines if line.what.endswith("mlp")]
    assert ops
    assert not any(line.decided for line in ops)  # as they were, and their parameters have to come


def test_stages_are_told_where_both_plans_have_some(costs: dict[str, jscaler.Cost]) -> None:
    found = difference(costs["stages"], costs["four stages"], ("a", "b"))
    assert any("stage" in line.a and "stage" in line.b for line in found.lines)
    found = difference(costs["data parallel"], costs["four stages"], ("a", "b"))
    assert not any("stage" in f"{line.a} {line.b}" for line in found.lines)


@pytest.fixture(scope="module")
def graph() -> Any:
    step = jscaler.parallelize("single", devices=1)(make_step())
    return step.graph(make_state(MOMENTUM), make_batch())


def test_layers_that_go_to_another_stage() -> None:
    step, *arguments = net(stacked=False)
    graph = jscaler.parallelize("single", devices=1)(step).graph(*arguments)
    found = jscaler.diff(graph, "pipeline(2, 4, at=['layer_2'])", "pipeline(2, 4, at=['layer_3'])", H100, devices=2)
    assert_adds_up(found)
    moved = {line.what for line in found.lines if line.decided}
    assert moved == {"layer_*/mlp", "state/params/*/*"}
    texts = {(line.a, line.b) for line in found.lines if line.decided and line.what == "layer_*/mlp"}
    assert texts == {("microbatch:4, stage 1", "microbatch:4, stage 0")}


def columns(tanh: bool = False) -> Any:
    """Tensor parallel, except that the tanh may be split by rows."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        split(graph, "up/dot", ("kernel", 1), devices)
        split(graph, "up/add", ("bias", 0), devices)
        split(graph, "act/tanh", ("up/add:0", 0 if tanh else 1), devices)
        split(graph, "down/dot", ("kernel", 0), devices)

    return policy


def test_after_a_change_of_one_op_its_neighbours_decide_as_before(graph: Any) -> None:
    found = jscaler.diff(graph, columns(), columns(tanh=True), H100, devices=4)
    assert_adds_up(found)
    decided = {line.what: (line.a, line.b) for line in found.lines if line.decided}
    assert decided == {"act": ("up.kernel[1]:4", "x[0]:4")}
    rest = {line.what for line in found.lines if not line.decided}
    assert rest & {"up", "down"}
    assert rest <= {"up", "down", "state/params/up/bias", "state/params/up/kernel"}
    sent = {line.what: line.sending for line in found.lines}
    assert sent["act"] > 0  # its operand has to come


def test_the_same_split_on_other_devices(graph: Any) -> None:
    def turned(graph: Any, devices: np.ndarray) -> None:
        split(graph, "act/tanh", ("up/add:0", 1), devices[::-1].copy())

    def straight(graph: Any, devices: np.ndarray) -> None:
        split(graph, "act/tanh", ("up/add:0", 1), devices)

    def two_axes(graph: Any, devices: np.ndarray, rows_first: bool) -> None:
        grid = devices.reshape(2, 2) if rows_first else devices.reshape(2, 2).T
        cells = graph.op_trans(graph["up/dot"], Split(("batch/x", 0), 2), Split(("kernel", 1), 2))
        graph.op_assign(cells, grid)

    found = jscaler.diff(graph, straight, turned, H100, devices=4)
    assert all(line.b == f"{line.a}, on other devices" for line in found.lines if line.decided)
    found = jscaler.diff(
        graph,
        lambda graph, devices: two_axes(graph, devices, rows_first=True),
        lambda graph, devices: two_axes(graph, devices, rows_first=False),
        H100,
        devices=4,
    )
    assert_adds_up(found)
    assert ("up.kernel[1]:2 x[0]:2", "up.kernel[1]:2 x[0]:2, on other devices") in {
        (line.a, line.b) for line in found.lines
    }


def test_fused_ops_are_compared_with_the_op_that_they_become(graph: Any) -> None:
    def fused(graph: Any, devices: np.ndarray) -> None:
        graph.fuse("up/dot", "up/add", "act/tanh", name="first")

    found = jscaler.diff(graph, "single", fused, H100, devices=1)
    assert_adds_up(found)
    assert [(line.what, line.a, line.b) for line in found.lines if line.decided] == [
        ("first", "copy", "copy, 3 ops as one")
    ]


@pytest.mark.parametrize("draw", [draw_policy, draw_groups_policy, draw_loops_policy, draw_timed_policy])
@pytest.mark.filterwarnings("ignore::jscaler.errors.PlanWarning")
def test_lines_add_up_for_random_plans(graph: Any, draw: Any) -> None:
    base, made = jscaler.cost(graph, tensor_parallel, H100, devices=4), 0
    for seed in range(3):
        try:
            cost = jscaler.cost(graph, draw(seed, 4), H100, devices=4)
        except PlanError:
            continue
        assert_adds_up(difference(base, cost, ("tensor_parallel", "random")))
        made += 1
    assert made


def test_plans_as_cost_takes_them_and_a_lowered_step(graph: Any, tmp_path: Any) -> None:
    step = jscaler.parallelize("zero1", devices=4, donate_argnames="state")(make_step())
    lowered = step.lower(make_state(MOMENTUM), make_batch())
    lowered.plan.save(tmp_path / "plan.json")
    want = jscaler.diff(graph, "data_parallel", "zero1", H100, devices=4).as_json()
    for plan in (lowered.plan.plan, str(tmp_path / "plan.json"), jscaler.plans.zero1()):
        found = jscaler.diff(graph, "data_parallel", plan, "8xH100-80GB", devices=4)
        assert found.as_json()["lines"] == want["lines"]
    same = jscaler.diff(lowered, "zero1", lowered.plan.plan, H100, devices=4)
    assert not same.lines
    assert "both plans decide alike, and cost the same" in str(same)


def test_as_text_and_as_data(costs: dict[str, jscaler.Cost]) -> None:
    found = difference(costs["data parallel"], costs["stages"], ("data_parallel", PLANS["stages"]))
    record = json.loads(json.dumps(found.as_json()))
    assert record["b"]["plan"] == PLANS["stages"]
    assert sum(line["seconds"] for line in record["lines"]) == pytest.approx(record["seconds"])
    assert record["lines"][0]["what"] == found.lines[0].what
    text = str(found)
    for said in ("a: data_parallel, ", f"b: {PLANS['stages']}, ", "b less a: ", found.lines[0].what, "activations"):
        assert said in text


def test_refusals(graph: Any) -> None:
    two = jscaler.cost(graph, "data_parallel", H100, devices=2).step.plan
    with pytest.raises(DeviceError, match="is for 2 devices, and 'zero1' for 8: two plans are compared on as many"):
        jscaler.diff(graph, two, "zero1", H100)
    with pytest.raises(DeviceError, match="is for 2 devices, and 4 are given"):
        jscaler.diff(graph, "zero1", two, H100, devices=4)
    assert jscaler.diff(graph, two, "zero1", H100, devices=2).a.num_devices == 2
    with pytest.raises(UnknownNameError, match="did you mean 'zero1'"):
        jscaler.diff(graph, "zero1", "zer1", H100)
    with pytest.raises(PlanError, match="a graph costs nothing without a plan"):
        jscaler.diff(graph, "zero1", None, H100)
    with pytest.raises(PlanError, match="diff takes a train step's graph"):
        jscaler.diff("graph", "zero1", "zero1", H100)
    step, *arguments = net(stacked=True)
    other = jscaler.parallelize("single", devices=1)(step).graph(*arguments)
    with pytest.raises(PlanFitError):
        jscaler.diff(other, "zero1", two, H100, devices=2)
    with pytest.raises(PlanError, match="for one captured step, and these costs are of two"):
        difference(jscaler.cost(graph, two, H100), jscaler.cost(other, "zero1", H100, devices=2), ("a", "b"))
    nothing_known = Cluster("one host", 1, 4, Link(1e-6, 1e9), Link(1e-6, 1e9))
    with pytest.raises(DeviceError, match="cluster 'one host' has no device kind"):
        jscaler.diff(graph, "zero1", "data_parallel", nothing_known)
