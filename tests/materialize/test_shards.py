"""A shard is one more cut of a layout: on the dim that it names, beyond the cuts that are there, if that divides."""

import itertools

import pytest

from jscaler.materialize import DeviceMesh, Layout
from jscaler.materialize.shards import ShardCut

MESH = DeviceMesh(tuple(range(8)), (("dp", 2), ("tp", 4)))


def layout(*cuts: tuple[str, ...], values: tuple[str, ...] = (), shape: tuple[int, ...] = (16, 8)) -> Layout:
    return Layout(MESH, tuple((s,) for s in shape), cuts, tuple((axis, "add") for axis in values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "dim", "after"),
    [
        (layout((), ()), 0, layout(("dp",), ())),
        (layout((), ("tp",)), 0, layout(("dp",), ("tp",))),
        (layout(("tp",), ()), 0, layout(("tp", "dp"), ())),  # cut further
        (layout((), (), values=("dp", "tp")), 1, layout((), ("dp",), values=("tp",))),  # the shares along it are joined
        (layout(("dp",), ()), 1, layout(("dp",), ())),  # it cuts another dim already
        (layout(("tp",), (), shape=(4, 8)), 0, layout(("tp",), (), shape=(4, 8))),  # nothing is left to cut
    ],
)
def test_a_layout_as_a_shard(before: Layout, dim: int, after: Layout) -> None:
    assert ShardCut(dim, ("dp",), MESH).of(before) == after
    assert ShardCut(dim, ("dp",), MESH).of(after) == after


def test_a_sub_dim_that_is_used_up_leaves_the_next() -> None:
    heads = Layout(MESH, ((4, 6), (8,)), (("tp",), (), ()))
    assert ShardCut(0, ("dp",), MESH).of(heads).cuts == (("tp",), ("dp",), ())
    whole = Layout(MESH, ((3, 4), (8,)), ((), ("tp",), ()))  # an array cannot be stored so, nor cut further
    assert ShardCut(0, ("dp",), MESH).of(whole) == whole


def test_every_shard_is_storable_and_holds_each_element_once_per_replica() -> None:
    for size, axes in itertools.product((4, 8, 12, 16), ((), ("tp",))):
        made = ShardCut(0, ("dp",), MESH).of(layout(axes, (), shape=(size, 8)))
        assert made.even
        assert made.partition_spec() is not None
