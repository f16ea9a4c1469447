"""Predicted memory against what XLA allocates for a described CUDA cluster (marked ``aot``)."""

import jax
import pytest

from bench.predicted import Case, gpt, measure

SMALL = {"batch": 8, "hidden": 256, "layers": 3, "heads": 4, "sequence": 512, "vocabulary": 8192}


@pytest.mark.aot
@pytest.mark.parametrize(
    ("plan", "devices", "changes"),
    [
        ("single", 1, {}),
        ("data_parallel", 4, {"dropout": 0.0}),
        ("megatron(dp=2, tp=2)", 4, {"stacked": True, "remat": True}),
        ("co_shard(4)", 1, {"stacked": True}),
        ("accumulate(4, recompute_layers())", 1, {"stacked": True}),
        ("megatron(dp=2, tp=2, pp=2, microbatches=4)", 8, {"batch": 16, "stacked": True, "remat": True}),
    ],
)
def test_the_peak_is_within_15_percent(plan: str, devices: int, changes: dict[str, object]) -> None:
    case = Case(plan, devices, lambda: gpt(**SMALL | changes), "small")
    row = measure(case, "8xH100-80GB")
    assert row["value"] <= row["bound"], row
    assert jax.devices()[0].platform == "cpu"
