"""Mixture of experts: four all-to-alls per layer and step, and the experts' state in parts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plan_steps import TX, activations, made_once, planned

import jscaler
from jscaler.errors import SplitError, UnknownNameError
from jscaler.lower.flat_program import FlatLoop
from jscaler.plans import accumulate, expert_parallel
from models.moe import MoE, MoEConfig
from models.training import TrainState, balanced_train_step

SIZES = MoEConfig(hidden=8, layers=1, heads=2, sequence=8, vocabulary=16, experts=4)


@made_once
def moe(layers: int = 2, tx: Any = TX) -> tuple[Any, tuple[TrainState, dict[str, np.ndarray]]]:
    def step(state: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        return balanced_train_step(state, batch, value_and_grad)

    kind, draws = jnp.zeros(()).dtype, np.random.default_rng(1)
    model = MoE(dataclasses.replace(SIZES, layers=layers, dtype=kind, param_dtype=kind))
    tokens = np.random.default_rng(0).integers(0, 16, (12, 9), np.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens[:, :-1])["params"]
    params = jax.tree.map(lambda p: jnp.asarray(draws.normal(size=p.shape) * 0.3, p.dtype), params)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx, key=jax.random.key(2))
    return step, (state, {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})


def test_state_behind_a_condition_lies_like_the_experts() -> None:
    tx = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), 3)
    plan = planned(expert_parallel(), moe(1, tx), 4)
    inputs = {t.name: layout for t, layout in plan.completed.inputs.items()}
    experts = {name: layout for name, layout in inputs.items() if "/experts/" in name and "router" not in name}
    assert len(experts) == 3 * sum(name.startswith("state/params") for name in experts)
    for name, layout in experts.items():
        assert layout == inputs["state/params" + name[name.index("/block") :]], name
        assert any(layout.cuts), name


def test_four_all_to_alls_per_layer() -> None:
    plan = planned(expert_parallel(), moe(layers=2), 4)
    assert activations(plan)["all_to_all"] == 4 * 2
    assert activations(plan)["all_gather"] == 0
    inputs = {t.name: layout for t, layout in plan.completed.inputs.items()}
    cut = {name for name, layout in inputs.items() if any(layout.cuts) and name.startswith("state")}
    assert len(cut) == 4 * 2  # the two kernels and their momenta
    assert all("/experts/" in name for name in cut)


def test_micro_batches_of_experts_run_in_one_loop() -> None:
    """Experts, of which each device has some, and rows, of which each has some, take the same rows at a time."""
    step, (state, batch) = moe(layers=1)
    more = {name: np.concatenate([rows, rows[:4]]) for name, rows in batch.items()}  # two on each of four devices
    plan = planned(accumulate(2, expert_parallel()), (step, (state, more)), 4)
    loops = [item for item in plan.flat.items if isinstance(item, FlatLoop)]
    assert [loop.loop.length for loop in loops] == [2]
    assert activations(plan)["all_gather"] == 0


@pytest.mark.one_day_in(2)
def test_the_numbers_are_those_of_one_device() -> None:
    with jax.enable_x64(True):
        step, (state, batch) = moe(layers=1)
        whole = jax.jit(lambda s, b: step(s, b, jax.value_and_grad)).lower(state, batch).compile()
        lowered = jscaler.parallelize(expert_parallel(), devices=4)(step).lower(state, batch)
        parts = lowered.compile()
        ours = theirs = state
        for _ in range(2):
            (ours, mine), (theirs, other) = parts(ours, batch), whole(theirs, batch)
            assert abs(float(mine["loss"] - other["loss"])) < 1e-10
            assert abs(float(mine["auxiliary"] - other["auxiliary"])) < 1e-10
        for got, want in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
            assert np.abs(np.asarray(got) - np.asarray(want)).max() <= 1e-11


def test_mistakes() -> None:
    with pytest.raises(UnknownNameError, match=r"pass expert_parallel\(experts=\.\.\.\)"):
        planned(expert_parallel(["*/expert/up"]), moe(), 4)
    with pytest.raises(SplitError, match=r"experts/up' cannot split factor 'dim 0' of size 4 into 3 parts"):
        planned(expert_parallel(), moe(), 3)
