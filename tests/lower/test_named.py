"""The HLO of a lowered adapter holds the collectives that its path names: their kinds, members in order, and bytes.

Layouts are drawn at random: counts R·V·D, sums and maxima, sizes that do not divide, any device order, left open too.
Expected are the groups of the path's meshes, as positions in the program's device list: what a group is called, and in
which order groups stand, is XLA's. Many adapters share a program; their inputs differ, so that nothing is shared.
"""

import functools
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from of_the_day import of_the_day

from bench.redistribution import factorizations
from jscaler.clusters import BYTES, find_cluster
from jscaler.clusters.transition_kinds import Kind
from jscaler.lower.emit_collectives import exchange
from jscaler.lower.named import named_collectives
from jscaler.materialize import Adapter, DeviceMesh, Layout, Transition, find_adapter, opened, parse_layout
from jscaler.materialize.transitions import moves, regions_between
from jscaler.report.hlo import AS_WRITTEN, KINDS, collectives
from jscaler.report.targets import described_devices

NUM_DEVICES = 8
AT_ONCE = 15  # adapters per program: a program of many takes long, many programs too
SHAPES = {2: ((16, 16), (16, 24), (7, 10), (10, 9)), 3: ((16, 16, 16), (8, 16, 8), (7, 10, 9), (10, 9, 5))}
MESHES = {  # of the program: its axes seldom are the layouts' axes
    "one axis": DeviceMesh(tuple(range(NUM_DEVICES)), (("x", NUM_DEVICES),)),
    "three axes": DeviceMesh((4, 5, 7, 6, 0, 1, 3, 2), (("a", 2), ("b", 2), ("c", 2))),
}
H100 = "8xH100-80GB"

Launch = tuple[str, float, tuple[tuple[int, ...], ...]]  # kind, bytes sent, and groups or pairs, sorted among themselves


def draw(rng: random.Random, shape: tuple[int, ...], on: str) -> Layout:
    replicas, shares, *parts = rng.choice(list(factorizations(NUM_DEVICES, len(shape) + 2)))
    values = {1: ["1"], 2: ["2", "2max"], 4: ["4", "4max", "2·2max", "2max·2"], 8: ["8", "8max", "2·4max"]}[shares]
    layout = parse_layout(f"R{replicas} V{rng.choice(values)} D({','.join(map(str, parts))}) on {on}", shape)
    assert isinstance(layout, Layout)
    return layout


def draw_adapter(rng: random.Random, dims: int) -> Adapter:
    """Half of them between random device orders, some to an order that is left open; cheapest in bytes or in time."""
    shape = rng.choice(SHAPES[dims])
    anyhow = rng.random() < 0.5
    orders = [rng.sample(range(NUM_DEVICES), NUM_DEVICES) if anyhow else range(NUM_DEVICES) for _ in "st"]
    source, target = (draw(rng, shape, f"[{' '.join(map(str, order))}]") for order in orders)
    is_open = source.even and target.even and rng.random() < 0.2
    return find_adapter(source, opened(target) if is_open else target, 4, rng.choice([BYTES, find_cluster("h100")]))


@functools.cache
def sample(dims: int, count: int) -> list[Adapter]:
    """``count`` adapters with something to do, all different."""
    rng = random.Random(dims)
    drawn = (draw_adapter(rng, dims) for _ in itertools.count())
    return list(itertools.islice(dict.fromkeys(a for a in itertools.islice(drawn, 3 * count) if a.stages), count))


# What the path says


def named(adapter: Adapter, mesh: DeviceMesh, itemsize: int) -> list[Launch]:
    """The launches of an adapter in a program over ``mesh``."""
    place = {d: i for i, d in enumerate(mesh.devices)}
    return [launch for here, step in adapter.walk for launch in launches_of(here, step, place, itemsize)]


