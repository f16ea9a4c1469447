"""What XLA needs for a plan, where it can be asked: JAX's CUDA plugin is installed (extra ``aot``)."""

from collections.abc import Callable
from typing import Any

from jscaler.clusters import Cluster
from jscaler.plan_search.candidates import Candidate
from jscaler.report.targets import plugin_installed
from jscaler.runtime.target import compile_for


def asked_of_xla(cluster: Cluster, wanted: bool | None = None) -> Callable[[Candidate], int | None] | None:
    """A function that compiles a plan for ``cluster`` and gives the bytes on a device; None where it cannot be asked.

    Args:
        wanted: whether to ask; by default where the plugin is installed.
    """
    if not (plugin_installed() if wanted is None else wanted):
        return None

    def peak(candidate: Candidate, told: Callable[[str], Any] = lambda stage: None) -> int | None:
        assert candidate.cost is not None
        step = candidate.cost.step
        graph = step.captured if step.captured is not None else step.source
        donated = sorted(graph.next_version.values())
        return compile_for(step, cluster, donated, told).memory.peak

    return peak
