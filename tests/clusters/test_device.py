"""Kinds of devices: plausible figures, names, and what a matrix product of each type runs at."""

import pytest

from jscaler.clusters import DEVICE_KINDS, DeviceKind
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
    ],
)
def test_flops_of_a_product(kind: str, dtype: str, expected: float) -> None:
    assert DEVICE_KINDS[kind].peak.of(dtype) == expected


def test_a_kind_by_the_name_of_its_generation_where_that_is_one() -> None:
    assert find_kind("H100") is DEVICE_KINDS["H100-80GB"]
    with pytest.raises(UnknownNameError, match="no device kind named 'A100'; did you mean 'A100-80GB'"):
        find_kind("A100")
