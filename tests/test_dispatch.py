"""A step's own arrays pass through untouched from call to call, whatever else its arguments are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import api

LEAVES = 300


def all_whole(graph: Any, devices: np.ndarray) -> None:
    graph.op_assign(graph.ops[0], devices)


def add(state: dict[str, jax.Array], batch: Any, times: int = 1, **more: jax.Array) -> tuple[Any, jax.Array]:
    """Add the batch's mean to every leaf."""
    return jax.tree.map(lambda x: x + times * batch.mean(), state), batch.sum() + sum(x.sum() for x in more.values())


def leaves(count: int = 3) -> dict[str, jax.Array]:
    return {f"leaf_{i}": jnp.full(2, float(i), jnp.float32) for i in range(count)}


def step_of(**options: Any) -> jscaler.Parallelized:
    return jscaler.parallelize(all_whole, devices=2, static_argnames="times", **options)(add)


def count_calls(monkeypatch: pytest.MonkeyPatch, target: Any, name: str) -> list[Any]:
    """Every call of ``target.name`` from now on."""
    calls, real = [], getattr(target, name)
    monkeypatch.setattr(target, name, lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs))
    return calls


def test_a_state_of_many_leaves_passes_through_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    step, batch = step_of(donate_argnames="state"), np.ones(4, np.float32)
    state, _ = step(leaves(LEAVES), batch)
    step(jax.tree.map(jnp.copy, state), batch)  # copies of whole arrays lie elsewhere: they are bound and moved
    state, _ = step(state, batch)
    bound = count_calls(monkeypatch, api.Arguments, "bind")
    moved = count_calls(monkeypatch, jax, "device_put")
    live = len(jax.live_arrays())
    for index in range(20):
        given, pointers = state, {x.addressable_shards[0].data.unsafe_buffer_pointer() for x in state.values()}
        state, _ = step(state, batch)
        assert len(jax.live_arrays()) == live
        assert all(x.is_deleted() for x in given.values())
        assert pointers == {x.addressable_shards[0].data.unsafe_buffer_pointer() for x in state.values()}
        assert len(moved) == index + 1  # the batch, a numpy array
    assert bound == []
    np.testing.assert_array_equal(state["leaf_7"], [29.0, 29.0])


def test_another_form_of_call_is_not_taken_for_the_last() -> None:
    step, state, batch = step_of(), leaves(), jnp.arange(4.0)
    state = jax.tree.map(lambda x: x, step(state, batch)[0])
    for _ in range(2):
        assert step(state, batch)[0]["leaf_0"][0] == 3.0
        assert step(state, batch=batch, times=2)[0]["leaf_0"][0] == 4.5
        assert step(state, batch=batch, times=1)[0]["leaf_0"][0] == 3.0
        assert step(state, batch[:2])[0]["leaf_0"][0] == 2.0
        assert step(state, batch.astype(int))[0]["leaf_0"][0] == 3.0
        assert step(state, np.asarray(batch) + 1)[0]["leaf_0"][0] == 4.0
        assert step(state, batch, z=batch, a=2 * batch)[1] == 24.0
        assert step(state, batch, a=batch, z=3 * batch)[1] == 30.0
        assert step({**state, "leaf_0": np.zeros(2, np.float32)}, batch)[0]["leaf_0"][0] == 1.5
        assert step({**state, "leaf_0": jnp.zeros(2, jnp.int32)}, batch)[0]["leaf_0"][0] == 1.5
    assert len(step._compiled) == 7
    with pytest.raises(jscaler.CaptureError, match="being traced"):
        jax.jit(step)(state, batch)


def test_arguments_in_any_order_reach_their_inputs() -> None:
    @jscaler.parallelize(all_whole, devices=2)
    def step(z: jax.Array, a: jax.Array, *rest: jax.Array, m: jax.Array) -> jax.Array:
        return z - 10 * a + 100 * rest[0] - 1000 * m

    lies = jscaler.parallelize(all_whole, devices=2)(lambda x: 2 * x)
    one, two, three, four = (lies(jnp.full(4, x)) for x in (0.5, 1.0, 1.5, 2.0))
    for _ in range(3):
        np.testing.assert_array_equal(step(one, two, three, m=four), [1 - 20 + 300 - 4000] * 4)
    for _ in range(3):
        np.testing.assert_array_equal(step(one, two, three, m=np.ones(4, np.float32)), [1 - 20 + 300 - 1000] * 4)


def test_a_compiled_step_knows_its_arguments_again(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = np.ones(4, np.float32)
    compiled = step_of().lower(leaves(), batch).compile()
    state, _ = compiled(leaves(), batch)
    state, _ = compiled(state, batch)
    bound = count_calls(monkeypatch, api.Arguments, "bind")
    state, _ = compiled(state, batch)
    assert bound == []
    with pytest.raises(jscaler.CaptureError, match="'batch' is float32"):
        compiled(state, batch[:2])
