"""What a step does not change lies where it is read: nothing is sent of it, and to its caller it is one array."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jscaler
from jscaler import plans
from jscaler.runtime.checkpoint import Checkpoints, restore_latest

WIDTH, ROWS = 8, 4
TX = optax.adam(1e-2)


def loss_of(params: Any, frozen: Any, batch: Any, key: jax.Array) -> jax.Array:
    """A mask, frozen parameters, and a key, which layers of all stages read."""
    h = batch["x"]
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            dropped = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, h.shape)
            h = h + jnp.where(dropped, jnp.tanh(h @ w + frozen["shift"]) * frozen["scale"] * batch["mask"][:, None], 0)
    return (h**2).mean()


def train_step(state: Any, batch: Any, key: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    loss, grads = value_and_grad(loss_of)(state["params"], state["frozen"], batch, key)
    updates, moments = TX.update(grads, state["moments"], state["params"])
    return {**state, "params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


def make_state() -> Any:
    params = [jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / 3 for i in range(4)]
    frozen = {"shift": jnp.linspace(-1.0, 1.0, WIDTH), "scale": jnp.asarray(0.7)}
    return {"params": params, "moments": TX.init(params), "frozen": frozen}


def make_batch(rows: int = ROWS) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {"x": rng.normal(size=(rows, WIDTH)), "mask": (rng.random(rows) < 0.7) + 0.5}


UNCHANGED = ["state/frozen/shift", "state/frozen/scale", "batch/mask", "key"]
PLANS = {
    "pipeline(2, 2, batch='batch/*')": 2,
    "pipeline(2, 2, plan=data_parallel('batch/*'), batch='batch/*')": 4,
    "pipeline(2, 2, plan=zero3('batch/*'), batch='batch/*')": 4,
    "pipeline(2, 2, 'zb_v', plan=data_parallel('batch/*'), batch='batch/*')": 4,
    "pipeline(4, 2, batch='batch/*')": 4,
}


@functools.cache
def planned(plan: str, donated: bool = False) -> Any:
    options: dict[str, Any] = {"donate_argnames": "state"} if donated else {}
    return jscaler.parallelize(plans.by_name(plan), devices=PLANS[plan], **options)(train_step)


@pytest.mark.parametrize("plan", PLANS)
def test_nothing_is_sent_of_it(plan: str) -> None:
    """And it is there on each group that reads it, with no more than one of it on a device."""
    step = planned(plan).lower(make_state(), make_batch(), jax.random.key(5)).plan
    assert sum(t.crossing.sent for t in step.sent if t.tensor.name.partition("@")[0] in UNCHANGED) == 0
    groups = set(step.completed.groups)
    for name in UNCHANGED:
        tensors = [t for t in step.graph.inputs if t.name.partition("@")[0] == name]
        assert {step.completed.inputs[t].mesh for t in tensors} == groups, name
        assert len(tensors) == len(groups)
    assert not [t for t in step.graph.copy_of if t.name.partition("@")[0] not in UNCHANGED]


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("plan", [list(PLANS)[1], list(PLANS)[2]])
def test_it_is_one_array_and_the_numbers_are_those_of_one_device(plan: str, donated: bool) -> None:
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        batch, key = make_batch(), jax.random.key(5)
        train = planned(plan, donated)
        ours, theirs = train.init(make_state, batch=batch, key=key), make_state()
        plain = jax.jit(lambda *args: train_step(*args, value_and_grad=jax.value_and_grad))
        for _ in range(3):
            before = ours["frozen"]["shift"]
            (ours, loss), (theirs, true) = train(ours, batch, key), plain(theirs, batch, key)
            assert abs(float(loss) - float(true)) < 1e-12
            assert (ours["frozen"]["shift"] is before) is not donated
            assert before.is_deleted() is donated
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), jax.device_get(ours), theirs)
        assert ours["frozen"]["shift"].sharding.mesh.shape["stages"] == 2
        assert len(ours["frozen"]["scale"].addressable_shards) == 4


def test_a_step_that_follows_takes_it_where_it_lies() -> None:
    plan = list(PLANS)[1]
    train, batch, key = planned(plan), make_batch(), jax.random.key(5)
    state, _ = train(train.init(make_state, batch=batch, key=key), batch, key)

    @train.follow
    def evaluate(state: Any, batch: Any, key: jax.Array) -> jax.Array:
        return loss_of(state["params"], state["frozen"], batch, key)

    compiled = evaluate.lower(state, batch, key).compile()
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(batch), key]
    moved = [a for a, b in zip(leaves, compiled.place(leaves), strict=True) if a is not b and isinstance(a, jax.Array)]
    assert moved == [key]
    assert not [t for t in compiled.plan.sent if "frozen" in t.tensor.name]
    host = jax.device_get(state)
    np.testing.assert_allclose(evaluate(state, batch, key), loss_of(host["params"], host["frozen"], batch, key), rtol=1e-5)


def test_it_is_saved_and_restored_into_other_plans(tmp_path: Any) -> None:
    batch, key = make_batch(), jax.random.key(5)
    first, second = planned(list(PLANS)[1]), jscaler.parallelize("single", devices=1)(train_step)
    state, _ = first(first.init(make_state, batch=batch, key=key), batch, key)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    for step in (second, first):
        _, restored = restore_latest(tmp_path, step.abstract_state(make_state, batch=batch, key=key))
        jax.tree.map(np.testing.assert_array_equal, restored, jax.device_get(state))
        np.testing.assert_allclose(step(restored, batch, key)[1], first(state, batch, key)[1], rtol=1e-5)


def test_groups_that_lie_otherwise_share_scalars_alone() -> None:
    """Both halves on the same device, or on other numbers of devices: no array lies on them as they want it."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        for op in graph.forward():
            own = devices[:1] if "layer_0" in op.path or "layer_1" in op.path else devices
            if not op.path.startswith(("layer_0", "layer_1", "layer_2", "layer_3")):
                continue
            graph.op_assign(graph.op_trans(op, jscaler.Replicate(own.size)) if own.size > 1 else op, own)

    step = jscaler.parallelize(policy, devices=2)(train_step)
    plan = step.lower(make_state(), make_batch(), jax.random.key(5)).plan
    assert {t.name for t in plan.graph.copy_of.values()} == {"state/frozen/scale", "key"}
    state, loss = step(make_state(), make_batch(), jax.random.key(5))
    plain = jax.jit(lambda *args: train_step(*args, value_and_grad=jax.value_and_grad))
    np.testing.assert_allclose(loss, plain(make_state(), make_batch(), jax.random.key(5))[1], rtol=1e-5)
    assert len(state["frozen"]["scale"].addressable_shards) == 2
