"""Built-in models as jobs: their names, and batches that go on where a run has stopped."""

import itertools

import jax
import numpy as np

from jscaler.commands.built_in_job import built_in_job, model_and_size
from jscaler.commands.planned_job import PlannedJob


def test_a_model_and_its_size_in_one_word_or_two() -> None:
    assert model_and_size("gpt-1.3b", None) == model_and_size("gpt", "1.3b") == model_and_size("gpt-1.3b", "1.3b")
    assert model_and_size("moe", None) == ("moe", "nano")


def test_a_resumed_run_reads_the_batches_that_it_would_have_read() -> None:
    whole, rest = (PlannedJob(built_in_job("gpt", "nano", 4, seq=8), "single", 1) for _ in range(2))
    expected = list(itertools.islice(whole.batches(), 2, 4))
    for one, other in zip(expected, rest.batches(2), strict=False):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert rest.arguments()[1]["tokens"].shape == (4, 8)


def test_it_says_what_it_is() -> None:
    job = built_in_job("gpt-nano", None, 4, seq=8, dtype="bf16", stacked=True)
    assert PlannedJob(job, "single", 1).describe() == "gpt-nano, bfloat16, stacked, 0.1 M parameters, batch 4 × 8"
