"""Halo exchanges on virtual devices: each part with its neighbours' rows, element by element as numpy has it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from masks import elements
from materialize.layouts import mesh_of

import jscaler
from jscaler import Split
from jscaler.lower.halo import extend
from jscaler.lower.program import Compute
from jscaler.materialize import DeviceMesh, Layout
from jscaler.materialize.edges import Edge, extended_shape, halo_bytes, messages
from jscaler.report.hlo import collectives


def expected(layout: Layout, edges: tuple[Edge, ...], whole: np.ndarray, position: int) -> np.ndarray:
    """The part and the rows around it, cut out of the padded whole."""
    around = {e.dim: (e.before, e.after) for e in edges}
    padded = np.pad(whole, [around.get(d, (0, 0)) for d in range(whole.ndim)])
    at = []
    for dim, ((start, stop),) in enumerate(layout.mask(position).box):
        at.append(slice(start, stop + sum(around.get(dim, (0, 0)))))
    return padded[tuple(at)]


def compiled(cases: list[tuple[Layout, tuple[Edge, ...]]], mesh: DeviceMesh, parts: list[Any]) -> Any:
    devices = np.array([jax.devices()[d] for d in mesh.devices]).reshape([s for _, s in mesh.axes])
    names = Mesh(devices, mesh.names)

    def local(held: list[jax.Array]) -> list[jax.Array]:
        return [extend(edges, x[0], mesh, layout.mesh)[None] for (layout, edges), x in zip(cases, held, strict=True)]

    run = jax.shard_map(local, mesh=names, in_specs=P(mesh.names), out_specs=P(mesh.names), check_vma=False)
    return jax.jit(run).lower([jax.device_put(x, NamedSharding(names, P(mesh.names))) for x in parts]).compile()


def check(
    mesh: DeviceMesh, cases: list[tuple[tuple[int, ...], tuple[tuple[Edge, ...]], str]], of: DeviceMesh | None = None
) -> None:
    """Parts of what lies on the mesh ``of``, which is another order of the program's ``mesh`` if it is given."""
    of, layouts, wholes, parts = of or mesh, [], [], []
    place = [of.devices.index(d) for d in mesh.devices]
    rng = np.random.default_rng(1)
    for shape, edges, dtype in cases:
        cuts = {e.dim: e.axes for e in edges}
        layouts.append((Layout(of, tuple((s,) for s in shape), tuple(cuts.get(d, ()) for d in range(len(shape)))), edges))
        wholes.append(rng.integers(0, 2 if dtype == "bool" else 99, shape).astype(jnp.dtype(dtype)))
        held = [wholes[-1][tuple(slice(a, b) for ((a, b),) in layouts[-1][0].mask(p).box)] for p in place]
        parts.append(np.stack(held))
    run = compiled(layouts, mesh, parts)
    for (layout, edges), whole, found in zip(layouts, wholes, run(parts), strict=True):
        for position, ours in zip(place, np.asarray(found), strict=True):
            assert ours.shape == extended_shape(layout, edges)
            np.testing.assert_array_equal(ours, expected(layout, edges, whole, position), err_msg=f"{edges} at {position}")


@pytest.mark.smoke
def test_rows_columns_and_corners() -> None:
    mesh = mesh_of(2, 2, 2)
    rows, deep, turned = (Edge(0, axes, 2, 1) for axes in (("x0",), ("x0", "x1"), ("x1", "x0")))
    columns = Edge(1, ("x2",), 0, 3)
    check(mesh, [
        ((8, 6), (rows,), "float32"),
        ((8, 6), (deep,), "bfloat16"),
        ((8, 6), (turned,), "int32"),
        ((8, 6), (rows, columns), "bool"),
        ((4, 2, 2), (turned, columns), "float32"),  # parts of one row and one column: some come from two devices away
    ])  # fmt: skip


@st.composite
def edges(draw: Any) -> tuple[tuple[int, ...], tuple[Edge, ...], str]:
    axes = draw(st.permutations(["x0", "x1", "x2"]))
    counts = draw(st.sampled_from([(3,), (2,), (1,), (1, 1), (2, 1), (1, 2)]))
    dims = draw(st.permutations([0, 1, 2]))[: len(counts)]
    shape = [draw(st.integers(1, 3)) for _ in range(3)]
    found, rest = [], list(axes)
    for dim, count in sorted(zip(dims, counts, strict=True)):
        own, rest = tuple(rest[:count]), rest[count:]
        shape[dim] *= 2**count
        found.append(Edge(dim, own, draw(st.integers(0, 5)), draw(st.integers(0, 5))))
    return tuple(shape), tuple(found), draw(st.sampled_from(["float32", "int32"]))


@settings(max_examples=4)
@given(st.lists(edges(), min_size=4, max_size=4))
def test_any_edges(cases: list[Any]) -> None:
    check(mesh_of(2, 2, 2, devices=(3, 2, 1, 0, 4, 5, 6, 7)), cases)
    check(mesh_of(2, 2, 2), cases[2:], mesh_of(2, 2, 2, devices=(7, 3, 1, 5, 4, 0, 6, 2)))


