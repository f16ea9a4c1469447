"""Adapters on virtual devices, for all pairs of layouts: every device gets exactly what the target's mask says."""

import dataclasses
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
from materialize.oracle import every_count
from of_the_day import of_the_day

from jscaler.clusters import BYTES, CostModel
from jscaler.clusters.cost_model import FEW_STEPS
from jscaler.lower.emit_collectives import exchange
from jscaler.materialize import Adapter, Layout, Stage, Transition, find_adapter, parse_layout
from jscaler.materialize.canonical import on_common_mesh

Pair = tuple[Layout, Layout]
AT_ONCE = 98  # adapters per compiled function: compiling is what takes the time


def adapted(
    adapters: Sequence[Adapter], sources: Sequence[Sequence[np.ndarray]], gloo: bool = False
) -> list[list[np.ndarray]]:
    """Run the adapters in one program; for each the parts that the devices end with, by position of its target."""
    mesh = adapters[0].source.mesh
    devices = np.array([jax.devices()[d] for d in mesh.devices]).reshape([size for _, size in mesh.axes])
    physical = Mesh(devices, mesh.names)
    spec = P(mesh.names)
    stacked = []
    for adapt, parts in zip(adapters, sources, strict=True):
        held = dict(zip(adapt.source.mesh.devices, parts, strict=True))
        stacked.append(jax.device_put(np.stack([held[d] for d in mesh.devices]), NamedSharding(physical, spec)))

    def local(parts: list[jax.Array]) -> list[jax.Array]:
        return [exchange(adapt, part[0], mesh, gloo=gloo)[None] for adapt, part in zip(adapters, parts, strict=True)]

    run = jax.jit(jax.shard_map(local, mesh=physical, in_specs=spec, out_specs=spec, check_vma=False))
    ended = [{s.device.id: np.asarray(s.data)[0] for s in out.addressable_shards} for out in run(stacked)]
    return [
        [parts[jax.devices()[d].id] for d in adapt.target.mesh.devices]
        for adapt, parts in zip(adapters, ended, strict=True)
    ]


def check(pairs: Sequence[Pair], dtype: str = "float32", cost: CostModel = FEW_STEPS, gloo: bool = False) -> None:
    assert pairs
    rng = np.random.default_rng(0)
    for some in (pairs[i : i + AT_ONCE] for i in range(0, len(pairs), AT_ONCE)):
        wholes = [whole_of(source.shape, dtype, rng) for source, _ in some]
        parts = [make_parts(source, whole, rng) for (source, _), whole in zip(some, wholes, strict=True)]
        adapters = [find_adapter(*pair, whole.itemsize, cost) for pair, whole in zip(some, wholes, strict=True)]
        for adapt, whole, ended in zip(adapters, wholes, adapted(adapters, parts, gloo), strict=True):
            try:
                assert_lies_as(adapt.target, ended, whole)
            except AssertionError as error:
                raise AssertionError(f"{adapt.source!r}\n -> {adapt.target!r}\nby {adapt}: {error}") from None


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


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize(
    ("mesh", "shape", "most"),
    of_the_day(
        [
            ((2, 2), (4, 8), 18 * 18),  # all
            ((2, 2), (2, 6), 80),  # not every cut divides
            ((2, 3), (6, 12), 40),
            ((2, 2), (4, 4, 8), 40),
            ((2, 3), (6, 6, 12), 40),
            ((2, 2, 2), (8, 16), 30),
            ((2, 2, 2), (8, 4, 8), 30),
        ]
    ),
    ids=str,
)
def test_pairs_on_a_grid_of_devices(mesh: tuple[int, ...], shape: tuple[int, ...], most: int) -> None:
    """``tests/verification`` proves all of them symbolically."""
    check(pairs_of(every_layout(mesh_of(*mesh), tuple((s,) for s in shape)), most=most))


@pytest.mark.parametrize(("mesh", "shape"), [((2, 2), (4, 8)), ((2, 3), (6, 12))], ids=str)
def test_paths_that_send_the_fewest_bytes(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """More of them are point-to-point exchanges."""
    check(pairs_of(every_layout(mesh_of(*mesh), tuple((s,) for s in shape)), most=25), cost=BYTES)


@pytest.mark.parametrize("combiners", [("max",), ("min",)], ids=str)
def test_shares_that_are_maxima_or_minima(combiners: tuple[str, ...]) -> None:
    check(pairs_of(every_layout(mesh_of(2, 2), ((4,), (4,)), combiners), most=50))


def test_shares_of_shares_with_different_combiners() -> None:
    """Nested shares are joined from the inside: the sum of maxima is not the maximum of sums."""
    check(pairs_of(every_layout(mesh_of(2, 2), ((4,),), ("add", "max", "min")), most=100))


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)], ids=str)
def test_cuts_on_minor_sub_dims(mesh: tuple[int, ...]) -> None:
    layouts = list(every_layout(mesh_of(*mesh), ((3, 4, 2), (2,))))
    assert any(layout.cuts[2] and not layout.cuts[0] for layout in layouts)
    check(pairs_of(layouts, most=40))


