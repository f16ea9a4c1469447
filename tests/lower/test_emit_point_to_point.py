"""Irregular redistribution on virtual devices: every buffer is compared element by element with numpy."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from materialize.holdings import Case, box_mask, buffers_of, cases, draw_values, expected, holdings
from materialize.layouts import box_of, every_layout, mesh_of
from of_the_day import drawn

from jscaler.ir.mask import Share
from jscaler.lower.emit_point_to_point import neutral, run_regions
from jscaler.materialize.point_to_point import Holding, plan_regions
from jscaler.verification.whole_against_parts import COMBINE

DTYPES = ["float32", "bfloat16", "int32", "uint8", "bool"]
AT_ONCE = 3  # cases per compiled function: compiling is what takes the time


def run(cases: Sequence[Case], parts: Sequence[Sequence[np.ndarray]], devices: Sequence[int]) -> list[list[np.ndarray]]:
    """Run the cases, all of one group, in one program; per consumer (of all cases) the buffer of each position."""
    sizes = (2, len(devices) // 2) if len(devices) % 2 == 0 else (len(devices),)
    names = ("x", "y")[: len(sizes)]
    mesh = Mesh(np.array([jax.devices()[d] for d in devices]).reshape(sizes), names)
    plans = [plan_regions(case.shape, case.held, case.wanted, case.num_devices) for case in cases]
    stacked = [jax.device_put(np.stack(list(held)), NamedSharding(mesh, P(names))) for held in parts]

    def local(held: list[jax.Array]) -> list[jax.Array]:
        outputs = [run_regions(plan, part[0], names) for plan, part in zip(plans, held, strict=True)]
        return [buffer[None] for output in outputs for buffer in output]

    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=False))
    return [list(np.asarray(buffer)) for buffer in program(stacked)]


def neutral_of(dtype: Any) -> Callable[[str], Any]:
    return lambda combiner: np.asarray(neutral(combiner, dtype))[()]


def whole_of(shape: Sequence[int], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Small whole numbers, so that sums are exact in every dtype."""
    return rng.integers(*((0, 2) if dtype == "bool" else (5, 99)), tuple(shape)).astype(jnp.dtype(dtype))


def check(cases: Sequence[Case], dtype: str = "float32", devices: Sequence[int] | None = None) -> None:
    rng = np.random.default_rng(0)
    drawn = [draw_values(case, whole_of(case.shape, dtype, rng), rng) for case in cases]
    parts = [
        buffers_of(case.held, case.num_devices, lambda h, v=values: box_of(h.mask, v[h.mask.shares]))
        for case, values in zip(cases, drawn, strict=True)
    ]
    ended = iter(run(cases, parts, devices or range(cases[0].num_devices)))
    for case, values in zip(cases, drawn, strict=True):
        for consumer, side in enumerate(case.wanted):
            buffers = next(ended)
            if side:
                wanted = expected(case, consumer, values, neutral_of(values[()].dtype))
                for position, (buffer, want) in enumerate(zip(buffers, wanted, strict=True)):
                    assert buffer.shape == want.shape
                    np.testing.assert_array_equal(buffer, want, err_msg=f"{position} of consumer {consumer}, {case}")


@st.composite
def groups(draw: Any) -> list[Case]:
    """A few cases on one number of devices."""
    first = draw(cases())
    more = [draw(cases(first.num_devices)) for _ in range(AT_ONCE - 1)]
    return [first, *more]


@pytest.mark.smoke
@drawn(10)
@given(groups(), st.sampled_from(DTYPES), st.randoms(use_true_random=False))
def test_any_holdings(some: list[Case], dtype: str, order: random.Random) -> None:
    """Uneven parts, replicas, halos, refinements, nested shares, several consumers, any devices in any order."""
    check(some, dtype, order.sample(range(8), some[0].num_devices))


def layout_case(source: Any, target: Any) -> Case:
    count = len(source.mesh.devices)
    held, wanted = ([Holding(p, layout.mask(p)) for p in range(count)] for layout in (source, target))
    return Case(source.shape, tuple(held), (tuple(wanted),), count)


