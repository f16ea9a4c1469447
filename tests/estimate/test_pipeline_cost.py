"""Memory and seconds of steps on several device groups: over the instructions, against slow and obvious counts."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from report.stand_in import LAYERS, WIDTH, arguments, on_cpu, step

import jscaler
from jscaler.estimate.live import LiveTensors
from jscaler.estimate.memory import memory_by_devices
from jscaler.estimate.timed_step import timed_step
from jscaler.estimate.waiting import Waiting
from jscaler.lower.instructions import Gather, Run, Send
from jscaler.lower.step_plan import StepPlan
from jscaler.plans import data_parallel, pipeline
from jscaler.report.target_report import SEND, TargetReport

STAGES, MICROBATCHES = LAYERS, 4
PLANS = ["1f1b", "gpipe"]


def lowered(plan: Any, devices: int) -> Any:
    return jscaler.parallelize(plan, devices=devices, donate_argnums=0)(step).lower(*arguments())


@pytest.fixture(scope="module", params=PLANS)
def plan(request: pytest.FixtureRequest) -> StepPlan:
    return lowered(pipeline(STAGES, MICROBATCHES, request.param), STAGES).plan


def reads_and_writes(one: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(one, Run):
        return one.reads, one.writes
    return ((one.source,), (one.target,)) if isinstance(one, Send) else (one.pieces, (one.target,))


def bytes_of_slots(step: StepPlan) -> dict[int, tuple[frozenset[int], int]]:
    """Slot -> the devices that hold it, and its bytes on each, where nothing is donated."""
    found: dict[int, tuple[frozenset[int], int]] = {}
    for one in step.instructions.steps:
        if isinstance(one, Run):
            block = step.blocks[one.block]
            untouched = {*block.flat.inputs[: len(block.takes)]}
            for place, (slot, var) in enumerate(zip(one.writes, block.flat.outputs, strict=True)):
                kept = place < len(block.results) and not hasattr(var, "val") and var in untouched
                size = 0 if kept or hasattr(var, "val") else var.aval.size * var.aval.dtype.itemsize
                found[slot] = frozenset(block.group.devices), size
        elif isinstance(one, Send):
            sent = step.transfers[one.transfer]
            parts = jax.ShapeDtypeStruct(sent.crossing.target.local_shape, sent.tensor.dtype)
            found[one.target] = frozenset(sent.crossing.target.mesh.devices), parts.size * parts.dtype.itemsize
        else:
            assert isinstance(one, Gather)
            found[one.target] = found[one.pieces[0]][0], sum(found[slot][1] for slot in one.pieces)
    return found


@pytest.mark.parametrize(
    ("policy", "devices"),
    [
        *((pipeline(STAGES, MICROBATCHES, schedule), STAGES) for schedule in PLANS),
        (pipeline(2, MICROBATCHES, plan=data_parallel()), 4),  # of unequal ranges: the stack lies on all devices
    ],
)
def test_what_waits_is_what_was_written_and_is_read_later(policy: Any, devices: int) -> None:
    step: StepPlan = lowered(policy, devices).plan
    steps, sizes = step.instructions.steps, bytes_of_slots(step)
    written = {slot: place for place, one in enumerate(steps) for slot in reads_and_writes(one)[1]}
    last = {slot: place for place, one in enumerate(steps) for slot in reads_and_writes(one)[0]}
    last |= dict.fromkeys(range(len(step.graph.outputs)), len(steps))
    waiting = Waiting(step, LiveTensors(step.graph))
    runs = list(waiting.runs())
    assert {run.place for run in runs} == {i for i, one in enumerate(steps) if isinstance(one, Run)}
    assert sorted(d for own in waiting.alike for d in own) == list(range(step.plan.num_devices))
    for run, waits in zip(runs, waiting.at(runs), strict=True):
        device = run.devices[0]
        alive = [s for s, at in written.items() if at < run.place <= last.get(s, -1) and device in sizes[s][0]]
        assert sum(run.waiting.values()) == sum(sizes[s][1] for s in alive)
        assert sum(held.what.nbytes for held in waits) == sum(sizes[s][1] for s in alive)


def test_a_stage_holds_as_many_micro_batches_as_are_under_way() -> None:
    one_by_one, all_at_once = (lowered(pipeline(STAGES, MICROBATCHES, s), STAGES).plan for s in PLANS)
    first, second = (memory_by_devices(step)[0].memory for step in (one_by_one, all_at_once))
    saved = WIDTH * 512 // MICROBATCHES * 4  # of one micro-batch
    assert second.activations - first.activations >= saved * (MICROBATCHES - STAGES)
    peaks = [found.memory.peak for found in memory_by_devices(one_by_one)]
    assert peaks == sorted(peaks, reverse=True), "earlier stages hold more"
    held = memory_by_devices(one_by_one)[0]
    assert max(moment.nbytes for moment in held.timeline) == held.memory.peak
    assert all(sum(moment.kinds.values()) == moment.nbytes for moment in held.timeline)
    assert held.memory.at.startswith("0B of micro-batch 0, at ")


def test_a_step_takes_as_long_as_its_table(plan: StepPlan) -> None:
    names = {n: own for n, own in plan.instructions.names.items() if n not in plan.instructions.ends}
    seconds = [sum({"F": 1.0, "B": 2.0}[kind] for _, kind in names.get(n, ())) for n in range(len(plan.blocks))]
    fast, slow, rendezvous = (
        max(one.end for one in timed_step(plan, seconds, [hop] * len(plan.transfers), sends)[0])
        for hop, sends in ((0.0, "asynchronous"), (0.5, "asynchronous"), (0.5, "rendezvous"))
    )
    assert fast == 3 * (MICROBATCHES + STAGES - 1)
    assert fast < slow < rendezvous


def test_the_cost_of_a_pipeline(plan: StepPlan) -> None:
    found = jscaler.cost(plan, None, "4xH100-80GB")
    assert [share.devices for share in found.shares] == [(0,), (1,), (2,)]
    assert found.seconds.total == pytest.approx(found.elapsed)
    assert 0 < found.seconds.idle < 1
    alone = jscaler.cost(lowered("single", 1), None, "4xH100-80GB")
    assert found.total_flops == pytest.approx(alone.flops)
    assert alone.elapsed is None
    assert found.flops < alone.flops
    sent = found.sent.kinds["send"]
    assert sent[0] >= MICROBATCHES
    assert json.loads(json.dumps(found.as_json()))["shares"][0]["devices"] == [0]
    for word in ("waiting", "[0]", "[1]", "[2]", "0B of micro-batch 0"):
        assert word in str(found)


@pytest.fixture(scope="module")
def report() -> Iterator[TargetReport]:
    with pytest.MonkeyPatch.context() as patch:
        on_cpu(patch)
        yield lowered(pipeline(STAGES, MICROBATCHES), STAGES).compile(target="3xV100-32GB")


def test_a_target_s_report_of_a_pipeline(report: TargetReport) -> None:
    assert [one.devices for one in report.by_devices] == [(0,), (1,), (2,)]
    text, record = str(report), json.loads(json.dumps(report.as_json()))
    assert [one["memory"]["peak"] for one in record["by_devices"]] == [one.memory.peak for one in report.by_devices]
    assert report.memory.peak == max(one.memory.peak for one in report.by_devices)
    for one in report.by_devices:
        assert sum(c.nbytes for c in one.contributors) == one.memory.peak
        assert one.at.split(" of ")[0] in text
    names = [block.name for block in report.blocks]
    assert {"0F", "1F", "1B", "0B", "2F", "2F 2B end", "2B"} <= {*names}
    sends = [row for row in report.collectives if row.kind == SEND]
    assert {row.groups for row in sends} >= {((0,), (1,)), ((1,), (2,)), ((2,), (1,)), ((1,), (0,))}
    assert all(row.crosses is False for row in sends)
    assert "state/params/layers" in text
    assert report.as_text(names.index("1F")).startswith("HloModule")
    with pytest.raises(jscaler.JscalerError, match="several device groups"):
        report.compiled


def test_equal_stages_are_compiled_once(report: TargetReport) -> None:
    alike = [number for number, block in enumerate(report.blocks) if block.alike != number]
    assert alike, "the update of one middle stage is that of another"
    for number in alike:
        assert report.blocks[number].xla == report.blocks[report.blocks[number].alike].xla


def test_stages_of_one_program_are_lowered_once_and_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch)
    state, batch = arguments()
    params = {**state["params"], "layers": jax.ShapeDtypeStruct((5, WIDTH, WIDTH), "float32")}
    made = jscaler.parallelize(pipeline(5, MICROBATCHES), devices=5)(step).lower(
        {"params": params, "moments": params}, batch
    )
    named = {made.plan.block_name(number): one.named for number, one in enumerate(made.executable.blocks)}
    assert named["0F"] < named["1F"] == named["2F"] == named["3F"] < named["1B"] == named["2B"] == named["3B"]
    for stage, one in enumerate(made.compile(target="5xV100-32GB").by_devices):
        layers = {found[1] for c in one.contributors if (found := re.match(r"layer/\w+\[(\d+):", c.op))}
        assert layers == {str(stage)}, one


def test_predicted_and_compiled_memory_go_over_the_same_table(report: TargetReport) -> None:
    for guess, found in zip(memory_by_devices(report.plan), report.by_devices, strict=True):
        assert guess.devices == found.devices
        assert (guess.memory.parameters, guess.memory.optimizer) == (found.memory.parameters, found.memory.optimizer)
        assert guess.memory.at.split(", at ")[0] == found.at


def test_stages_of_one_device_each_that_are_not_there() -> None:
    stages = 9
    assert len(jax.devices()) < stages
    kernels = {f"layer_{i}": jax.ShapeDtypeStruct((4, 4), "float32") for i in range(stages)}

    def nine(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            x = batch
            for i in range(stages):
                with jax.named_scope(f"layer_{i}"):
                    x = jax.numpy.tanh(x @ p[f"layer_{i}"])
            return (x**2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jscaler.grad(loss)(params))

    made = jscaler.parallelize(pipeline(stages, 2), devices=stages)(nine).lower(
        kernels, jax.ShapeDtypeStruct((4, 4), "float32")
    )
    assert "0F" in str(made)
    assert jscaler.cost(made, None, "9xH100-80GB").shares[-1].devices == (8,)


def test_state_that_is_donated_is_updated_where_it_lies(plan: StepPlan) -> None:
    donate = frozenset(plan.graph.next_version.values())
    left = [slot for slot in range(len(plan.graph.outputs)) if slot in plan.graph.next_version]
    waiting = Waiting(plan, LiveTensors(plan.graph), donate)
    *_, (_, _, slots, _) = waiting.states()
    assert sum(slots[slot].what.nbytes for slot in left if slot in slots) == 0
