"""A new kind of transition is a line of the table, where it leads, and how it is written: a gather around a ring."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lower.test_emit_collectives import adapted
from materialize.layouts import assert_lies_as, make_parts, mesh_of

from jscaler.clusters import Bytes, Cluster, Link
from jscaler.clusters.transition_kinds import COLLECTIVES, TransitionKind
from jscaler.errors import VerificationError
from jscaler.estimate.traffic import traffic_of
from jscaler.ir import PTensor
from jscaler.lower.emit_collectives import RUN, exchange
from jscaler.lower.members import Members
from jscaler.lower.named import named_collectives
from jscaler.lower.program import Adapt
from jscaler.materialize import Adapter, Layout, Transition, find_adapter, search
from jscaler.materialize.transitions import steps_from
from jscaler.report.moved_tensors import moved_text
from jscaler.report.step_text import describe, groups_text
from jscaler.verification.check import verify_exchange

KIND = "ring_gather"


def ring_gather(local: Any, step: Transition, who: Members) -> Any:
    """Every member passes on what it got last, until all have all."""
    assert who.groups is None
    assert step.source is not None
    names, here, size = who.over["axis_name"], who.index(), local.shape[step.source]
    found = jnp.zeros([n * who.size if d == step.source else n for d, n in enumerate(local.shape)], local.dtype)
    for passed in range(who.size):
        if passed:
            local = lax.ppermute(local, names, [(i, (i + 1) % who.size) for i in range(who.size)])
        found = lax.dynamic_update_slice_in_dim(found, local, (here - passed) % who.size * size, step.source)
    return found


def leads(*args: Any) -> Iterator[Transition]:
    """As if there were no other gather."""
    for step in steps_from(*args):
        yield step._replace(kind=KIND) if step.kind == "all_gather" else step  # type: ignore[arg-type]


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Adapter:
    """From rows and columns on four devices to the whole, each way with a gather."""
    line = TransitionKind(lambda n: n - 1, lambda n: n - 1, "collective-permute", moves=True)
    monkeypatch.setitem(COLLECTIVES, KIND, line)
    monkeypatch.setitem(RUN, KIND, ring_gather)
    monkeypatch.setattr(search, "steps_from", leads)
    mesh = mesh_of(2, 2)
    source = Layout(mesh, ((4,), (6,)), (("x0",), ("x1",)))
    return find_adapter(
        source, Layout.replicated(mesh, (4, 6)), 4, Bytes(launch=0.125)
    )  # a cost of its own: paths are kept


def test_it_is_chosen_and_brings_what_the_target_says(adapter: Adapter) -> None:
    assert {step.kind for step in adapter.steps} == {KIND}
    whole = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    parts = make_parts(adapter.source, whole, np.random.default_rng(0))
    assert_lies_as(adapter.target, adapted([adapter], [parts])[0], whole)


def test_it_is_proven(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = adapter.source.mesh
    masks = [[layout.mask(p) for p in range(4)] for layout in (adapter.source, adapter.target)]

    def run(x: Any) -> Any:
        return exchange(adapter, x, mesh)

    assert verify_exchange(run, mesh, (4, 6), "float32", *masks).collectives == {"ppermute": 2}
    monkeypatch.setitem(RUN, KIND, lambda local, step, who: jnp.flip(ring_gather(local, step, who), step.source))
    with pytest.raises(VerificationError, match=r"device 0 holds element \(3, 5\) where element \(0, 0\) belongs"):
        verify_exchange(run, mesh, (4, 6), "float32", *masks)


def test_what_it_costs_and_what_it_is_called(adapter: Adapter) -> None:
    first = adapter.steps[0]
    assert adapter.bytes(4) == (6 + 12) * 4
    assert describe(adapter.source, first).startswith("ring_gather over 2 devices, dim")
    assert groups_text(adapter.source, first) in ("[0 1] [2 3]", "[0 2] [1 3]")
    assert named_collectives(adapter) == {"collective-permute": 2}
    tensor = PTensor("t", jax.ShapeDtypeStruct((4, 6), np.float32))
    traffic = traffic_of(Adapt(tensor, adapter, 0, 1), 4, 1, Cluster("c", 2, 2, Link(1e-6, 1e9), Link(1e-5, 1e8)))
    assert traffic.kinds == {KIND: (2, 72.0)}
    assert traffic.inside > 0 < traffic.between
    assert moved_text(traffic.kinds) == "2× ring_gather 72 B"
