"""``jscaler.nnx``: gradients like flax's, with shared references, filters, statistics and key counts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from of_the_day import of_the_day

import jscaler

X = jax.random.normal(jax.random.key(0), (4, 3))


class Net(nnx.Module):
    """A tied layer, batch normalisation, dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.again = self.up

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.again(self.drop(self.norm(jnp.tanh(self.up(x)))))


def loss(model: Net, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def loss_and_output(model: Net, x: jax.Array) -> Any:
    out = model(x)
    return jnp.mean(out**2), {"out": out}


def same(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


KERNELS = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("kernel")))
NORM = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("norm")))


@pytest.mark.parametrize(
    ("kind", "fun", "options"),
    of_the_day(
        [
            ("value_and_grad", loss, {}),
            ("value_and_grad", loss_and_output, {"has_aux": True}),
            ("grad", loss_and_output, {"has_aux": True, "argnums": KERNELS}),
            ("grad", loss, {"argnums": 1}),
            ("value_and_grad", loss, {"argnums": (NORM, 1)}),
        ],
        2,
    ),
)
def test_like_flax(kind: str, fun: Any, options: dict[str, Any]) -> None:
    ours, theirs = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    for _ in range(2):  # the second call draws other masks: the count has moved
        same(getattr(jscaler.nnx, kind)(fun, **options)(ours, X), getattr(nnx, kind)(fun, **options)(theirs, X))
        same(nnx.state(ours), nnx.state(theirs))


def test_keyword_arguments_and_decorators() -> None:
    @jscaler.nnx.value_and_grad(argnums=1)
    def decorated(x: jax.Array, model: nnx.Linear, *, scale: float) -> jax.Array:
        return jnp.sum(model(x)) * scale

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    value, grads = decorated(x=X, model=model, scale=2.0)
    expected = nnx.value_and_grad(lambda m: jnp.sum(m(X)) * 2.0)(model)
    same((value, grads), expected)


def test_a_tied_weight_has_one_gradient() -> None:
    model = Net(nnx.Rngs(0))
    model.eval()
    grads = jscaler.nnx.grad(loss)(model, X)
    assert set(grads) == {"again", "norm"}  # under the first of its names
    kernel, losses = model.up.kernel[...], []
    for step in (1e-2, -1e-2):
        model.up.kernel[...] = kernel.at[0, 0].add(step)
        losses.append(float(loss(model, X)))
    slope = (losses[0] - losses[1]) / 2e-2
    assert float(grads["again"]["kernel"][...][0, 0]) == pytest.approx(slope, rel=1e-2, abs=1e-4)


def test_mistakes() -> None:
    model = Net(nnx.Rngs(0))

    def adds(model: Net, x: jax.Array) -> jax.Array:
        model.extra = nnx.Param(jnp.ones(()))
        return loss(model, x)

    with pytest.raises(jscaler.CaptureError, match="the loss function changes the structure of an nnx object"):
        jscaler.nnx.grad(adds)(model, X)
    with pytest.raises(jscaler.GradientError, match=r"argnums \[2\] with 2 positional arguments; legal: 0 to 1"):
        jscaler.nnx.grad(loss, argnums=2)(model, X)
    with pytest.raises(jscaler.GradientError, match=r"with has_aux=True the loss function returns a pair \(value, aux\)"):
        jscaler.nnx.grad(loss, has_aux=True)(model, X)
    with pytest.raises(jscaler.GradientError, match="argnum 0 is repeated"):
        jscaler.nnx.grad(loss, argnums=(0, 0))
    with pytest.raises(jscaler.GradientError, match="holomorphic and allow_int must be False"):
        jscaler.nnx.grad(loss, allow_int=True)


def test_under_jit_and_vmap_like_flax() -> None:
    def step(kind: Any) -> Any:
        return nnx.jit(lambda model, x: kind(loss)(model, x))

    ours, theirs = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    same(step(jscaler.nnx.value_and_grad)(ours, X), step(nnx.value_and_grad)(theirs, X))
    same(nnx.state(ours), nnx.state(theirs))
