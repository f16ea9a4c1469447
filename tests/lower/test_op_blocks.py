"""Ops of one place, stage and kind are one block, unless it would wait for itself: blocks never form a circle."""

from collections.abc import Sequence
from graphlib import TopologicalSorter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import plans
from jscaler.lower.op_blocks import BlockGraph, BlockId
from jscaler.lower.segment import made_by

Item = tuple[int, list[int]]  # a stage, and the numbers of the items that it reads


def blocks_of(items: Sequence[Item]) -> tuple[BlockGraph, list[int]]:
    """Each stage on a place of its own."""
    graph, numbers = BlockGraph(), list[int]()
    for stage, reads in items:
        numbers.append(graph.join(stage, stage, None, [numbers[n] for n in reads]))
    return graph, numbers


def visits(items: Sequence[Item]) -> list[tuple[int | None, int]]:
    graph, numbers = blocks_of(items)
    return [(graph.blocks[n].stage, graph.blocks[n].visit) for n in numbers]


def test_a_last_stage_is_one_block_and_others_are_two() -> None:
    """Forward 0, 1, then backward 1, 0; and an op of stage 0 that reads nothing, last in the program."""
    assert visits([(0, []), (1, [0]), (1, [1]), (0, [0, 2]), (0, [])]) == [(0, 0), (1, 0), (1, 0), (0, 1), (0, 0)]


def test_gradients_of_an_encoder_come_from_several_stages() -> None:
    """They wait for the last of these, and so does the backward of the encoder; unless one of the stages waits for some."""
    items: list[Item] = [(0, []), (1, [0]), (2, [0, 1]), (2, [2]), (0, [3]), (1, [1, 3]), (0, [4, 5]), (0, [6])]
    forward = [(0, 0), (1, 0), (2, 0)]
    assert visits(items) == [*forward, (2, 0), (0, 1), (1, 1), (0, 1), (0, 1)]
    items[5] = (1, [1, 3, 4])
    assert visits(items) == [*forward, (2, 0), (0, 1), (1, 1), (0, 2), (0, 2)]


def test_what_no_way_leads_through_makes_no_circle_either() -> None:
    """Stage 0 is read by stage 1, and reads of it what has nothing to do with that."""
    items: list[Item] = [(0, []), (1, []), (1, [0]), (0, [1])]
    assert visits(items) == [(0, 0), (1, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    items: list[Item] = [
        (int(rng.integers(4)), sorted({int(rng.integers(n)) for _ in range(rng.integers(3))} if n else []))
        for n in range(30)
    ]
    graph, numbers = blocks_of(items)
    order = list(TopologicalSorter(dict(enumerate(graph.sources))).static_order())  # raises where there is a circle
    for number, (_, reads) in zip(numbers, items, strict=True):
        assert all(numbers[n] == number or numbers[n] in graph.sources[number] for n in reads)
    for first in range(len(order)):
        behind = {first}
        for number in order:
            behind |= {number} if graph.sources[number] & behind else set()
        assert {n for n in range(len(order)) if graph.runs_before(first, n)} == behind - {first}
    for number, block in enumerate(graph.blocks):  # a visit began since the one before it runs before what was to be read
        if block.visit:
            last = graph.blocks.index(BlockId(block.place, block.stage, block.kind, block.visit - 1))
            assert any(graph.runs_before(last, other) for other in graph.sources[number])


def test_every_op_of_a_zero_bubble_pipeline_is_in_the_block_of_its_stage() -> None:
    """Of a stack whose four ranges lie in a V on two groups; what the table calls a block is made of its ops alone."""

    def step(params: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss_of(params: jax.Array) -> jax.Array:
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0] ** 2)

        loss, grads = jscaler.value_and_grad(loss_of)(params)
        return params - 0.1 * grads, loss

    policy = plans.pipeline(2, 4, "zb_v", batch="x")
    plan = jscaler.parallelize(policy, devices=2)(step).lower(jnp.ones((4, 4, 4)), jnp.ones((8, 4))).plan
    names = plan.instructions.names
    assert sorted(name for own in names.values() for name in own) == [
        (stage, kind) for stage in range(4) for kind in "FIW" if (stage, kind) != (0, "I")
    ]  # nobody waits for the gradient of the batch
    for number, own in names.items():
        homes = (plan.completed.homes.get(path) for path in made_by(plan.blocks[number]))
        stages = {home.stage for home in homes if home is not None and home.stage is not None}
        assert stages <= {stage for stage, _ in own}
