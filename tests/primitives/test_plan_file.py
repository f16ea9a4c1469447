"""Plans as files: what is written is read again, in any process; what is not right is refused with its place."""

import dataclasses
import json
import os
import stat
import string
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from losing import losing
from of_the_day import of_the_day

import jscaler
from jscaler import Plan, PlanFileError, Prefix
from jscaler.ir import Place
from jscaler.primitives import Assign, Fuse, GridAxis, OnDevices, Order, Trans
from jscaler.primitives.made_for import MadeFor, OpRecord, RuleRecord
from jscaler.primitives.plan import (
    KINDS,
    Accumulation,
    Decision,
    LeafParts,
    LoopRanges,
    PerMicrobatch,
    Recompute,
    ReduceDtype,
    SaveResiduals,
    Schedule,
    Shard,
    Store,
)
from tests.lower.steps import MOMENTUM, make_batch, make_state, make_step
from tests.programs import devices_of, draw_policy, draw_program

GOLDEN = Path(__file__).parent / "golden_plan.json"  # `PYTHONPATH=tests python -m tests.primitives.test_plan_file`
FOUR = tuple(map(Place, (0, 2, 1, 3)))
RULE = RuleRecord("a b, b c -> a c", (("a", 16, "parallel"), ("b", 8, "reduction"), ("c", 6, "blocked")))
PLAN = Plan(
    "mine",
    4,
    (
        ReduceDtype("bfloat16"),
        Fuse(("head/dot", "loss/reduce_sum"), "loss"),
        SaveResiduals("up/dot", "saved"),
        Recompute(("up/dot", "down/dot"), ("up/dot", "down/dot:0")),
        Recompute(("sum/cumsum",)),
        Accumulation("float32", each_time=True),
        PerMicrobatch(("norm/rsqrt",)),
        Trans("up/dot", (GridAxis("a", 2), GridAxis(None, 2))),
        Assign("up/dot", ((0, 2), (0, 2)), FOUR),
        Trans("sum/cumsum", (GridAxis("b", 4, algorithm=Prefix("b", 4)),)),
        Assign("sum/cumsum", ((0, 4),), FOUR, any_order=True),
        Trans("down/dot", (GridAxis("c", 2, sizes=(5, 3)), GridAxis("a", 2)), (GridAxis("b", 8),)),
        Assign("down/dot", ((0, 1), (0, 2)), FOUR[:2]),
        Assign("down/dot", ((1, 2), (0, 2)), (Place(1), Place(3, "host"))),
        Order("up/dot", "down/dot"),
        Shard("state/params/up/kernel", 0, 2, (0, 2, 1, 3), stored=True),
        Shard("state/params/up/bias", 0, 4, (0, 2, 1, 3)),
        Store("state/params/down/kernel", (2, 2), (0, 2, 1, 3), ((1, 0), ())),
        OnDevices(("up/dot", "down/dot"), (0, 2), stage=0),
        Schedule("0F0 0B0\n1F0 1B0"),
        LeafParts(("params/layers/up", "moments/layers/up"), (2, 2)),
        LoopRanges("layers", (2, 2)),
    ),
    MadeFor((OpRecord("up/dot", RULE), OpRecord("down/dot", RULE), OpRecord("loss"))),
)


def changed(**entries: object) -> str:
    """The file of `PLAN` with other entries; None leaves one out."""
    data = json.loads(PLAN.to_json()) | entries
    return json.dumps({k: v for k, v in data.items() if v is not None})


@pytest.mark.smoke
def test_the_format_is_that_of_the_golden_file() -> None:
    text = GOLDEN.read_text()
    assert PLAN.to_json() == text, "the format has changed: files of users must still be read, or VERSION rise"
    read = Plan.from_json(text)
    assert read == PLAN
    assert read.made_for == PLAN.made_for
    assert read.digest == PLAN.digest


def test_stages_of_a_file_that_was_written_before_they_had_numbers() -> None:
    """They stand in order; the plan is the same."""
    data = json.loads(PLAN.to_json())
    (place,) = [d for d in data["decisions"] if d["kind"] == "on_devices"]
    del place["stage"], data["digest"]
    assert Plan.from_json(json.dumps(data)) == PLAN
    data["decisions"] += [place | {"stage": 3}, place]
    numbers = [d.stage for d in Plan.from_json(json.dumps(data)).decisions if isinstance(d, OnDevices)]
    assert numbers == [0, 3, 4]


def test_every_decision_is_one_line_and_every_device_array_stands_once() -> None:
    lines = PLAN.to_json().splitlines()
    assert sum('"kind":' in line for line in lines) == len(PLAN.decisions)
    assert lines.count("  [0, 2, 1, 3],") == 1


def test_every_kind_of_decision_is_named_drawn_and_in_the_golden_file() -> None:
    kinds = set(typing.get_args(Decision))
    assert set(KINDS.values()) == kinds
    assert set(strategies) == kinds
    assert {json.loads(line.rstrip(","))["kind"] for line in GOLDEN.read_text().splitlines() if '"kind":' in line} == {
        *KINDS
    }
    assert not any(f.name == "kind" for kind in KINDS.values() for f in dataclasses.fields(kind))


