"""Described clusters: their devices, their refusals, and (marked ``aot``) what XLA makes of programs for them."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from report.programs import FOLDED, MERGED, PROGRAMS, launches, stored

from jscaler.clusters import DEVICE_KINDS, find_cluster
from jscaler.errors import DeviceError, UnknownNameError
from jscaler.report.hlo import AS_WRITTEN, collectives
from jscaler.report.targets import described_devices


@pytest.mark.parametrize("cluster", ["", "8", "8 x H100-80GB", "0xH100-80GB", "4x0xV100-32GB", "1x4x8xH100-80GB"])
def test_a_malformed_description_is_refused(cluster: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"no cluster named '{cluster}' \(or describe one: 8xH100-80GB"):
        described_devices(cluster)


@pytest.mark.parametrize(
    ("kind", "near"), [("h100-80gb", "H100-80GB"), ("V100-32", "V100-32GB"), ("H200-14", "H200-141GB")]
)
def test_an_unknown_kind_names_its_neighbour_and_the_known(kind: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=f"'{kind}' in '8x{kind}'; did you mean '{near}'. known: V100-16GB, .*H200"):
        described_devices(f"8x{kind}")


def refuse(**_: object) -> None:
    raise NotImplementedError("topology not implemented for cuda")


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        (None, r'not installed: pip install "jscaler\[aot\]"'),
        (object(), "did not load: .* JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1"),
    ],
)
def test_a_plugin_that_is_missing_or_did_not_load(monkeypatch, installed: object, expected: str) -> None:
    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed)
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    with pytest.raises(DeviceError, match=expected):
        described_devices("3xH100-80GB")
    assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ


def test_a_cluster_that_does_not_say_what_its_devices_are() -> None:
    with pytest.raises(DeviceError, match=r"cluster 'cpu' does not say what its devices are; .* such as 8xH100-80GB"):
        described_devices("cpu")


@pytest.mark.aot
def test_devices_host_by_host() -> None:
    devices = described_devices("4x8xV100-32GB")
    assert [d.process_index for d in devices] == [i // 8 for i in range(32)]
    assert {(d.platform, d.device_kind) for d in devices} == {("gpu", "Tesla V100-SXM3-32GB")}
    assert described_devices("4x8xV100-32GB") == devices
    assert jax.devices()[0].platform == "cpu"


@pytest.mark.aot
@pytest.mark.parametrize("kind", DEVICE_KINDS)
def test_every_kind_compiles(kind: str) -> None:
    assert len(described_devices(f"2x{kind}")) == 2


@pytest.mark.aot
@pytest.mark.parametrize("cluster", ["8xH100-80GB", "4x8xV100-32GB"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_collectives(cluster: str, name: str) -> None:
    assert launches(PROGRAMS[name].compiled(described_devices(cluster)).as_text()) == PROGRAMS[name].launches


@pytest.mark.aot
@pytest.mark.parametrize("name", MERGED | FOLDED)
def test_merged_collectives(name: str) -> None:
    program = (MERGED | FOLDED)[name]
    found = collectives(program.compiled(described_devices("8xH100-80GB")).as_text())
    assert [c.kind for c in found] == [program.kinds[0]]


@pytest.mark.aot
@pytest.mark.parametrize("name", MERGED | FOLDED)
def test_collectives_as_written(name: str) -> None:
    program = (MERGED | FOLDED)[name]
    assert launches(program.compiled(described_devices("8xH100-80GB"), AS_WRITTEN).as_text()) == program.launches


@pytest.mark.aot
def test_a_group_over_hosts() -> None:
    devices = described_devices("4x8xV100-32GB")
    mesh = jax.sharding.Mesh(np.array(devices).reshape(4, 8), ("host", "device"))
    spec = jax.sharding.PartitionSpec(("host", "device"))
    reduce = jax.shard_map(lambda a: jax.lax.psum(a, "host"), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    array = jax.ShapeDtypeStruct((64, 16), "float16", sharding=jax.sharding.NamedSharding(mesh, spec))
    compiled = jax.jit(reduce).lower(array).compile()
    (found,) = collectives(compiled.as_text())
    assert found.groups == tuple(tuple(range(d, 32, 8)) for d in range(8))
    assert (found.sent, found.dtypes) == (2 * 3 * 2 * 16 * 2 / 4, ("f16",))
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * 16 * 2


@pytest.mark.aot
def test_a_kind_of_one_s_own_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(
        'hosts = 2\ndevices_per_host = 4\n[device]\nname = "L40S"\nlike = "A100-40GB"\ncapability = "8.9"\n'
        "threads_per_core = 1536\nmemory = 47_700_000_000\nshared_per_core = 102_400\nshared_per_block = 101_376\n"
        "[inside]\nlatency = 1e-5\nbandwidth = 32e9\n[between]\nlatency = 2e-5\nbandwidth = 25e9\n"
    )
    devices = described_devices(path)
    assert [d.process_index for d in devices] == [0] * 4 + [1] * 4
    assert {d.device_kind for d in devices} == {"L40S"}


@pytest.mark.aot
def test_a_kind_that_the_compiler_does_not_know() -> None:
    unborn = dataclasses.replace(DEVICE_KINDS["H100-80GB"], name="Z1-80GB", capability=(99, 0))
    with pytest.raises(DeviceError, match=r"makes no code for Z1-80GB \(compute capability 99.0\): .*jscaler\[aot\]"):
        described_devices(dataclasses.replace(find_cluster("8xH100-80GB"), device=unborn))


@pytest.mark.aot
def test_devices_can_be_described_before_anything_else_and_without_settings() -> None:
    program = (
        "from jscaler.report.targets import described_devices\n"
        "print(len(described_devices('8xH100-80GB')))\n"
        "import os, jax\n"
        "print(float(jax.numpy.ones(3).sum()), 'JAX_SKIP_CUDA_CONSTRAINTS_CHECK' in os.environ)\n"
    )
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    run = subprocess.run([sys.executable, "-c", program], env=settings, capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["8", "3.0", "False"], run.stderr


@pytest.mark.aot
def test_stored_text_is_what_xla_writes() -> None:
    """If not: ``PYTHONPATH=. .venv-aot/bin/python tests/report/programs.py`` writes it."""
    (path,) = (Path(__file__).parent / "hlo").glob(f"*-jax-{version('jax')}.txt")
    assert stored(described_devices("8xH100-80GB")) == path.read_text()
