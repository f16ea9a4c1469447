"""Adapters on virtual devices, for all pairs of layouts: every device gets exactly what the target's mask says."""

import itertools
import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from materialize.layouts import assert_lies_as, every_layout, make_parts, mesh_of

from jscaler.ir import PTensor
from jscaler.lower.collectives import exchange
from jscaler.lower.program import Adapt
from jscaler.materialize import Layout, adapter_stages

Pair = tuple[Layout, Layout]
AT_ONCE = 98  # adapters per compiled function: compiling is what takes the time


def adapter(source: Layout, target: Layout, dtype: np.dtype) -> Adapt:
    tensor = PTensor("t", jax.ShapeDtypeStruct(source.shape, dtype))
    stages, _ = adapter_stages(source, target, dtype.itemsize)
    return Adapt(tensor, stages, source, target, 0, 1)


def adapted(pairs: Sequence[Pair], sources: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """Run the adapters of ``pairs`` in one program; per pair, the parts that the devices end with, by position."""
    mesh = pairs[0][0].mesh
    devices = np.array([jax.devices()[d] for d in mesh.devices]).reshape([size for _, size in mesh.axes])
    physical = Mesh(devices, mesh.names)
    stacked = [jax.device_put(np.stack(parts), NamedSharding(physical, P(mesh.names))) for parts in sources]
    adapters = [adapter(source, target, x.dtype) for (source, target), x in zip(pairs, stacked, strict=True)]

    def local(parts: list[jax.Array]) -> list[jax.Array]:
        return [exchange(adapt, part[0])[None] for adapt, part in zip(adapters, parts, strict=True)]

    spec = P(mesh.names)
    run = jax.jit(jax.shard_map(local, mesh=physical, in_specs=spec, out_specs=spec, check_vma=False))
    ended = [{s.device.id: np.asarray(s.data)[0] for s in out.addressable_shards} for out in run(stacked)]
    return [[parts[jax.devices()[d].id] for d in mesh.devices] for parts in ended]


def check(pairs: Sequence[Pair], dtype: str = "float32") -> None:
    assert pairs
    rng = np.random.default_rng(0)
    for some in (pairs[i : i + AT_ONCE] for i in range(0, len(pairs), AT_ONCE)):
        wholes = [whole_of(source.shape, dtype, rng) for source, _ in some]
        parts = [make_parts(source, whole, rng) for (source, _), whole in zip(some, wholes, strict=True)]
        for (source, target), whole, ended in zip(some, wholes, adapted(some, parts), strict=True):
            try:
                assert_lies_as(target, ended, whole)
            except AssertionError as error:
                path = [str(step) for _, steps in adapter(source, target, whole.dtype).stages for step in steps]
                raise AssertionError(f"{source!r}\n -> {target!r}\nby {path}: {error}") from None


def whole_of(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Small whole numbers, so that sums are exact in every dtype."""
    return rng.integers(0, 2 if dtype == "bool" else 9, shape).astype(jnp.dtype(dtype))


def pairs_of(*kinds: Sequence[Layout], most: int | None = None) -> list[Pair]:
    """All ordered pairs among the layouts; a seeded sample where they are more than ``most``."""
    layouts = list(dict.fromkeys(itertools.chain(*kinds)))
    pairs = list(itertools.product(layouts, layouts))
    return pairs if most is None or len(pairs) <= most else random.Random(0).sample(pairs, most)


@pytest.mark.smoke
def test_all_pairs_on_two_devices() -> None:
    check(pairs_of(every_layout(mesh_of(2), ((2,), (6,)))))
    check(pairs_of(every_layout(mesh_of(2), ((2,), (3,), (4,)))))


@pytest.mark.parametrize(
    ("mesh", "shape", "count"),
    [
        ((2, 2), (4, 8), 18 * 18),
        ((2, 2), (2, 6), None),  # not every cut divides
        ((2, 3), (6, 12), 18 * 18),
        ((2, 2), (4, 4, 8), 28 * 28),
        ((2, 3), (6, 6, 12), 28 * 28),
    ],
    ids=str,
)
def test_all_pairs_on_a_grid_of_devices(mesh: tuple[int, ...], shape: tuple[int, ...], count: int | None) -> None:
    pairs = pairs_of(every_layout(mesh_of(*mesh), tuple((s,) for s in shape)))
    assert count is None or len(pairs) == count
    check(pairs)


def test_a_sample_of_pairs_on_eight_devices() -> None:
    mesh = mesh_of(2, 2, 2)
    check(pairs_of(every_layout(mesh, ((8,), (16,))), most=60))
    check(pairs_of(every_layout(mesh, ((8,), (4,), (8,))), most=60))


@pytest.mark.parametrize("combiners", [("max",), ("min",)], ids=str)
def test_shares_that_are_maxima_or_minima(combiners: tuple[str, ...]) -> None:
    check(pairs_of(every_layout(mesh_of(2, 2), ((4,), (4,)), combiners), most=150))


def test_shares_of_shares_with_different_combiners() -> None:
    """Nested shares are joined from the inside: the sum of maxima is not the maximum of sums."""
    check(pairs_of(every_layout(mesh_of(2, 2), ((4,),), ("add", "max", "min"))))


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)], ids=str)
def test_cuts_on_minor_sub_dims(mesh: tuple[int, ...]) -> None:
    layouts = list(every_layout(mesh_of(*mesh), ((3, 4, 2), (2,))))
    assert any(layout.cuts[2] and not layout.cuts[0] for layout in layouts)
    check(pairs_of(layouts, most=100))


def test_refinements_that_differ() -> None:
    mesh = mesh_of(2, 3)
    refinements = [((24,), (6,)), ((4, 6), (6,)), ((4, 2, 3), (3, 2)), ((2, 12), (6,))]
    check(pairs_of(*(every_layout(mesh, subdims) for subdims in refinements), most=100))


def test_refinements_without_common_boundaries_gather_first() -> None:
    mesh = mesh_of(2, 2)
    heads, tails = (
        Layout(mesh, ((3, 8), (2,)), ((), ("x0",), ("x1",))),
        Layout(mesh, ((4, 6), (2,)), (("x1", "x0"), (), ())),
    )
    stages, _ = adapter_stages(heads, tails, 4)
    assert [[step.kind for step in steps] for _, steps in stages] == [["all_gather", "all_gather"], ["slice", "slice"]]
    pairs = pairs_of(every_layout(mesh, ((3, 8), (2,))), every_layout(mesh, ((4, 6), (2,))), most=100)
    check([(a, b) for a, b in pairs if a.subdims != b.subdims])


def test_a_cut_off_the_common_boundaries_gathers_first() -> None:
    """Six parts of 24 = (4, 6) fall on no boundary of (4, 6): parts of 4 straddle the 6s."""
    mesh = mesh_of(2, 3)
    flat = Layout(mesh, ((24,),), (("x1", "x0"),))
    check([(flat, refined) for refined in every_layout(mesh, ((4, 6),))])
    check([(refined, flat) for refined in every_layout(mesh, ((4, 6),))])


@pytest.mark.parametrize(
    ("sizes", "devices"), [((2, 2), (2, 0, 3, 1)), ((2, 3), (5, 1, 0, 4, 2, 3)), ((2, 2), (7, 2, 4, 1))], ids=str
)
def test_device_orders(sizes: tuple[int, ...], devices: tuple[int, ...]) -> None:
    layouts = every_layout(mesh_of(*sizes, devices=devices), ((12,), (12,)))
    check(pairs_of(layouts, most=60))


@pytest.mark.parametrize(
    ("dtype", "combiners"),
    [("bfloat16", ("add",)), ("int32", ("add",)), ("int32", ("max",)), ("bool", ("max",)), ("bool", ("min",))],
    ids=str,
)
def test_dtypes(dtype: str, combiners: tuple[str, ...]) -> None:
    check(pairs_of(every_layout(mesh_of(2, 2), ((4,), (4,)), combiners), most=80), dtype)


def test_random_keys() -> None:
    """A batch of PRNG keys is cut and gathered like any tensor."""
    mesh = mesh_of(2, 2)
    layouts = [layout for layout in every_layout(mesh, ((4,), (4,))) if not layout.values]
    physical = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), mesh.names)
    keys = jax.random.split(jax.random.key(0), (4, 4))
    for source, target in pairs_of(layouts, most=20):
        adapt = adapter(source, target, np.dtype("uint64"))
        specs = {"in_specs": source.partition_spec(), "out_specs": target.partition_spec()}
        run = jax.shard_map(lambda x, adapt=adapt: exchange(adapt, x), mesh=physical, check_vma=False, **specs)
        np.testing.assert_array_equal(jax.random.key_data(jax.jit(run)(keys)), jax.random.key_data(keys))


def test_scalars() -> None:
    """A loss: value shares and copies are all that a scalar can have."""
    check(pairs_of(every_layout(mesh_of(2, 2), ())))
