"""Kinds of devices: plausible figures, names, and what a matrix product of each type runs at."""

import dataclasses

import pytest

from jscaler.clusters import DEVICE_KINDS, DeviceKind, Link, find_cluster
from jscaler.clusters.device import find_kind
from jscaler.errors import UnknownNameError


@pytest.mark.parametrize("kind", DEVICE_KINDS.values(), ids=str)
def test_built_in_kinds_are_plausible(kind: DeviceKind) -> None:
    promised = int(kind.name.rsplit("-", 1)[1].removesuffix("GB"))
    assert 0.95 * promised < kind.memory / 1e9 < 1.08 * promised
    # a fused multiply and add per unit and cycle, at the boost clock
    assert kind.peak.float32 == pytest.approx(2 * kind.num_cores * kind.fpus_per_core * kind.clock * 1e9, rel=0.01)
    assert kind.peak.float64 <= kind.peak.float32 < kind.peak.of("float16")
    assert 10 < kind.peak.of("bfloat16") / kind.bandwidth < 600  # FLOPs per byte at which compute takes over
    assert hash(kind) == hash(find_kind(kind.name))


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("V100-32GB", "float32", 15.7e12),  # no matrix units for it
        ("V100-32GB", "bfloat16", 15.7e12),
        ("V100-32GB", "float16", 125e12),
        ("A100-80GB", "float32", 156e12),
        ("A100-80GB", "float8_e4m3fn", 312e12),  # computed in bfloat16
        ("H100-80GB", "float8_e5m2", 1978.9e12),
        ("H100-80GB", "float64", 67e12),
        ("A100-80GB", "int8", 624e12),
    ],
)
def test_flops_of_a_product(kind: str, dtype: str, expected: float) -> None:
    assert DEVICE_KINDS[kind].peak.of(dtype) == expected


def test_a_kind_by_the_name_of_its_generation_where_that_is_one() -> None:
    assert find_kind("H100") is DEVICE_KINDS["H100-80GB"]
    with pytest.raises(UnknownNameError, match="no device kind named 'A100'; did you mean 'A100-80GB'"):
        find_kind("A100")


@pytest.mark.parametrize("kind", DEVICE_KINDS.values(), ids=str)
def test_what_is_reached_is_below_the_peaks(kind: DeviceKind) -> None:
    assert kind.reached is not None
    assert 0.7 * kind.bandwidth < kind.reached.bandwidth < kind.bandwidth
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        assert 0.5 * kind.peak.of(dtype) < kind.reached.products.of(dtype) < kind.peak.of(dtype)


@pytest.mark.parametrize("kind", DEVICE_KINDS.values(), ids=str)
def test_a_larger_product_runs_at_a_higher_rate_below_what_is_reached(kind: DeviceKind) -> None:
    assert kind.reached is not None
    sizes = [(1, n, n, n) for n in (128, 512, 2048, 8192, 32768)]
    rates = [2.0 * n**3 / kind.kernel_seconds([(2.0 * n**3, "float16", size)], 0.0) for size in sizes for n in size[1:2]]
    assert rates == sorted(rates)
    assert rates[0] < 0.1 * rates[-1]
    assert 0.95 * kind.reached.products.float16 < rates[-1] < kind.reached.products.float16
    seconds = [kind.kernel_seconds([(1.0, "vector", ())], nbytes) for nbytes in (1e3, 1e6, 1e9)]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 1e9 / kind.bandwidth


def waves(cores: int, rows: int, columns: int, tile: tuple[int, int]) -> int:
    """How often all cores make a tile each, counted tile by tile."""
    tiles = [(i, j) for i in range(0, rows, tile[0]) for j in range(0, columns, tile[1])]
    return len([tiles[i : i + cores] for i in range(0, len(tiles), cores)])


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (2048, 1024), (2048, 1280), (4096, 4096), (100, 30000)])
def test_a_product_without_depth_takes_whole_waves_of_tiles(rows: int, columns: int) -> None:
    """Of the tiles that there are the fastest; with a depth to divide, more cores have a part."""
    kind = find_kind("H200")
    assert kind.reached is not None
    flops = 2.0 * rows * columns * 64
    taken = kind.product_seconds(flops, "bfloat16", (1, rows, columns, 64))
    of_one = kind.reached.products.bfloat16 / kind.num_cores  # FLOP/s of a core
    by_hand = [
        waves(kind.num_cores, rows, columns, (high, wide)) * 2 * high * wide * 64 / (of_one * rate)
        for high, wide, rate in ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
    ]
    assert taken == pytest.approx(min(by_hand))
    deep = kind.product_seconds(64 * flops, "bfloat16", (1, rows, columns, 4096))
    assert deep <= 64 * taken * (1 + 1e-9)


def test_products_by_size_are_those_that_were_measured() -> None:
    """One H200, bfloat16, n x n x n: what is left beside the product is the same for all, the call (microseconds)."""
    kind, measured = find_kind("H200"), {512: 12.5e12, 1024: 89e12, 2048: 426e12, 4096: 646e12, 8192: 668e12}
    calls = {
        n: 2.0 * n**3 / rate - kind.product_seconds(2.0 * n**3, "bfloat16", (1, n, n, n)) for n, rate in measured.items()
    }
    assert all(12e-6 < calls[n] < 22e-6 for n in (512, 1024, 2048))
    assert all(abs(calls[n]) < 0.06 * 2.0 * n**3 / measured[n] for n in (4096, 8192))


def test_peaks_are_bounds() -> None:
    v100 = find_kind("V100-32GB").at_peaks()
    assert v100.kernel_seconds([(125e12, "float16", (1, 1, 1, 1))], 0.0, row=4096) == 1.0
    cluster = find_cluster("4x8xV100-32GB")
    bound = cluster.at_peaks()
    assert bound.at_peaks() == bound
    assert bound.memory == cluster.memory
    assert bound.between.bandwidth > cluster.between.bandwidth
    measured = dataclasses.replace(cluster, inside=Link(1e-6, 1e9))  # whatever was measured is what is reached
    assert (measured.at_peaks().inside, measured.at_peaks().between) == (measured.inside, bound.between)
    assert find_cluster("cpu").at_peaks() == find_cluster("cpu")


def test_a_kernel_that_holds_whole_rows_moves_less_in_a_second() -> None:
    kind = find_kind("H200")
    seconds = [kind.kernel_seconds([], 1e9, row) for row in (0, 1024, 11_000)]
    assert seconds == sorted(seconds)
    assert seconds[2] == pytest.approx(2 * seconds[0], rel=0.01)
    assert [find_kind(name).has_row_kernels for name in ("V100-32GB", "A100-80GB", "H100")] == [False, True, True]
