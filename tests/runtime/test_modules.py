"""A Flax module under a plan: linen and nnx, class and instance; its forward gives the module's own numbers."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from step_numbers import assert_trees_close

import jscaler

X = jax.random.normal(jax.random.key(0), (8, 3))


class Net(nn.Module):
    """Dense, batch normalisation, dropout; ``half`` is a method of its own."""

    hidden: int = 4

    def setup(self) -> None:
        self.up = nn.Dense(self.hidden)
        self.norm = nn.BatchNorm()
        self.drop = nn.Dropout(0.5)

    def __call__(self, x: jax.Array, train: bool = False, *, scale: Any = 1.0) -> jax.Array:
        x = self.norm(jnp.tanh(self.up(x)), use_running_average=not train)
        return self.drop(x, deterministic=not train) * scale

    def half(self, x: jax.Array) -> jax.Array:
        return self.up(x) / 2


class Twin(nnx.Module):
    """The same in nnx."""

    note = 0

    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(3, hidden, rngs=rngs)
        self.norm = nnx.BatchNorm(hidden, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array, *, scale: Any = 1.0) -> jax.Array:
        return self.drop(self.norm(jnp.tanh(self.up(x)))) * scale


MODEL = Net()
VARIABLES = MODEL.init(jax.random.key(1), X)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"train": True, "mutable": ["batch_stats"], "rngs": {"dropout": jax.random.key(3)}},
        {"method": "half"},
        {"method": Net.half},
        {"scale": jnp.full((8, 1), 2.0)},
        {"capture_intermediates": True, "mutable": "intermediates"},
    ],
    ids=["plain", "training", "method", "function", "keyword", "intermediates"],
)
def test_apply_of_a_linen_module(options: dict[str, Any]) -> None:
    model = jscaler.parallelize("data_parallel", devices=4)(MODEL)
    out = model.apply(VARIABLES, X, **options)
    assert_trees_close(out, MODEL.apply(VARIABLES, X, **options))
    assert isinstance(model, Net)
    assert model.hidden == 4


def test_a_linen_class() -> None:
    @jscaler.parallelize("data_parallel", devices=4)
    class Fast(nn.Module):
        """A net of mine."""

        features: int

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(self.features)(x)

    model = Fast(features=2)
    variables = model.init(jax.random.key(0), X)
    out = model.apply(variables, X)
    np.testing.assert_allclose(out, model.bind(variables)(X), rtol=1e-5)
    assert out.sharding.num_devices == 4
    assert (Fast.__name__, Fast.__doc__) == ("Fast", "A net of mine.")

    class Around(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Fast(features=2)(x)

    inside = {"params": {"Fast_0": variables["params"]}}
    np.testing.assert_allclose(Around().apply(inside, X), out, rtol=1e-5)


def test_linen_parameters_are_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = jscaler.parallelize("data_parallel", devices=4)(MODEL)
    variables = jax.tree.map(jnp.copy, VARIABLES)
    moved: list[tuple[int, ...]] = []
    put = jax.device_put

    def counted(x: Any, *rest: Any, **options: Any) -> Any:
        moved.append(x.shape)
        return put(x, *rest, **options)

    monkeypatch.setattr(jax, "device_put", counted)
    model.apply(variables, X)
    parameters = {leaf.shape for leaf in jax.tree.leaves(variables)}
    assert parameters <= set(moved)
    moved.clear()
    first = model.apply(variables, X)
    assert not parameters & set(moved)  # only the batch
    placed = model.place(variables, X)
    assert {len(p.sharding.device_set) for p in jax.tree.leaves(placed)} == {4}
    moved.clear()
    np.testing.assert_array_equal(model.apply(placed, X), first)
    assert not parameters & set(moved)


def test_what_is_remembered_goes_with_the_array() -> None:
    from jscaler.runtime.modules import Placed

    placed, whole = Placed(), jnp.ones(4)
    everywhere = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(jax.devices()[:2]), "d"), jax.sharding.PartitionSpec()
    )
    assert placed.place(whole, everywhere) is placed.place(whole, everywhere)
    assert len(placed) == 1
    del whole
    assert len(placed) == 0


@pytest.mark.parametrize(("kind", "plan", "devices"), [("class", "single", 1), ("instance", "data_parallel", 4)])
def test_an_nnx_module(kind: str, plan: str, devices: int) -> None:
    decorate = jscaler.parallelize(plan, devices=devices)
    theirs = Twin(4, nnx.Rngs(0))
    ours = decorate(Twin)(4, nnx.Rngs(0)) if kind == "class" else decorate(Twin(4, nnx.Rngs(0)))
    held = ours
    assert isinstance(ours, Twin)
    for model in (ours, theirs):
        model.train()
    for scale in (1.0, jnp.full((8, 1), 2.0)):  # statistics and key counts move
        np.testing.assert_allclose(ours(X, scale=scale), theirs(X, scale=scale), rtol=1e-5, atol=1e-6)
        assert_trees_close(nnx.to_pure_dict(nnx.state(held)), nnx.to_pure_dict(nnx.state(theirs)))
    kernel = held.up.kernel[...]
    assert len(kernel.sharding.device_set) == devices
    for model in (ours, theirs):
        model.eval()
    np.testing.assert_allclose(ours(X), theirs(X), rtol=1e-5, atol=1e-6)
    assert held.up.kernel[...] is kernel  # it stays where it is


def test_a_plan_can_be_read() -> None:
    linen = jscaler.parallelize("data_parallel", devices=4)(MODEL).lower(VARIABLES, X)
    assert {"variables/params/up/kernel", "batch/x"} <= {t.name for t in linen.graph.inputs}
    other = jscaler.parallelize("data_parallel", devices=4)(Twin(4, nnx.Rngs(0))).lower(X)
    assert [t.name for t in other.graph.inputs if "batch" in t.name] == ["batch/x"]
    assert "data_parallel" in other.plan.explain()


def test_mistakes() -> None:
    decorate = jscaler.parallelize("single", devices=1)
    with pytest.raises(
        jscaler.CaptureError, match=r"parallelize decorates a step function, .* not the class 'Placeholder'"
    ):
        decorate(type("Placeholder", (), {}))
    with pytest.raises(jscaler.CaptureError, match="not a int"):
        decorate(3)
    with pytest.raises(jscaler.CaptureError, match=r"donate_.* are for step functions"):
        jscaler.parallelize("single", devices=1, donate_argnames="variables")(MODEL)
    with pytest.raises(jscaler.CaptureError, match="a bound linen module holds its variables"):
        decorate(MODEL.bind(VARIABLES))
    model = decorate(MODEL)
    with pytest.raises(jscaler.CaptureError, match="argument 'scale' of the module holds a set, which is neither"):
        model.apply(VARIABLES, X, scale={1})
    with pytest.raises(TypeError, match=r"Net\(x: .*\) -> .*: missing a required argument: 'x'"):
        model.apply(VARIABLES)
    twin = decorate(Twin(4, nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"Twin\(x: .*: got an unexpected keyword argument 'scales'"):
        twin(X, scales=2)


def test_an_nnx_instance_shares_what_it_was_made_of() -> None:
    theirs = Twin(4, nnx.Rngs(0))
    ours = jscaler.parallelize("single", devices=1)(theirs)
    ours.note = 3
    assert theirs.note == 3
    assert ours.up is theirs.up
    assert jax.tree.structure(nnx.to_pure_dict(nnx.state(ours))) == jax.tree.structure(nnx.to_pure_dict(nnx.state(theirs)))


def test_inside_a_train_step_a_module_is_what_it_was() -> None:
    decorate = jscaler.parallelize("data_parallel", devices=4)
    model = decorate(MODEL)

    def step(params: Any, batch: jax.Array, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        value, grads = value_and_grad(lambda p: (model.apply({**VARIABLES, "params": p}, batch) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    ours = decorate(step)(VARIABLES["params"], X)
    assert_trees_close(ours, jax.jit(lambda p, b: step(p, b, jax.value_and_grad))(VARIABLES["params"], X))
    twins = [decorate(Twin(4, nnx.Rngs(0))), Twin(4, nnx.Rngs(0))]
    found = [jscaler.nnx.grad(lambda m: (m(X) ** 2).mean())(twin) for twin in twins]
    assert_trees_close(nnx.to_pure_dict(found[0]), nnx.to_pure_dict(found[1]))
