"""The verifier on halo exchanges: it passes what is right, and names rows that come from elsewhere."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lower.steps import with_segment
from lower.test_halo import IMAGE, arguments, by_rows, step

import jscaler
from jscaler import Split
from jscaler.errors import VerificationError
from jscaler.ir.mask import Mask, Share
from jscaler.lower import emit, halo
from jscaler.lower.program import Compute
from jscaler.lower.step_plan import StepPlan
from jscaler.materialize import DeviceMesh
from jscaler.materialize.edges import Edge
from jscaler.verification import flow
from jscaler.verification.extended import extended
from jscaler.verification.frames import Frame
from jscaler.verification.symbols import Patterns

Extend = Callable[[Sequence[Edge], Any, DeviceMesh], Any]


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    return jscaler.parallelize(by_rows, devices=4)(step).lower(*arguments()).plan


def test_right_halos(plan: StepPlan) -> None:
    report = jscaler.verify(plan)
    assert report.collectives["ppermute"] == sum(len(list(t.sent(4))) for t in plan.program.halos) == 6
    assert report.exchanges == len(plan.program.adapters) + len(plan.program.halos)


def swapped(edges: Sequence[Edge], local: Any, mesh: DeviceMesh, own: DeviceMesh) -> Any:
    """As many rows, but the halo lies on the wrong side."""
    (edge,) = edges
    parts = [lax.slice_in_dim(local, i, local.shape[1] if i else 1, axis=1) for i in (0, 1)]
    return halo.extend([dataclasses.replace(edge)], jnp.concatenate(parts[::-1], 1), mesh, own)


def around(edges: Sequence[Edge], local: Any, mesh: DeviceMesh, own: DeviceMesh) -> Any:
    """The last part's rows come around to the first."""
    (edge,) = edges
    rows, size = local.shape[1], mesh.size(edge.axes)
    ring = [[(p, (p + s) % size) for p in range(size)] for s in (1, -1)]
    above = lax.ppermute(lax.slice_in_dim(local, rows - edge.before, rows, axis=1), "x0", ring[0])
    below = lax.ppermute(lax.slice_in_dim(local, 0, edge.after, axis=1), "x0", ring[1])
    return jnp.concatenate([above, local, below], 1)


def reversed_(edges: Sequence[Edge], local: Any, mesh: DeviceMesh, own: DeviceMesh) -> Any:
    """Above comes what belongs below."""
    (edge,) = edges
    rows, size = local.shape[1], mesh.size(edge.axes)
    above = lax.ppermute(
        lax.slice_in_dim(local, rows - edge.before, rows, axis=1), "x0", [(p + 1, p) for p in range(size - 1)]
    )
    below = lax.ppermute(lax.slice_in_dim(local, 0, edge.after, axis=1), "x0", [(p, p + 1) for p in range(size - 1)])
    return jnp.concatenate([above, local, below], 1)


def ones(edges: Sequence[Edge], local: Any, mesh: DeviceMesh, own: DeviceMesh) -> Any:
    """Beyond the border there is something."""
    out = halo.extend(edges, local, mesh, own)
    first = (lax.axis_index("x0") == 0) & (jnp.arange(out.shape[1]) < edges[0].before)
    return jnp.where(first[None, :, None, None], 1, out)


def short(edges: Sequence[Edge], local: Any, mesh: DeviceMesh, own: DeviceMesh) -> Any:
    """One row too few above."""
    (edge,) = edges
    return halo.extend([dataclasses.replace(edge, before=edge.before - 1)], local, mesh, own)


