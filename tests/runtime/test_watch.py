"""What a watch over processes says: of which is gone, stopped or stuck, and where."""

import jax
import pytest

from jscaler import OutputError, PlanError
from jscaler.runtime.watch import READS, RUNS, Beat, Heard, Watch, may_be_for_want_of_another, verdict

FINE = Heard(Beat(RUNS, 12, 0.5))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (FINE, ""),
        (Heard(Beat(RUNS, 12, 0.5), silent=29.0), ""),
        (Heard(Beat("starts"), silent=31.0), "process 1 is silent for 31 s (starts): it was stopped, or is cut off"),
        (Heard(Beat(RUNS, 12, 0.5), gone=True), "process 1 has gone (runs step 12)"),
        (Heard(Beat(RUNS, 12, failed="ValueError: no", left=True)), "process 1 has failed (runs step 12): ValueError: no"),
        (Heard(Beat(RUNS, 12, left=True), silent=99.0, gone=True), ""),  # it has ended as it should
        (Heard(Beat(READS, 13, 99.0)), ""),  # the other still runs
    ],
)
def test_one_of_two(other: Heard, told: str) -> None:
    assert verdict({0: FINE, 1: other}, 30.0) == told


def test_where_none_goes_on_those_are_named_that_do_not_wait_in_the_step() -> None:
    waits = Heard(Beat(RUNS, 12, 31.0))
    reads = Heard(Beat(READS, 12, 40.0))
    longer = "; where steps take as long, give a longer --hang-after"
    reading = "no process goes on: process 1 reads a batch for step 12 for 40 s"
    assert verdict({0: waits, 1: reads, 2: waits}, 30.0) == reading + longer
    both = "no process goes on: process 0 runs step 12 for 31 s, process 1 runs step 12 for 31 s"
    assert verdict({0: waits, 1: waits}, 30.0) == both + longer
    compiles = Heard(Beat("begins with", 0, 999.0))
    assert verdict({0: waits, 1: compiles}, 30.0) == ""  # as long as it wants


def test_who_is_the_cause_is_named_and_not_who_fails_for_want_of_it() -> None:
    wants = Heard(Beat(RUNS, 12, 0.2, failed="JaxRuntimeError: closed by peer", left=True))
    gone, failed = Heard(FINE.beat, gone=True), Heard(Beat(READS, 12, 0.9, failed="DataError: no", left=True), silent=0.1)
    assert verdict({0: wants, 1: FINE, 2: gone}, 30.0) == "process 2 has gone (runs step 12)"
    told = "process 1 has failed (reads a batch for step 12): DataError: no"
    assert verdict({0: wants, 1: failed, 2: wants}, 30.0) == told


def test_alone_there_is_nothing_to_watch() -> None:
    ended = list[tuple[str, int]]()
    with Watch(1, end=lambda told, code: ended.append((told, code))) as watch:
        watch.at(RUNS, 3)
    assert jax.process_count() == 1
    assert ended == []
    with pytest.raises(PlanError, match="watch: limit is a positive whole number, not 0"):
        Watch(0)


def test_a_state_that_could_not_be_gathered_may_be_for_want_of_another_process() -> None:
    """It is said that it cannot be written; who has gone is waited for, and named, where that is the cause."""
    gloo = jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")
    for cause, waits in ((gloo, True), (OSError("No space left on device"), False), (None, False)):
        error = OutputError("cannot write the checkpoint")
        error.__cause__ = cause
        assert may_be_for_want_of_another(error) is waits