def test_refinements_that_differ() -> None:
    mesh = mesh_of(2, 3)
    refinements = [((24,), (6,)), ((4, 6), (6,)), ((4, 2, 3), (3, 2)), ((2, 12), (6,))]
    check(pairs_of(*(every_layout(mesh, subdims) for subdims in refinements), most=40))


def test_refinements_without_common_boundaries_gather_first() -> None:
    mesh = mesh_of(2, 2)
    heads, tails = (
        Layout(mesh, ((3, 8), (2,)), ((), ("x0",), ("x1",))),
        Layout(mesh, ((4, 6), (2,)), (("x1", "x0"), (), ())),
    )
    found = find_adapter(heads, tails, 4, FEW_STEPS)
    assert [[step.kind for step in stage.steps] for stage in found.stages] == [
        ["all_gather", "all_gather"],
        ["slice", "slice"],
    ]
    pairs = pairs_of(every_layout(mesh, ((3, 8), (2,))), every_layout(mesh, ((4, 6), (2,))), most=40)
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
    check(pairs_of(layouts, most=20))


@pytest.mark.parametrize(
    ("dtype", "combiners"),
    [("bfloat16", ("add",)), ("int32", ("add",)), ("int32", ("max",)), ("bool", ("max",)), ("bool", ("min",))],
    ids=str,
)
def test_dtypes(dtype: str, combiners: tuple[str, ...]) -> None:
    check(pairs_of(every_layout(mesh_of(2, 2), ((4,), (4,)), combiners), most=20), dtype)


@pytest.mark.parametrize(("dtype", "rows"), [("float32", 12), ("float32", 3 * 2**14), ("int8", 3 * 2**16)])
def test_sums_that_gloo_should_scatter_go_round_a_ring(dtype: str, rows: int) -> None:
    """Small ones are reduced to all."""
    layouts = every_layout(mesh_of(2, 3, devices=(5, 1, 0, 4, 2, 3)), ((6,), (rows,)))

    def scatters(pair: Pair) -> bool:
        return any(step.kind == "reduce_scatter" for step in find_adapter(*pair, 4, FEW_STEPS).steps)

    pairs = [pair for pair in pairs_of(layouts, most=60) if scatters(pair)]
    check(pairs, dtype, gloo=True)
    adapters = [find_adapter(*pair, 4, FEW_STEPS) for pair in pairs]
    mesh = adapters[0].source.mesh
    shapes = [jax.ShapeDtypeStruct(adapter.source.local_shape, dtype) for adapter in adapters]
    run = lambda *parts: [exchange(a, x, mesh, gloo=True) for a, x in zip(adapters, parts, strict=True)]  # noqa: E731
    bound = str(jax.make_jaxpr(run, axis_env=[*mesh.axes])(*shapes))
    assert "reduce_scatter" not in bound
    assert ("scan" in bound) == (rows > 12)


def test_random_keys() -> None:
    """A batch of PRNG keys is cut and gathered like any tensor."""
    mesh = mesh_of(2, 2)
    layouts = [layout for layout in every_layout(mesh, ((4,), (4,))) if not layout.values]
    physical = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), mesh.names)
    keys = jax.random.split(jax.random.key(0), (4, 4))
    for source, target in pairs_of(layouts, most=10):
        adapt = find_adapter(source, target, 8)
        specs = {"in_specs": source.partition_spec(), "out_specs": target.partition_spec()}
        run = jax.shard_map(lambda x, adapt=adapt: exchange(adapt, x, mesh), mesh=physical, check_vma=False, **specs)
        np.testing.assert_array_equal(jax.random.key_data(jax.jit(run)(keys)), jax.random.key_data(keys))


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        ("R1 V1 D(4) on [0 1 2 3]", "R1 V1 D(4) on [2 0 3 1]", "permute"),
        ("R2 V1 D(2) on [0 1 2 3]", "R1 V1 D(4) on [3 1 0 2]", "point_to_point"),
    ],
    ids=["permute", "point_to_point"],
)
def test_random_keys_between_device_orders(source: str, target: str, kind: str) -> None:
    before, after = parse_layout(source, (6,)), parse_layout(target, (6,))
    step = Transition(kind, to=after)
    adapt = Adapter(before, after, (Stage(before, (step,), before.local_sizes, after.local_sizes),), 0.0)
    mesh = mesh_of(2, 2)
    physical = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), mesh.names)
    data = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 6)))
    parts = make_parts(before, np.arange(6), np.random.default_rng(0))

    def local(words: jax.Array) -> jax.Array:
        return jax.random.key_data(exchange(adapt, jax.random.wrap_key_data(words[0]), mesh))[None]

    spec = P(mesh.names)
    run = jax.jit(jax.shard_map(local, mesh=physical, in_specs=spec, out_specs=spec, check_vma=False))
    held = dict(zip(before.mesh.devices, parts, strict=True))
    ended = np.asarray(run(jax.device_put(data[np.stack([held[d] for d in range(4)])], NamedSharding(physical, spec))))
    number = {tuple(words): i for i, words in enumerate(data.tolist())}
    found = [np.array([number.get(tuple(words), -1) for words in ended[d].tolist()]) for d in after.mesh.devices]
    assert_lies_as(after, found, np.arange(6))


