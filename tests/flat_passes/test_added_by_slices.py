"""Gradients of stacks are added layer by layer: by the same numbers, in less memory, and only where the sum is free."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

import jscaler
from jscaler.flat_passes.added_by_slices import added_by_slices
from jscaler.lower.flat_program import FlatLoop, Item, reads, renamed, results
from jscaler.verification.local_programs import Local, trace_local
from jscaler.verification.values import Values

LAYERS, WIDTH, ROWS = 6, 16, 8
STATE = {name: np.linspace(-0.3, 0.2, LAYERS * WIDTH * WIDTH).reshape(LAYERS, WIDTH, WIDTH) for name in ("up", "down")}
BATCH = np.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


def step(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        def layer(x: Any, kernels: Any) -> Any:
            up, down = (kernel.astype(x.dtype) for kernel in kernels)
            return x + jnp.tanh(x @ up) @ down, None

        return (lax.scan(layer, batch, (params["up"], params["down"]))[0] ** 2).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, state, jscaler.grad(loss)(state))


def lowered(plan: str, devices: int, state: Any = STATE, without: tuple[str, ...] = ()) -> Any:
    planned = jscaler.parallelize(plan, devices=devices, without_passes=without)(step)
    return planned.lower(state, BATCH.astype(state["up"].dtype))


def loops(items: Any) -> Iterator[FlatLoop]:
    for item in items:
        if isinstance(item, FlatLoop):
            yield item
            yield from loops(item.items)


def sums(made: Any) -> list[int]:
    """How many sums the loops of each block have."""
    return [sum(len(loop.sums) for loop in loops(block.flat.items)) for block in made.plan.blocks]


PLANS = {
    "accumulate(4)": 1, "accumulate(4, zero2())": 2, "pipeline(2, 4)": 2, "pipeline(2, 4, 'zb_h1')": 2,
    "pipeline(2, 4, 'interleaved', chunks=3)": 2, "pipeline(2, 4, 'zb_v')": 2,
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_both_kernels_are_added_by_slices_in_every_plan_and_the_numbers_are_one_device_s(plan: str) -> None:
    with jax.enable_x64(True):
        made = lowered(plan, PLANS[plan])
        stages = {"1f1b": 2, "interleaved": 6, "zb_v": 4}.get(plan.split("'")[1] if "'" in plan else "", 2)
        assert sum(sums(made)) == 2 * (stages if plan.startswith("pipeline") else 1)
        ours, theirs = made.compile()(STATE, BATCH), jax.jit(step)(STATE, BATCH)
    for name, leaf in theirs.items():
        np.testing.assert_allclose(np.asarray(ours[name]), leaf, rtol=1e-12, atol=1e-13)


def test_gradients_of_one_layer_lie_beside_the_sums_where_those_of_all_did() -> None:
    with jax.enable_x64(True):
        stack = 8 * LAYERS * WIDTH * WIDTH
        temporaries = [
            lowered("accumulate(4)", 1, without=without).compile().memory_analysis().temp_size_in_bytes
            for without in ((), ("added_by_slices",))
        ]
    assert temporaries[1] - temporaries[0] >= 2 * stack - 2 * stack // LAYERS


def test_a_step_without_micro_batches_adds_to_nothing() -> None:
    assert sums(lowered("data_parallel", 2, jax.tree.map(np.float32, STATE))) == [0]


def test_a_sum_that_somebody_else_reads_or_that_is_made_here_is_left_alone() -> None:
    made = lowered("accumulate(4)", 1, jax.tree.map(np.float32, STATE), without=("added_by_slices",))
    program = made.plan.flat
    assert len([one for loop in loops(added_by_slices(program).items) for one in loop.sums]) == 2
    (outer,) = [loop for loop in loops(program.items) if loop.loop.time]
    added = [item for item in outer.items if any(v in reads(item) for _, v, _, _ in outer.carries)]
    twice = dataclasses.replace(outer, items=(*outer.items, *(fresh(item) for item in added)))
    rest = tuple(twice if item is outer else item for item in program.items)
    assert not [one for loop in loops(added_by_slices(dataclasses.replace(program, items=rest)).items) for one in loop.sums]


def fresh(item: Item) -> Item:
    """The same once more."""
    return renamed(item, {}, {v: core.Var(v.aval) for v in results(item)})


def traced(add: Any) -> Local:
    """A loop from the end that adds to a sum of ``LAYERS`` rows, as ``add`` says of the sum, a number and a row."""

    def run(total: Any, rows: Any) -> Any:
        def body(state: Any, row: Any) -> Any:
            total, number = state
            return (add(total, number, row), lax.sub(number, np.uint32(1))), None

        return [lax.scan(body, (total, jnp.uint32(LAYERS - 1)), rows, reverse=True)[0][0]]

    return trace_local(run, {}, [jax.ShapeDtypeStruct((LAYERS, WIDTH), jnp.float32)] * 2)


def by_slices(total: Any, number: Any, row: Any) -> Any:
    start = (number, np.uint32(0))
    more = lax.add(lax.dynamic_slice(total, start, (1, WIDTH)), lax.broadcast_in_dim(row, (1, WIDTH), (1,)))
    return lax.dynamic_update_slice(total, more, start)


OTHERS = {
    "of another row": lambda total, number, row: by_slices(total, lax.sub(number, np.uint32(1)), row),
    "taken away": lambda total, number, row: lax.sub(total, lax.sub(total, by_slices(total, number, row))),
    "of the row and the sum": lambda total, number, row: by_slices(total, number, lax.mul(row, total[0])),
}


def test_a_sum_of_slices_is_known_to_be_that_of_the_stacks_and_nothing_else_is() -> None:
    def number(local: Local) -> int:
        values = Values(3)
        whole = trace_local(lambda a, b: [a + lax.scan(lambda c, x: (c, jnp.tanh(x)), 0.0, b, reverse=True)[1]], {}, [
            jax.ShapeDtypeStruct((LAYERS, WIDTH), jnp.float32)] * 2)  # fmt: skip
        args = [values.argument("total"), values.argument("rows")]
        return values.results(local, args) == values.results(whole, args)

    assert number(traced(lambda total, number, row: by_slices(total, number, jnp.tanh(row))))
    for other in OTHERS.values():
        assert not number(traced(lambda total, number, row, other=other: other(total, number, jnp.tanh(row))))