def launches_of(here: Layout, step: Transition, place: dict[int, int], itemsize: int) -> list[Launch]:
    if step.kind in ("slice", "value_mask"):
        return []
    if step.kind == "permute":
        sent = {(place[a], place[b]) for a, b in moves(here, step.to).tolist()}
        kept = {(p, p) for p in place.values()} - {(b, b) for _, b in sent}
        return [("collective-permute", step.bytes(here, itemsize), tuple(sorted(sent | kept)))] if sent else []
    if step.kind == "point_to_point":
        order = [place[d] for d in here.mesh.devices]
        rounds = regions_between(here, step.to).rounds
        pairs = [tuple(sorted((order[a], order[b]) for a, b in r.pairs)) for r in rounds]
        nbytes = [r.size * itemsize * len(r.pairs) / NUM_DEVICES for r in rounds]
        return [("collective-permute", sent, p) for sent, p in zip(nbytes, pairs, strict=True)]
    exchanged = step.kind == "reduce_scatter" and step.combiner != "add"
    groups = tuple(sorted(tuple(place[d] for d in group) for group in here.mesh.groups(step.axes).tolist()))
    return [("all-to-all" if exchanged else step.line.hlo, step.bytes(here, itemsize), groups)]


# What the HLO says


def compiled(adapters: Sequence[Adapter], mesh: DeviceMesh, devices: Sequence[Any], dtype: str = "float32") -> str:
    """The HLO of one program that runs all ``adapters``, each on a tensor of its own."""
    array = np.array([devices[d] for d in mesh.devices]).reshape([size for _, size in mesh.axes])
    physical, spec = Mesh(array, mesh.names), P(mesh.names)

    def local(parts: list[jax.Array]) -> list[jax.Array]:
        return [exchange(adapter, part[0], mesh)[None] for adapter, part in zip(adapters, parts, strict=True)]

    split = NamedSharding(physical, spec)
    parts = [jax.ShapeDtypeStruct((NUM_DEVICES, *a.source.local_shape), dtype, sharding=split) for a in adapters]
    run = jax.jit(jax.shard_map(local, mesh=physical, in_specs=spec, out_specs=spec, check_vma=False))
    return run.lower(parts).compile(compiler_options=AS_WRITTEN).as_text()


def launched(text: str) -> list[Launch]:
    return [(c.kind, c.sent, tuple(sorted(c.pairs or c.groups))) for c in collectives(text)]


def rounded(launches: Sequence[Launch]) -> Counter[Launch]:
    """In no order; sums of floats are rounded."""
    return Counter((kind, round(sent, 6), members) for kind, sent, members in launches)


def check(adapters: Sequence[Adapter], mesh: DeviceMesh, devices: Sequence[Any]) -> None:
    for some in (adapters[i : i + AT_ONCE] for i in range(0, len(adapters), AT_ONCE)):
        found = launched(compiled(some, mesh, devices))
        expected = [launch for adapter in some for launch in named(adapter, mesh, 4)]
        if rounded(found) != rounded(expected):
            raise AssertionError("\n".join(differences(some, mesh, devices)))
        assert Counter(kind for kind, *_ in found) == sum(map(named_collectives, some), Counter())
        assert sum(sent for _, sent, _ in found) == pytest.approx(sum(adapter.bytes(4) for adapter in some))


def differences(adapters: Sequence[Adapter], mesh: DeviceMesh, devices: Sequence[Any]) -> list[str]:
    """Which of the adapters differ when each has a program to itself."""
    lines = []
    for adapter in adapters:
        found, expected = rounded(launched(compiled([adapter], mesh, devices))), rounded(named(adapter, mesh, 4))
        if found != expected:
            extra, missing = list((found - expected).elements()), list((expected - found).elements())
            lines.append(f"{adapter.source} -> {adapter.target} by {adapter}: HLO has {extra} in place of {missing}")
    return lines or ["a program of many adapters differs, those of each alone do not"]


# Tests


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(("dims", "count"), of_the_day([(2, 40), (3, 40)], 2))
@pytest.mark.parametrize("mesh", of_the_day(MESHES))
def test_the_path_names_what_the_program_launches(mesh: str, dims: int, count: int) -> None:
    check(sample(dims, count), MESHES[mesh], jax.devices())


