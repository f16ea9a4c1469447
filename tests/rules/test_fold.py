"""Paddings next to windows are folded into them: the same numbers with fewer equations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jscaler.capture.jaxprs import evaluate, inline, trace_flat
from jscaler.rules.fold import fold_pads

rng = np.random.default_rng(2)
LINE = ("NHC", "HIO", "NHC")
X, K = rng.normal(size=(2, 6, 3)), rng.normal(size=(3, 3, 2))


def conv(x: Any, padding: Any = "VALID", **more: Any) -> Any:
    return lax.conv_general_dilated(x, K, (1,), padding, dimension_numbers=LINE, **more)


def rows(*pad: int, value: float = 0.0) -> Any:
    return lambda x: lax.pad(x, jnp.asarray(value, x.dtype), ((0, 0, 0), pad, (0, 0, 0)))


def window(x: Any, init: Any = 0.0, what: Any = lax.add) -> Any:
    return lax.reduce_window(x, init, what, (1, 3, 1), (1, 1, 1), "VALID")


FOLDED = {
    "zeros around a convolution": lambda x: conv(rows(1, 2, 0)(x)),
    "a gap between rows": lambda x: conv(rows(1, 1, 2)(x)),
    "rows left out before": lambda x: conv(rows(-1, 1, 0)(x)),
    "dilated twice": lambda x: conv(rows(1, 0, 1)(x), [(2, 1)], lhs_dilation=(2,)),
    "windows left out": lambda x: rows(-1, -2, 0)(conv(x, [(2, 2)])),
    "windows of a dilated operand left out": lambda x: rows(-1, 0, 0)(conv(x, [(2, 2)], lhs_dilation=(2,))),
    "jnp.pad": lambda x: conv(jnp.pad(x, ((0, 0), (1, 1), (0, 0)))),
    "a sum": lambda x: window(rows(1, 1, 1)(x)),
    "a maximum": lambda x: window(rows(1, 1, 0, value=-np.inf)(x), -np.inf, lax.max),
}
KEPT = {
    "another value": lambda x: conv(rows(1, 1, 0, value=2.0)(x)),
    "zeros around a maximum": lambda x: window(rows(1, 1, 0)(x), -np.inf, lax.max),
    "padding that is read twice": lambda x: conv(rows(1, 1, 0)(x)) + rows(1, 1, 0)(x)[:, :6, :2],
    "padded samples": lambda x: conv(lax.pad(x, 0.0, ((1, 0, 0), (0, 0, 0), (0, 0, 0)))),
    "rows left out of a sum": lambda x: window(rows(-1, 0, 0)(x)),
    "windows added": lambda x: rows(1, 0, 0)(conv(x)),
}


@pytest.mark.parametrize("name", [*FOLDED, *KEPT])
def test_the_same_numbers(name: str) -> None:
    fun = (FOLDED | KEPT)[name]
    jaxpr = inline(trace_flat(lambda x: [fun(x)], [jax.typeof(X)]))
    folded = fold_pads(jaxpr)
    assert any(e.primitive.name == "pad" for e in folded.eqns) == (name in KEPT)
    (ours,), (theirs,) = (jax.jit(lambda x, j=j: evaluate(j, [x]))(X) for j in (folded, jaxpr))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    assert ours.shape == folded.outvars[0].aval.shape
