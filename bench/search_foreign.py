"""Models that were not written for jscaler under ``"auto"``, with less and less memory: right, and within the limit?

For each model of `bench.foreign_models` a plan is searched for 4 V100 with 100, 50 and 25 % of the memory that plain data
parallelism takes (by ``jscaler.cost``), and runs on 4 virtual devices. ``right``: two steps give what ``jax.jit`` gives (as
in `bench.foreign`, also in float64 where rounding hides it); ``of_limit`` is the plan's peak by the limit, at most 1; where
nothing fits ``why`` says so.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import jscaler
from bench.foreign import IN_FLOAT64, TOLERANCE, Plain, difference, holds, off_in_float64, one_device, run
from bench.foreign_models import MODELS
from bench.harness import Row, main
from jscaler.clusters import Cluster, find_cluster
from jscaler.plan_search.engine import search_graph
from jscaler.plan_search.found import nothing_fits
from jscaler.spaces import as_spaces

COLUMNS = ("model", "memory", "plan", "right", "off", "of_limit", "gap", "seconds", "value", "bound", "why")
CLUSTER, DEVICES = "4xV100-32GB", 4
PARTS = (1.0, 0.5, 0.25)


def rows(quick: bool, model: str, seconds: float) -> Iterator[Row]:
    for number, name in enumerate(MODELS):
        if holds(name, model) and not (quick and number % 12):
            yield from of_model(name, seconds)


def of_model(name: str, seconds: float) -> Iterator[Row]:
    """A row for each limit."""
    plain, cluster = one_device(name, True), find_cluster(CLUSTER)
    model = plain.model
    step = model.step(jscaler)
    graph = jscaler.parallelize("single", devices=1)(step).graph(*model.arguments())
    whole = peak_of_data_parallel(graph, cluster)
    for part in PARTS:
        yield {"model": name, "memory": f"{part:.0%}", **searched(plain, graph, cluster, part * whole, seconds)}


def peak_of_data_parallel(graph: Any, cluster: Cluster) -> float:
    """Bytes of a device under plain data parallelism; of one device alone where the batch does not divide."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return jscaler.cost(graph, "data_parallel", cluster).memory.peak
        except jscaler.JscalerError:
            assert cluster.device is not None
            return jscaler.cost(graph, "single", cluster.device.name).memory.peak


def searched(plain: Plain, graph: Any, cluster: Cluster, memory: float, seconds: float) -> Row:
    """What is found within so many bytes, and whether it is right."""
    found = search_graph(graph, cluster, as_spaces(None), seconds=seconds, memory=memory)
    row: Row = {"seconds": found.searched, "gap": float(found.gap), "value": 0, "bound": 0}
    if found.plan is None or found.chosen is None:
        return {**row, "why": nothing_fits(found)[0]}
    step = jscaler.parallelize(found.plan, donate_argnums=())(plain.model.step(jscaler))
    try:
        off = difference(plain, *run(plain.model, step))
    except Exception as error:  # a plan that is found runs
        return {
            **row,
            "plan": found.chosen.text,
            "right": False,
            "value": 1,
            "why": f"{type(error).__name__}: {error}"[:200],
        }
    right = off <= TOLERANCE or off_in_float64(plain.model, found.plan, DEVICES) <= IN_FLOAT64
    of_limit = found.chosen.peak / memory
    return {
        **row, "plan": found.chosen.text, "right": right, "off": off, "of_limit": of_limit,
        "value": int(not right or of_limit > 1),
    }  # fmt: skip


OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"default": "", "help": "only models whose names hold this"},
    "seconds": {"type": float, "default": 20.0, "help": "of each search"},
}

if __name__ == "__main__":
    main("search_foreign", __doc__ or "", COLUMNS, rows, devices=DEVICES, options=OPTIONS)
