"""A state of each model, this project's and others', is saved under one plan, restored under another, and exported."""

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
from jscaler.runtime.graph_nodes import revived, stored

pytestmark = pytest.mark.filterwarnings("ignore::jscaler.PlanWarning", "ignore::jscaler.UnknownPrimitiveWarning")
PLANS = {"zero3": 4, "data_parallel": 2, "single": 1}
PAIRS = [(a, b) for a in PLANS for b in PLANS if a != b]
Made = tuple[Callable[..., Any], Callable[[], Any], dict[str, Any]]  # step, state, its other arguments


def own(name: str) -> Made:
    """A model of this project, with the state of `bench.parity`."""
    case = parity_cases.CASES[name][0](jnp.float32)
    optimizer = optax.adamw(1e-2)

    def step(state: Any, batch: Any, key: jax.Array) -> Any:
        params, moments, rest = state
        loss_of = jscaler.value_and_grad(lambda p: case.loss(p, rest, batch, key), has_aux=True)
        (loss, rest), gradients = loss_of(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments, rest), loss

    given = {"batch": case.batches[0], "key": jax.random.key(0)}
    return step, lambda: (case.params, optimizer.init(case.params), case.rest), given


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


@pytest.mark.parametrize("name", of_the_day(MODELS, 9, ALWAYS))
def test_saved_restored_and_exported(name: str, tmp_path: Path) -> None:
    step, make, given = MODELS[name]()
    first, second = PAIRS[list(MODELS).index(name) % len(PAIRS)]
    state = jscaler.parallelize(first, devices=PLANS[first])(step).init(make, **given)
    checkpoint.save(tmp_path, 3, state)
    target = jscaler.parallelize(second, devices=PLANS[second])(step).abstract_state(make, **given)
    number, restored = checkpoint.restore_latest(tmp_path, target)
    assert number == 3
    assert jax.tree.structure(stored(restored)) == jax.tree.structure(stored(state))
    leaves = [jax.tree.leaves(stored(tree)) for tree in (restored, state, target)]
    for ours, theirs, wanted in zip(*leaves, strict=True):
        assert ours.sharding.is_equivalent_to(wanted.sharding, ours.ndim)
        np.testing.assert_array_equal(numbers(ours), numbers(theirs))
    file = tmp_path / "out.msgpack"
    result = CliRunner().invoke(app, ["export", str(tmp_path), str(file), "--part", "."])
    assert result.exception is None, result.output
    exported = jax.tree.leaves(serialization.msgpack_restore(file.read_bytes()))
    assert sorted(x.shape for x in exported) == sorted(numbers(x).shape for x in leaves[1])


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
    tree = stored(state)
    assert tree["model"]["layers"]["10"]["kernel"].shape == (3, 3)
    again = revived(jax.tree.map(lambda x: x, tree), state)
    assert type(again["model"]) is Layers
    assert again["model"] is not model
    for ours, theirs in zip(again["model"].layers, model.layers, strict=True):
        np.testing.assert_array_equal(ours.kernel[...], theirs.kernel[...])
    assert stored({"a": 1}) == {"a": 1}


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
