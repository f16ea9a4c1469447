"""Leaves whose ranges share devices, or are of several sizes: one array to their owner, and the chunks to the step."""

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_restart import X, for_orbax, make_state, staged, step

import jscaler
from jscaler import ChunkedArray
from jscaler.runtime.checkpoint import restore, save
from jscaler.runtime.chunked_array import ChunkedSharding, is_equivalent
from jscaler.runtime.dispatch import place
from jscaler.runtime.fetching import fetched_chunks
from jscaler.training.not_finite import not_finite

WHOLE = np.arange(24.0, dtype=np.float32).reshape(6, 4)


def chunked(sizes: tuple[int, ...] = (2, 1, 3), devices: tuple[int, ...] = (0, 1, 0)) -> ChunkedArray:
    parts = tuple(jax.sharding.SingleDeviceSharding(jax.devices()[d]) for d in devices)
    return ChunkedSharding(sizes, parts, len(set(devices))).placed(WHOLE)


def test_it_reads_as_one_array() -> None:
    leaf = chunked()
    np.testing.assert_array_equal(np.asarray(leaf), WHOLE)
    np.testing.assert_array_equal(jax.device_get({"a": leaf})["a"], WHOLE)
    np.testing.assert_array_equal(jscaler.fetch([leaf])[0], WHOLE)
    for ours, numpys in (
        (2 * leaf - leaf, WHOLE), (np.ones(4, np.float32) + leaf, 1 + WHOLE), (leaf @ WHOLE.T, WHOLE @ WHOLE.T),
        (jnp.ones(4) * leaf, WHOLE), (-leaf, -WHOLE), (leaf > 3, WHOLE > 3), (leaf[1:3], WHOLE[1:3]), (leaf.T, WHOLE.T),
        (leaf.at[0].set(7.0)[0], np.full(4, 7.0)), (jnp.asarray(leaf).sum(0), WHOLE.sum(0)), (np.exp(leaf), np.exp(WHOLE)),
    ):  # fmt: skip
        assert isinstance(ours, jax.Array)
        np.testing.assert_allclose(ours, numpys, rtol=1e-6)
    assert (len(leaf), leaf.shape, leaf.dtype, leaf.nbytes) == (6, (6, 4), np.float32, WHOLE.nbytes)
    assert repr(leaf) == "ChunkedArray(float32[6, 4], 3 chunks on 2 devices)"
    with pytest.raises(AttributeError, match="a ChunkedArray has no 'sums'"):
        leaf.sums
    with pytest.raises(TypeError, match="unhashable"):
        hash(leaf)


def test_keys_are_chunks_too() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    leaf = ChunkedArray([keys[:1], keys[1:]])
    apart = ChunkedSharding((3, 1), tuple(jax.sharding.SingleDeviceSharding(d) for d in jax.devices()[:2]), 2)
    for found in (
        leaf.whole(),
        leaf.on_host(),
        fetched_chunks([leaf])[0],
        place(leaf, apart).whole(),
        place(keys, apart)[:],
    ):
        assert (jax.random.key_data(found) == jax.random.key_data(keys)).all()


@pytest.mark.parametrize("sizes", [(2, 1, 3), (1, 1, 4), (3, 3)])
def test_it_is_laid_out_in_any_other_way(sizes: tuple[int, ...]) -> None:
    leaf = chunked()
    other = chunked(sizes, (1, 0, 2)[: len(sizes)])
    moved = place(leaf, other.sharding)
    assert [part.shape[0] for part in moved.parts] == list(sizes)
    assert [part.devices() for part in moved.parts] == [part.devices() for part in other.parts]
    np.testing.assert_array_equal(np.asarray(moved), WHOLE)
    assert place(moved, other.sharding) is moved
    rows = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:3], "x"), jax.sharding.PartitionSpec("x"))
    array = place(leaf, rows)
    assert isinstance(array, jax.Array)
    assert array.sharding == rows
    np.testing.assert_array_equal(place(array, leaf.sharding), WHOLE)
    assert not is_equivalent(rows, leaf.sharding, 2)
    assert not is_equivalent(leaf.sharding, rows, 2)