def test_layouts_with_value_shares() -> None:
    """Whatever collectives can do between layouts of one mesh, messages can do too."""
    mesh = mesh_of(2, 2)
    layouts = list(every_layout(mesh, ((4,), (3, 4)), ("max",))) + list(every_layout(mesh, ((12,), (4,))))
    pairs = [(a, b) for a in layouts for b in layouts if a.shape == b.shape]
    pairs = [(a, b) for a, b in pairs if a.values or not b.values]
    check([layout_case(*pair) for pair in random.Random(0).sample(pairs, 40)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_halos_and_sizes_that_do_not_divide(dtype: str) -> None:
    """Seven rows on four devices, each wanting one row more on both sides; and all of them the last column."""
    bounds = [0, 2, 4, 6, 7]
    held = [box_mask((7, 5), (bounds[d], bounds[d + 1]), (0, 5)) for d in range(4)]
    halo = [box_mask((7, 5), (max(0, bounds[d] - 1), min(7, bounds[d + 1] + 1)), (0, 5)) for d in range(4)]
    column = [box_mask((7, 5), (0, 7), (4, 5))] * 4
    check([Case((7, 5), holdings(*held), (holdings(*halo), holdings(*column)), 4)], dtype, (3, 1, 6, 0))


def test_parts_of_a_stacked_parameter_between_stages() -> None:
    """Stages of 5 and 2 layers on two devices each, to stages of 3 and 4 on other devices of the group."""
    shape = (7, 6, 4)
    held = [box_mask(shape, layers, (0, 6), half) for layers in ((0, 5), (5, 7)) for half in ((0, 2), (2, 4))]
    wanted = [box_mask(shape, layers, half, (0, 4)) for layers in ((0, 3), (3, 7)) for half in ((0, 3), (3, 6))]
    check([Case(shape, holdings(*held), (holdings(*wanted, start=4),), 8)], devices=(5, 2, 7, 0, 1, 3, 6, 4))


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
@pytest.mark.parametrize("combiner", ["max", "min"])
def test_maxima_and_minima(combiner: Any, dtype: str) -> None:
    """Four shares to everybody, to two shares, and to shares of each share."""
    leaves = [(Share(a, 2, combiner), Share(b, 2, combiner)) for a in range(2) for b in range(2)]
    held = [box_mask((3, 4), (0, 3), (0, 4), shares=leaf) for leaf in leaves]
    whole = [box_mask((3, 4), (0, 3), (0, 4))] * 4
    half = [box_mask((3, 4), (0, 3), (0, 4), shares=leaf[:1]) for leaf in leaves]
    deeper = [box_mask((3, 4), (0, 3), (0, 4), shares=(*leaves[0], Share(d, 4, combiner))) for d in range(4)]
    check([Case((3, 4), holdings(*held), tuple(holdings(*side) for side in (whole, half, deeper)), 4)], dtype)


def test_a_sum_is_the_same_on_every_device() -> None:
    """Addition of floats depends on its order: replicas must not drift apart."""
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((6, 5)).astype(np.float32) * 10.0**d for d in range(6)]
    held = [box_mask((6, 5), (0, 6), (0, 5), shares=(Share(d, 6),)) for d in range(6)]
    wanted = [box_mask((6, 5), (max(0, d - 3), 6), (0, 5)) for d in range(6)]
    case = Case((6, 5), holdings(*held), (holdings(*wanted),), 6)
    ended = run([case], [parts], range(6))[0]
    np.testing.assert_allclose(ended[0], np.sum(parts, axis=0), rtol=1e-4)
    for d in range(1, 6):
        start = max(0, d - 3)
        np.testing.assert_array_equal(ended[d][: 6 - start], ended[0][start:])


@pytest.mark.parametrize(("outer", "inner"), [("add", "max"), ("max", "add")])
def test_deeper_shares_join_to_the_value(outer: Any, inner: Any) -> None:
    """A sum of maxima, or a maximum of sums, of a value that one device holds: the others get what changes nothing."""
    whole = np.arange(12, dtype=np.int32).reshape(3, 4) - 6
    paths = [(Share(a, 2, outer), Share(b, 2, inner)) for a in range(2) for b in range(2)]
    wanted = [box_mask((3, 4), (0, 3), (0, 4), shares=path) for path in paths]
    case = Case((3, 4), holdings(None, box_mask((3, 4), (0, 3), (0, 4))), (holdings(*wanted),), 4)
    parts = [np.zeros_like(whole), whole, np.zeros_like(whole), np.zeros_like(whole)]
    a, b, c, d = run([case], [parts], range(4))[0]
    np.testing.assert_array_equal(COMBINE[outer](COMBINE[inner](a, b), COMBINE[inner](c, d)), whole)


def test_the_compiled_program_sends_pieces_and_nothing_else() -> None:
    """One permute per round, no other collective, and selects on pieces only, never on whole buffers."""
    held = [box_mask((8, 4), (2 * d, 2 * d + 2), (0, 4)) for d in range(4)]
    wanted = [box_mask((8, 4), (max(0, 2 * d - 1), 2 * d + 2), (0, 4)) for d in range(4)]
    plan = plan_regions((8, 4), holdings(*held), [holdings(*wanted)], 4)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    specs = {"in_specs": P("x"), "out_specs": P("x")}
    program = jax.jit(jax.shard_map(lambda x: run_regions(plan, x, "x")[0], mesh=mesh, check_vma=False, **specs))
    text = program.lower(jax.ShapeDtypeStruct((8, 4), jnp.float32)).as_text()
    assert text.count("stablehlo.collective_permute") == len(plan.rounds) == 1
    assert not any(name in text for name in ("all_gather", "all_reduce", "all_to_all"))
    selects = [line for line in text.splitlines() if "select" in line and "xf32" in line]
    assert selects
    assert all("tensor<1x4xf32>" in line for line in selects)
