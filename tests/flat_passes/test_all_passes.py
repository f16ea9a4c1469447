"""The passes can be seen, looked behind, and (those that save memory or time alone) left out."""

import inspect
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from lower.steps import MOMENTUM, make_batch, make_state, make_step, planned
from typer.testing import CliRunner

import jscaler
from jscaler import PlanError, UnknownNameError
from jscaler.cli import app
from jscaler.flat_passes.all_passes import FLAT_PASSES, FOR_XLA, flat_passes
from jscaler.ir.passes import name_of
from jscaler.lower.flat_program import FlatProgram
from jscaler.materialize.group_passes import GROUP_PASSES
from jscaler.schedule import GRAPH_PASSES

GRAPH = (*GRAPH_PASSES, *GROUP_PASSES)
EVERY = (*GRAPH, *FLAT_PASSES)


def test_every_pass_has_a_name_of_its_own_one_argument_and_says_why_it_exists() -> None:
    assert len({name_of(one) for one in EVERY}) == len(EVERY)
    for one in EVERY:
        assert len(inspect.signature(one).parameters) == 1
        assert len((one.__doc__ or "").split()) > 8, name_of(one)


def test_a_lowered_step_lists_what_each_pass_did() -> None:
    step = jscaler.parallelize("data_parallel", devices=2)(make_step())
    passes = step.lower(make_state(MOMENTUM), make_batch()).passes
    assert [run.name for run in passes.runs] == [name_of(one) for one in EVERY]
    counts = [(run.before, run.after) for run in passes.runs]
    graph, flat = counts[: len(GRAPH)], counts[len(GRAPH) :]
    for chain in (graph, flat):
        assert all(after == before for (_, after), (before, _) in itertools.pairwise(chain))
    assert all(run.seconds >= 0 for run in passes.runs)
    shown = str(passes)
    assert all(run.name in shown and run.why in shown for run in passes.runs)
    assert [row["name"] for row in passes.as_json()] == [run.name for run in passes.runs]


def test_the_program_behind_a_pass() -> None:
    plan = planned("data_parallel", 2)
    program = plan.passes.after("live")
    assert isinstance(program, FlatProgram)
    assert program is plan.flat
    text = str(program)
    for exchange in program.exchanges:
        assert exchange.adapt.tensor.name in text
    assert text.count("\n") >= len(program.items)
    assert "up/dot" in str(plan.passes.after("backward_bodies"))
    with pytest.raises(UnknownNameError, match="no pass named 'lives'; did you mean 'live'"):
        plan.passes.after("lives")


@pytest.mark.parametrize("name", [name_of(one) for one in FOR_XLA])
def test_a_pass_for_xla_can_be_left_out_and_numbers_stay(name: str) -> None:
    made = {}
    for without in ((), (name,)):
        step = jscaler.parallelize("data_parallel", devices=2, without_passes=without)(make_step())
        made[without] = step.lower(make_state(MOMENTUM), make_batch())
        assert (name in [run.name for run in made[without].passes.runs]) == (not without)
    ours, whole = (lowered.compile()(make_state(MOMENTUM), make_batch()) for lowered in made.values())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), ours, whole)


@pytest.mark.parametrize("name", ["live", "none", "time_loops"])
def test_a_pass_that_is_needed_cannot_be_left_out(name: str) -> None:
    with pytest.raises(PlanError, match=f"no pass '{name}' can be left out.*added_by_slices, swapped_dots"):
        flat_passes([name])
    with pytest.raises(PlanError):
        jscaler.parallelize("single", without_passes=name)


def test_on_the_command_line() -> None:
    def printed(*arguments: str) -> Any:
        found = CliRunner().invoke(app, ["plan", "--size", "nano", "--devices", "2", "--no-stacked", *arguments])
        assert found.exit_code == 0, found.output
        return found.output

    shown = printed("--passes", "--after", "merged_conditions")
    assert all(name_of(one) in shown for one in EVERY)
    assert "dot_general" in shown
