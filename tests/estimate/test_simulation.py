"""``jscaler.simulate``: a step on several groups in time, and what each device holds."""

import dataclasses
from typing import Any

import jax
import pytest
from layer_chain import step

import jscaler
from jscaler import PlanError, plans
from jscaler.clusters import find_cluster
from jscaler.clusters.device import find_kind
from jscaler.errors import UnknownNameError
from jscaler.lower.level import FRONT
from jscaler.tables import SCHEDULES
from jscaler.tables.simulator import UNITS, simulate_table

STAGES, MICROBATCHES = 2, 4


def lowered(schedule: str) -> Any:
    params = [jax.ShapeDtypeStruct((8, 8), "float32") for _ in range(4)]
    policy = plans.pipeline(STAGES, MICROBATCHES, schedule, batch="x")
    return jscaler.parallelize(policy, devices=STAGES)(step).lower(params, jax.ShapeDtypeStruct((16, 8), "float32"))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_v", "dualpipe_v", "chimera", "interleaved"])
def test_with_seconds_of_each_kind_a_step_takes_as_long_as_its_table(schedule: str) -> None:
    """The first stage has no gradient of its input to hand on: its I takes nothing where W is apart."""
    given = lowered(schedule)
    names = {given.plan.block_name(n) for n in range(len(given.plan.blocks))}
    seconds = {n: sum(UNITS[k] for _, k in own) for n, own in given.plan.instructions.names.items()}
    found = jscaler.simulate(given, seconds=[seconds.get(n, 0) for n in range(len(given.plan.blocks))])
    table = given.plan.instructions.table
    assert "0I" not in names
    empty = {cell for row in table.rows for e in row for cell in e.cells if cell.stage == 0 and cell.kind == "I"}
    whole = simulate_table(SCHEDULES[schedule].table(STAGES, MICROBATCHES))
    assert found.makespan <= whole.makespan
    assert found.makespan == whole.makespan or empty
    assert 0 <= found.bubble < 0.6


def test_sends_show_where_devices_wait_for_them() -> None:
    given = lowered("1f1b")
    blocks = [1.0] * len(given.plan.blocks)
    free, dear = (jscaler.simulate(given, seconds=blocks, hops=[hop] * len(given.plan.transfers)) for hop in (0.0, 2.0))
    assert free.exposed == 0
    assert dear.makespan == pytest.approx(free.makespan + dear.exposed)
    assert sum(one.waits for one in dear.runs) > sum(one.waits for one in free.runs) == 0


def test_blocks_are_slowed_down_beside_sends() -> None:
    """Blocks of a second at both ends of a send of half a second, with an interference of 2: a quarter more each."""
    device = find_kind("H100")
    assert device.reached is not None
    reached = dataclasses.replace(device.reached, interference=2.0)
    on = dataclasses.replace(find_cluster("2xH100-80GB"), device=dataclasses.replace(device, reached=reached))
    given = lowered("gpipe")
    names = [given.plan.block_name(number) for number in range(len(given.plan.blocks))]
    seconds = [float(name in ("0F", "1F")) for name in names]
    hops = [0.5 * (transfer.level != FRONT and number == 0) for number, transfer in enumerate(given.plan.transfers)]
    assert {one.name for one in jscaler.simulate(given, seconds=seconds, hops=hops).sends if one.end > one.begin} == {
        given.plan.transfers[0].tensor.name
    }
    slow = jscaler.simulate(given, on, seconds=seconds, hops=hops)
    first, second = ([(r.begin, r.end) for r in slow.runs if r.name == name] for name in ("0F", "1F"))
    # each first block's result is on its way beside the second one's
    assert first == [(0, 1), (1, 2.25), (2.25, 3.5), (3.5, 4.75)]
    assert second == [(1.5, 2.75), (2.75, 4.0), (4.0, 5.25), (5.25, 6.25)]
    at_once = jscaler.simulate(given, on, seconds=seconds, hops=hops, sends="rendezvous")
    assert {r.seconds for r in at_once.runs if r.name == "0F"} == {1.0}, "blocks wait for it"
    assert slow.exposed == pytest.approx(slow.makespan - jscaler.simulate(given, seconds=seconds).makespan)


def test_memory_over_time_has_the_estimate_s_peak() -> None:
    given = lowered("gpipe")
    found = jscaler.simulate(given, "8xH100-80GB")
    held = jscaler.cost(given, None, "8xH100-80GB").by_devices
    assert {own: found.peak(own[0]) for own in found.memory} == {one.devices: one.memory.peak for one in held}
    assert found.fits
    assert all(times == sorted(times) for states in found.memory.values() for times in [[t for t, _ in states]])


def test_what_it_is_told_is_looked_at() -> None:
    given = lowered("1f1b")
    with pytest.raises(PlanError, match="say how fast its devices are: give a cluster"):
        jscaler.simulate(given)
    with pytest.raises(PlanError, match="seconds= has 2 entries, and the step has 7 blocks: block 0, "):
        jscaler.simulate(given, seconds=[1.0, 2.0])
    with pytest.raises(UnknownNameError, match="no block named '0G'"):
        jscaler.simulate(given, seconds={"0G": 1.0})
    assert jscaler.simulate(given, seconds={"0F": 1.0}).makespan == MICROBATCHES
