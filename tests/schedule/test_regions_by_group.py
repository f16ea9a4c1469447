"""What stands in a loop over groups (regions of recompute, loops over parts, masks of the batch) stays on each group."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import PlanError, Replicate, Split, TimeSplit, plans
from jscaler.ir import Graph

ROWS, WIDTH, MICROBATCHES = 8, 6, 2
DRAWS = np.random.default_rng(0)
PARAMS = {name: DRAWS.normal(size=(WIDTH, WIDTH)) / 3 for name in "ab"}
BATCH = {"x": DRAWS.normal(size=(ROWS, WIDTH)), "there": DRAWS.integers(0, 2, ROWS)}
REMAT = jax.checkpoint_policies.nothing_saveable


def make_step(value_and_grad: Any = jscaler.value_and_grad, remat: bool = True) -> Any:
    def layers(params: Any, x: Any, there: Any) -> Any:
        with jax.named_scope("first"):
            mask = (there > 0).astype(x.dtype)[:, None]
            h = jnp.tanh(x @ params["a"]) * mask
        with jax.named_scope("second"):
            return jnp.tanh(jnp.sin(h) @ params["b"]) * mask

    def loss_of(params: Any, batch: Any) -> Any:
        inside = jax.checkpoint(layers, policy=REMAT) if remat else layers
        with jax.named_scope("zero"):
            x = batch["x"] * 2.0
        y = inside(params, x, batch["there"])
        with jax.named_scope("second"):
            return jnp.mean(y**2)

    def step(params: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def halves(hidden: bool = False) -> Any:
    """Two stages of micro-batches; or with the columns of the first product in parts, too, which the second reads."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        rows = graph.factor_of("batch/x", 0) | graph.factor_of("batch/there", 0)
        columns = graph.factor_of("params/a", 1)
        for scope, device in (("zero", 0), ("first", 0), ("second", 1)):
            for op in graph.select(f"*{scope}/*", kind="forward"):
                if op in rows:
                    parts = [TimeSplit(rows[op], MICROBATCHES, "mb")]
                    inner = hidden and op in columns and columns[op] != rows[op]
                    parts += [TimeSplit(columns[op], 3, "hidden")] if inner else []
                    graph.op_assign(graph.op_trans(op, *parts), device)

    return policy


def lowered(policy: Any, remat: bool = True) -> Any:
    return jscaler.parallelize(policy, devices=2)(make_step(remat=remat)).lower(PARAMS, BATCH)


def check_numbers(given: Any) -> None:
    with jax.enable_x64(True):
        jscaler.verify(given)
        run, plain = given.compile(), jax.jit(make_step(jax.value_and_grad))
        ours = theirs = PARAMS
        for _ in range(2):
            (ours, mine), (theirs, true) = run(ours, BATCH), plain(theirs, BATCH)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), (ours, mine), (theirs, true))


def sent_of_a_microbatch(given: Any) -> list[str]:
    return [t.tensor.name for t in given.plan.sent if t.phase in given.plan.spanning.phases]


def test_a_region_on_two_groups_sends_its_activation_once() -> None:
    with jax.enable_x64(True):
        given = lowered(halves())
        assert len(sent_of_a_microbatch(given)) == 2, "the activation, its cotangent, and neither again for recompute"
        again = [op.path for op in given.plan.graph.ops if op.again is not None]
        assert any("first/" in path for path in again)
        assert any("second/" in path for path in again)
        check_numbers(given)


def test_a_mask_of_the_batch_is_made_by_each_group_though_the_plan_places_it() -> None:
    with jax.enable_x64(True):
        given = lowered(halves(), remat=False)
        sent = [t.tensor.name for t in given.plan.sent]
        assert len(sent_of_a_microbatch(given)) == 2
        assert not [name for name in sent if "gt" in name or "convert" in name], sent


