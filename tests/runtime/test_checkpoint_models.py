"""A state of each model, this project's and others', is saved under one plan, restored under another, and exported."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from of_the_day import of_the_day
from typer.testing import CliRunner

import jscaler
from bench import foreign_models, parity_cases
from jscaler.cli import app
from jscaler.errors import DataError
from jscaler.runtime import checkpoint
from jscaler.runtime.graph_nodes import from_saved_tree, to_saved_tree

pytestmark = pytest.mark.filterwarnings("ignore::jscaler.PlanWarning", "ignore::jscaler.UnknownPrimitiveWarning")
PLANS = {"zero3": 4, "data_parallel": 2, "single": 1}
PAIRS = [(a, b) for a in PLANS for b in PLANS if a != b]
Made = tuple[Callable[..., Any], Callable[[], Any], dict[str, Any]]  # step, state, its other arguments


def own(name: str) -> Made:
    """A model of this project, with the state of `bench.parity`."""
    case = parity_cases.CASES[name][0](jnp.float32)
    optimizer = optax.adamw(1e-2)
    given = {"batch": case.batches[0], "key": jax.random.key(0)}
    return case.train_step(optimizer), lambda: case.state(optimizer), given


def gpt_of_objects() -> Made:
    """The GPT in nnx, whose layers are an ``nnx.List``, as an object."""
    from models.gpt import GPTConfig
    from models.gpt_nnx import GPT

    tx = optax.adamw(1e-2)

    def make() -> Any:
        model = GPT(GPTConfig(hidden=32, layers=2, heads=4, sequence=16), nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        def loss_of(model: Any) -> jax.Array:
            return parity_cases.cross_entropy(model(batch["tokens"]), batch["labels"])

        loss, gradients = jscaler.nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    return step, make, {"batch": parity_cases.text_batches()[0]}


def foreign(name: str) -> Made:
    model = foreign_models.MODELS[name]()
    arguments = model.arguments()
    step = model.step(jscaler)
    if name.startswith("nnx"):
        return step, lambda: model.arguments()[:2], {"batch": arguments[2]}
    return step, lambda: arguments[0], {"batch": arguments[1]}


MODELS: dict[str, Callable[[], Made]] = {name: lambda name=name: own(name) for name in parity_cases.CASES}
MODELS |= {"GPT of nnx objects": gpt_of_objects} | {n: lambda n=n: foreign(n) for n in foreign_models.MODELS}
ALWAYS = ["GPT of nnx objects", "nnx GPT"]


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("name", of_the_day(MODELS, 14, ALWAYS))
def test_saved_restored_and_exported(name: str, tmp_path: Path) -> None:
    step, make, given = MODELS[name]()
    first, second = PAIRS[list(MODELS).index(name) % len(PAIRS)]
    state = jscaler.parallelize(first, devices=PLANS[first])(step).init(make, **given)
    checkpoint.save(tmp_path, 3, state)
    target = jscaler.parallelize(second, devices=PLANS[second])(step).abstract_state(make, **given)
    number, restored = checkpoint.restore_latest(tmp_path, target)
    assert number == 3
    assert jax.tree.structure(to_saved_tree(restored)) == jax.tree.structure(to_saved_tree(state))
    leaves = [jax.tree.leaves(to_saved_tree(tree)) for tree in (restored, state, target)]
    for ours, theirs, wanted in zip(*leaves, strict=True):
        assert ours.sharding.is_equivalent_to(wanted.sharding, ours.ndim)
        np.testing.assert_array_equal(numbers(ours), numbers(theirs))
    file = tmp_path / "out.msgpack"
    result = CliRunner().invoke(app, ["export", str(tmp_path), str(file), "--part", "."])
    assert result.exception is None, result.output
    exported = jax.tree.leaves(serialization.msgpack_restore(file.read_bytes()))
    assert sorted(x.shape for x in exported) == sorted(numbers(x).shape for x in leaves[1])


@pytest.mark.one_day_in(2)
def test_a_run_of_objects_goes_on_under_another_plan(tmp_path: Path) -> None:
    step, make, given = gpt_of_objects()

    def train_step(state: Any, batch: Any) -> Any:
        return step(*state, batch)

    def losses(plan: str, steps: int, **more: Any) -> list[float]:
        told = Losses()
        job = jscaler.Job(lambda _: make(), train_step, lambda: itertools.repeat(given["batch"]))
        jscaler.train(job, plan, steps, devices=PLANS[plan], trackers=[told], say=lambda _: None, **more)
        return told.losses

    want = losses("single", 4)
    got = losses("zero3", 2, checkpoint=tmp_path) + losses("data_parallel", 4, checkpoint=tmp_path, resume=True)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert want[3] < want[0]


class Losses(jscaler.Tracker):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def step(self, record: Any) -> None:
        self.losses.append(float(record.loss))


def numbers(leaf: Any) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


class Layers(nnx.Module):
    def __init__(self, count: int, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(count)])
        self.drop = nnx.Dropout(0.1, rngs=rngs)


def test_objects_as_dicts_and_back() -> None:
    """Twelve layers: as text, '10' stands before '2'."""
    model = Layers(12, nnx.Rngs(0))
    state = {"model": model, "step": jnp.zeros((), jnp.int32)}
    tree = to_saved_tree(state)
    assert tree["model"]["layers"]["10"]["kernel"].shape == (3, 3)
    again = from_saved_tree(jax.tree.map(lambda x: x, tree), state)
    assert type(again["model"]) is Layers
    assert again["model"] is not model
    for ours, theirs in zip(again["model"].layers, model.layers, strict=True):
        np.testing.assert_array_equal(ours.kernel[...], theirs.kernel[...])
    assert to_saved_tree({"a": 1}) == {"a": 1}


def test_a_state_that_was_saved_as_objects_is_read_all_the_same(tmp_path: Path) -> None:
    """As jscaler wrote nnx objects until November 2026: a leaf's name ends in 'value'."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    with checkpoint.Checkpoints(tmp_path) as states:
        assert states._manager is not None
        states._manager.save(1, args=checkpoint.ocp.args.StandardSave(model))
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), model)
    step, restored = checkpoint.restore_latest(tmp_path, target)
    assert step == 1
    np.testing.assert_array_equal(restored.kernel[...], model.kernel[...])


@pytest.mark.one_day_in(2)
def test_a_readers_own_error_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not ask to remove a good state, nor puts it aside."""
    state = {"w": jnp.ones(3)}
    checkpoint.save(tmp_path, 1, state)
    target = {"w": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=state["w"].sharding)}

    def broken(*_: Any, **__: Any) -> Any:
        raise TypeError("'<' not supported between instances of 'str' and 'int'")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.ocp.CheckpointManager, "restore", broken)
        with pytest.raises(DataError, match=r"cannot be read: TypeError: '<' not supported.*it stays as it is") as found:
            checkpoint.restore_latest(tmp_path, target)
    assert not isinstance(found.value, checkpoint.DamagedError)
    assert checkpoint.restore_latest(tmp_path, target)[0] == 1
