"""Is what the integer program finds the best, and how long does it take? Small graphs against all choices, and GPTs.

Rows ``all choices`` solve graphs of a few ops that are drawn, on two to four devices, and try every choice one after
another: ``value`` is the largest relative difference, ``count`` how many graphs. Rows of a GPT solve it within a device's
memory: ``seconds`` of the solve, tables included; ``found`` seconds of the step by the program, ``gap`` to what it proves,
``tables`` and ``cost`` what `Prices` and ``jscaler.cost`` say of the plan, ``peak`` in GB by ``cost``.
"""

import dataclasses
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jscaler
from bench.harness import Row, main
from jscaler.clusters import find_cluster
from jscaler.estimate.prices import Prices

COLUMNS = ("case", "mesh", "count", "seconds", "found", "gap", "tables", "cost", "peak", "value")
MESHES = ((4,), (2,), (3,), (2, 2))
MOST = 2_500  # choices that are tried, of each graph
SAME = 1e-6
NOTHING = 1e-12  # seconds: of graphs on links alone over which nothing need go
GB = 1e9


@dataclass(frozen=True)
class Case:
    """A GPT on V100s, 512 rows in micro-batches."""

    size: str
    mesh: tuple[int, ...]
    microbatches: int
    space: str
    stacked: bool = True
    quick: bool = False


CASES = (
    Case("1.3b", (2, 2), 32, "columns and rows", quick=True),
    Case("1.3b", (8,), 16, "free"),
    Case("1.3b", (2, 4), 16, "columns and rows", stacked=False),
    Case("2.6b", (2, 4), 32, "columns and rows"),
    Case("2.6b", (4, 2), 16, "columns and rows"),
    Case("2.6b", (4, 2), 16, "free"),
)


def columns_and_rows(graph: Any, devices: Any) -> None:
    """Rows of the batch on the first axis; heads, hidden units, words or positions on the second; all else is open."""
    from jscaler.spaces import any_split, maybe, one_of

    for op in graph.forward():
        split = any_split(0, "batch", copies="needed"), any_split(1, ("heads", "units", "words", "sequence"))
        graph.op_trans(op, *split)
        graph.recompute(op, maybe())
    graph.shard("*", one_of(None, "zero1", "zero2", "zero3"))


def rows(quick: bool, graphs: int, seconds: float) -> Iterator[Row]:
    yield all_choices(20 if quick else graphs)
    for case in CASES:
        if case.quick or not quick:
            yield measure(case, seconds)


def all_choices(graphs: int) -> Row:
    from jscaler.plan_search.program.fill import program_of
    from jscaler.spaces import space_of
    from tests.plan_search.brute import best
    from tests.plan_search.small_models import drawn, links_alone, splits_products

    worst, count, started = 0.0, 0, time.perf_counter()
    for seed in range(graphs):
        mesh = MESHES[seed % len(MESHES)]
        devices = math.prod(mesh)
        real = dataclasses.replace(find_cluster("8xA100-80GB"), devices_per_host=devices)
        prices = Prices(drawn(seed, 3 if len(mesh) == 1 else 1), real if seed % 3 else links_alone(1, devices))
        program = program_of(prices, space_of(splits_products, prices.graph, mesh), mesh, 1)
        if math.prod(len(node.choices) for node in program.nodes.by_name.values()) <= MOST:
            found = program.solve(60.0, 0.0)
            assert found is not None
            least, _ = best(program)
            worst, count = max(worst, abs(found.objective - least) / max(least, NOTHING)), count + 1
    taken = time.perf_counter() - started
    return {"case": "all choices", "count": count, "seconds": taken, "value": worst, "bound": SAME}


def measure(case: Case, seconds: float) -> Row:
    from bench.paper_models import Model
    from jscaler.plan_search.program import fill

    changes = () if case.stacked else (("stacked", False),)
    cluster = find_cluster(f"{math.prod(case.mesh)}xV100-32GB")
    prices = Prices(Model("gpt", case.size, 512, changes).graph, cluster)
    started = time.perf_counter()
    space = columns_and_rows if case.space != "free" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fill(prices, space, case.mesh, case.microbatches, 0.95 * cluster.memory, seconds)
        taken = time.perf_counter() - started
        cost = jscaler.cost(prices.graph, found.policy, cluster)
    shown = f"gpt-{case.size}{'' if case.stacked else ', a Python loop'}, {case.space}, {case.microbatches} micro-batches"
    row = {"case": shown, "mesh": "x".join(map(str, case.mesh)), "seconds": taken, "found": found.seconds}
    row |= {"gap": found.seconds / found.bound - 1, "tables": found.price.seconds}
    return row | {"cost": cost.seconds.total, "peak": cost.memory.peak / GB}


if __name__ == "__main__":
    options: dict[str, Any] = {
        "graphs": {"type": int, "default": 200, "help": "how many are drawn"},
        "seconds": {"type": float, "default": 120.0, "help": "for each solve"},
    }
    main("plan_program", (__doc__ or "").splitlines()[0], COLUMNS, rows, options=options)
