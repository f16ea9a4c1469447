"""Built-in models as jobs: their names, and batches that go on where a run has stopped."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from jscaler.commands.built_in_job import EVALUATED, built_in_job, model_and_size, stacked_by_default
from jscaler.errors import JscalerError
from jscaler.training.planned_job import PlannedJob


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


DESCRIBED = {
    "moe": "moe-nano, 0.6 M parameters, batch 4 × 64",
    "mbart": "mbart-nano, stacked, 0.3 M parameters, batch 4 × 64",
    "convnet": "convnet-nano, 3,922 parameters, batch 4 × 16 × 16 × 3, 4",
    "swin": "swin-nano, stacked, 10,062 parameters, batch 4 × 32 × 32 × 3, 4",
    "evoformer": "evoformer-nano, stacked, 18,375 parameters, batch 4 × 8 × 8, 4 × 8",
}


@pytest.mark.parametrize("model", DESCRIBED)
def test_every_model_has_a_state_and_data(model: str) -> None:
    job = built_in_job(model, None, 4, stacked=stacked_by_default(model, None))
    assert PlannedJob(job, "single", 1).describe() == DESCRIBED[model]


def test_images_of_a_large_model_take_no_memory_to_plan() -> None:
    images = next(iter(built_in_job("swin-27b", None, 32).batches()))["images"]
    assert images.shape == (32, 1536, 1536, 3)
    assert images.base is not None
    assert images.strides[1] == 0


@pytest.mark.parametrize(
    ("model", "option", "lacking"),
    [
        ("swin", {"seq": 8}, "no --seq and no --data"),
        ("convnet", {"remat": True}, "no --data and no --stacked and no --remat"),
    ],
)
def test_options_that_a_model_lacks_are_refused(model: str, option: dict[str, Any], lacking: str) -> None:
    with pytest.raises(JscalerError, match=f"model {model} has .*{lacking}; leave them out"):
        built_in_job(model, None, 4, **option)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("convnet", "data_parallel"),
        *(
            pytest.param(*one, marks=pytest.mark.one_day_in(5))
            for one in (
                ("gpt", "pipeline(2, 2)"), ("moe", "data_parallel"), ("mbart", "zero3"),
                ("swin", "zero1"), ("evoformer", "data_parallel"),
            )
        ),
    ],
)  # fmt: skip
def test_every_model_is_evaluated_on_rows_that_it_is_not_trained_on(model: str, plan: str) -> None:
    job = built_in_job(model, "nano", 4, stacked=stacked_by_default(model, None), eval_every=1)
    planned = PlannedJob(job, plan, 2)
    state = planned.state()
    planned.step.lower(state, planned.first_batch)
    found = job.evaluation.following(planned.step)(state)
    here = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), state)
    every = [jax.jit(job.evaluation.step)(here, batch) for batch in job.evaluation.batches()]
    assert len(every) == EVALUATED
    assert found.keys() == every[0].keys()
    for name, value in found.items():
        assert value == pytest.approx(np.mean([one[name] for one in every]), rel=1e-5)