@pytest.mark.aot
@pytest.mark.parametrize(("dims", "count"), [(2, 40), (3, 40)])
@pytest.mark.parametrize("mesh", MESHES)
def test_and_what_it_launches_on_gpus(mesh: str, dims: int, count: int) -> None:
    """Of float32 no pass of XLA:GPU rewrites anything but those that ``AS_WRITTEN`` turns off."""
    check(sample(dims, count), MESHES[mesh], described_devices(H100))


@pytest.mark.one_day_in(2)
def test_the_samples_have_everything() -> None:
    """What is drawn is more than the easy cases: otherwise the tests above say little."""
    drawn = [*sample(2, 40), *sample(3, 40)]
    steps = [step for adapter in drawn for step in adapter.steps]
    assert {step.kind for step in steps} == {*get_args(Kind)}
    assert any(step.kind == "reduce_scatter" and step.combiner == "max" for step in steps)
    assert any(len(step.axes) > 1 for step in steps if step.kind == "all_gather")
    assert any(not adapter.source.even for adapter in drawn)
    assert any(len(adapter.source.shares) > 1 for adapter in drawn)
    assert {kind for adapter in drawn for kind in named_collectives(adapter)} == set(KINDS)


# What travels wider than it is

ONE_EACH = (  # source, target, the only collective of their adapter
    ("R1 V8 D(1,1)", "R8 V1 D(1,1)", "all-reduce"),
    ("R1 V8 D(1,1)", "R1 V1 D(8,1)", "reduce-scatter"),
    ("R1 V8max D(1,1)", "R8 V1 D(1,1)", "all-reduce"),
    ("R1 V8max D(1,1)", "R1 V1 D(8,1)", "all-to-all"),
    ("R1 V1 D(8,1)", "R8 V1 D(1,1)", "all-gather"),
    ("R1 V1 D(8,1)", "R1 V1 D(1,8)", "all-to-all"),
    ("R1 V1 D(8,1)", "R1 V1 D(8,1) on [7 6 5 4 3 2 1 0]", "collective-permute"),
)


def wider(dtype: str, devices: Sequence[Any]) -> dict[tuple[str, str], str]:
    """The collectives that a program of ``dtype`` runs in another: (kind, combiner) and that dtype, as HLO has them."""
    found = {}
    for source, target, kind in ONE_EACH:
        pair = (parse_layout(source, (16, 16)), parse_layout(target, (16, 16)))
        (launch,) = collectives(compiled([find_adapter(*pair, 4)], MESHES["one axis"], devices, dtype))
        assert launch.kind == kind
        if launch.dtypes != (HLO_DTYPE[dtype],):
            (found[kind, "max" if "max" in source else "add"],) = launch.dtypes
    return found


HLO_DTYPE = {
    "float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8": "s8", "int16": "s16", "uint16": "u16", "int32": "s32",
}  # fmt: skip
REDUCTIONS = (("all-reduce", "add"), ("reduce-scatter", "add"), ("all-reduce", "max"))
OTHERS = (("all-to-all", "max"), ("all-gather", "add"), ("all-to-all", "add"), ("collective-permute", "add"))


@pytest.mark.parametrize("dtype", HLO_DTYPE)
def test_what_travels_wider_on_cpu(dtype: str) -> None:
    """XLA:CPU has no bfloat16: every collective sends twice the bytes that the path counts."""
    assert wider(dtype, jax.devices()) == (dict.fromkeys(REDUCTIONS + OTHERS, "f32") if dtype == "bfloat16" else {})


@pytest.mark.aot
@pytest.mark.parametrize("dtype", HLO_DTYPE)
def test_what_travels_wider_on_gpus(dtype: str) -> None:
    """NCCL reduces no 16-bit integers: XLA:GPU makes them 32-bit, for the reductions only."""
    promoted = {"int16": "s32", "uint16": "u32"}.get(dtype)
    assert wider(dtype, described_devices(H100)) == (dict.fromkeys(REDUCTIONS, promoted) if promoted else {})
