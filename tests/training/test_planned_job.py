"""A job under a plan: its batches, its state, what a step returns."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jscaler
from jscaler import Job
from jscaler.errors import DataError, JobError
from jscaler.training.planned_job import PlannedJob
from jscaler.training.train import check_result

X = np.ones((8, 4), np.float32)


def make_state(key: Any) -> Any:
    return {"w": jax.random.normal(key, (4, 2))}


def train_step(state: Any, batch: Any) -> Any:
    loss, grads = jscaler.value_and_grad(lambda s: ((batch @ s["w"]) ** 2).mean())(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss


def planned(batches: Any, step: Any = train_step) -> PlannedJob:
    return PlannedJob(Job(make_state, step, batches, "mine"), "single", 1)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "the batches of mine are none: there is nothing to train on"),
        (lambda: iter(()), "the batches of mine are none"),
        (
            [X, X[:3]],
            r"the batch of step 1 of mine is not like the first: 'batch' is float32\[3, 4\] instead of float32\[8, 4\]",
        ),
        ([{"x": X}, {"y": X}], "not like the first: it holds 'batch/y' instead of 'batch/x'"),
        ([{"x": X, "name": "a text"}], "the first batch of mine holds 'batch/name', a str: a batch is a tree of arrays"),
        ([np.array(["a", "b"])], "the first batch of mine holds 'batch', an array of <U1"),
        ([None], "the first batch of mine is None, in which there is no array"),
        ([jax.ShapeDtypeStruct((8, 4), "float32")], "the batches of mine are shapes alone, which can be planned, not run"),
    ],
)
def test_batches_that_are_none(batches: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(itertools.islice(planned(batches).batches(), 3))


def test_shapes_alone_can_be_planned() -> None:
    job = planned([jax.ShapeDtypeStruct((8, 4), "float32")])
    assert job.describe() == "mine, 8 numbers of state, batch 8 × 4"
    assert job.step.lower(*job.arguments()).plan.name == "single"


def test_numbers_of_64_bits_are_planned_as_they_are_run() -> None:
    job = planned([X.astype(np.float64)])
    assert job.arguments()[1].dtype == np.float32
    assert job.step.bind(*job.arguments()).key == job.step.bind(job.state(), next(job.batches())).key


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda state, batch: {"state": train_step(state, batch)[0]}, r"train_step returns a dict: return \(state, loss\)"),
        (lambda state, batch: train_step(state, batch)[::-1], "not the next version of its state: their trees differ"),
        (lambda state, batch: (*train_step(state, batch), 1.0), "train_step returns a tuple of 3"),
        (lambda state, batch: (train_step(state, batch)[0], {"accuracy": 1.0}), "without a 'loss', only accuracy; add it"),
        (lambda state, batch: (train_step(state, batch)[0], batch), r"is an array of shape \(8, 4\): return one number"),
        (lambda state, batch: (train_step(state, batch)[0], [batch]), "is a list: return one number"),
    ],
)
def test_steps_that_do_not_return_state_and_loss(step: Any, message: str) -> None:
    job = planned([X], step)
    with pytest.raises(JobError, match=message):
        check_result(job.step.compiled(job.step.bind(job.start()[1], X)), job.start()[1])


class Records:
    """A tracker that keeps what it is told."""

    def begin(self, compiled: Any, start: int, steps: int) -> None:
        self.found: list[jscaler.StepRecord] = []

    def step(self, record: jscaler.StepRecord) -> None:
        self.found.append(record)

    def end(self, error: BaseException | None) -> None:
        pass


def make_nnx(key: Any) -> Any:
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(key))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def nnx_step(state: Any, batch: Any) -> Any:
    model, optimizer = state
    loss, grads = jscaler.nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
    optimizer.update(model, grads)
    return {"loss": loss, "again": 2 * loss}


def test_nnx_objects_are_changed_in_place() -> None:
    mine = Job(make_nnx, nnx_step, [X], "mine")
    job = PlannedJob(mine, "zero1", 2)
    _, state = job.start()
    before = np.asarray(state[0].kernel[...])
    records = Records()
    state = jscaler.train(mine, "zero1", 3, devices=2, trackers=[records], say=lambda _: None)
    assert [(one.step, one.metrics["again"]) for one in records.found] == [
        (i, 2 * one.loss) for i, one in enumerate(records.found)
    ]
    ours = make_nnx(jax.random.key(0))
    for _ in range(3):
        nnx.jit(nnx_step)(ours, X)
    assert not np.array_equal(before, state[0].kernel[...])
    np.testing.assert_allclose(state[0].kernel[...], ours[0].kernel[...], rtol=1e-5)
    assert job.describe().startswith("mine, ")
