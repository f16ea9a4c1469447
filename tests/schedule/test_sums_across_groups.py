"""What another device group adds up over parts in time arrives whole; who takes it for a summand gets it n times."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from of_the_day import of_the_day

import jscaler
from jscaler.errors import PlanError, VerificationError
from jscaler.ir import PTensor
from jscaler.plans import co_shard, pipeline
from jscaler.rules.part_forms import Form, Summed
from jscaler.schedule import writer
from jscaler.schedule.time_regions import TimeRegions
from tests.pipelines import INNER, SCHEDULES, draw_net, measure_pipeline, plan_of
from tests.step_numbers import assert_step_like_jit

PARAMS = {f"w{i}": jax.random.normal(jax.random.key(i), (8, 8)) / 3 for i in range(4)}
BATCH = {"x": jax.random.normal(jax.random.key(9), (8, 8))}


def chain(params: Any, batch: Any, value_and_grad: Callable[..., Any] = jscaler.value_and_grad) -> Any:
    """Layers without residuals: the first stage ends right behind a pair of kernels."""

    def loss(params: Any) -> jax.Array:
        x = batch["x"]
        for i in range(4):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ params[f"w{i}"])
        return (x**2).mean()

    value, gradients = value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
@pytest.mark.parametrize("parts", [2, 4])
def test_a_stage_that_ends_behind_a_pair_in_parts(parts: int, schedule: str) -> None:
    with jax.enable_x64(True):
        params, batch = jax.tree.map(lambda x: x.astype(jnp.float64), (PARAMS, BATCH))
        assert_step_like_jit(chain, params, batch, f"pipeline(2, 2, '{schedule}', plan=co_shard({parts}))", 2)


def _seen_too_far(self: TimeRegions, node: Any, nodes: Sequence[Any]) -> dict[PTensor, Form]:
    """As it was once: what another group adds up is taken for summands, too."""
    deepest = max((nodes[s].depth for s in node.sources), default=0)
    forms = {t: self.forms.get(t) for t, source in node.read.items() if nodes[source].in_time}
    return {t: f for t, f in forms.items() if not isinstance(f, Summed) or nodes[node.read[t]].depth >= deepest}


def test_the_fault_is_found_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted again, and what else would notice it taken away: the proof alone is left, and nobody asks for it."""

    class Nothing:
        pass

    monkeypatch.setattr(TimeRegions, "_seen", _seen_too_far)
    monkeypatch.setattr(TimeRegions, "_torn_sums", lambda *_: set())
    monkeypatch.setattr(writer, "Summed", Nothing)
    step = jscaler.parallelize(pipeline(2, 2, plan=co_shard(2)), devices=2)(chain)
    with pytest.raises(VerificationError, match=r"loop 'co_shard@.*' over 2 parts, 'd\(layer_1/tanh:0\)"):
        step(PARAMS, BATCH)
    unproven = jscaler.parallelize(pipeline(2, 2, plan=co_shard(2)), devices=2, verify=False)(chain).lower(PARAMS, BATCH)
    assert unproven.plan.proof == ""
    assert "verified" not in unproven.plan.explain()


def test_what_is_proven_unasked() -> None:
    """Plans over several groups, or with time axes; explain says what was proven."""
    proofs: Mapping[str, bool] = {
        "data_parallel": False,
        "accumulate(2)": True,
        "co_shard(2)": True,
        "pipeline(2, 2)": True,
    }
    for plan, proven in proofs.items():
        lowered = jscaler.parallelize(plan, devices=1 if "(2)" in plan else 2)(chain).lower(PARAMS, BATCH)
        assert bool(lowered.plan.proof) == proven, plan
        assert ("\nverified on " in lowered.plan.explain()) == proven
    with pytest.raises(PlanError, match="verify is True or False, not 1"):
        jscaler.parallelize("single", verify=1)  # type: ignore[arg-type]


def test_seeds_go_through_all_pairs_of_inner_plan_and_schedule_and_stages_that_end_at_no_residual() -> None:
    seeds = range(len(INNER) * len(SCHEDULES))
    assert len({plan_of(seed) for seed in seeds}) == len(seeds)
    without = sum(not any(name.endswith("+") for name in draw_net(seed).steps) for seed in seeds)
    assert without > len(seeds) / 3


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("seed", of_the_day(range(0, 2200, 17), 32))
def test_random_pipelines_give_one_device_s_numbers(seed: int) -> None:
    with jax.enable_x64(True):
        found = measure_pipeline(seed, 1)
    assert not found.refused or "co_shard" in found.refused  # regions of recompute that do not nest; no pair of kernels
    assert found.worst <= 1, f"{plan_of(seed)} of {found.steps}: {found.where} is {found.worst:.3g} off"