names = st.text(string.ascii_letters + '/_@·ü"\\\n', min_size=1, max_size=8)
counts = st.integers(1, 8)
places = st.lists(st.builds(Place, st.integers(0, 9), st.sampled_from(["device", "host"])), max_size=9).map(tuple)
axes = st.builds(
    GridAxis,
    st.none() | names,
    counts,
    st.none() | st.lists(counts, min_size=1).map(tuple),
    st.none() | st.builds(Prefix, names | st.tuples(names, st.integers(-3, 3)), counts),
)
grids = st.lists(axes, max_size=3).map(tuple)
records = st.builds(OpRecord, names, st.none() | st.just(RULE))
numbers = st.lists(counts, max_size=4).map(tuple)
strategies: dict[type, st.SearchStrategy[Any]] = {
    Trans: st.builds(Trans, names, grids, grids),
    Assign: st.builds(Assign, names, st.lists(st.tuples(counts, counts), max_size=3).map(tuple), places, st.booleans()),
    Order: st.builds(Order, names, names),
    ReduceDtype: st.builds(ReduceDtype, names),
    SaveResiduals: st.builds(SaveResiduals, names, st.sampled_from(["inputs", "saved"])),
    Shard: st.builds(Shard, names, counts, counts, st.lists(counts).map(tuple), st.booleans()),
    Fuse: st.builds(Fuse, st.lists(names).map(tuple), names),
    Recompute: st.builds(Recompute, st.lists(names).map(tuple), st.lists(names).map(tuple)),
    Accumulation: st.builds(Accumulation, st.none() | names, st.booleans(), st.booleans()),
    PerMicrobatch: st.builds(PerMicrobatch, st.lists(names).map(tuple)),
    OnDevices: st.builds(OnDevices, st.lists(names).map(tuple), numbers, stage=counts),
    Schedule: st.builds(Schedule, names),
    LoopRanges: st.builds(LoopRanges, names, numbers),
    LeafParts: st.builds(LeafParts, st.lists(names).map(tuple), numbers),
    Store: st.builds(Store, names, numbers, numbers, st.lists(numbers, max_size=3).map(tuple)),
}
decisions = st.one_of(*strategies.values())
random_plans = st.builds(
    Plan,
    names,
    counts,
    st.lists(decisions, max_size=6).map(tuple),
    st.none() | st.lists(records, max_size=3, unique_by=lambda op: op.path).map(lambda ops: MadeFor(tuple(ops))),
)


@pytest.mark.one_day_in(2)
@given(random_plans)
@settings(max_examples=200, deadline=None)
def test_any_plan_is_read_as_it_was_written(plan: Plan) -> None:
    text = plan.to_json()
    read = Plan.from_json(text)
    assert read == plan
    assert read.made_for == plan.made_for
    assert read.digest == plan.digest
    assert read.to_json() == text


@given(random_plans, random_plans)
@settings(max_examples=100, deadline=None)
def test_digests_are_equal_where_decisions_are(one: Plan, other: Plan) -> None:
    same = (one.num_devices, one.decisions) == (other.num_devices, other.decisions)
    assert (one.digest == other.digest) == same


@losing
@pytest.mark.filterwarnings("ignore::jscaler.UnknownPrimitiveWarning")
@pytest.mark.parametrize("seed", of_the_day(range(100, 104), 2))
def test_the_plan_of_a_random_program_makes_the_same_program_again(seed: int, tmp_path: Path) -> None:
    with jax.enable_x64(True):
        program, devices = draw_program(seed), devices_of(seed)
        first = jscaler.parallelize(draw_policy(seed, devices), devices=devices)(program.train_step)
        lowered = first.lower(program.params, program.batch)
        lowered.plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        again = jscaler.parallelize(loaded, devices=devices)(program.train_step).lower(program.params, program.batch)
    assert loaded == lowered.plan.plan
    assert again.plan.digest == lowered.plan.digest
    assert again.as_text() == lowered.as_text()


OTHER_PROCESS = """
import sys
from lower.steps import MOMENTUM, make_batch, make_state, make_step
import jscaler
from jscaler.primitives import make_plan

name = "megatron(dp=2, tp=2, vocab=False, columns={'*up/kernel': 1})"
policy = name if "save" in sys.argv else sys.argv[1]
step = jscaler.parallelize(policy, devices=4)(make_step())
lowered = step.lower(make_state(MOMENTUM), make_batch())
if "save" in sys.argv:
    lowered.plan.save(sys.argv[1])
else:
    afresh = make_plan(jscaler.plans.by_name(name), step.graph(make_state(MOMENTUM), make_batch()), 4)
    assert afresh.to_json() == lowered.plan.plan.to_json()
print(lowered.plan.digest, lowered.plan.plan.to_json(), lowered.as_text())
"""


