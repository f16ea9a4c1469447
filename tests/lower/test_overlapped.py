"""Which overlapped entries are one executable, what they cost then, and that others run apart, with the same numbers."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_chain import step

import jscaler
from jscaler import plans
from jscaler.clusters import Cluster, find_cluster
from jscaler.clusters.link import Link
from jscaler.estimate.block_costs import BlockCost, block_costs
from jscaler.lower.instructions import Run, Send
from jscaler.lower.overlapped import chains_of
from jscaler.lower.step_plan import StepPlan
from jscaler.tables.entry_seconds import entry_seconds

TABLE = "0F0 0F1 0F2 (0F3;0B0) (0B1;0B2) 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
INNER = plans.tensor_parallel(columns=["params/0", "params/2", "params/4"])


def stacked_step(params: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    def loss_of(params: Any) -> jax.Array:
        def layer(h: jax.Array, w: Any) -> Any:
            return h + jnp.tanh(h @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    loss, grads = value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments() -> tuple[Any, jax.Array]:
    return [jax.random.normal(jax.random.key(i), (8, 8)) for i in range(6)], jnp.ones((16, 8))


def lowered(cost: Cluster | None = None, inner: Any = INNER) -> Any:
    policy = plans.pipeline(2, 4, TABLE, at=["layer_4"], plan=inner, batch="x")
    return jscaler.parallelize(policy, devices=4, cluster=cost)(step).lower(*arguments())


def runs_as(plan: StepPlan, stage: str = "0") -> Counter[str]:
    """How often the executables of a stage run."""
    runs = (one for one in plan.instructions.steps if isinstance(one, Run))
    names = [plan.block_name(run.block) for run in runs]
    return Counter(name for name in names if name.startswith(stage))


def network(latency: float) -> Cluster:
    """Two hosts of two devices, and how long it takes between them."""
    return Cluster("two", 2, 2, Link(1e-6, 1e9), Link(latency, 1e9), device=find_cluster("h100").device)


NEAR, FAR = network(1e-7), network(1e-3)


def test_cells_are_one_executable_where_more_hides_than_it_holds_back() -> None:
    """A forward has two sums of products over its group, a backward one; between hosts a forward's result and the gradient
    that a backward reads travel."""
    assert runs_as(lowered().plan) == {"0F": 3, "0F 0B": 1, "0B 0B": 1, "0B": 1}
    assert runs_as(lowered(NEAR).plan) == {"0F": 3, "0F 0B": 1, "0B 0B": 1, "0B": 1}
    assert runs_as(lowered(FAR).plan) == {"0F": 4, "0B": 4}
    assert runs_as(lowered(inner=plans.data_parallel("x")).plan) == {"0F": 4, "0B": 4}, "they send nothing inside"


def test_a_backward_hides_nothing_of_its_own_forward() -> None:
    table = "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n1F0 1F1 1B0 1B1 1F2 1B2 (1F3;1B3)"
    policy = plans.pipeline(2, 4, table, at=["layer_4"], plan=INNER, batch="x")
    plan = jscaler.parallelize(policy, devices=4)(step).lower(*arguments()).plan
    assert runs_as(plan, "1") == {"1F": 4, "1B": 4}


def test_what_runs_apart_is_sent_when_it_is_made() -> None:
    plan = lowered(FAR).plan
    told = [plan.block_name(one.block) if isinstance(one, Run) else "send" for one in plan.instructions.steps]
    forwards = [place for place, name in enumerate(told) if name == "0F"]
    assert told[forwards[3] :][:3].count("send") >= 1, "of the fourth forward, in front of the backward behind it"
    last = plan.instructions.steps[forwards[3]]
    assert isinstance(last, Run)
    sent = next(n for n, one in enumerate(plan.instructions.steps) if isinstance(one, Send) and one.source in last.writes)
    assert told[forwards[3] + 1 : sent].count("0B") == 0


@pytest.mark.parametrize("cost", [None, NEAR, FAR])
def test_numbers_are_those_of_one_device(cost: Cluster | None) -> None:
    ours, _ = lowered(cost).compile()(*arguments())
    theirs, _ = jax.jit(lambda *given: step(*given, value_and_grad=jax.value_and_grad))(*arguments())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)


def test_loops_over_layers_run_one_after_another() -> None:
    params = {"up": jnp.ones((4, 8, 8)), "down": jnp.ones((4, 8, 8))}
    inner = plans.tensor_parallel({"*/up": 2})
    policy = plans.pipeline(2, 4, TABLE, plan=inner, batch="x")
    plan = jscaler.parallelize(policy, devices=4)(stacked_step).lower(params, jnp.ones((16, 8))).plan
    assert any(block.flat.exchanges for block in plan.blocks)
    assert runs_as(plan) == {"0F": 4, "0B": 4}


def costs_by_name(plan: StepPlan, on: Cluster) -> dict[str, BlockCost]:
    return {plan.block_name(number): one for number, one in enumerate(block_costs(plan, on))}


def test_what_hides_is_not_waited_for() -> None:
    plan, on = lowered().plan, NEAR
    own = costs_by_name(plan, on)
    pair, forward, backward = own["0F 0B"], own["0F"], own["0B"]
    assert len(pair.parts) == 2
    assert [part.collectives for part in pair.parts] == pytest.approx([forward.sent.seconds, backward.sent.seconds])
    assert sum(part.arithmetic for part in pair.parts) == pytest.approx(pair.priced.total)
    assert pair.seconds == entry_seconds(pair.parts, on.interference) < forward.seconds + backward.seconds
    assert pair.seconds == pytest.approx(pair.priced.total + pair.sent.seconds - pair.hidden)
    assert (forward.hidden, forward.seconds) == (0, forward.priced.total + forward.sent.seconds)
    assert pair.on(on.at_peaks()).seconds < pair.seconds
    found = jscaler.cost(plan, on)
    share = next(one for one in found.shares if one.devices == (0, 1))
    twice = own["0B 0B"]
    assert share.hidden == pytest.approx(pair.hidden + twice.hidden)
    assert found.bound is not None
    assert found.bound <= (found.elapsed or 0.0)


def test_halves_of_a_backward_are_one_chain() -> None:
    table = "0F0 0F1 0B0 0B1\n1F0 1F1 2F0 2B0 1B0 2F1 2B1 1I1 1W1"
    policy = plans.pipeline(2, 2, table, at=["layer_2", "layer_4"], plan=INNER, batch="x")
    plan = jscaler.parallelize(policy, devices=4)(step).lower(*arguments()).plan
    whole = costs_by_name(plan, NEAR)["1B"]
    assert (len(whole.block.parts), len(chains_of(whole.block.parts)), whole.hidden) == (2, 1, 0)
