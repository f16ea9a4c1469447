"""The sweep of the paper's models: bounds below what they bound, micro-batches that need no extrapolation, a quick run."""

import dataclasses
from pathlib import Path

import pytest

import jscaler
from bench.paper import record_rows, recorded, rows_of
from bench.paper_bounds import LEVELS
from bench.paper_estimates import Estimates
from bench.paper_models import GPUS, SIZES, Model
from bench.paper_pictures import draw
from bench.paper_plans import configs
from bench.paper_scaling import VARIANTS, fetched, step_seconds
from bench.paper_sweep import CLOSE, Sweep, cluster_for, scaled
from jscaler.clusters import find_cluster
from jscaler.estimate.block_costs import block_seconds, hop_seconds
from jscaler.estimate.query import planned
from jscaler.estimate.timed_step import timed_step
from jscaler.materialize import parse_layout

NANO = Model("gpt", "nano", 32, (("layers", 4),))


@pytest.mark.one_day_in(5)
def test_a_quick_run_has_a_row_for_old_and_new_plans() -> None:
    found = list(rows_of(NANO, 4, Estimates(), quick=True))
    assert [row["new"] for row in found] == [False, False, True]
    assert all(row["fits"] and row["step_seconds"] > 0 and row["peak_bytes"] > 0 for row in found)
    assert found[-1]["speedup"] > 0
    assert "links" in found[-1]["sensitivity"]


