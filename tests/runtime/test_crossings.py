"""Hops between device groups: those of equal crossings share what is compiled for them."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jscaler.materialize import Layout, parse_layout
from jscaler.materialize.crossing import find_crossing
from jscaler.runtime.crossings import CrossingRun, find_hop


def test_equal_crossings_are_compiled_once_and_each_value_arrives() -> None:
    """From four devices, in parts of rows, to two others, in parts of columns."""
    devices = jax.devices()
    source, target = (parse_layout(text, (8, 4)) for text in ("R1 V1 D(4,1) on [0-3]", "R1 V1 D(1,2) on [6 7]"))
    assert isinstance(source, Layout)
    assert isinstance(target, Layout)
    here, there = (
        NamedSharding(Mesh(np.array([devices[d] for d in one.mesh.devices]), ("x",)), P("x")) for one in (source, target)
    )
    known: dict[object, CrossingRun] = {}
    runs = set[CrossingRun]()
    for number, dtype in enumerate(("float32", "float32", "int32")):
        hop = find_hop(find_crossing(source, target, 4), dtype, devices, there, known)
        runs.update(known.values())
        whole = np.arange(32, dtype=dtype).reshape(8, 4) + number
        came = np.asarray(hop(jax.device_put(whole, here)))  # parts of rows, one behind the other, are the whole
        np.testing.assert_array_equal(np.hstack(np.split(came, 2)), whole)
    assert len(runs) == 2
