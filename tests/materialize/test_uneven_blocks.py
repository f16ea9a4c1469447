"""Layouts with block sizes of their own, and what leads from and to them: each exchange is proven."""

import itertools
import re

import jax
import numpy as np
import pytest
from materialize.layouts import assert_lies_as, make_parts, mesh_of
from of_the_day import of_the_day

from jscaler.clusters.cost_model import FEW_STEPS
from jscaler.errors import PlanError
from jscaler.lower.emit_collectives import exchange
from jscaler.materialize import Adapter, Layout, find_adapter, opened, parse_layout
from jscaler.verification import verify_exchange

SHAPE = (8, 6)
TEXTS = [
    "R1 V1 D(5+3,2)", "R1 V1 D(5+3,4+2)", "R1 V2 D(5+3,1)", "R2 V1 D(6+2,1)", "R1 V2 D(1,4+2)", "R1 V4 D(1,1)",
    "R4 V1 D(1,1)", "R1 V2max D(5+3,1)", "R1 V1 D(1+2+3+2,1) on [3 1 0 2]", "R1 V1 D(4,1)", "R1 V1 D(3+2+2+1,1)",
    "R2 V1 D(5+3,1) on [1 0 2 3]", "R1 V1 D(2,2)",
]  # fmt: skip


def laid(text: str, shape: tuple[int | tuple[int, ...], ...] = SHAPE) -> Layout:
    found = parse_layout(text, shape)
    assert isinstance(found, Layout)
    return found


def proven(source: Layout, target: Layout) -> Adapter:
    adapter = find_adapter(source, target, 4)
    place = {d: i for i, d in enumerate(target.mesh.devices)}
    held = [source.mask(i) for i in range(len(place))]
    wanted = [target.mask(place[d]) for d in source.mesh.devices]
    verify_exchange(lambda x: exchange(adapter, x, source.mesh), source.mesh, source.shape, "float32", held, wanted)
    return adapter


@pytest.mark.smoke
def test_masks_are_the_blocks() -> None:
    layout = laid("R1 V1 D(5+3,2)")
    assert layout.local_shape == (5, 3)
    assert not layout.even
    assert [str(layout.mask(i)) for i in range(4)] == ["[0:5, 0:3]", "[0:5, 3:6]", "[5:8, 0:3]", "[5:8, 3:6]"]
    assert layout.partition_spec() is None
    whole = np.arange(48.0).reshape(SHAPE)
    assert_lies_as(layout, make_parts(layout, whole, np.random.default_rng(0)), whole)


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_printed_is_read_back(text: str) -> None:
    layout = laid(text)
    assert str(layout).split(" on")[0] == text.split(" on")[0]
    assert laid(str(layout)) == layout
    assert opened(layout).on(layout.mesh.devices) == layout
    assert str(opened(layout)) == text.split(" on")[0] + " on any"


def test_blocks_that_a_count_gives_are_that_count() -> None:
    mesh = mesh_of(3)
    plain = Layout(mesh, ((8,),), (("x0",),))
    assert plain.with_sizes({0: (3, 3, 2)}) == plain
    assert plain.with_sizes({0: (2, 3, 3)}).uneven == ((0, (2, 3, 3)),)


def test_a_refined_dim_is_cut_where_its_major_sub_dim_is() -> None:
    heads, flat = laid("R1 V1 D(3+1·1,1)", ((4, 3), 2)), laid("R1 V1 D(9+3,1)", (12, 2))
    assert flat.refined(heads.subdims) == heads
    assert laid("R1 V1 D(7+5,1)", (12, 2)).refined(heads.subdims) is None
    assert heads.uneven_rows(0) == flat.uneven_rows(0) == (("x0",), (9, 3))
    assert heads.uneven_rows(1) is None
    assert proven(heads, flat).nothing


def test_equal_blocks_on_devices_in_another_order() -> None:
    one, other = laid("R1 V1 D(5+3,1) on [0 1]"), laid("R1 V1 D(5+3,1) on [1 0]")
    assert not proven(one, other).nothing
    one, other = laid("R2 V1 D(5+3,1) on [0 1 2 3]"), laid("R2 V1 D(5+3,1) on [2 3 0 1]")
    assert proven(one, other).nothing  # the copies change places


@pytest.mark.parametrize("source", of_the_day(TEXTS))
def test_between_any_two(source: str) -> None:
    for target in TEXTS:
        proven(laid(source), laid(target))


def test_over_different_refinements() -> None:
    rows = {
        "R1 V1 D(3+1·1)": (4, 3),
        "R1 V1 D(9+3)": (12,),
        "R1 V1 D(1·2+1)": (4, 3),
        "R1 V1 D(7+5)": (12,),
        "R1 V1 D(2)": (6, 2),
    }
    layouts = [laid(text, (dims if len(dims) > 1 else dims[0],)) for text, dims in rows.items()]
    for source, target in itertools.permutations(layouts, 2):
        proven(source, target)


def test_value_shares_are_joined_in_place() -> None:
    joined = find_adapter(laid("R1 V2 D(5+3,1)"), laid("R2 V1 D(5+3,1)"), 4, FEW_STEPS)
    assert [step.kind for step in joined.steps] == ["all_reduce"]
    nested = laid("R1 V2max·2 D(5+3)", (8,))
    assert [step.kind for step in proven(nested, laid("R8 V1 D(1)", (8,))).steps] == [
        "all_reduce", "all_reduce", "point_to_point",
    ]  # fmt: skip


def test_large_groups_are_refused_by_name() -> None:
    mesh = mesh_of(65)
    uneven = Layout(mesh, ((130,),), (("x0",),)).with_sizes({0: (1, 3, *[2] * 63)})
    assert find_adapter(uneven, uneven, 4).nothing
    with pytest.raises(PlanError, match=r"uneven blocks .* at most 64 devices; there are 65. Split this factor"):
        find_adapter(uneven, Layout.replicated(mesh, (130,)), 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [("R1 V1 D(5+4,1)", "the blocks 5+4 do not make a dim of 8"),
     ("R1 V1 D(8+0,1)", "the blocks 8+0 do not make a dim of 8"),
     ("R1 V1 D(5+,1)", "D '5+' does not parse; write the number of parts, like 4, 2·2 or 5+3")],
)  # fmt: skip
def test_blocks_that_do_not_fit(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        laid(text)


def test_keys_travel_too() -> None:
    source, target = laid("R1 V1 D(3+1)", (4,)), laid("R2 V1 D(1)", (4,))
    adapter = find_adapter(source, target, 8)
    keys = jax.random.split(jax.random.key(0), 3)
    mesh = jax.sharding.AbstractMesh((2,), ("x0",), axis_types=(jax.sharding.AxisType.Auto,))
    fun = jax.shard_map(
        lambda k: exchange(adapter, k, source.mesh), mesh=mesh, in_specs=jax.sharding.PartitionSpec(), check_vma=False,
        out_specs=jax.sharding.PartitionSpec(),
    )  # fmt: skip
    assert jax.eval_shape(fun, keys).shape == (4,)
