"""The sweep of the paper's models: bounds below what they bound, micro-batches that need no extrapolation, a quick run."""

import dataclasses
import itertools
from pathlib import Path

import pytest

import jscaler
from bench.paper import rows_of
from bench.paper_bounds import LEVELS
from bench.paper_models import Model
from bench.paper_plans import configs
from bench.paper_sweep import Sweep, cluster_for, scaled
from jscaler.clusters import find_cluster

NANO = Model("gpt", "nano", 32, (("layers", 4),))


def test_a_quick_run_has_a_row_for_old_and_new_plans() -> None:
    found = list(rows_of(NANO, 4, quick=True))
    assert [row["new"] for row in found] == [False, False, True]
    assert all(row["fits"] and row["step_seconds"] > 0 and row["peak_bytes"] > 0 for row in found)
    assert found[-1]["speedup"] > 0
    assert "links" in found[-1]["sensitivity"]


def test_bounds_are_below_what_they_bound() -> None:
    sweep = Sweep(NANO, cluster_for(4), None)
    some = itertools.islice((one for one in configs(NANO, 4) if one.rows == 2 and one.schedule != "chimera"), 0, None, 23)
    for one in some:
        found = sweep.estimate(one.text)
        assert not found.error, found.error
        assert all(sweep.least(one, level) <= found.seconds * 1.001 for level in range(LEVELS)), one.text


def test_estimates_are_kept_for_the_next_run(tmp_path: Path) -> None:
    first = Sweep(NANO, cluster_for(4), tmp_path / "kept.jsonl")
    found = first.estimate("accumulate(4, data_parallel())")
    again = Sweep(NANO, cluster_for(4), tmp_path / "kept.jsonl")
    assert again.estimate("accumulate(4, data_parallel())") == found
    assert again.estimated == 0
    faster = again.estimate("accumulate(4, data_parallel())", scaled(again.cluster, compute=1.3))
    assert again.estimated == 1
    assert faster.seconds < found.seconds


@pytest.mark.parametrize("plan", ["pipeline(4, {m})", "accumulate({m}, data_parallel())"])
def test_seconds_grow_evenly_with_micro_batches_once_stages_are_full(plan: str) -> None:
    """What the simulation of all micro-batches says is what two short ones foretell."""
    cluster, seconds = find_cluster("4xV100-32GB"), {}
    for count in (8, 16, 32):
        rows = count * (4 if "accumulate" in plan else 1)
        graph = dataclasses.replace(NANO, batch=rows).graph
        seconds[count] = jscaler.cost(graph, plan.format(m=count), cluster).seconds.total
    assert seconds[32] == pytest.approx(seconds[16] + 2 * (seconds[16] - seconds[8]), rel=0.02)
