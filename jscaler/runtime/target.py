"""Compile a planned step for a cluster that need not be there: does it fit, what takes the memory, what travels?"""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jscaler.clusters import Cluster, find_cluster
from jscaler.errors import DeviceError
from jscaler.lower.segment import only
from jscaler.lower.step_plan import StepPlan
from jscaler.report.buffers import dump_options, read_dump
from jscaler.report.target_report import TargetReport, collective_rows, xla_bytes
from jscaler.report.targets import described_devices, device_kind
from jscaler.report.xla_memory import compiled_memory
from jscaler.runtime.executable import executable, lowered

Target = str | os.PathLike[str] | Cluster
# Without a GPU to try them on, XLA chooses Triton tiles for a matmul that it then cannot compile.
WITHOUT_GPU: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
_CACHE = threading.Lock()


@contextmanager
def without_cache() -> Iterator[None]:
    """JAX's persistent compilation cache is neither read nor written: an executable from there comes without a dump.

    JAX asks once in a process whether the cache is on, so it is made to ask again, before and after. What other threads
    compile meanwhile misses the cache, and no more.
    """
    with _CACHE:
        settings = jax.config.values
        if not (settings["jax_compilation_cache_dir"] and settings["jax_enable_compilation_cache"]):
            yield
            return
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", True)
            compilation_cache.reset_cache()


def find_target(target: Target) -> Cluster:
    """The cluster that a target names (``jscaler.cost.find_cluster``), or the cluster itself.

    Raises:
        UnknownNameError: no such cluster.
        DeviceError: the cluster does not say what its devices are.
    """
    cluster = target if isinstance(target, Cluster) else find_cluster(os.fspath(target))
    device_kind(cluster)
    return cluster


def compile_for(
    step: StepPlan, target: Target, donated: Sequence[int] = (), progress: Callable[[str], Any] = lambda stage: None
) -> TargetReport:
    """Compile a plan for a described CUDA cluster, without a GPU. Needs the extra ``aot``.

    Args:
        step: the plan, for as many devices as the target has.
        target: ``"8xH100-80GB"``, ``"4x8xV100-32GB"``, a built-in cluster's name, a TOML file, or a `Cluster`.
        donated: flat positions of the arguments whose buffers the step may reuse.
        progress: is told each stage before it begins.

    Raises:
        UnknownNameError: no such cluster or device kind.
        DeviceError: the target has another number of devices; or its devices cannot be described (see
            ``described_devices``).
    """
    cluster = find_target(target)
    if step.plan.num_devices != cluster.num_devices:
        raise DeviceError(
            f"the plan '{step.name}' is for {step.plan.num_devices} devices and the target '{cluster.name}' has "
            f"{cluster.num_devices}; plan for {cluster.num_devices}: parallelize(..., devices={cluster.num_devices})"
        )
    only(step.segments, "the report on a target")
    progress("describing the devices")
    devices = described_devices(cluster)
    started = time.perf_counter()
    progress("lowering to StableHLO")
    (program,) = lowered(step, executable(step, devices, donated))
    before = time.perf_counter()
    progress("compiling with XLA")
    with tempfile.TemporaryDirectory(prefix="jscaler-") as folder:
        with without_cache():
            compiled = program.compile({**WITHOUT_GPU, **dump_options(Path(folder))})
        seconds = {"lower": before - started, "compile": time.perf_counter() - before}
        progress("reading the buffer assignment")
        dump = read_dump(Path(folder))
    memory, contributors = compiled_memory(step, dump, cluster.memory)
    return TargetReport(
        step,
        cluster,
        memory,
        contributors,
        collective_rows(compiled.as_text(), step.program.group.devices, cluster.devices_per_host),
        xla_bytes(compiled.memory_analysis()),
        float((compiled.cost_analysis() or {}).get("flops", 0.0)),
        seconds,
        compiled,
    )