@pytest.mark.one_day_in(2)
@pytest.mark.smoke
def test_another_process_plans_and_loads_and_lowers_the_same_text(tmp_path: Path) -> None:
    """With another hash seed, byte for byte: the plan made afresh, and the one loaded by name, as on the command line."""
    path = str(tmp_path / "plan.json")

    def output(seed: str, *arguments: str) -> str:
        tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        paths = os.pathsep.join([tests, os.path.dirname(tests)])
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths, "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}
        words = [sys.executable, "-c", OTHER_PROCESS, path, *arguments]
        return subprocess.run(words, env=env, capture_output=True, text=True, check=True, timeout=300).stdout

    saved = output("1", "save")
    assert "stablehlo" in saved
    assert output("2") == saved
    assert Plan.load(path).digest == saved.split()[0]


FLAGS = "--xla_force_host_platform_device_count=4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is no JSON"),
        ("[]", "it is no plan file"),
        ('{"format": "other"}', "it is no plan file"),
        (changed(version=2), r"is of version 2, and this jscaler reads up to version 1"),
        (changed(version="1"), "its version is '1'"),
        (changed(decisons=[]), "'decisons' is nothing a plan file has; did you mean 'decisions'"),
        (changed(devices=None), "'devices' is missing; it must be a whole number"),
        (changed(devices=0), "'devices' is 0"),
        (changed(devices=8), "its decisions were changed after it was written: .* delete the line 'digest'"),
        (changed(places=[[0, "x"]]), r"places\[0\]\[1\] is 'x', not a device's number"),
        (changed(places=[3]), r"places\[0\] is 3, not a list"),
        (changed(decisions=[7]), r"decisions\[0\] is of the kind None; known: op_trans"),
        (changed(decisions=[{"kind": "op_tans"}]), r"decisions\[0\] is of the kind 'op_tans'; did you mean 'op_trans'"),
        (changed(decisions=[{"kind": "op_trans", "op": "x"}]), r"decisions\[0\] \(op_trans\) lacks its field 'axes'"),
        (
            changed(decisions=[{"kind": "op_order", "before": "x", "aftr": "y"}]),
            r"decisions\[0\] \(op_order\) has no field 'aftr'; did you mean 'after'",
        ),
        (
            changed(decisions=[{"kind": "op_trans", "op": "x", "axes": [{"factor": "a", "parts": "2"}]}]),
            r"decisions\[0\] \(op_trans\).axes\[0\].parts is '2', not a whole number",
        ),
        (
            changed(decisions=[{"kind": "op_assign", "op": "x", "index": [[0, 1, 2]], "places": 0}]),
            r"index\[0\] is \[0, 1, 2\], not a list",
        ),
        (
            changed(decisions=[{"kind": "op_assign", "op": "x", "index": [], "places": 9}]),
            r"places is row 9 of 'places', which has 3",
        ),
        (
            changed(decisions=[{"kind": "residuals", "op": "x", "mode": "some"}]),
            "mode is 'some', not 'inputs' or 'saved'",
        ),
        (changed(ops=[{"op": "x", "rule": 5}]), r"ops\[0\] is .*, not an op's path and the number of one of 1 rules"),
        (changed(rules=["a -> a; a many"]), r"rules\[0\] is 'a -> a; a many'"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(PlanFileError, match=message):
        Plan.from_json(text)


def test_a_plan_that_stores_state_in_parts_makes_the_same_program_again() -> None:
    def lowered(plan: str | Plan) -> jscaler.Lowered:
        return jscaler.parallelize(plan, devices=4)(make_step()).lower(make_state(MOMENTUM), make_batch())

    first = lowered("zero3")
    assert any(isinstance(d, Shard) for d in first.plan.plan.decisions)
    loaded = Plan.from_json(first.plan.plan.to_json())
    again = lowered(loaded)
    assert loaded == first.plan.plan
    assert again.plan.digest == first.plan.digest
    assert again.as_text() == first.as_text()


def test_a_file_edited_on_purpose_is_read_without_its_digest() -> None:
    assert Plan.from_json(changed(digest=None, devices=8)).num_devices == 8


def test_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(PlanFileError, match=r"plan.json': it is no JSON"):
        jscaler.parallelize(tmp_path / "plan.json", devices=4)
    with pytest.raises(PlanFileError, match=r"none.json' cannot be read: No such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanFileError, match=r"cannot be written: No such file"):
        PLAN.save(tmp_path / "folder" / "plan.json")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    before = path.read_text()

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PlanFileError, match="No space left"):
        Plan("other", 1).save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert stat.S_ISREG(path.stat().st_mode)


def test_many_devices_and_ops_make_a_small_file() -> None:
    wide = tuple(map(Place, range(1024)))
    made = [
        d for i in range(1000) for d in (Trans(f"op_{i}", (GridAxis("a", 1024),)), Assign(f"op_{i}", ((0, 1024),), wide))
    ]
    text = Plan("wide", 1024, tuple(made)).to_json()
    assert len(text) < 200 * len(made)
    assert Plan.from_json(text).decisions == tuple(made)


if __name__ == "__main__":
    GOLDEN.write_text(PLAN.to_json())