FAULTS: dict[str, tuple[Extend, str]] = {
    "rows in another order": (swapped, r"holds at \[0, 1, 0, 0\] of its part extended by dim 1: 1 before, 1 after "
                                       r"element \(0, 1, 0, 0\) where element \(0, 0, 0, 0\) belongs"),
    "a ring": (around, r"device 0 holds at \[0, 0, 0, 0\] .* element \(0, 7, 0, 0\) where nothing \(neutral for add\)"),
    "the wrong neighbours": (reversed_, r"device 0 holds at \[0, 0, 0, 0\] .* element \(0, 3, 0, 0\) where nothing"),
    "no zeros beyond the border": (ones, r"device 0 holds at \[0, 0, 0, 0\] .* a constant where nothing \(neutral for"),
    "too few rows": (short, r"leaves local arrays of \[1, 3, 4, 2\]; \[1, 4, 4, 2\] are wanted"),
    "nothing sent": (lambda edges, local, mesh, own: jnp.pad(local, [(0, 0), (1, 1), (0, 0), (0, 0)]),
                     r"device 0 holds at \[0, 3, 0, 0\] .* nothing \(neutral for add\) where element \(0, 2, 0, 0\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(plan: StepPlan, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault, message = FAULTS[name]

    def first(edges: Sequence[Edge], local: Any, mesh: DeviceMesh, own: DeviceMesh) -> Any:
        return (fault if edges[0].before == 1 else halo.extend)(edges, local, mesh, own)

    monkeypatch.setattr(flow, "extend", first)
    with pytest.raises(VerificationError, match=rf"^step \d+, exchange of 'batch'.*{message}"):
        jscaler.verify(plan)


def test_an_emitted_halo_that_is_not_the_plan_s(plan: StepPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def fewer(edges: Sequence[Edge], local: Any, mesh: DeviceMesh, own: DeviceMesh) -> Any:
        (edge,) = edges
        return jnp.pad(local, [(edge.before, edge.after) if d == 1 else (0, 0) for d in range(4)])

    monkeypatch.setattr(emit, "extend", fewer)
    with pytest.raises(VerificationError, match=r"output \d+ '.*': the emitted program computes another value"):
        jscaler.verify(plan)


def test_an_op_that_reads_around_its_part_where_nothing_is(plan: StepPlan) -> None:
    at, task = next(
        (i, t) for i, t in enumerate(plan.program.tasks)
        if isinstance(t, Compute) and plan.program.halos[0].output in t.inputs
    )  # fmt: skip
    plain = {e.output: e.input for e in plan.program.halos}
    wrong = dataclasses.replace(task, inputs=tuple(plain.get(s, s) for s in task.inputs))
    tasks = (*plan.program.tasks[:at], wrong, *plan.program.tasks[at + 1 :])
    with pytest.raises(VerificationError, match="parts with nothing around them, where dim 1: 1 before, 1 after is read"):
        jscaler.verify(with_segment(plan, program=dataclasses.replace(plan.program, tasks=tasks)))


def test_parts_without_edges_are_as_they_were() -> None:
    """Refined dims, parts of several sizes, value shares: rows and padding lie where the frame has them."""
    cuts = [((0, 2), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (0, 2)), ((2, 3), (2, 3))]
    masks = [Mask(((3, 3), (4,)), (intervals, ((0, 4),)), (Share(share, 2),)) for intervals in cuts for share in range(2)]
    frame, patterns = Frame(masks), Patterns((9, 4))
    held = patterns.held(frame)
    found = extended(patterns, frame, (), held.pattern[:, 0, 0])
    np.testing.assert_array_equal(found.element, held.element)
    np.testing.assert_array_equal(found.pattern, held.pattern)


def test_parts_of_several_sizes_beside_an_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three images on two rows of devices: the padded image has neighbours, too, and rows in the wrong place are seen."""
    kernel, images = np.ones((3, 3, 2, 2)), np.ones((3, 8, 4, 2))

    def convolve(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=IMAGE)

    def policy(graph: Any, devices: np.ndarray) -> None:
        (op,) = graph.ops
        names = {dim: graph.factor_of("image", dim)[op] for dim in (0, 1)}
        grid = graph.op_trans(op, Split(names[0], sizes=(2, 1)), Split(names[1], 2))
        graph.op_assign(grid, devices.reshape(2, 2))

    plan = jscaler.parallelize(policy, devices=4)(convolve).lower(images, kernel).plan
    assert jscaler.verify(plan).collectives["ppermute"] == 2
    monkeypatch.setattr(flow, "extend", swapped)
    with pytest.raises(VerificationError, match=r"holds at \[0, 1, 0, 0\] of its part extended by dim 1: 1 before"):
        jscaler.verify(plan)