@pytest.mark.parametrize("remat", [True, False])
def test_a_loop_within_lies_on_one_group(remat: bool) -> None:
    """Parts of hidden units, which a product on another group reads, go there whole."""
    with jax.enable_x64(True):
        given = lowered(halves(hidden=True), remat)
        inner = [loop for loop in given.plan.graph.loops.values() if loop.time == "hidden"]
        assert inner
        assert all(len(_groups(given.plan.graph, given.plan.completed, loop.name)) == 1 for loop in inner)
        check_numbers(given)


def _groups(graph: Graph, completed: Any, loop: str) -> set[Any]:
    return {completed.ops[op.path].placement.group for op in graph.ops if op.loop == loop}


def test_sums_in_more_bits_of_a_loop_run_where_it_lies():
    """They are unplaced ops; of fewest bytes the next stage, which reads them, is as near as the loop."""
    sizes = {"a": (6, 8), "b": (8, 6), "c": (6, 6)}
    params = {name: jnp.asarray(DRAWS.normal(size=size) / 3, jnp.bfloat16) for name, size in sizes.items()}
    x = jnp.asarray(BATCH["x"], jnp.bfloat16)

    def loss_of(params: Any, x: Any) -> Any:
        with jax.named_scope("first"):
            h = jnp.tanh(x @ params["a"]) @ params["b"]
        with jax.named_scope("second"):
            return jnp.mean((jnp.tanh(h) @ params["c"]).astype(jnp.float32) ** 2)

    plan = plans.pipeline(2, 2, plan=plans.co_shard(2, on={"*a": 1}, loss=False), at=["second"], batch="x")
    step = jscaler.parallelize(plan, devices=2)(jscaler.value_and_grad(loss_of))
    lowered = step.lower(params, x)
    group = {op: lowered.plan.completed.homes[op.path].group for op in lowered.plan.graph.ops if op.loop is not None}
    sums = [op for op in group if op.path.endswith(":part@more")]
    assert sums
    for op in sums:
        assert {place for other, place in group.items() if other.loop == op.loop} == {group[op]}
    expected = jax.jit(jax.value_and_grad(loss_of))(params, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a.astype(float), b.astype(float), atol=0.02), step(params, x), expected
    )


# -- what a forward loop saves, read by backwards on other groups


def norm_step(params: Any, x: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    """Its mean over rows needs all of them: forward and backward are two loops over micro-batches."""

    def loss_of(params: Any) -> Any:
        with jax.named_scope("first"):
            h = jnp.tanh(x @ params["a"])
        with jax.named_scope("norm"):
            h = h - h.mean(0)
        with jax.named_scope("second"):
            return jnp.mean(jnp.tanh(h @ params["b"]) ** 2)

    loss, grads = value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def elsewhere(*backwards: str) -> Any:
    """What the first product leaves lies in two layouts on [1, 2]; ``backwards`` are on [3]."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        (rows,) = {graph.factor_of("x", 0)[graph[path]] for path in ("first/dot", "first/tanh")}
        graph.op_assign(graph.op_trans("first/dot", TimeSplit(rows, 2, "t"), Replicate(2)), [1, 2])
        graph.op_assign(graph.op_trans("first/tanh", TimeSplit(rows, 2, "t"), Split(rows, 2)), [1, 2])
        for path in backwards:
            graph.op_assign(path, 3)

    return policy


@pytest.mark.filterwarnings("ignore::jscaler.PlanWarning")
def test_what_several_layouts_hold_is_read_on_another_group() -> None:
    """Refused with the ops' names, where one loop spans groups; on one group, right."""
    params, x = PARAMS, BATCH["x"]
    step = jscaler.parallelize(elsewhere("first/tanh@backward"), devices=4)(norm_step)
    with pytest.raises(
        PlanError, match=r"'norm/reduce_sum' .* needs 'first/tanh:0' of all micro-batches, which 'first/tanh' makes"
    ):
        step.lower(params, x)
    with jax.enable_x64(True):
        step = jscaler.parallelize(elsewhere("first/tanh@backward", "first/dot@backward"), devices=4)(norm_step)
        expected = jax.jit(lambda *given: norm_step(*given, jax.value_and_grad))(params, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), step(params, x), expected)
