"""Kinds of devices: plausible figures, names, and what a matrix product of each type runs at."""

import pytest

from jscaler.clusters import DEVICE_KINDS, DeviceKind, find_cluster
from jscaler.clusters.device import REACHED, find_kind
from jscaler.errors import DeviceError, UnknownNameError


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
    ],
)
def test_flops_of_a_product(kind: str, dtype: str, expected: float) -> None:
    assert DEVICE_KINDS[kind].peak.of(dtype) == expected


def test_a_kind_by_the_name_of_its_generation_where_that_is_one() -> None:
    assert find_kind("H100") is DEVICE_KINDS["H100-80GB"]
    with pytest.raises(UnknownNameError, match="no device kind named 'A100'; did you mean 'A100-80GB'"):
        find_kind("A100")


@pytest.mark.parametrize("kind", REACHED)
def test_what_is_reached_is_below_the_peaks(kind: str) -> None:
    peak, reached = DEVICE_KINDS[kind], DEVICE_KINDS[kind].as_reached().reached
    assert reached is not None
    assert reached.bandwidth < peak.bandwidth
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        assert 0.5 * peak.peak.of(dtype) < reached.products.of(dtype) < peak.peak.of(dtype)


@pytest.mark.parametrize("kind", REACHED)
def test_a_larger_product_runs_at_a_higher_rate_below_the_peak(kind: str) -> None:
    device = DEVICE_KINDS[kind].as_reached()
    rates = [flops / device.kernel_seconds([("float16", flops)], 0.0) for flops in (1e7, 1e9, 1e11, 1e13)]
    assert rates == sorted(rates)
    assert rates[-1] < DEVICE_KINDS[kind].peak.float16
    assert device.product_seconds(device.reached.half, "float16") == pytest.approx(  # type: ignore[union-attr]
        2 * device.reached.half / device.reached.products.float16  # type: ignore[union-attr]
    )
    seconds = [device.kernel_seconds([("vector", 1.0)], nbytes) for nbytes in (1e3, 1e6, 1e9)]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 1e9 / device.bandwidth


def test_peaks_are_bounds_unless_one_asks_for_what_is_reached() -> None:
    v100 = DEVICE_KINDS["V100-32GB"]
    assert v100.kernel_seconds([("float16", 125e12)], 0.0) == 1.0
    cluster = find_cluster("4x8xV100-32GB")
    reached = cluster.as_reached()
    assert reached.as_reached() == reached
    assert reached.memory == cluster.memory
    assert reached.between.bandwidth < cluster.between.bandwidth
    with pytest.raises(DeviceError, match="no figures are known of what H100-80GB reaches"):
        find_cluster("H100-80GB").as_reached()
    with pytest.raises(DeviceError, match="does not say what its devices are"):
        find_cluster("cpu").as_reached()