def test_the_text_of_the_program_sends_what_is_counted() -> None:
    mesh = mesh_of(4)
    layout, around = Layout(mesh, ((8,), (3,)), (("x0",), ())), (Edge(0, ("x0",), 3, 1),)
    run = compiled([(layout, around)], mesh, [np.ones((4, 2, 3), np.float32)])
    found = collectives(run.as_text())
    assert [c.kind for c in found] == ["collective-permute"] * 3
    assert len(list(messages(layout, around))) == 3
    # (2 + 1 + 1) rows of 3 floats, from 3, 2 and 3 of the 4 devices
    assert halo_bytes(layout, around, 4) == [2 * 12 * 3 / 4, 12 * 2 / 4, 12 * 3 / 4]


IMAGE = ("NHWC", "HWIO", "NHWC")


def step(state: dict[str, jax.Array], batch: jax.Array) -> Any:
    def loss(s: dict[str, jax.Array]) -> jax.Array:
        with jax.named_scope("one"):
            x = lax.conv_general_dilated(batch, s["one"], (1, 1), "SAME", dimension_numbers=IMAGE)
        with jax.named_scope("two"):
            x = lax.conv_general_dilated(jnp.tanh(x), s["two"], (1, 1), "SAME", dimension_numbers=IMAGE)
        with jax.named_scope("loss"):
            return (x**2).sum()

    value, grads = jscaler.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def by_rows(graph: Any, devices: np.ndarray) -> None:
    for op, factor in graph.factor_of("batch", 1).items():
        if op.kind != "backward":
            graph.op_assign(graph.op_trans(op, Split(factor, devices.size)), devices)


def arguments(dtype: Any = jnp.float32) -> tuple[dict[str, jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    state = {"one": jax.random.normal(keys[0], (3, 3, 2, 2), dtype), "two": jax.random.normal(keys[1], (5, 1, 2, 2), dtype)}
    return state, jax.random.normal(keys[2], (1, 8, 4, 2), dtype)


def test_equal_halos_are_exchanged_once() -> None:
    """The kernels' gradients read the images with the halo that the forward read them with."""
    lowered = jscaler.parallelize(by_rows, devices=2)(step).lower(*arguments())
    plan = lowered.plan
    jscaler.verify(lowered)
    sent = [(task.tensor.name, str(task.edges[0])) for task in plan.program.halos]
    first, hidden = "dim 1: 1 before, 1 after", "dim 1: 2 before, 2 after"
    assert len(sent) == 3
    assert sent[0] == ("batch", first)
    assert [edge for _, edge in sent[1:]] == [hidden, hidden]  # the hidden image, and its gradient
    assert len(plan.flat.exchanges) == len(plan.program.adapters) + 3
    reads = [t for t in plan.program.tasks if isinstance(t, Compute) and plan.program.halos[0].output in t.inputs]
    assert [t.op.kind for t in reads] == ["forward", "backward"]
    assert "2× halo 64 B" in plan.explain()  # 1 row of 4 × 2 floats up and one down, each from one of two devices


def test_a_cast_goes_before_a_halo() -> None:
    """Rows that are read as bfloat16 travel as such."""

    def narrow(image: jax.Array, kernel: jax.Array) -> jax.Array:
        with jax.named_scope("conv"):
            halves = image.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
            return lax.conv_general_dilated(*halves, (1, 1), "SAME", dimension_numbers=IMAGE)

    def policy(graph: Any, devices: np.ndarray) -> None:
        for op, factor in graph.factor_of("image", 1).items():
            graph.op_assign(graph.op_trans(op, Split(factor, devices.size)), devices)

    image, kernel = arguments()[1], arguments()[0]["one"]
    mapped = jscaler.parallelize(policy, devices=4)(narrow)
    lowered = mapped.lower(image, kernel)
    jscaler.verify(lowered)
    assert [e.input.aval.dtype for e in lowered.plan.flat.exchanges] == [jnp.bfloat16]
    np.testing.assert_array_equal(mapped(image, kernel), jax.jit(narrow)(image, kernel))


def test_an_op_views_the_rows_around_its_part() -> None:
    """Ops overlap where their windows do: what device 0 reads, device 1 has in part."""
    plan = jscaler.parallelize(by_rows, devices=2)(step).lower(*arguments()).plan
    reads = [plan.vtensors("one/conv", device)[0] for device in (0, 1)]
    (index,) = [i for i, t in enumerate(reads[0]) if t.ptensor.name == "batch"]
    views = [r[index].mask for r in reads]
    assert [v.box[1] for v in views] == [((0, 5),), ((3, 8),)]
    assert not set(elements(views[0])).isdisjoint(elements(views[1]))


def test_two_readers_of_one_part_have_halos_of_their_own() -> None:
    def convolve(image: jax.Array, small: jax.Array, large: jax.Array) -> list[jax.Array]:
        made = []
        for name, kernel in (("small", small), ("large", large)):
            with jax.named_scope(name):
                made.append(lax.conv_general_dilated(image, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")))
        return made

    def policy(graph: Any, devices: np.ndarray) -> None:
        rows = graph.factor_of("image", 1)
        for op in graph.ops:
            graph.op_assign(graph.op_trans(op, Split(rows[op], devices.size)), devices)

    draws = np.random.default_rng(3)
    args = [draws.normal(size=size).astype(np.float32) for size in ((2, 8, 3), (3, 3, 2), (5, 3, 2))]
    run = jscaler.parallelize(policy, devices=2)(convolve)
    program = run.lower(*args).plan.program
    assert len({halo.input for halo in program.halos}) == 1
    assert [(e.before, e.after) for halo in program.halos for e in halo.edges] == [(1, 1), (2, 2)]
    for ours, theirs in zip(run(*args), convolve(*map(jnp.asarray, args)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