def test_each_device_stores_the_ranges_that_it_runs() -> None:
    """Two chunks on each of two groups of two devices, under ZeRO-3 in halves; in a V, the second chunks in turn."""
    for order, groups in (("interleaved", [0, 1, 0, 1]), ("zb_v", [0, 1, 1, 0])):
        step = staged(2, order, "zero3", 12)
        state = step.init(make_state, 12, x=X)
        for _ in range(2):
            up = state[0]["layers"]["up"]
            assert isinstance(up, ChunkedArray)
            held: dict[int, list[tuple[int, int]]] = {}
            for shard in up.addressable_shards:
                held.setdefault(shard.device.id, []).append(shard.index[0].indices(12)[:2])
                np.testing.assert_array_equal(np.asarray(up)[shard.index], shard.data)
            ranges = list(itertools.pairwise(range(0, 13, 3)))
            wanted = {d: [own for own, group in zip(ranges, groups, strict=True) if group == d // 2] for d in range(4)}
            assert held == wanted
            assert sum(shard.data.nbytes for shard in up.addressable_shards) == up.nbytes, "each row once"
            moments = jax.tree.leaves(state[1])
            assert sum(isinstance(m, ChunkedArray) for m in moments) == 4
            state, _ = step(state, X)


@pytest.mark.parametrize("order", ["interleaved", "zb_v", "unequal"])
def test_nothing_of_the_state_is_cut_or_sent(order: str) -> None:
    """No transfer of a parameter or of its gradient, and no op that takes a stack apart, or joins one."""
    plan = staged(2, order, "none", 9).lower(make_state(9), X).plan
    graph = plan.graph
    stacked = {t.name for t in graph.inputs if "layers" in t.name}
    assert len(stacked) == 3 * 2 * (2 if order == "unequal" else 4)
    sent = [t.tensor for t in plan.transfers]
    assert not [t.name for t in sent if t.role in ("parameter", "gradient") and t.name.split("@")[0] in stacked]
    assert not [t.name for t in sent if t.shape[:1] in ((9,), (8,), (5,), (3,), (2,))], "activations have rows of the batch"
    assert not [op.path for op in graph.ops if op.ranges in ("apart", "joined")]


def test_the_step_takes_any_form_of_it_and_its_own_untouched() -> None:
    step = staged(2, "unequal", "none", 9)
    state = step.init(make_state, 9, x=X)
    arrays, numbers = for_orbax(state), jscaler.fetch(state)
    losses = [float(step(given, X)[1]) for given in (arrays, numbers)]
    new, loss = step(state, X)
    assert losses == [float(loss)] * 2
    assert state[0]["layers"]["up"].is_deleted(), "it was donated"
    with pytest.raises(jscaler.DeletedArgumentError, match="state/0/layers/down"):
        step(state, X)
    params, (moments, *rest) = new
    shared = params, (moments._replace(mu=params), *rest)  # one array in two donated leaves
    assert float(step(shared, X)[1]) < losses[0]


def test_an_evaluation_follows_and_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    step = staged(2, "interleaved", "none", 12)
    state = step.init(make_state, 12, x=X)

    def mean(state: Any) -> Any:
        return jax.tree.map(lambda p: jnp.mean(p * p), state[0])

    found = step.follow(mean)(state)
    wanted = mean(make_state(12))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), jscaler.fetch(found), wanted)
    save(tmp_path / "kept", 3, state)
    back = restore(tmp_path / "kept", 3, step.abstract_state(make_state, 12, x=X))
    for ours, true in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert type(ours) is type(true)
        assert is_equivalent(ours.sharding, true.sharding, ours.ndim)
        np.testing.assert_array_equal(ours, true)
    state[0]["layers"]["up"] = state[0]["layers"]["up"].sharding.placed(np.full((12, 4, 8), np.nan, np.float32))
    assert not_finite(state) == {"state/0/layers/up": 12 * 4 * 8}


@pytest.mark.parametrize("more", ["'interleaved', chunks=2, ", "'zb_v', ", "'1f1b', layers=[33, *[1] * 15], "])
def test_devices_that_are_not_at_hand(more: str) -> None:
    """Sixteen: the state's types are there, each leaf on as many devices as run it; and the step is lowered."""
    policy = eval(f"pipeline(16, 16, {more}batch='x')", dict(vars(jscaler.plans)))
    far = jscaler.parallelize(policy, devices=16)(step)
    up = far.abstract_state(make_state, 48, x=X)[0]["layers"]["up"]
    assert (up.shape, up.sharding.mesh.size) == ((48, 4, 8), 16)
    assert "stablehlo" in far.lower(make_state(48), X).as_text(0)
