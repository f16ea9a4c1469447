"""Compiling for a cluster that need not be there: which devices, what is refused, and (marked ``aot``) what XLA says."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from report.stand_in import LAYERS, WIDTH, arguments, on_cpu, step

import jscaler
from jscaler.clusters import find_cluster
from jscaler.errors import DeviceError, UnknownNameError
from jscaler.plans import data_parallel, pipeline
from jscaler.report.target_report import TargetReport
from jscaler.runtime.target import blocks_alike


def compiled(target: Any, devices: int | None = None) -> TargetReport:
    return jscaler.parallelize("data_parallel", devices=devices, donate_argnums=0)(step).lower(*arguments()).compile(target)


def test_another_number_of_devices_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"'data_parallel' is for 4 devices and the target .* has 8; .*devices=8"):
        compiled("8xH100-80GB", devices=4)


def test_without_a_number_it_is_planned_for_the_target_s(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch)
    report = compiled("2xA100-40GB")
    assert len(jax.devices()) == 8
    assert report.plan.plan.num_devices == report.cluster.num_devices == 2


def test_a_finished_plan_is_for_its_own_number() -> None:
    plan = jscaler.parallelize("data_parallel", devices=2)(step).lower(*arguments()).plan.plan
    again = jscaler.parallelize(plan)(step).lower(*arguments())
    assert again.plan.plan.num_devices == 2
    with pytest.raises(DeviceError, match=r"plan 'data_parallel' is for 2 devices and the target '8xH100-80GB' has 8"):
        again.compile(target="8xH100-80GB")


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("8xH10", UnknownNameError, "no device kind named 'H10' in '8xH10'"),
        ("cpu", DeviceError, "cluster 'cpu' does not say what its devices are"),
        ("nowhere.toml", DeviceError, "cannot read the cluster file nowhere.toml"),
    ],
)
def test_targets_that_are_none(target: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compiled(target, devices=8)


def test_jax_s_compilation_cache_is_kept_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_cpu(monkeypatch)
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jax.jit(lambda x: x + 1).lower(1.0).compile()
        mine = set(tmp_path.iterdir())
        assert mine
        first, second = compiled("2xA100-40GB"), compiled("2xA100-40GB")
        assert first.memory == second.memory
        assert not [path for path in set(tmp_path.iterdir()) - mine if "step" in path.name]
        jax.jit(lambda x: x + 2).lower(1.0).compile()
        assert len(set(tmp_path.iterdir())) > len(mine)  # on again
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_blocks_are_alike_if_their_devices_lie_on_the_hosts_alike() -> None:
    policy = pipeline(LAYERS, 4, plan=data_parallel())
    made = jscaler.parallelize(policy, devices=2 * LAYERS)(step).lower(*arguments())
    pairs, across = (blocks_alike(made.plan, made.segments, find_cluster(f"{n}xV100-32GB")) for n in ("3x2", "2x3"))
    assert len({*pairs}) < len({*across}), "the second of three stages has a device on each host"
    assert all(first <= number for number, first in enumerate(across))


@pytest.mark.aot
def test_a_step_for_gpus() -> None:
    report = compiled("2x2xH100-80GB")
    state = 4 * (LAYERS * WIDTH * WIDTH + WIDTH * 8)
    assert (report.memory.parameters, report.memory.optimizer) == (state, state)
    assert report.memory.gradients >= state / 2
    stats = report.memory_analysis()
    assert report.xla["temp"] == stats.temp_size_in_bytes
    reserved = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert 0 <= report.memory.peak - reserved - stats.temp_size_in_bytes < 1024
    (reduced,) = report.collectives
    assert (reduced.kind, reduced.launches, reduced.groups, reduced.crosses) == ("all-reduce", 1, ((0, 1, 2, 3),), True)
    assert reduced.payload >= state
    assert any("state/params/layers" in c.op for c in report.contributors if c.kind == "gradients")


@pytest.mark.aot
def test_each_block_is_compiled_for_its_own_kind_of_device() -> None:
    """Also where two stages are one program; a group of several kinds is compiled for the slowest."""
    policy = pipeline([[0], [1], [2, 3]], 4, plan=data_parallel())
    report = jscaler.parallelize(policy, devices=4)(step).lower(*arguments()).compile("1xV100-32GB+2xA100-80GB+1xV100-16GB")
    kinds = {(0,): "Tesla V100-SXM3-32GB", (1,): "NVIDIA A100-SXM4-80GB", (2, 3): "Tesla V100-SXM2-16GB"}
    for block in report.blocks:
        devices = {d for one in jax.tree.leaves(block.compiled.output_shardings) for d in one.device_set}
        assert {d.device_kind for d in devices} == {kinds[block.devices]}
    sizes = {one.devices: one.memory.capacity for one in report.by_devices}
    assert sizes == {(0,): 34_089_730_048, (1,): 85_100_068_864, (2, 3): 16_935_682_048}
    assert "1 Tesla V100-SXM3-32GB, 2 NVIDIA A100-SXM4-80GB, 1 Tesla V100" in str(report)


@pytest.mark.aot
def test_what_does_not_fit() -> None:
    small = dataclasses.replace(find_cluster("4xV100-16GB"), memory=1 << 14)
    report = compiled(small)
    assert not report.fits
    assert "does not fit" in str(report)
