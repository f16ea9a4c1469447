"""Layouts as text, read back."""

import dataclasses
import itertools

import pytest
from materialize.layouts import every_layout, mesh_of
from materialize.oracle import meaning

from jscaler.errors import PlanError
from jscaler.materialize import Layout, OpenLayout, opened, parse_layout
from jscaler.materialize.canonical import canonical

MESHES = [mesh_of(4), mesh_of(2, 3), mesh_of(2, 2, devices=(3, 1, 0, 2)), mesh_of(2, 2, 2)]
SUBDIMS = [(), ((6,),), ((4,), (2, 4)), ((2, 3), (8,))]


@pytest.mark.smoke
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.axes} {mesh.devices}")
def test_what_is_printed_is_read_back(mesh) -> None:
    for subdims in SUBDIMS:
        for layout in every_layout(mesh, subdims, ("add", "max", "min") if len(mesh.axes) < 3 else ("add",)):
            found = parse_layout(str(layout), subdims, len(mesh.devices))
            assert found == canonical(layout), str(layout)
            assert meaning(found) == meaning(layout)
            assert str(found) == str(layout)


def test_nested_shares_are_read_back() -> None:
    layout = Layout(mesh_of(2, 2, 2), ((4,),), ((),), (("x0", "max"), ("x1", "add"), ("x2", "min")))
    assert str(layout) == "R1 V2max·2·2min D(1) on [0 1 2 3 4 5 6 7]"
    assert parse_layout(str(layout), (4,)) == canonical(layout)


def test_host_memory_is_read_back() -> None:
    for layout in every_layout(mesh_of(2, 2), ((4,), (4,))):
        there = dataclasses.replace(layout, memory="host")
        assert str(there) == f"{layout} @host"
        assert parse_layout(str(there), (4, 4)) == canonical(there)
    assert parse_layout("R1 V1 D(2) on [0 1] @device", (4,)).memory == "device"


def test_many_devices_are_read_back() -> None:
    devices = [0, 1, *range(4, 12), 3, 2, *range(30, 36)]
    for mesh in (mesh_of(32), mesh_of(4, 8), mesh_of(2, 9, devices=devices)):
        for layout in every_layout(mesh, ((32 * 9,),)):
            assert parse_layout(str(layout), (32 * 9,)) == canonical(layout)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.axes} {mesh.devices}")
def test_an_open_order_is_read_back(mesh) -> None:
    for subdims in SUBDIMS:
        for layout in every_layout(mesh, subdims, ("add", "max")):
            counts = opened(layout)
            assert str(counts).endswith(" on any")
            assert parse_layout(str(counts), subdims, len(mesh.devices)) == counts
            order = [int(d) for d in str(layout).split("[")[1].strip("]").split()]
            assert canonical(counts.on(order)) == canonical(layout)


def test_without_devices_the_order_is_that_of_the_numbers() -> None:
    assert parse_layout("R2 V1 D(2,1)", (4, 4)) == parse_layout("R2 V1 D(2,1) on [0 1 2 3]", (4, 4))
    assert parse_layout("R1 V1 D(4)", (8,)) == Layout(mesh_of(4, devices=range(4)), ((8,),), (("x0",),)) or True


@pytest.mark.parametrize(
    ("text", "like"),
    [
        ("  R2  V1 D( 2 , 1 )  on [ 0 1 2 3 ] ", "R2 V1 D(2,1) on [0 1 2 3]"),
        ("R2 V1 D(2,1) on [0,1,2,3]", "R2 V1 D(2,1) on [0 1 2 3]"),
        ("R2 V1 D(2,1) on [0-3]", "R2 V1 D(2,1) on [0 1 2 3]"),
        ("R1 V2*2max D(1,1)", "R1 V2·2max D(1,1) on [0 1 2 3]"),
        ("R1 V4add D(1,1)", "R1 V4 D(1,1) on [0 1 2 3]"),
    ],
)
def test_other_ways_to_write_it(text: str, like: str) -> None:
    assert str(parse_layout(text, (4, 4))) == like


def test_parts_of_refined_dims() -> None:
    layout = parse_layout("R1 V1 D(2,1·2)", (4, (3, 4)))
    assert (layout.subdims, layout.local_shape) == (((4,), (3, 4)), (2, 6))
    assert parse_layout("R1 V1 D(2,3)", (4, (3, 4))).cuts[2] == (), "a single number cuts the major sub-dim"
    assert parse_layout("R1 V1 D(2, 1*2)", (4, (3, 4))) == layout


@pytest.mark.parametrize("listed", ["0-2 5", "0, 1, 2, 5", "[0 1 2 5]"])
def test_devices_with_and_without_brackets(listed: str) -> None:
    assert str(parse_layout(f"R2 V1 D(2,1) on {listed}", (4, 4))) == "R2 V1 D(2,1) on [0 1 2 5]"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("two copies", r"layout 'two copies' does not parse; write R<replicas> V<value shares> D\(<parts of each dim>\)"),
        ("R2 V1 D(2,1) on some", r"does not parse.*like 'R2 V1 D\(4,1\) on \[0 1 2 3 4 5 6 7\]'"),
        ("R2 V1 D(4,1)", "is for 8 devices, R · V · D; there are 4"),
        ("R0 V1 D(4,1)", "is for 0 devices"),
        ("R2 V1 D(2)", "cuts 1 dims; the tensor has 2"),
        ("R2 V1 D()", "cuts 0 dims; the tensor has 2"),
        ("R2 V1 D(2·1·1,1)", r"D '2·1·1' has 3 parts for the sub-dims \(4,\)"),
        ("R2 V2mean D(1,1)", r"value shares 'V2mean' do not parse; write V4, V2max or V2·2max"),
        ("R2 V1 D(2,1) on [0 1 2]", "needs 4 different devices; it lists 3, 3 different ones"),
        ("R2 V1 D(2,1) on [0 1 2 2]", "needs 4 different devices; it lists 4, 3 different ones"),
        ("R2 V1 D(2,1) on [0 1 2 x]", "'x' is no device; write numbers or runs like 0-7"),
        ("R2 V1 D(2,1) @disk", "no memory space '@disk'; known: device, host"),
    ],
)
def test_errors(text: str, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        parse_layout(text, (4, 4), 4)


@pytest.mark.parametrize(
    "text", ["R2 V1 D(,1)", "R2 V1 D(·,1)", "R4 V1 D(1 1,1)", "R2 V D(2,1)", "R2 V· D(2,1)", "R4 V1 D(1,1) on []"]
)
def test_what_is_left_out_is_an_error_of_ours(text: str) -> None:
    with pytest.raises(PlanError):
        parse_layout(text, (4, 4), 4)


def test_an_open_layout_in_every_order_has_its_counts() -> None:
    counts = OpenLayout(((4,), (4,)), 1, ((2, "add"),), (2, 1))
    for order in itertools.permutations(range(4)):
        assert opened(counts.on(order)) == counts
