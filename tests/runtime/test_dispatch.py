"""A step's own arrays pass through untouched from call to call, whatever else its arguments are."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import api
from jscaler.runtime import dispatch

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


@pytest.mark.one_day_in(2)
@pytest.mark.smoke
def test_a_state_of_many_leaves_passes_through_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    step, batch = step_of(donate_argnames="state"), np.ones(4, np.float32)
    state, _ = step(leaves(LEAVES), batch)
    step(jax.tree.map(jnp.copy, state), batch)  # copies of whole arrays lie elsewhere: they are bound and moved
    state, _ = step(state, batch)
    bound = count_calls(monkeypatch, api.Arguments, "bind")
    moved = count_calls(monkeypatch, jax, "device_put")
    gc.collect()  # arrays of other tests
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


def test_a_leaf_that_lies_elsewhere_is_moved_though_all_else_is_known() -> None:
    step, batch = step_of(), np.ones(4, np.float32)
    state, _ = step(leaves(), batch)
    for _ in range(2):
        state, _ = step(state, batch)
    elsewhere = {**state, "leaf_0": jax.device_put(state["leaf_0"], jax.devices()[5])}
    made, _ = step(elsewhere, batch)
    np.testing.assert_array_equal(made["leaf_0"], [4.0, 4.0])
    assert made["leaf_0"].sharding == state["leaf_0"].sharding


def test_an_array_of_weak_type_is_another_form_of_call() -> None:
    step, half = jscaler.parallelize(all_whole, devices=2)(lambda a, b: a * b), jnp.ones(2, jnp.float16)
    weak, strong = jnp.asarray(2.0), jnp.float32(2)
    assert (weak.weak_type, strong.weak_type) == (True, False)
    for _ in range(2):
        assert [step(half, two).dtype.name for two in (weak, strong, 2.0)] == ["float16", "float32", "float16"]


def test_a_count_that_two_stages_read_stays_of_weak_type() -> None:
    """Or the second call would be of another form, and compile again."""

    def step(state: dict[str, Any], batch: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(0), state["count"])

        def loss(w: list[jax.Array]) -> jax.Array:
            h = jnp.tanh(batch @ w[0]) @ w[1]
            return jnp.mean((jnp.tanh(h + jax.random.normal(key, h.shape)) @ w[2]) ** 2)

        w = jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], jscaler.grad(loss)(state["w"]))
        return {"w": w, "count": state["count"] + 1}

    state = {"w": [jnp.eye(8)] * 3, "count": 0}
    pipelined = jscaler.parallelize("pipeline(2, 2)", devices=2)(step)
    assert pipelined(state, jnp.ones((8, 8)))["count"].weak_type
    assert jax.jit(step)(state, jnp.ones((8, 8)))["count"].weak_type


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


def train(trained: dict[str, jax.Array], frozen: dict[str, Any], batch: Any) -> tuple[Any, Any, jax.Array]:
    """A layer is trained behind one that is not, and comes back as it came."""
    loss, gradients = jscaler.value_and_grad(lambda p: ((batch @ frozen["base"] @ p["head"]) ** 2).mean())(trained)
    return jax.tree.map(lambda p, g: p - 0.1 * g, trained, gradients), frozen, loss


def columns(graph: Any, devices: np.ndarray) -> None:
    graph.op_assign(graph.op_trans(graph.forward()[0], jscaler.Split(("frozen/base", 1), devices.size)), devices)


def frozen_step(donated: Any) -> jscaler.Parallelized:
    return jscaler.parallelize(columns, devices=2, donate_argnames=donated)(train)


def trained_and_frozen() -> tuple[dict[str, jax.Array], dict[str, Any]]:
    base = np.arange(32, dtype=np.float32).reshape(4, 8) / 64
    return {"head": jnp.ones((8, 2)) / 8}, {"base": base, "scale": jnp.arange(3.0)}


@pytest.mark.smoke
@pytest.mark.parametrize("donated", [(), "trained"])
def test_what_comes_back_unchanged_is_the_very_array(donated: Any) -> None:
    step, batch = frozen_step(donated), np.ones((4, 4), np.float32)
    trained, frozen = trained_and_frozen()
    compiled = step.lower(trained, frozen, batch).compile()
    assert sorted(compiled.lowered.executable.returned.values()) == [1, 2]
    assert compiled.memory_analysis().output_size_in_bytes < 128  # the base takes 64 on each device, the head 64
    trained, kept, first = step(trained, frozen, batch)
    assert kept["base"].sharding.shard_shape((4, 8)) == (4, 4)  # moved to the plan's layout, once
    np.testing.assert_array_equal(kept["base"], trained_and_frozen()[1]["base"])
    frozen["base"][:] = 7  # the caller's own memory
    for _ in range(2):
        trained, again, loss = step(trained, kept, batch)
        assert all(again[name] is kept[name] for name in kept)
    np.testing.assert_array_equal(kept["base"], trained_and_frozen()[1]["base"])
    assert loss < first


def test_of_a_donated_argument_what_is_unchanged_keeps_its_memory() -> None:
    step, batch = frozen_step(("trained", "frozen")), np.ones((4, 4), np.float32)
    trained, frozen, _ = step(*trained_and_frozen(), batch)
    held = [s.data.unsafe_buffer_pointer() for s in frozen["base"].addressable_shards]
    given = frozen["base"]
    trained, frozen, _ = step(trained, frozen, batch)
    assert given.is_deleted()
    assert held == [s.data.unsafe_buffer_pointer() for s in frozen["base"].addressable_shards]


def test_an_array_of_numpy_may_be_written_to_after_every_call() -> None:
    step, mine = frozen_step(()), np.ones((4, 8), np.float32)
    trained, batch = {"head": jnp.ones((8, 2))}, np.ones((4, 4), np.float32)
    results = []
    for value in range(3):  # the first call is bound, the others are known
        mine[:] = value
        results.append(step(trained, {"base": mine}, batch)[1]["base"])
    mine[:] = 9
    assert [float(r[0, 0]) for r in results] == [0.0, 1.0, 2.0]


def test_an_array_of_numpy_that_jax_reads_in_place_may_be_written_to_as_well() -> None:
    buffer = np.zeros(64 + 4 * 8 * 4, np.uint8)
    start = -buffer.ctypes.data % 64  # as JAX wants it, to copy nothing
    mine = buffer[start : start + 4 * 8 * 4].view(np.float32).reshape(4, 8)
    in_place = jax.device_put(mine)
    step = jscaler.parallelize("single", devices=1)(train)
    kept = step({"head": jnp.ones((8, 2))}, {"base": mine}, np.ones((4, 4), np.float32))[1]["base"]
    mine[:] = 9
    assert float(in_place[0, 0]) == 9.0
    assert float(kept[0, 0]) == 0.0


def test_what_comes_back_twice_is_two_arrays_that_can_both_be_donated() -> None:
    twice = jscaler.parallelize(all_whole, devices=2)(lambda params: {"params": params, "ema": params, "sum": params.sum()})
    update = jscaler.parallelize(all_whole, devices=2, donate_argnames="state")(
        lambda state: {"params": state["params"] + 1, "ema": state["ema"] * 2, "sum": state["sum"]}
    )
    params = twice(jnp.arange(4.0))["params"]
    state = twice(params)
    assert state["params"] is params or state["ema"] is params
    assert state["params"] is not state["ema"]
    state = update(state)
    np.testing.assert_array_equal(state["params"] - state["ema"], [1.0, 0.0, -1.0, -2.0])


@pytest.mark.parametrize("made", [jnp.asarray, np.asarray])
def test_a_state_of_ones_own_is_known_once_it_has_been_returned(monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    step, batch = step_of(donate_argnames="state"), np.ones(4, np.float32)
    state = {name: made(np.full(2, 1.0, np.float32)) for name in leaves(5)}
    for _ in range(2):
        state, _ = step(state, batch)
    bound = count_calls(monkeypatch, api.Arguments, "bind")
    typed = count_calls(monkeypatch, dispatch, "leaf_type")
    state, _ = step(state, batch)
    assert bound == []
    assert len(typed) == 1  # the batch


@pytest.mark.smoke
def test_an_array_in_two_places_is_donated_once() -> None:
    step, batch = step_of(donate_argnames="state"), np.ones(4, np.float32)
    state = {"params": jnp.zeros(2), "ema": jnp.zeros(2), "key": jnp.ones(2)}
    state["ema"] = state["params"]
    for _ in range(3):
        state, _ = step(state, batch)
        state |= {"ema": state["params"]}  # and where it lies as the plan wants it
    step(state, batch, a=state["key"])
    assert not state["key"].is_deleted()  # it was read elsewhere, too
    np.testing.assert_array_equal(state["key"], [4.0, 4.0])


def test_keys_in_two_places_are_donated_once() -> None:
    def split(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return jax.tree.map(lambda key: jax.random.fold_in(key, 1), state)

    step, key = jscaler.parallelize(all_whole, devices=2, donate_argnames="state")(split), jax.random.key(0)
    state = step(step({"a": key, "b": key}))
    assert jnp.array_equal(jax.random.key_data(state["a"]), jax.random.key_data(state["b"]))
