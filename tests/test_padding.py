"""``jscaler.pad_batch``: a batch that does not divide has the numbers of ``jax.jit`` on the batch as it was."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jscaler
from jscaler import plans
from jscaler.errors import DataError, PlanError, SplitError

draws = np.random.default_rng(0)
TX = optax.adamw(1e-2)
PARAMS = {"up": draws.normal(size=(4, 8)).astype(np.float32), "down": draws.normal(size=(8, 3)).astype(np.float32)}
X, LABELS = draws.normal(size=(8, 4)).astype(np.float32), draws.integers(0, 3, 8)


def losses(params: Any, batch: Any) -> jax.Array:
    """(rows,). The logarithm of a row's length has no gradient at 0."""
    logits = jnp.tanh(batch["x"] @ params["up"]) @ params["down"] + jnp.log(jnp.linalg.norm(batch["x"], axis=1))[:, None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])


def mean(params: Any, batch: Any) -> jax.Array:
    return losses(params, batch).mean()


def masked_mean(params: Any, batch: Any) -> jax.Array:
    return (losses(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


def step_of(loss: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        value, gradients = jscaler.value_and_grad(loss)(state["params"], batch)
        updates, opt = TX.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, (value, gradients)

    return step


@pytest.mark.parametrize(
    ("plan", "devices", "multiple"),
    [(plans.data_parallel(), 4, 4), (plans.zero3(), 4, 4), (plans.accumulate(2, plans.data_parallel()), 2, 4)],
    ids=["data_parallel", "zero3", "accumulate"],
)
def test_numbers_of_a_padded_batch_are_those_of_the_batch(plan: Any, devices: int, multiple: int) -> None:
    ours = theirs = {"params": PARAMS, "opt": TX.init(PARAMS)}
    step = jscaler.parallelize(plan, devices=devices)(step_of(masked_mean))
    reference = jax.jit(step_of(mean))
    for rows in (8, 6, 5):  # one shape for ours
        batch = {"x": X[:rows], "labels": LABELS[:rows]}
        padded, mask = jscaler.pad_batch(batch, multiple)
        ours, mine = step(ours, {**padded, "mask": mask})
        theirs, right = reference(theirs, batch)
        for a, b in zip(jax.tree.leaves((ours, mine)), jax.tree.leaves((theirs, right)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_what_it_makes() -> None:
    batch = {"x": X[:3], "more": [jnp.asarray(LABELS[:3]), 7, None, "text"]}
    padded, mask = jscaler.pad_batch(batch, 4)
    np.testing.assert_array_equal(padded["x"], X[[0, 1, 2, 2]])
    np.testing.assert_array_equal(padded["more"][0], LABELS[[0, 1, 2, 2]])
    assert padded["more"][1:] == [7, None, "text"]
    assert isinstance(padded["x"], np.ndarray)
    assert isinstance(padded["more"][0], jax.Array)
    assert mask.dtype == np.float32
    assert mask.tolist() == [1, 1, 1, 0]


def test_a_batch_that_divides_stays_as_it_is() -> None:
    batch, mask = jscaler.pad_batch(X, 4)
    assert batch is X
    assert mask.tolist() == [1] * 8


@pytest.mark.parametrize(
    ("batch", "multiple", "error", "message"),
    [
        ({"x": X, "y": LABELS[:5]}, 4, DataError, r"one number of rows in dim 0.*; batch\['x'\] has 8, batch\['y'\] has 5"),
        ({"x": X[:0]}, 4, DataError, r"at least one row; batch\['x'\] has 0"),
        ({"x": 3.0}, 4, DataError, "no leaf is an array with rows"),
        (X, 0, PlanError, "pad_batch: multiple is a positive whole number, not 0"),
    ],
)
def test_mistakes(batch: Any, multiple: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jscaler.pad_batch(batch, multiple)


@pytest.mark.parametrize(("rows", "told"), [(6, "8 rows and a mask for the loss, or leave out the last 2$"), (3, "4 rows")])
def test_the_error_of_a_batch_that_does_not_divide_says_so(rows: int, told: str) -> None:
    batch = {"x": X[:rows], "labels": LABELS[:rows]}
    state = {"params": PARAMS, "opt": TX.init(PARAMS)}
    said = rf"'batch/\w+' cannot split factor 'dim 0' of size {rows} into 4 parts; legal: .*; "
    with pytest.raises(SplitError, match=said + r"jscaler.pad_batch\(batch, 4\) makes it " + told):
        jscaler.parallelize("data_parallel", devices=4)(step_of(mean)).lower(state, batch)
