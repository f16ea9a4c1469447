"""Segments that compute the same are looked at once; one whose blocks are wired otherwise is another."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from materialize.layouts import mesh_of

import jscaler
from jscaler.errors import VerificationError
from jscaler.lower.emit_collectives import exchange
from jscaler.lower.instructions import Run
from jscaler.lower.segment import PlacedBlock, Segment
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize import Layout, find_adapter
from jscaler.plans import pipeline
from jscaler.verification import verify_exchange

KERNELS = [jax.ShapeDtypeStruct((6, 4, 4), jnp.float32)] * 2
ROWS = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def train_step(params: Any, x: jax.Array) -> Any:
    """A stack whose forward keeps two values of one shape for its backward."""

    def loss(params: Any) -> jax.Array:
        def layer(h: jax.Array, kernels: Any) -> Any:
            return jnp.tanh(h @ kernels[0]) * jnp.sin(h @ kernels[1]), None

        with jax.named_scope("layers"):
            return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    value, gradients = jscaler.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def swapped(plan: StepPlan, segment: Segment, block: PlacedBlock, i: int, j: int) -> StepPlan:
    """``plan`` whose ``block`` takes two of its imports for each other, in the instructions too."""

    def other(some: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(some[j if n == i else i if n == j else n] for n in range(len(some)))

    number = next(n for n, one in enumerate(plan.blocks) if one is block)
    steps = [
        dataclasses.replace(one, reads=other(one.reads)) if isinstance(one, Run) and one.block == number else one
        for one in plan.instructions.steps
    ]
    new = dataclasses.replace(block, imports=other(block.imports))
    own = dataclasses.replace(segment, blocks=tuple(new if one is block else one for one in segment.blocks))
    return dataclasses.replace(
        plan,
        segments=tuple(own if one is segment else one for one in plan.segments),
        blocks=tuple(new if one is block else one for one in plan.blocks),
        instructions=dataclasses.replace(plan.instructions, steps=tuple(steps)),
    )


def test_what_blocks_of_a_segment_hand_to_each_other_tells_segments_apart() -> None:
    step = jscaler.parallelize(pipeline(3, 4, "gpipe", batch="x"), devices=3, verify=False)(train_step)
    plan = step.lower(KERNELS, ROWS).plan
    jscaler.verify(plan)
    planted = 0
    for segment in plan.segments:
        known = {*segment.program.imports, *segment.program.exports, *segment.program.results}
        for block in segment.blocks:
            kept = [i for i, value in enumerate(block.imports) if value not in known]
            shapes = [block.flat.inputs[len(block.takes) + i].aval for i in range(len(block.imports))]
            pairs = [(i, j) for i, j in itertools.combinations(kept, 2) if shapes[i] == shapes[j]]
            for i, j in pairs[:1]:
                planted += 1
                with pytest.raises(VerificationError, match="computes another value"):
                    jscaler.verify(swapped(plan, segment, block, i, j))
    assert planted >= 3


@pytest.mark.parametrize(("shape", "cut"), [((0, 4), 1), ((4, 0), 0)])
def test_tensors_without_elements(shape: tuple[int, int], cut: int) -> None:
    mesh = mesh_of(2)
    whole = Layout.replicated(mesh, shape)
    parts = dataclasses.replace(whole, cuts=tuple(("x0",) if dim == cut else () for dim in range(2)))
    for source, target in ((whole, parts), (parts, whole)):
        adapter = find_adapter(source, target, 4)
        ends = [[layout.mask(position) for position in range(2)] for layout in (source, target)]
        report = verify_exchange(lambda x, adapter=adapter: exchange(adapter, x, mesh), mesh, shape, "float32", *ends)
        assert report.elements == 0


def test_a_loop_with_a_carry_that_stays() -> None:
    """The model's checkpoint hides from its loop that the mask does not change."""

    def train_step(params: Any, x: jax.Array, mask: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            def layer(carry: Any, w: jax.Array) -> Any:
                h, mask = carry
                return (jnp.tanh(h @ w) * mask, mask), None

            with jax.named_scope("layers"):
                (h, mask_again), _ = jax.lax.scan(jax.checkpoint(layer), (x, mask), params["w"])
            return jnp.mean((h * mask_again) ** 2)

        value, gradients = jscaler.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    shapes = {"w": jax.ShapeDtypeStruct((4, 4, 4), jnp.float32)}, ROWS, jax.ShapeDtypeStruct((8, 1), jnp.float32)
    for plan, devices in (("data_parallel", 4), (pipeline(2, 2, batch="x"), 2)):
        lowered = jscaler.parallelize(plan, devices=devices)(train_step).lower(*shapes)
        jscaler.verify(lowered)
        loops = [loop for loop in lowered.plan.graph.loops.values() if loop.time]
        assert len(loops) == (devices == 2)  # the mask is no carry, which would be whole between layers
