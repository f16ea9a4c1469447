"""Halos as messages: who sends how many rows to whom, and which part of the whole a device then has."""

import numpy as np
import pytest
from masks import elements
from materialize.layouts import mesh_of

from jscaler.clusters import BYTES
from jscaler.ir import Factor, Halo, Rule
from jscaler.materialize import Layout
from jscaler.materialize.edges import (
    Edge,
    Hop,
    edges_of,
    extended_mask,
    extended_shape,
    halo_bytes,
    halo_cost,
    hops,
    messages,
    neighbours,
)


def test_edges_are_where_split_factors_are_read_around() -> None:
    rule = Rule(
        {"h": Factor("h", 8), "w": Factor("w", 8)},
        ((("h",), ("w",)), (("h",), ("w",))),
        ((("h",), ("w",)),),
        {},
        {("w", 0, 1): Halo(1, 0), ("h", 0, 0): Halo(2, 1), ("h", 1, 0): Halo(0, 3)},
    )
    assert edges_of(rule, {"h": ("x0",)}, 0) == (Edge(0, ("x0",), 2, 1),)
    assert edges_of(rule, {"w": ("x1",), "h": ("x0",)}, 0) == (Edge(0, ("x0",), 2, 1), Edge(1, ("x1",), 1, 0))
    assert edges_of(rule, {"h": ("x0",)}, 1) == (Edge(0, ("x0",), 0, 3),)
    assert edges_of(rule, {"w": ("x0",)}, 1) == ()
    assert edges_of(rule, {}, 0) == ()


@pytest.mark.parametrize(
    ("before", "after", "rows", "parts", "expected"),
    [
        (1, 1, 4, 4, [Hop(1, 1), Hop(-1, 1)]),
        (0, 2, 4, 2, [Hop(-1, 2)]),
        (5, 0, 2, 8, [Hop(1, 2), Hop(2, 2), Hop(3, 1)]),
        (5, 3, 2, 2, [Hop(1, 2), Hop(-1, 2)]),  # what would come from further away lies beyond the border
        (4, 0, 2, 8, [Hop(1, 2), Hop(2, 2)]),
    ],
)
def test_hops(before: int, after: int, rows: int, parts: int, expected: list[Hop]) -> None:
    assert hops(Edge(0, ("x0",), before, after), rows, parts) == expected


def test_neighbours_follow_the_order_of_the_axes() -> None:
    mesh = mesh_of(2, 2, devices=(5, 6, 7, 8))
    assert neighbours(mesh, ("x0", "x1"), 1).tolist() == [[5, 6], [6, 7], [7, 8]]
    assert neighbours(mesh, ("x1", "x0"), 1).tolist() == [[5, 7], [7, 6], [6, 8]]
    assert neighbours(mesh, ("x1",), -1).tolist() == [[6, 5], [8, 7]]
    assert neighbours(mesh, ("x0", "x1"), 3).tolist() == [[5, 8]]


def test_bytes_count_corners_and_borders() -> None:
    layout = Layout(mesh_of(2, 2), ((8,), (8,), (3,)), (("x0",), ("x1",), ()))
    edges = (Edge(0, ("x0",), 1, 1), Edge(1, ("x1",), 2, 0))
    assert extended_shape(layout, edges) == (6, 6, 3)
    # a row of 4 × 3 up and down, between two pairs; then two columns of the 6 extended rows × 3, one way
    assert [(len(pairs), elements) for pairs, elements in messages(layout, edges)] == [(2, 12), (2, 12), (2, 36)]
    assert halo_bytes(layout, edges, 4) == [24.0, 24.0, 72.0]
    assert halo_cost(layout, edges, 4, BYTES) == pytest.approx(120, abs=0.1)
    assert halo_cost(layout, (), 4, BYTES) == 0


def test_an_extended_part_ends_at_the_border() -> None:
    mesh = mesh_of(2, 2)
    layout = Layout(mesh, ((4, 2), (6,)), (("x1", "x0"), (), ()))  # rows by the major sub-dim of 4, two each
    edges = (Edge(0, ("x1", "x0"), 3, 1),)
    whole = np.arange(48).reshape(8, 6)
    for position in range(4):
        mask = layout.mask(position)
        own = sorted({i for i, _ in elements(mask)})
        found = sorted({i for i, _ in elements(extended_mask(mask, edges))})
        assert found == [r for r in range(own[0] - 3, own[-1] + 2) if 0 <= r < len(whole)]
    assert extended_mask(layout.mask(0), ()) == layout.mask(0)
