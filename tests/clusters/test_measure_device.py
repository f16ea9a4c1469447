"""What a device reaches is really run and really timed; ``calibrate`` from the device to a file that is read back."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from typer.testing import CliRunner

from jscaler.cli import app
from jscaler.clusters import find_cluster
from jscaler.clusters.device import find_kind
from jscaler.clusters.measure_device import DeviceSample, DeviceTrial, device_trials, fit_reached, measure_device

H200, V100 = find_kind("H200"), find_kind("V100-32GB")


def calibrate(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["calibrate", "--quick", *arguments])


def test_each_type_that_a_kind_has_units_for_is_measured() -> None:
    fields = [trial.field for trial in device_trials(H200, quick=True) if trial.what == "product"]
    assert fields == ["float64", "float32", "tensorfloat32", "float16", "bfloat16"]
    assert [t.field for t in device_trials(V100, quick=True) if t.what == "product"] == ["float64", "float32", "float16"]
    whole = list(device_trials(H200))
    assert {t.size for t in whole if t.what == "product"} == {1024, 2048, 4096, 8192}
    assert all(2 <= t.repeats <= 256 for t in whole)


@pytest.mark.parametrize("field", ["float64", "float32", "bfloat16"])
def test_a_product_is_repeated_in_the_program_and_counted(field: str) -> None:
    found = measure_device(DeviceTrial("product", field, 64, 8), jax.devices()[0], 2)
    assert found.amount == 2 * 64**3
    assert 1e-8 < found.seconds < 1


def test_a_pass_over_memory_is_read_and_written() -> None:
    found = measure_device(DeviceTrial("memory", "", 1 << 20, 8), jax.devices()[0], 2)
    assert found.amount == 2 << 20
    assert 1e5 < found.amount / found.seconds < 1e13


@pytest.mark.parametrize("number", [None, 1])
def test_products_beside_copies_take_as_long_or_longer(number: int | None) -> None:
    """To the host, or to another device; a product of which nothing is known but that it ends."""
    trial = DeviceTrial("beside", "float32", 64, 4)
    found = measure_device(trial, jax.devices()[0], 2, None if number is None else jax.devices()[number])
    assert 1 <= found.amount < 1e4
    assert 1e-8 < found.seconds < 1


def test_what_was_not_measured_has_its_usual_share() -> None:
    assert H200.reached is not None
    samples = [
        DeviceSample(DeviceTrial("product", "bfloat16", 1024, 2), 1e12, 0.01),
        DeviceSample(DeviceTrial("product", "bfloat16", 4096, 2), 1e12, 0.002),
        DeviceSample(DeviceTrial("memory", "", 1 << 30, 2), 2e9, 1e-3),
        DeviceSample(DeviceTrial("memory", "", 1 << 20, 2), 2e6, 1e-7),
        DeviceSample(DeviceTrial("chain", "", 16, 2), 1, 3.9e-6),
        DeviceSample(DeviceTrial("beside", "bfloat16", 8192, 2), 1.25, 0.002),
    ]
    found = fit_reached(samples, H200, H200.reached)
    assert found.products.bfloat16 == 5e14
    assert found.products.float16 == pytest.approx(H200.reached.products.float16)
    assert found.products.float8 == pytest.approx(H200.peak.float8 * 5e14 / H200.peak.bfloat16)
    assert (found.bandwidth, found.launch) == (2e12, pytest.approx(2.5e-6))
    assert found.interference == 1.25
    assert (found.inside, found.half_row) == (H200.reached.inside, H200.reached.half_row)
    assert fit_reached([], H200, H200.reached) == H200.reached


def test_from_a_device_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "lab.toml"
    found = calibrate("--devices", "1", "--like", "H200", "--out", str(path), "--json")
    assert found.exit_code == 0, found.output
    record = json.loads(found.output.splitlines()[-1])
    cluster = find_cluster(str(path))
    assert cluster.device is not None
    assert cluster.device.reached is not None
    assert vars(cluster.device.reached.products) == record["reached"]["products"]
    assert cluster.device.reached.launch == record["reached"]["launch"]
    assert (cluster.device.name, cluster.num_devices, cluster.device.peak) == ("cpu", 1, H200.peak)
    assert cluster.inside == find_cluster("1xH200").inside  # nothing to measure: as is usual
    assert cluster.interference == record["reached"]["interference"] >= 1
    assert len(record["samples"]) == 8
    assert path.read_text().startswith("# measured by jscaler calibrate on 1 × cpu")
    assert dataclasses.replace(cluster.at_peaks().device or H200, name="H200-141GB").peak == H200.peak


def test_a_device_without_a_data_sheet_has_to_be_likened() -> None:
    found = calibrate("--devices", "1")
    assert found.exit_code == 1
    assert "no data sheet is built in of 'cpu': say which kind it is like with --like (V100-16GB" in " ".join(
        str(found.exception).split()
    )
    assert "no device kind named 'K80' of --like" in str(calibrate("--devices", "1", "--like", "K80").exception)
