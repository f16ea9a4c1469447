"""Stages with devices and plans of their own: searched, against all of a small space by ``jscaler.cost``."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_search.small_models import graph_of

import jscaler
from bench.small_step import arguments, train_step
from jscaler import plans
from jscaler.clusters import find_cluster
from jscaler.errors import PlanError
from jscaler.estimate.prices import Prices
from jscaler.ir import Graph
from jscaler.plan_search.engine import search_graph
from jscaler.plan_search.found import Found
from jscaler.plan_search.stages import StageCuts
from jscaler.spaces import Setting, Space, StageSpace
from jscaler.spaces.space import StageOpening

CLUSTER = find_cluster("3xV100-32GB")
INSIDE = {"zero1()": Space("zero1"), "recompute_layers(zero1())": Space("recompute_layers", plan=Space("zero1"))}


@functools.cache
def small() -> Graph:
    return graph_of(train_step, *jax.eval_shape(lambda: arguments(4096)))


def space(microbatches: Any = (2, 8)) -> StageSpace:
    return StageSpace([*INSIDE.values()], devices=[1, 2], stages=[2], microbatches=[*microbatches])


def searched(memory: float | None = None, **more: Any) -> Found:
    return search_graph(small(), CLUSTER, [[space(**more)]], seconds=1000.0, memory=memory)


@functools.cache
def every_cost() -> dict[str, tuple[float, float]]:
    """Seconds and peaks of all plans with cuts between layers."""
    found = {}
    for sizes, cut, inside, m in itertools.product(
        ([1, 2], [2, 1]), range(1, 6), itertools.product(INSIDE, repeat=2), (2, 8)
    ):  # fmt: skip
        text = f"pipeline({sizes}, {m}, plan=[{', '.join(inside)}], layers=[{cut}, {6 - cut}])"
        cost = jscaler.cost(small(), text, CLUSTER)
        found[text] = cost.seconds.total or math.inf, cost.memory.peak
    return found


@pytest.mark.one_day_in(3)
def test_no_cut_and_no_plan_of_a_stage_is_faster() -> None:
    """Without a limit; and nearly so where half or a quarter of them do not fit, by tables that are too low by a third."""
    peaks = sorted(peak for _, peak in every_cost().values())
    for memory, most in ((None, 1.001), (peaks[len(peaks) // 2], 1.06), (peaks[3 * len(peaks) // 4], 1.06)):
        found = searched(memory)
        best = min(seconds for seconds, peak in every_cost().values() if memory is None or peak <= memory)
        assert found.chosen is not None
        assert found.complete
        assert found.chosen.seconds <= best * most
        assert memory is None or found.chosen.peak <= memory
        assert found.bound <= best
    assert searched(peaks[0] / 2).chosen is None


def test_what_is_found_is_the_text_of_a_plan() -> None:
    found = searched(microbatches=[8])
    assert found.chosen is not None
    assert found.plan is not None
    again = jscaler.cost(small(), plans.by_name(found.chosen.text), CLUSTER)
    assert again.seconds.total == pytest.approx(found.chosen.seconds, rel=1e-12)


@pytest.mark.parametrize("stages", ["[2, 1]", "3"])
@pytest.mark.parametrize("inside", INSIDE)
def test_segments_add_up_to_the_price_of_a_pipeline(stages: str, inside: str) -> None:
    """The cutter's tables say of a pipeline what prices of whole plans do, and what its schedule's order takes."""
    prices = Prices(small(), CLUSTER)
    cuts, sizes = StageCuts(prices), [2, 1] if stages == "[2, 1]" else [1, 1, 1]
    opening = opening_of(StageSpace(INSIDE[inside], devices=[1, 2], stages=[len(sizes)], microbatches=[8]), CLUSTER)
    chain, points = cuts.chain(opening, None)
    ends = [0, 4, len(cuts.row.kinds)] if len(sizes) == 2 else [0, 2, 4, len(cuts.row.kinds)]
    numbers = [next(n for n, one in enumerate(chain.choices) if one.devices == size) for size in sizes]
    found = tuple((start, stop, n) for (start, stop), n in zip(itertools.pairwise(ends), numbers, strict=True))
    layers = np.diff([0, *(cuts.row.begins[start].iteration for start in ends[1:-1]), 6]).tolist()
    cost = jscaler.cost(small(), f"pipeline({stages}, 8, plan={inside}, layers={layers})", CLUSTER)
    price = cuts.price(opening, chain, found, points)
    assert price.seconds == pytest.approx(cost.seconds.total, rel=0.1)
    assert chain.seconds(found) == pytest.approx(price.seconds, rel=0.05)
    assert price.peak == pytest.approx(cost.memory.peak, rel=0.3)
    if len(sizes) == 3:
        whole = prices.of(cost.step.plan)
        assert price.seconds == pytest.approx(whole.seconds, rel=0.02)


def opening_of(space: StageSpace, cluster: Any, rows: int = 4096) -> StageOpening:
    point = next(space.points(Setting(cluster.num_devices, cluster.devices_per_host, rows)))
    assert isinstance(point.opening, StageOpening)
    return point.opening


def two_halves(params: Any, batch: Any) -> jax.Array:
    """An encoder, and a decoder whose layers all read what it makes; layers of each are a loop."""

    def encode(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w), None

    inside = jax.lax.scan(encode, batch["x"], params["encoder"])[0]

    def decode(y: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return y + jnp.tanh(y @ w) * inside, None

    return jnp.mean(jax.lax.scan(decode, batch["y"], params["decoder"])[0] ** 2)


def no_layers(params: Any, batch: Any) -> jax.Array:
    """Products of unlike sizes, one behind the other."""
    x = batch["x"]
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


def step_of(loss: Any) -> Any:
    def step(params: Any, batch: Any) -> Any:
        value, grads = jscaler.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def shaped(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float64)


HALVES = {"encoder": shaped(4, 64, 64), "decoder": shaped(4, 64, 64)}, {"x": shaped(16, 64), "y": shaped(16, 64)}
SIZES = (64, 256, 32, 128, 64)
UNLIKE = {f"w{n}": shaped(*own) for n, own in enumerate(itertools.pairwise(SIZES))}, {"x": shaped(16, 64)}


@pytest.mark.parametrize(("loss", "shapes"), [(two_halves, HALVES), (no_layers, UNLIKE)], ids=["two loops", "no layers"])
def test_models_that_are_no_stack_have_their_numbers_under_what_is_found(loss: Any, shapes: Any) -> None:
    with jax.enable_x64(True):
        step, space = step_of(loss), StageSpace([*INSIDE.values()], devices=[1, 2], stages=[2, 3], microbatches=[4])
        found = search_graph(graph_of(step, *shapes), CLUSTER, [[space]], seconds=1000.0)
        assert found.chosen is not None
        assert found.bound <= found.chosen.seconds
        keys = iter(jax.random.split(jax.random.key(0), 10))
        params, batch = jax.tree.map(lambda one: jax.random.normal(next(keys), one.shape, one.dtype) / 8, shapes)
        train, plain = jscaler.parallelize(found.chosen.text, devices=3)(step), jax.jit(step)
        theirs = ours = params
        for _ in range(3):
            (ours, loss_here), (theirs, true) = train(ours, batch), plain(theirs, batch)
            np.testing.assert_allclose(loss_here, true, rtol=1e-10)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-10)


def test_losses_apart_have_no_one_row() -> None:
    def step(params: Any, batch: Any) -> Any:
        first, one = jscaler.value_and_grad(no_layers)(params["a"], batch)
        second, other = jscaler.value_and_grad(no_layers)(params["b"], batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, {"a": one, "b": other}), first + second

    found = search_graph(graph_of(step, {"a": UNLIKE[0], "b": UNLIKE[0]}, UNLIKE[1]), CLUSTER, [[space()]], seconds=1000.0)
    assert found.chosen is None
    assert "several that are cut apart; pipeline(...) cuts them all by balance" in "".join(found.illegal.values())


def test_unlike_devices_have_no_tables() -> None:
    found = search_graph(small(), find_cluster("1xV100-32GB+2xA100-80GB"), [[space()]], seconds=1000.0)
    assert "tables of one kind of devices" in "".join(found.illegal.values())


def test_a_stage_is_on_one_host_or_on_whole_hosts() -> None:
    sizes = opening_of(
        StageSpace(Space("zero1"), devices=[1, 3, 4, 6, 8], microbatches=[2]), find_cluster("4x4xV100-32GB")
    ).plans
    assert sorted(sizes) == [1, 3, 4, 8]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StageSpace([]), "takes spaces for the devices of a stage, one or more, not \\[\\]"),
        (lambda: StageSpace("zero1"), "takes spaces for the devices of a stage"),
        (lambda: StageSpace(Space("zero1"), schedules=["zb_v"]), "and not for 'zb_v'; a space of pipeline"),
        (lambda: opening_of(StageSpace(Space("zero1"), stages=[1]), CLUSTER), "StageSpace: stages"),
    ],
)
def test_spaces_of_stages_that_are_none(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()