@pytest.mark.one_day_in(5)
def test_bounds_are_below_what_they_bound_and_the_best_is_that_of_all() -> None:
    sweep = Sweep(NANO, cluster_for(4))
    some = [one for one in configs(NANO, 4) if one.dp * one.rows == 2 and one.tp < 4 and one.parts < 4 and not one.sequence]
    some = [
        one for one in some if one.plan in ("megatron", "interleaved", "co_shard") and one.pp < 4 and one.zero in (0, 2)
    ]
    found = [sweep.estimate(one.text) for one in some]
    for one, estimate in zip(some, found, strict=True):
        assert not estimate.error, estimate.error
        assert all(sweep.least(one, level) <= estimate.seconds * 1.001 for level in range(LEVELS)), one.text
    half = sorted(estimate.peak for estimate in found)[len(found) // 2]
    for memory in (max(estimate.peak for estimate in found), half):
        cluster = dataclasses.replace(sweep.cluster, memory=memory)
        known = Estimates()
        known.kept = {key: dataclasses.replace(one, fits=one.peak <= memory) for key, one in sweep.estimates.kept.items()}
        best = Sweep(NANO, cluster, known).best(some)
        fastest = min(estimate.seconds for estimate in found if estimate.peak <= memory)
        assert best is not None
        assert best[1].fits
        assert fastest <= best[1].seconds <= fastest / (1 - CLOSE)


def test_estimates_are_kept_for_the_next_run(tmp_path: Path) -> None:
    first = Sweep(NANO, cluster_for(4), Estimates(tmp_path / "kept.jsonl"))
    found = first.estimate("accumulate(4, data_parallel())")
    again = Sweep(NANO, cluster_for(4), Estimates(tmp_path / "kept.jsonl"))
    assert again.estimate("accumulate(4, data_parallel())") == found
    assert again.estimated == 0
    faster = again.estimate("accumulate(4, data_parallel())", scaled(again.cluster, compute=1.3))
    assert again.estimated == 1
    assert faster.seconds < found.seconds


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("plan", ["pipeline(4, {m})", "accumulate({m}, data_parallel())"])
def test_seconds_grow_evenly_with_micro_batches_once_stages_are_full(plan: str) -> None:
    """What the simulation of all micro-batches says is what two short ones foretell."""
    cluster, seconds = find_cluster("4xV100-32GB"), {}
    for count in (8, 16, 32):
        rows = count * (4 if "accumulate" in plan else 1)
        graph = dataclasses.replace(NANO, batch=rows).graph
        seconds[count] = jscaler.cost(graph, plan.format(m=count), cluster).seconds.total
    assert seconds[32] == pytest.approx(seconds[16] + 2 * (seconds[16] - seconds[8]), rel=0.02)


@pytest.mark.one_day_in(2)
def test_a_plan_takes_longer_the_less_of_its_communication_is_searched() -> None:
    """On two hosts of four, a stage on each: all that cross are sent to each of four devices, or to one of them."""
    cluster = dataclasses.replace(scaled(find_cluster("2x4xV100-32GB")), name="two hosts")
    wide = (*NANO.changes, ("hidden", 512), ("sequence", 1024))
    step = planned(
        dataclasses.replace(NANO, batch=8, changes=wide).graph, "megatron(dp=1, tp=4, pp=2, microbatches=4)", cluster
    )
    p2p, within, searched = (step_seconds(step, cluster, variant, "rendezvous") for variant in VARIANTS)
    assert p2p > within > searched
    runs, _ = timed_step(step, block_seconds(step, cluster), hop_seconds(step, cluster), "rendezvous")
    assert searched == pytest.approx(max(run.end for run in runs))


def test_every_device_is_sent_all_that_it_needs() -> None:
    cluster, shape, nbytes = scaled(find_cluster("2x4xV100-32GB")), (1 << 20, 4), 4 << 20
    copies = [parse_layout(f"R4 V1 D(1,1) on [{devices}]", shape) for devices in ("0 1 2 3", "4 5 6 7")]
    summands = parse_layout("R1 V4 D(1,1) on [0 1 2 3]", shape)
    across, inside = cluster.between, cluster.inside
    assert fetched(copies[0], copies[1], 1, cluster) == pytest.approx(across.latency + 4 * nbytes / across.bandwidth)
    assert fetched(summands, copies[0], 1, cluster) == pytest.approx(3 * (inside.latency + nbytes / inside.bandwidth))
    assert fetched(copies[0], copies[0], 1, cluster) == 0


@pytest.mark.one_day_in(2)
def test_pictures_of_rows_are_drawn(tmp_path: Path) -> None:
    known = {"gpus": 4, "fits": True, "memory": "XLA", "model": "gpt-1.3b"}
    rows = [
        {**known, "plan": "megatron: x", "new": False, "step_seconds": 2.0, "peak_bytes": 3e10},
        {**known, "plan": "co_shard: y", "new": True, "step_seconds": 1.0, "peak_bytes": 2e10, "paper": 1.5},
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in draw(rows, tmp_path))


def test_rows_are_recorded_in_place_of_those_of_their_model_and_size(tmp_path: Path) -> None:
    path = tmp_path / "paper.jsonl"
    first = {"model": "gpt-2.6b", "gpus": 8, "plan": "zero1: x", "fits": True, "sweep_seconds": 3.0}
    record_rows([first, first | {"plan": "zero2: y"}], path)
    record_rows([{"model": "swin-1.8b", "gpus": 4, "plan": "zero3: z", "fits": False}], path)
    record_rows([first | {"plan": "zero3: z"}], path)
    assert [(row["model"], row["plan"]) for row in recorded(path)] == [("swin-1.8b", "zero3: z"), ("gpt-2.6b", "zero3: z")]
    assert "sweep_seconds" not in recorded(path)[1]
    every = {(row["model"], row["gpus"]) for row in recorded()}
    assert every == {(f"{name}-{size}", gpus) for name in SIZES for size, gpus in zip(SIZES[name], GPUS, strict=True)}


@pytest.mark.aot
def test_xla_says_the_memory_of_what_leads(tmp_path: Path) -> None:
    sweep = Sweep(NANO, cluster_for(4), Estimates(tmp_path / "kept.jsonl"))
    text = "pipeline(2, 4, plan=data_parallel())"
    estimated = sweep.estimate(text)
    sweep.compiled(text)
    again = Sweep(NANO, cluster_for(4), Estimates(tmp_path / "kept.jsonl")).estimate(text)
    assert (again.memory, again.seconds) == ("XLA", estimated.seconds)
    assert again.peak == pytest.approx(estimated.peak, rel=0.15)
