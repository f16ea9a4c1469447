"""Replica groups: each spelling of XLA's gives the members in order."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jscaler.errors import JscalerError
from jscaler.report.hlo import collectives
from jscaler.report.replica_groups import replica_groups

# Of programs compiled by JAX 0.10.2 and 0.12.0.1, but for the explicit device_ids and the last three
SPELLINGS = {
    "{{6,0,2,4},{7,5,3,1}}": ((6, 0, 2, 4), (7, 5, 3, 1)),
    "{}": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "[4,2]<=[2,4]T(1,0)": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "[8,2]<=[2,4,2]T(2,1,0)": ((0, 8), (2, 10), (4, 12), (6, 14), (1, 9), (3, 11), (5, 13), (7, 15)),
    "mesh['x'=8] {'x'}": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "mesh['a'=2,'b'=2,'c'=2] {'b'}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "mesh['a'=2,'b'=2,'c'=2] {'a','c'}": ((0, 1, 4, 5), (2, 3, 6, 7)),
    "mesh['a'=2,'b'=2,'c'=2] {'c','a'}": ((0, 4, 1, 5), (2, 6, 3, 7)),
    "mesh['axis_0'=1,'axis_1'=2,'axis_2'=4] {'axis_1'}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([4,2]T(1,0)) {'axis_0'}": ((0, 4, 1, 5), (2, 6, 3, 7)),
    "mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'a'}": ((3, 2), (1, 0)),
    "mesh['x'=16] {'x':(1)4}": ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),
    "mesh['x'=16] {'x':(4)4}": ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)),
    "mesh['x'=4,'y'=2] {'x':(1)2}": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "mesh['x'=8] {'x':(4)2,'x':(1)2}": ((0, 4, 1, 5), (2, 6, 3, 7)),
    "mesh[x=2,y=2] {y,x}": ((0, 2, 1, 3),),
    "mesh['x'=2,'y'=1] {'y'}": ((0,), (1,)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_members_in_order(spelling: str) -> None:
    line = f"%a = f32[4]{{0}} all-reduce(%p), channel_id=1, replica_groups={spelling}, use_global_device_ids=true"
    assert replica_groups(line, 8) == SPELLINGS[spelling]


@pytest.mark.parametrize(
    ("older", "newer"),
    [  # one program, as two versions of JAX have it compiled
        ("mesh['axis_0'=4,'axis_1'=4,'axis_2'=1] {'axis_0'}", "mesh['x'=16] {'x':(1)4}"),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=4], device_ids=([4,4]T(1,0)) {'axis_0'}", "mesh['x'=16] {'x':(4)4}"),
        ("mesh['axis_0'=2,'axis_1'=4,'axis_2'=1,'axis_3'=2] {'axis_0'}", "mesh['x'=8,'y'=2] {'x':(1)2}"),
        ("mesh['axis_0'=2,'axis_1'=8], device_ids=([8,2]T(1,0)) {'axis_0'}", "mesh['x'=8,'y'=2] {'y'}"),
    ],
)
def test_spellings_of_two_versions_agree(older: str, newer: str) -> None:
    assert replica_groups(f"replica_groups={older}", 16) == replica_groups(f"replica_groups={newer}", 16)


def test_no_groups_are_one_group_of_all() -> None:
    assert replica_groups("%a = f32[4]{0} all-reduce(%p), to_apply=%add", 3) == ((0, 1, 2),)


def test_an_unknown_spelling_is_refused() -> None:
    with pytest.raises(JscalerError, match="cannot read the replica groups of '%a = f32"):
        replica_groups("%a = f32[4]{0} all-reduce(%p), replica_groups=everyone", 8)


@pytest.mark.parametrize("order", [None, (3, 1, 2, 0, 7, 6, 5, 4)])
@pytest.mark.parametrize("axes", ["a", ("a", "c"), ("c", "a"), ("c", "b", "a")])
def test_members_are_mesh_positions_in_the_order_in_which_they_are_gathered(axes, order) -> None:
    devices = np.array(jax.devices())[list(order or range(8))].reshape(2, 2, 2)
    mesh = Mesh(devices, ("a", "b", "c"))
    every = P(("a", "b", "c"))
    run = jax.jit(
        jax.shard_map(
            lambda i: lax.all_gather(i, axes, tiled=True)[None], mesh=mesh, in_specs=every, out_specs=every, check_vma=False
        )
    )
    positions = jax.device_put(np.arange(8), NamedSharding(mesh, every))
    (gather,) = collectives(run.lower(positions).compile().as_text())
    gathered = {tuple(row) for row in np.asarray(run(positions)).tolist()}
    assert set(gather.groups) == gathered
