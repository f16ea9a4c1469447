"""Plans that are found have one device's numbers, whatever the space leaves: it is drawn."""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small_models import links_alone

import jscaler
from jscaler.clusters import Cluster
from jscaler.estimate.prices import Prices
from jscaler.plan_search.program import fill
from jscaler.primitives import Order, Replicate, Split
from jscaler.spaces import any_split, maybe, one_of, together
from jscaler.stages import transform
from models.llama import Llama, LlamaConfig
from models.moe import MoE, MoEConfig
from tests.plans.plan_steps import TX, assert_same_numbers, gpt, made_once, mlp, with_arguments

TOKENS = np.random.default_rng(0).integers(0, 32, (8, 9), np.int32)


def text(model: Any) -> Any:
    return with_arguments(model, TX, {"tokens": TOKENS[:, :-1], "labels": TOKENS[:, 1:]}, TOKENS[:1, :-1])


@made_once
def llama() -> Any:
    kinds = {"dtype": jnp.zeros(()).dtype, "param_dtype": jnp.zeros(()).dtype}
    config = LlamaConfig(hidden=16, layers=2, heads=4, groups=2, units=24, sequence=8, vocabulary=32, **kinds)
    graphdef, params = nnx.split(Llama(config, nnx.Rngs(0)), nnx.Param)

    def step(state: Any, batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = nnx.merge(graphdef, params, copy=True)(batch["tokens"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, grads = jscaler.value_and_grad(loss_fn)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, loss

    return step, ({"params": params}, {"tokens": TOKENS[:, :-1], "labels": TOKENS[:, 1:]})


@made_once
def moe() -> Any:
    config = MoEConfig(hidden=16, layers=1, heads=2, sequence=8, vocabulary=32, experts=4, param_dtype=jnp.zeros(()).dtype)
    return text(MoE(config))


MODELS: dict[str, Callable[[], Any]] = {
    "mlp": mlp,
    "mlp, 8 layers": functools.partial(mlp, layers=8),
    "gpt, stacked": functools.partial(gpt, layers=2, stacked=True),
    "gpt, a loop": functools.partial(gpt, layers=6),
    "llama": llama,
    "moe": moe,
}


def slow_devices(count: int) -> Cluster:
    """Links are fast, and devices slow, so that nothing is copied for nothing."""
    cluster = links_alone(1, count)
    assert cluster.device is not None
    peak = dataclasses.replace(cluster.device.peak, float64=1e6, float32=1e6)
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, bandwidth=1e6, peak=peak))


def drawn_space(seed: int) -> Callable[[Any, Any], None]:
    """Leaves out two in five of what there is, but no copies."""

    def space(graph: Any, devices: Any) -> None:
        for op in graph.forward():
            rng = random.Random(f"{seed} {op.path}")
            splits = [
                one_of(
                    Replicate(size), *(Split(f.name, size) for f in graph.rule(op).factors.values() if legal(f, size, rng))
                )
                for size in devices.shape
            ]
            graph.op_trans(op, *splits)
        graph.shard("*", one_of(None, "zero1", "zero2", "zero3"))

    def legal(factor: Any, size: int, rng: random.Random) -> bool:
        return factor.splittable and factor.size > 1 and factor.size % size == 0 and rng.random() < 0.6

    return space


@functools.cache
def prices(model: str, devices: int) -> Prices:
    with jax.enable_x64(True):
        step, arguments = MODELS[model]()
        return Prices(jscaler.parallelize("single", devices=1)(step).graph(*arguments), slow_devices(devices))


@pytest.mark.filterwarnings("ignore:plan .found.:jscaler.PlanWarning")  # the space is odd
@pytest.mark.parametrize(
    ("model", "mesh", "microbatches", "seed"),
    [
        ("mlp", (2, 2), 1, 0), ("mlp, 8 layers", (4,), 2, 1), ("gpt, stacked", (2, 2), 2, 3), ("llama", (4,), 1, 5),
        ("moe", (2, 2), 1, 6), pytest.param("gpt, a loop", (2, 2), 1, 4, marks=pytest.mark.one_day_in(7)),
    ],
)  # fmt: skip
def test_numbers_are_those_of_one_device(model: str, mesh: tuple[int, ...], microbatches: int, seed: int) -> None:
    devices = int(np.prod(mesh))
    with jax.enable_x64(True):
        found = fill(prices(model, devices), drawn_space(seed), mesh, microbatches)
    assert any(any(own) for own in found.choices.values())
    assert_same_numbers(found.policy, MODELS[model], devices)


@pytest.mark.one_day_in(4)
@pytest.mark.filterwarnings("ignore:plan .found.:jscaler.PlanWarning")
@pytest.mark.parametrize(
    ("model", "mesh", "microbatches", "share"),
    [("gpt, stacked", (2,), 1, 0.8), ("gpt, stacked", (2, 2), 2, 0.5)],
)
def test_numbers_where_memory_is_short(model: str, mesh: tuple[int, ...], microbatches: int, share: float) -> None:
    """Rows alone are split: parameters lie in parts, and ops run again."""
    devices = int(np.prod(mesh))
    with jax.enable_x64(True):
        known = prices(model, devices)
        free = fill(known, rows_alone, mesh, microbatches)
        scratch = known.tables.program().scratch.max()  # as much as all the rest of a small model
        most = scratch + share * (free.price.peak - scratch)
        found = fill(known, rows_alone, mesh, microbatches, memory=most)
    assert found.price.peak <= most
    assert found.recomputed
    assert {2, 3} & {*found.zero.values()}
    assert_same_numbers(found.policy, MODELS[model], devices)


def rows_alone(graph: Any, devices: Any) -> None:
    """Data parallel, of any stage of ZeRO, with anything computed again."""
    for op in graph.forward():
        graph.op_trans(op, any_split(dims="batch"))
        graph.recompute(op, maybe())
    graph.shard("*", one_of(None, "zero1", "zero2", "zero3"))


@pytest.mark.filterwarnings("ignore:plan .found.:jscaler.PlanWarning")
def test_numbers_under_constraints_between_ops() -> None:
    """One of two ops runs in front of the other, and all of an attention runs again, or nothing of it."""
    with jax.enable_x64(True):
        known = prices("gpt, stacked", 2)
        labels, head = (
            next(op.path for op in known.graph.forward() if name in op.path) for name in ("where", "attend/dot")
        )

        def constrained(graph: Any, devices: Any) -> None:
            for op in graph.forward():
                graph.op_trans(op, any_split(dims="batch"))
            graph.op_order(labels, head)
            graph.recompute("*/attn/*", together())

        free = fill(known, constrained, (2,), memory=1e12)
        scratch = known.tables.program().scratch.max()
        found = fill(known, constrained, (2,), memory=scratch + 0.97 * (free.price.peak - scratch))
        plan = transform(known.captured, found.policy, 2, cost=known.cluster)
    program = found.filling.program
    assert program.again is not None
    assert not free.recomputed
    assert {*found.recomputed} == {*program.again.runs}
    assert Order(labels, head, None, None) in plan.decisions
    assert_same_numbers(found.policy, MODELS["gpt, stacked"], 2)
