"""Batches of Grain data sets: any of them at once, each row read by those that need it, and as many runs over the data."""

import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from commands.test_checkpoints import MODEL, state_of
from commands.test_processes import ended, started

import jscaler
from jscaler.runtime.checkpoint import written_beside

EXAMPLES = [{"x": np.full(3, i, np.float32), "y": i} for i in range(10)]
READS = """
import os


class Examples:
    def __init__(self, log):
        self.log = log

    def __len__(self):
        return 400

    def __getitem__(self, i):
        if self.log:
            with open(f"{self.log}.{jax.process_index()}", "a") as file:
                file.write(f"{i}\\n")
        return np.random.default_rng(int(i)).normal(size=8).astype(np.float32)


def reads(log=""):
    return jscaler.Job(make_state, step, jscaler.Batches(Examples(log), rows=8, seed=5, ahead=1, threads=1))
"""


def told(batches: Any, count: int) -> list[list[int]]:
    return [batch["y"].tolist() for batch in itertools.islice(batches, count)]


def test_a_run_may_begin_with_any_batch() -> None:
    batches = jscaler.Batches(EXAMPLES, rows=4, seed=1)
    every = told(batches(), 10)
    epochs = np.reshape(every, (4, 10)).tolist()
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert all(told(batches.starting(step), 3) == every[step : step + 3] for step in range(7))
    assert [batches.at(step)["y"].tolist() for step in range(10)] == every
    assert every != told(jscaler.Batches(EXAMPLES, rows=4, seed=2)(), 10)
    assert told(jscaler.Batches(EXAMPLES, rows=1, seed=None).starting(9), 2) == [[9], [0]]
    assert told(jscaler.Batches(EXAMPLES, rows=4, seed=None)(), 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    mapped = grain.MapDataset.source(EXAMPLES).filter(lambda one: one["y"] != 3).map(lambda one: {"y": -one["y"]})
    with pytest.raises(jscaler.DataError, match="row 3 of batch 0 is None, as Grain's filter"):
        told(jscaler.Batches(mapped, rows=5, seed=None)(), 2)
    doubled = grain.MapDataset.source(EXAMPLES).map(lambda one: {"y": 2 * one["y"]})
    assert told(jscaler.Batches(doubled, rows=5, seed=None)(), 2) == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]


def test_rows_that_are_not_wanted_are_not_read() -> None:

    class Counted:
        def __init__(self) -> None:
            self.reads = 0

        def __len__(self) -> int:
            return len(EXAMPLES)

        def __getitem__(self, i: int) -> Any:
            self.reads += 1
            return EXAMPLES[i]

    whole = list(itertools.islice(jscaler.Batches(EXAMPLES, rows=4, seed=3).starting(2), 3))
    for wanted in ([0, 1], [3], [1, 2], []):
        source = Counted()
        found = list(itertools.islice(jscaler.Batches(source, rows=4, seed=3, ahead=1).starting(2, wanted), 3))
        for ours, theirs in zip(found, whole, strict=True):
            assert ours["x"].shape == (4, 3)
            assert (ours["x"].dtype, ours["y"].dtype) == (theirs["x"].dtype, theirs["y"].dtype)
            np.testing.assert_array_equal(ours["x"][wanted], theirs["x"][wanted])
        assert source.reads <= max(1, 6 * len(wanted))  # and those of the batches that are read ahead


def test_records_of_a_file(tmp_path: Path) -> None:
    writer = ArrayRecordWriter(str(tmp_path / "data"), "group_size:1")
    for i in range(6):
        writer.write(np.full(2, i, np.int32).tobytes())
    writer.close()
    source = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(str(tmp_path / "data")))
    batches = jscaler.Batches(source.map(lambda record: np.frombuffer(record, np.int32)), rows=3, seed=None)
    assert next(batches.starting(1)).tolist() == [[3, 3], [4, 4], [5, 5]]


def test_what_is_no_data() -> None:
    repeated = grain.MapDataset.source(EXAMPLES).repeat()
    for source, told in [([], "empty"), (repeated, "repeated already"), (iter(EXAMPLES), "has a length"), (3, "not 3")]:
        with pytest.raises(jscaler.DataError, match=told):
            jscaler.Batches(source, rows=4)
    with pytest.raises(jscaler.DataError, match="seed is a whole number"):
        jscaler.Batches(EXAMPLES, rows=4, seed=-1)
    with pytest.raises(jscaler.PlanError, match="rows"):
        jscaler.Batches(EXAMPLES, rows=0)
    batches = jscaler.Batches(EXAMPLES, rows=4)
    for step, wanted in [(-1, None), (0, [4])]:
        with pytest.raises(jscaler.PlanError, match="rows 0 to 3"):
            batches.starting(step, wanted)
    with pytest.raises(jscaler.JobError, match="have no end"):
        jscaler.Evaluation(lambda state, batch: 0.0, batches).following(None)  # type: ignore[arg-type]


def test_a_loader_that_is_too_slow_is_waited_for() -> None:
    class Slow:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, i: int) -> Any:
            time.sleep(0.02)
            return np.ones(4, np.float32)

    def step(state: Any, batch: Any) -> Any:
        loss, gradient = jscaler.value_and_grad(lambda w: (w * batch).mean())(state)
        return state - gradient, loss

    seen = []

    class Kept(jscaler.Tracker):
        def step(self, record: jscaler.StepRecord) -> None:
            seen.append(record.waited)

    job = jscaler.Job(lambda key: jnp.ones(4), step, jscaler.Batches(Slow(), rows=4, ahead=1, threads=1))
    jscaler.train(job, "data_parallel", 4, devices=2, trackers=[Kept()], say=lambda _: None)
    assert all(waited > 0.01 for waited in seen[1:])


@pytest.mark.one_day_in(5)
@pytest.mark.parametrize(
    ("plan", "shared"), [("zero3", False), ("megatron(dp=2, tp=2)", False), ("megatron(dp=1, tp=4)", True)]
)
def test_processes_read_by_data_parallel_rank(tmp_path: Path, plan: str, shared: bool) -> None:
    """Each its own rows, but for the first batch, which all compare; with tensor parallelism between them the same."""
    model = tmp_path / "my_model.py"
    model.write_text(MODEL + READS)
    states = []
    for count in ("1", "2"):
        folder, log = tmp_path / f"by_{count}", tmp_path / f"read_{count}"
        process = started(
            model, folder, "--plan", plan, "--steps", "4", "--local-processes", count, job=f'reads(log="{log}")'
        )
        output = ended(process)
        assert process.returncode == 0, output
        states.append(state_of(folder, 4))
    assert written_beside(tmp_path / "by_2", 4)["run"]["data"] == "8 rows of 400 examples, shuffled by seed 5"
    for ours, theirs in zip(*states, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    read = [Counter((tmp_path / f"read_2.{number}").read_text().split()) for number in (0, 1)]
    both = (read[0] & read[1]).total()
    assert both >= 5 * 8 if shared else both == 8
