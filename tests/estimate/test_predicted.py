"""Predicted memory against what XLA allocates for a described CUDA cluster (marked ``aot``)."""

import jax
import pytest

from bench.predicted import Case, gpt, measure
from jscaler.report.targets import described_devices

SMALL = {"hidden": 256, "layers": 3, "heads": 4, "sequence": 512, "vocabulary": 8192}


@pytest.mark.aot
@pytest.mark.parametrize(
    ("plan", "devices", "changes"),
    [
        ("single", 1, {}),
        ("data_parallel", 4, {"dropout": 0.0}),
        ("megatron(dp=2, tp=2)", 4, {"stacked": True, "remat": True}),
        ("co_shard(4)", 1, {"stacked": True}),
        ("accumulate(4, recompute_layers())", 1, {"stacked": True}),
    ],
)
def test_the_peak_is_within_15_percent(plan: str, devices: int, changes: dict[str, object]) -> None:
    case = Case(plan, devices, lambda: gpt(8, **SMALL, **changes), "small")
    row = measure(case, "8xH100-80GB", described_devices("8xH100-80GB"))
    assert abs(row["ratio"] - 1) <= 0.15, row
    assert jax.devices()[0].platform == "cpu"
