"""A step as it runs: its results, its order, what is written of it for people."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_chain import step

import jscaler
from jscaler import plans
from jscaler.errors import JscalerError, UnknownNameError
from jscaler.report.trace_file import trace_events
from jscaler.runtime.tracing import times_seen
from jscaler.tables.tasks import Task
from jscaler.tables.timeline import Timeline

NEEDED = {
    "M": {"args"},
    "X": {"ts", "dur", "cat"},
    "C": {"ts", "args"},
    "s": {"ts", "id", "cat"},
    "f": {"ts", "id", "cat", "bp"},
}


def arguments() -> tuple[Any, jax.Array]:
    return [jax.random.normal(jax.random.key(i), (8, 8)) for i in range(8)], jnp.ones((16, 8))


@pytest.fixture(scope="module")
def traced() -> tuple[Any, Any, Timeline]:
    inner = plans.tensor_parallel(columns=[f"params/{i}" for i in range(0, 8, 2)])  # so there is something to hide
    policy = plans.pipeline(2, 4, "dualpipe_v", plan=inner, batch="x")
    compiled = jscaler.parallelize(policy, devices=4, donate_argnames="params")(step).lower(*arguments()).compile()
    params, x = arguments()
    result, timeline = compiled.trace(params, x)
    assert not any(p.is_deleted() for p in params), "what is donated else stays"
    return compiled, result, timeline


def test_a_traced_step_has_the_numbers_of_any(traced: Any) -> None:
    _, result, _ = traced
    true = jax.jit(lambda *given: step(*given, value_and_grad=jax.value_and_grad))(*arguments())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), result, true)


def test_blocks_ran_in_the_order_of_the_table(traced: Any) -> None:
    compiled, _, timeline = traced
    table = compiled.plan.instructions.table
    for device, row in enumerate(table.rows):  # two devices each
        ran = [[str(c) for c in one.cells] for one in timeline.by_device[2 * device] if one.cells]
        wanted = [str(c) for entry in row for c in entry.cells if str(c)[:2] != "0I"]  # the first stage hands nothing on
        assert [c for cells in ran for c in cells] == [c.replace("0B", "0W") for c in wanted]
        times = [(one.begin, one.end) for one in timeline.by_device[2 * device]]
        assert all(b <= e for b, e in times)
        assert all(e <= after for (_, e), (after, _) in itertools.pairwise(times)), "one after another"
    assert len(timeline.sends) == sum(type(one).__name__ == "Send" for one in compiled.plan.instructions.steps)


def test_nothing_begins_before_what_it_reads_has_ended() -> None:
    """Whenever threads wake: a maker's that is seen late, and a block of two groups that is seen before one of each."""
    places = [("a",), ("b",), ("a", "b"), ("a",), ("b",)]
    waits = [(), (0,), (1,), (2,), (0, 2)]
    tasks = [Task(own, 0.0, before) for own, before in zip(places, waits, strict=True)]
    draws = np.random.default_rng(0)
    for _ in range(50):
        true = 1.0 + np.cumsum(draws.random(len(tasks)))  # when they end, one after the other
        seen = [float(end + draws.choice([0.0, 3.0]) * draws.random()) for end in true]
        times = times_seen(tasks, [0.1 * i for i in range(len(tasks))], seen)
        for number, (begin, end) in enumerate(times):
            assert true[number] <= end <= seen[number]
            assert all(times[maker][1] <= begin <= end for maker in waits[number])
            assert all(times[n][1] <= begin for n in range(number) if {*places[n]} & {*places[number]})


def test_measured_blocks_begin_behind_those_that_they_read(traced: Any) -> None:
    compiled, *_ = traced
    _, timeline = compiled.trace(*arguments())
    ends = {str(cell): one.end for one in timeline.runs for cell in one.cells}
    begins = {str(cell): one.begin for one in timeline.runs for cell in one.cells}
    for stage in range(1, 4):
        assert all(ends[f"{stage - 1}F{i}"] <= begins[f"{stage}F{i}"] for i in range(4))


def test_measured_seconds_are_what_the_simulator_takes(traced: Any) -> None:
    compiled, *_ = traced
    alone = compiled.measure(*arguments(), rounds=2)
    assert len(alone.blocks) == len(alone.names) == len(compiled.plan.blocks)
    assert all(seconds > 0 for seconds in alone.blocks)
    assert jscaler.simulate(compiled, seconds=alone.blocks, hops=alone.hops).makespan > 0


def test_a_step_on_one_group_can_be_traced() -> None:
    compiled = jscaler.parallelize(plans.data_parallel("x"), devices=2)(step).lower(*arguments()).compile()
    _, timeline = compiled.trace(*arguments())
    assert len(timeline.runs) == 1
    assert timeline.devices == [0, 1]


def test_events_are_of_the_trace_event_format(traced: Any, tmp_path: Path) -> None:
    *_, timeline = traced
    jscaler.write_trace(tmp_path / "deep" / "step.json", timeline)
    read = json.loads((tmp_path / "deep" / "step.json").read_text())
    assert read["traceEvents"] == trace_events(timeline)
    for event in read["traceEvents"]:
        assert {"name", "ph", "pid"} <= event.keys()
        assert NEEDED[event["ph"]] <= event.keys()
        assert event.get("dur", 0) >= 0
    arrows = {kind: sorted(e["id"] for e in read["traceEvents"] if e["ph"] == kind) for kind in "sf"}
    assert arrows["s"] == arrows["f"] != []
    names = {event["name"] for event in read["traceEvents"] if event["ph"] == "X"}
    assert "0F0" in names
    assert any(";" in name for name in names), "overlapped blocks are one slice"


def test_a_picture_of_several_timelines(traced: Any, tmp_path: Path) -> None:
    compiled, _, timeline = traced
    simulated = jscaler.simulate(compiled, "8xH100-80GB")
    jscaler.draw_timelines(tmp_path / "step.png", [simulated, timeline])
    assert (tmp_path / "step.png").stat().st_size > 10_000
    with pytest.raises(UnknownNameError, match="picture format"):
        jscaler.draw_timelines(tmp_path / "step.txt", [simulated])
    with pytest.raises(JscalerError, match="cannot write the trace"):
        jscaler.write_trace("/proc/none/step.json", timeline)
