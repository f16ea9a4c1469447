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
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from jscaler.clusters import Cluster, find_cluster
from jscaler.errors import DeviceError
from jscaler.lower.step_plan import StepPlan
from jscaler.report.buffers import Dump, dump_options, read_dump
from jscaler.report.target_report import (
    CompiledBlock,
    TargetReport,
    collective_rows,
    send_rows,
    together,
    xla_bytes,
)  # fmt: skip
from jscaler.report.targets import described_as, device_kind
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
    """The cluster that a target names (`clusters.find_cluster`), or the cluster itself.

    Raises:
        UnknownNameError: no such cluster.
        DeviceError: the cluster does not say what its devices are.
    """
    cluster = target if isinstance(target, Cluster) else find_cluster(target)
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
    progress("describing the devices")
    kinds = [device_kind(cluster.of(block.group.devices)) for block in step.blocks]
    described = {kind: described_as(cluster, kind) for kind in kinds}
    started = time.perf_counter()
    progress("lowering to StableHLO")
    made = {kind: executable(step, devices, donated) for kind, devices in described.items()}
    each = {kind: lowered(step, one, {n for n, own in enumerate(kinds) if own == kind}) for kind, one in made.items()}
    programs = [each[kind][number] for number, kind in enumerate(kinds)]
    before = time.perf_counter()
    alike = blocks_alike(step, programs, cluster)
    found: dict[int, tuple[Any, Dump]] = {}
    for number in dict.fromkeys(alike):
        name = f" {step.block_name(number)}, {len(found) + 1} of {len({*alike})}" if len(programs) > 1 else ""
        progress(f"compiling{name} with XLA")
        found[number] = _compiled(programs[number])
    seconds = {"lower": before - started, "compile": time.perf_counter() - before}
    progress("reading the buffer assignment")
    compiled, dumps = zip(*(found[number] for number in alike), strict=True)
    whole = made[kinds[0]]  # names and numbers of arguments are alike for all kinds
    named = [whole.blocks[number].named for number in alike]
    memory = compiled_memory(step, dumps, named, whole.ins.numbers(donated), lambda own: cluster.of(own).memory)
    blocks = tuple(_block(step, number, alike[number], one) for number, one in enumerate(compiled))
    rows = [row for one in blocks for row in collective_rows(one.as_text(), one.devices, cluster, one.times)]
    rows += send_rows(step, cluster)
    return TargetReport(step, cluster, memory, together(rows), blocks, seconds)


def blocks_alike(step: StepPlan, programs: Sequence[Any], cluster: Cluster) -> list[int]:
    """For each block the first of the same text whose devices are of one kind, and lie on the hosts in the same way."""
    first: dict[Any, int] = {}
    found = []
    for number, (block, program) in enumerate(zip(step.blocks, programs, strict=True)):
        hosts = cluster.hosts_of(np.array(block.group.devices)).tolist()
        known = {host: i for i, host in enumerate(dict.fromkeys(hosts))}
        kind = device_kind(cluster.of(block.group.devices))
        found.append(first.setdefault((program.as_text(), kind, tuple(known[host] for host in hosts)), number))
    return found


def _compiled(program: Any) -> tuple[Any, Dump]:
    """XLA's executable of a program, and its account of the memory."""
    with tempfile.TemporaryDirectory(prefix="jscaler-") as folder:
        with without_cache():
            compiled = program.compile({**WITHOUT_GPU, **dump_options(Path(folder))})
        return compiled, read_dump(Path(folder))


def _block(step: StepPlan, number: int, alike: int, compiled: Any) -> CompiledBlock:
    flops = float((compiled.cost_analysis() or {}).get("flops", 0.0))
    xla = xla_bytes(compiled.memory_analysis())
    return CompiledBlock(
        step.block_name(number), step.blocks[number].group.devices, step.runs_of(number), xla, flops, alike, compiled
    )
