"""The order of a step's blocks, searched for these very blocks: as the simulator has them, never worse, and it runs."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest
from of_the_day import of_the_day

import jscaler
from jscaler.clusters import find_cluster
from jscaler.errors import PlanError
from jscaler.estimate.block_costs import block_seconds, hop_seconds
from jscaler.estimate.memory import memory_by_devices
from jscaler.estimate.schedule_problem import schedule_problem
from jscaler.estimate.searched_order import with_searched_schedule
from jscaler.estimate.timed_step import timed_step
from jscaler.estimate.waiting import devices_alike
from jscaler.lower.step_plan import StepPlan
from jscaler.stages import reordered
from jscaler.tables import Table
from jscaler.tables.search.replay import replay
from tests.runtime.test_restart import OPTIMIZER, X, make_state, step

pytest.importorskip("ortools")
CLUSTER = find_cluster("4xA100-80GB")
PLANS = [
    "pipeline(2, 4, batch='x')", "pipeline(4, 8, batch='x')", "pipeline(4, 8, 'zb_h1', batch='x')",
    "pipeline(2, 4, 'zb_v', batch='x')", "pipeline(2, 4, 'interleaved', chunks=2, batch='x')",
    "pipeline(2, 4, 'chimera', batch='x')", "pipeline(4, 4, '1f1b+R', batch='x')",
    "pipeline(2, 8, 'zb_h2+R early', batch='x')",
    "pipeline(2, 4, layers=[9, 3], batch='x', recompute='with')",
]  # fmt: skip


def planned(plan: str) -> StepPlan:
    devices = int(plan.partition("(")[2].partition(",")[0])
    return jscaler.parallelize(plan, devices=devices)(step).lower(make_state(12), X).plan


def of_loop(plan: StepPlan, seconds: Sequence[float], hops: Sequence[float]) -> float:
    """Seconds of the loop over micro-batches alone: of what is sent in front of it, and of other blocks, nothing counts."""
    numbers = [seconds[n] if n in plan.instructions.names else 0.0 for n in range(len(plan.blocks))]
    assert plan.spanning is not None
    inside = [hop if t.phase in plan.spanning.phases else 0.0 for t, hop in zip(plan.transfers, hops, strict=True)]
    return max(run.end for run in timed_step(plan, numbers, inside)[0])


@pytest.mark.parametrize("text", of_the_day(PLANS, 3))
def test_the_problem_is_the_step(text: str) -> None:
    """Its blocks take as long in the order of the table as the simulator says, and hold as much more than the rest."""
    plan = planned(text)
    seconds, hops = block_seconds(plan, CLUSTER), hop_seconds(plan, CLUSTER)
    problem, table = schedule_problem(plan, seconds, hops)
    assert replay(problem, table).seconds == pytest.approx(of_loop(plan, seconds, hops), rel=0.02)
    held = [sum(b.held for b in problem.lanes[0]), sum(b.freed for b in problem.lanes[0])]
    assert held[0] == pytest.approx(held[1])
    assert held[0] > 0
    peaks = {one.devices: one.memory.peak for one in memory_by_devices(plan)}
    assert all(0 < own <= peaks[d] for own, d in zip(replay(problem, table).peaks, devices_alike(plan), strict=True))


@pytest.mark.parametrize("text", of_the_day([p for p in PLANS if "R" not in p], 3))
def test_it_is_never_worse_and_runs(text: str) -> None:
    plan = planned(text)
    found = jscaler.find_schedule(plan, CLUSTER, limit=3.0)
    assert found.seconds <= found.before * 1.001
    assert found.bound <= found.loop.seconds * (1 + 1e-9)
    again = jscaler.find_schedule(plan, CLUSTER, limit=3.0)
    assert again.table == found.table, "equal inputs give equal results"
    devices = int(text.partition("(")[2].partition(",")[0])

    def policy(graph: Any, numbers: np.ndarray) -> None:
        jscaler.plans.by_name(text)(graph, numbers)
        graph.schedule(found.table)

    run = jscaler.parallelize(policy, devices=devices)(step)
    ours = run.lower(make_state(12), X).plan
    assert ours.instructions.table == Table.parse(str(found.table))
    assert [*ours.instructions.names.values()] == [*plan.instructions.names.values()], "the same blocks"
    assert jscaler.simulate(ours, CLUSTER).makespan == pytest.approx(found.seconds)
    (_, loss), (_, wanted) = run(make_state(12), X), jscaler.parallelize("single", devices=1)(step)(make_state(12), X)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)


def test_less_memory_takes_longer() -> None:
    """Within the least memory that it names, the table keeps; below it, the error says what is needed."""
    plan = planned("pipeline(4, 8, 'gpipe', batch='x')")
    most = max(one.memory.peak for one in memory_by_devices(plan))
    free = jscaler.find_schedule(plan, CLUSTER, memory=most, limit=3.0)
    least = max(one.memory.peak for one in memory_by_devices(planned("pipeline(4, 8, batch='x')")))
    tight = jscaler.find_schedule(plan, CLUSTER, memory=least, limit=3.0)
    assert free.seconds <= tight.seconds
    assert max(one.memory.peak for one in memory_by_devices(reordered(plan, tight.table))) <= least < most
    with pytest.raises(PlanError, match=r"hold .* beside what waits for later blocks; the limit is"):
        jscaler.find_schedule(plan, CLUSTER, memory=most / 2, limit=3.0)


def test_measured_seconds_count() -> None:
    """A last stage that takes three times as long: its backward is what all others wait for."""
    plan = planned("pipeline(2, 4, batch='x')")
    names = [plan.block_name(number) for number in range(len(plan.blocks))]
    seconds = {name: 3.0 if name[0] == "1" else 1.0 for name in names if name[:1].isdigit()}
    found = jscaler.find_schedule(plan, seconds=seconds, limit=3.0)
    assert found.proved
    assert found.seconds >= 4 * sum(s for name, s in seconds.items() if name[0] == "1")
    assert "no order of these blocks is shorter" in str(found)


def test_what_has_no_order_is_said() -> None:
    with pytest.raises(PlanError, match="has no loop over micro-batches that lies on several device groups"):
        jscaler.find_schedule(jscaler.parallelize("single", devices=1)(step).lower(make_state(12), X), CLUSTER)
    with pytest.raises(PlanError, match=r"overlaps blocks, \(0F3;3B1\): search the order of a step whose table has no"):
        jscaler.find_schedule(planned("pipeline(2, 4, 'dualpipe_v', batch='x')"), CLUSTER)
    with pytest.raises(PlanError, match="a number above 0, not 0"):
        jscaler.find_schedule(planned("pipeline(2, 4, batch='x')"), CLUSTER, limit=0)
    with pytest.raises(PlanError, match=r"recompute='late' puts blocks R into a published schedule that has none"):
        jscaler.plans.pipeline(2, 4, "1f1b+R", recompute="late")


@pytest.mark.parametrize(
    "how",
    of_the_day(
        [
            "'search'",
            "'search', chunks=2",
            "'search', recompute='late'",
            "'search', recompute='with'",
            "'1f1b', recompute='early'",
        ],
        2,
    ),
)
def test_a_pipeline_searches_its_schedule(how: str) -> None:
    """Three steps, as on one device; and what it found is as good as 1F1B."""
    run = jscaler.parallelize(f"pipeline(2, 4, schedule={how}, batch='x')", devices=2, cluster=CLUSTER)(step)
    alone = jax.jit(plain)
    ours, theirs = make_state(12), make_state(12)
    for _ in range(3):
        (ours, loss), (theirs, wanted) = run(ours, X), alone(theirs, X)
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), jscaler.fetch(ours), theirs)
    if "recompute" not in how:
        found = jscaler.simulate(run.lower(make_state(12), X), CLUSTER).makespan
        assert found <= jscaler.simulate(planned("pipeline(2, 4, batch='x')"), CLUSTER).makespan * 1.001


def plain(state: Any, x: jax.Array) -> Any:
    """The step without jscaler."""
    params, moments = state

    def loss_of(params: Any) -> jax.Array:
        def layer(x: jax.Array, p: Any) -> Any:
            return x + jax.numpy.tanh(x @ p["up"]) @ p["down"], None

        y, _ = jax.lax.scan(layer, x @ params["first"], params["layers"])
        return jax.numpy.mean((y @ params["head"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def test_a_plan_without_a_search_stays() -> None:
    plan = planned("pipeline(2, 4, batch='x')")
    assert with_searched_schedule(None, plan.plan, CLUSTER) is plan.plan  # type: ignore[arg-type]