# Where source and target share little


def layouts_of(num_devices: int, shape: tuple[int, ...], uneven: bool, rng: random.Random | None = None) -> list[Layout]:
    """All counts of ``shape``, also those that do not divide its sizes; in random device orders."""
    order, found = list(range(num_devices)), []
    for counts in every_count(num_devices, [s * num_devices if uneven else s for s in shape]):
        if rng is not None:
            rng.shuffle(order)
        found.append(parse_layout(f"{counts} on [{' '.join(map(str, order))}]", shape))
    return found


@pytest.mark.parametrize("cost", of_the_day([FEW_STEPS, BYTES], 2), ids=str)
def test_two_device_orders(cost: CostModel) -> None:
    rng = random.Random(0)
    pairs = [tuple(rng.choices(layouts_of(8, (8, 16), False, rng), k=2)) for _ in range(25)]
    check(pairs, cost=cost)


@pytest.mark.parametrize(
    ("num_devices", "shape"), of_the_day([(2, (3, 5)), (3, (7, 2)), (4, (6, 3)), (6, (7,))], 2), ids=str
)
def test_sizes_that_do_not_divide(num_devices: int, shape: tuple[int, ...]) -> None:
    """Blocks are padded at the end: in a common padding, as pieces, or through the full copy."""
    check(pairs_of(layouts_of(num_devices, shape, True), most=20))
    check(pairs_of(layouts_of(num_devices, shape, True, random.Random(0)), most=15), cost=BYTES)


def test_meshes_without_a_common_refinement() -> None:
    """Cuts of two on 3 × 2 devices, of three on 2 × 3 devices."""
    pairs = [pair for pair in pairs_of(layouts_of(6, (6, 12), False)) if on_common_mesh(*pair) is None]
    assert len(pairs) > 40
    check(random.Random(0).sample(pairs, 40))


@pytest.mark.parametrize(
    ("dtype", "combiner"), [(d, c) for d in ("float32", "int32", "bool") for c in ("max", "min")], ids=str
)
def test_maxima_and_minima_are_scattered(dtype: str, combiner: str) -> None:
    """In any order of the members, along a minor dim, beside a cut, and over shares that stay."""
    source = parse_layout(f"R1 V4{combiner} D(1,1)", (4, 8))
    half = Layout(mesh_of(2, 2), ((4,), (8,)), (("x0",), ()), (("x1", combiner),))
    both = Layout(mesh_of(2, 2), ((4,), (8,)), ((), ()), (("x0", combiner), ("x1", combiner)))
    pairs = [
        (source, parse_layout("R1 V1 D(1,4)", (4, 8))),
        (source, parse_layout("R1 V1 D(4,1)", (4, 8))),
        (both, dataclasses.replace(half, cuts=((), ("x1", "x0")), values=())),
        (half, dataclasses.replace(half, cuts=(("x0",), ("x1",)), values=())),
        (both, dataclasses.replace(both, cuts=((), ("x1",)), values=(("x0", combiner),))),
    ]
    for pair in pairs:
        assert [step.kind for step in find_adapter(*pair, 4, FEW_STEPS).steps] == ["reduce_scatter"]
    check(pairs, dtype)


def test_a_permute_that_moves_nothing_is_no_collective() -> None:
    """Replicas in another order hold what they will need."""
    pair = [parse_layout(f"R2 V1 D(2) on [{order}]", (4,)) for order in ("0 1 2 3", "2 3 0 1")]
    (step,) = find_adapter(*pair, 4, FEW_STEPS).steps
    assert (step.kind, step.bytes(pair[0], 4)) == ("permute", 0)
    mesh = mesh_of(4)
    run = jax.shard_map(
        lambda x: exchange(find_adapter(*pair, 4, FEW_STEPS), x, mesh),
        mesh=Mesh(np.array(jax.devices()[:4]), mesh.names),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    assert "ppermute" not in str(jax.make_jaxpr(run)(jnp.zeros(2)))


def test_scalars() -> None:
    """A loss: value shares and copies are all that a scalar can have."""
    check(pairs_of(every_layout(mesh_of(2, 2), ())))
