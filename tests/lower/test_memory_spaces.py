"""A layout names a memory space: parts come from the host's memory and go back to it."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from materialize.layouts import mesh_of

from jscaler.lower.emit_collectives import exchange
from jscaler.materialize import Layout, find_adapter

MESH = mesh_of(2, 2)
ROWS = Layout(MESH, ((8,), (4,)), (("x0", "x1"), ()))
COLUMNS = Layout(MESH, ((8,), (4,)), ((), ("x0", "x1")))
KIND = {"device": "device", "host": "pinned_host"}


@pytest.mark.smoke
@pytest.mark.parametrize(("before", "after"), list(itertools.product(KIND, KIND)))
@pytest.mark.parametrize("target", [ROWS, COLUMNS], ids=["as it lies", "exchanged"])
def test_parts_end_in_the_memory_that_the_layout_says(target: Layout, before: str, after: str) -> None:
    source, target = dataclasses.replace(ROWS, memory=before), dataclasses.replace(target, memory=after)
    adapter = find_adapter(source, target, 4)
    assert adapter.nothing == (source == target)
    physical = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), MESH.names)

    def sharding(layout: Layout) -> NamedSharding:
        spec = layout.partition_spec()
        assert isinstance(spec, PartitionSpec)
        return NamedSharding(physical, spec, memory_kind=KIND[layout.memory])

    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), sharding(source))
    specs = {"in_specs": source.partition_spec(), "out_specs": target.partition_spec(), "check_vma": False}
    run = jax.shard_map(lambda part: exchange(adapter, part, MESH), mesh=physical, **specs)
    y = jax.jit(run, out_shardings=sharding(target))(x)
    assert y.sharding.memory_kind == KIND[after]
    np.testing.assert_array_equal(y, np.arange(32.0).reshape(8, 4))


def test_the_text_form_says_where() -> None:
    assert str(dataclasses.replace(ROWS, memory="host")) == "R1 V1 D(4,1) on [0 1 2 3] @host"
    adapter = find_adapter(ROWS, dataclasses.replace(ROWS, memory="host"), 4)
    assert (adapter.stages, str(adapter)) == ((), "copy to host")
