"""What a stage computes again, as a block of its own: what is kept until it runs, what it keeps, and what it costs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_numbers import assert_trees_close

import jscaler
from jscaler import TimeSplit, plans
from jscaler.errors import PlanError
from jscaler.lower.step_plan import StepPlan
from jscaler.report.block_rows import kept_bytes

LAYERS, WIDTH, ROWS, MICROBATCHES = 8, 8, 64, 8
LARGE = 2**16  # rows of steps that are only lowered


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    """An embedding, and layers of two products; of a stack one loop."""

    def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ own["up"]) @ own["down"], None

    with jax.named_scope("embed"):
        x = x @ params["embed"]
    if isinstance(params["layers"], dict):
        return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0] ** 2)
    for number, own in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{number}"):
            x, _ = layer(x, own)
    return jnp.mean(x**2)


def step(params: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
    loss, grads = value_and_grad(lambda p: loss_of(p, x))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments(stacked: bool = False, rows: int = ROWS) -> Any:
    draws = np.random.default_rng(0)
    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = [{k: jnp.asarray(draws.normal(size=s) / 4) for k, s in shapes.items()} for _ in range(LAYERS)]
    stack = jax.tree.map(lambda *parts: jnp.stack(parts), *params) if stacked else params
    return {"embed": jnp.eye(WIDTH), "layers": stack}, jnp.asarray(draws.normal(size=(rows, WIDTH)))


@functools.cache
def lowered(schedule: str, stacked: bool = False, groups: int = 2, recompute: bool = False) -> StepPlan:
    inner = plans.recompute_layers() if recompute else None
    policy = plans.pipeline(groups, MICROBATCHES, schedule, inner, batch="x")
    with jax.enable_x64(True):
        found = jscaler.parallelize(policy, devices=groups)(step).lower(*arguments(stacked, LARGE))
        jscaler.verify(found)
    return found.plan


def block(plan: StepPlan, name: str) -> int:
    return next(n for n in range(len(plan.blocks)) if plan.block_name(n) == name)


def products(plan: StepPlan, name: str) -> int:
    return sum(eqn.primitive.name == "dot_general" for eqn in plan.blocks[block(plan, name)].flat.equations)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_forward_keeps_what_enters_its_stage_and_r_what_its_backward_reads(stacked: bool) -> None:
    """Two layers keep what enters each; R makes of the product that their backwards read, and no product is made twice."""
    plan, plain = lowered("1f1b+R", stacked, 4), lowered("1f1b", stacked, 4)
    entering = LARGE // MICROBATCHES * WIDTH * 8
    assert kept_bytes(plan, block(plan, "1F")) == 2 * entering
    assert kept_bytes(plan, block(plan, "0F")) == 2 * entering
    made = plan.blocks[block(plan, "1R")].flat.outputs
    assert sum(v.aval.size * v.aval.dtype.itemsize for v in made) == 2 * 4 * entering  # type: ignore[attr-defined]
    layers = 1 if stacked else 2
    assert [products(plan, f"1{kind}") for kind in "FRB"] == [2 * layers, layers, products(plain, "1B")]
    assert "3F 3B" in {plan.block_name(n) for n in range(len(plan.blocks))}, "the last stage has all that it reads there"


def test_what_r_makes_is_held_from_r_to_b() -> None:
    """In the first of four stages: layer by layer in backwards less is held, and where nothing is computed again more."""
    peaks = {
        name: jscaler.simulate(plan, seconds=[1.0] * len(plan.blocks)).peak(0)
        for name, plan in {
            "none": lowered("1f1b", groups=4),
            "apart": lowered("1f1b+R", groups=4),
            "in backwards": lowered("1f1b", groups=4, recompute=True),
        }.items()
    }
    assert peaks["in backwards"] < peaks["apart"] < peaks["none"]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_r_is_not_slower_than_recompute_in_backwards(name: str) -> None:
    """A unit for each product; the last stage of 1F1B computes nothing again."""
    spans = []
    for plan in (lowered(f"{name}+R"), lowered(name, recompute=True)):
        seconds = [float(products(plan, plan.block_name(n))) for n in range(len(plan.blocks))]
        spans.append(jscaler.simulate(plan, seconds=seconds).makespan)
    assert spans[0] < spans[1]


def test_a_stage_without_layers_keeps_what_enters_it() -> None:
    def unlike(params: Any, x: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        def loss(params: Any) -> jax.Array:
            with jax.named_scope("sums"):
                sums = jnp.sum(jnp.exp(x * params[0]), axis=1, keepdims=True)
            with jax.named_scope("scaled"):
                h = x * params[0] * sums
            with jax.named_scope("second"):
                return jnp.mean((h @ params[1]) ** 2)

        loss_, grads = value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss_

    with jax.enable_x64(True):
        given = [jnp.ones(WIDTH), jnp.ones((WIDTH, 2))], arguments()[1]
        policy = plans.pipeline(2, 4, "1f1b+R", at=["second"], batch="x")
        found = jscaler.parallelize(policy, devices=2)(unlike).lower(*given)
        jscaler.verify(found)
        expected = jax.jit(functools.partial(unlike, value_and_grad=jax.value_and_grad))(*given)
        assert_trees_close(found.compile()(*given), expected)
    assert kept_bytes(found.plan, block(found.plan, "0F")) == 0
    assert [v.aval.shape for v in found.plan.blocks[block(found.plan, "0R")].flat.outputs] == [(ROWS // 4, 1)]


def by_hand(table: str, again: Callable[..., None]) -> Callable[..., None]:
    """Two stages that no built-in plan has made, and what ``again`` has computed again."""

    def policy(graph: Any, devices: Any) -> None:
        rows = graph.factor_of("x", 0)
        for op in graph.select("*", kind="forward"):
            if op in rows:
                first = op.path.startswith(("embed", *(f"layer_{n}/" for n in range(LAYERS // 2))))
                graph.op_assign(
                    graph.op_trans(op, TimeSplit(rows[op], 2, "microbatch")), devices[:1] if first else devices[1:]
                )
        again(graph)
        graph.schedule(table)

    return policy


def each_layer(graph: Any) -> None:
    for number in range(LAYERS // 2):
        graph.recompute(f"layer_{number}/*")


TABLE = "0F0 0F1 0R1 0R0 0B0 0B1\n1F0 1B0 1F1 1B1"


@pytest.mark.one_day_in(2)
def test_regions_of_a_policy_of_ones_own_run_as_one_block() -> None:
    """Layer by layer each keeps what enters it; for a micro-batch whose R has no cell it is a part of the backward."""
    with jax.enable_x64(True):
        expected = jax.jit(functools.partial(step, value_and_grad=jax.value_and_grad))(*arguments())
        for table in (TABLE, TABLE.replace(" 0R1", "")):
            found = jscaler.parallelize(by_hand(table, each_layer), devices=2)(step).lower(*arguments())
            jscaler.verify(found)
            assert_trees_close(found.compile()(*arguments()), expected)
            assert str(found.plan.instructions.table) == table
    again, entering = block(found.plan, "0R"), ROWS // 2 * WIDTH * 8
    assert kept_bytes(found.plan, block(found.plan, "0F")) == LAYERS // 2 * entering
    assert products(found.plan, "0R") == LAYERS // 2, "of each layer the first"
    assert again != block(found.plan, "0R 0B")


def test_a_table_whose_r_has_nothing_to_do_is_refused() -> None:
    with pytest.raises(PlanError, match="has '0R0, which does not run anywhere', '0R1, which does not run anywhere'"):
        jscaler.parallelize(by_hand(TABLE, lambda graph: None), devices=2)(step).lower(*arguments())
