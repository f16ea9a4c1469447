"""Shardy answers for primitives that the table lacks, and is only believed where a part checks out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.interpreters import batching, mlir
from parts import check, fragment, primitives_in

from jscaler import UnknownPrimitiveWarning

rng = np.random.default_rng(10)
x = rng.normal(size=(4, 6))


def primitive(name: str, fun: Any) -> core.Primitive:
    """A primitive that nobody has a rule for."""
    made = core.Primitive(name)
    made.def_impl(fun)
    made.def_abstract_eval(lambda *avals: avals[0])
    batching.primitive_batchers[made] = lambda args, dims: (jax.vmap(fun, dims)(*args), 0)
    mlir.register_lowering(made, mlir.lower_fun(fun, multiple_results=False))
    return made


def test_a_reduction_by_a_program_keeps_its_other_dims() -> None:
    made = fragment(lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + 0 * b, (1,)), x)
    assert "reduce" in primitives_in(made)
    assert made.open == {"a": 4}
    check(lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + 0 * b, (1,)), x)


BLENDS = {
    "by element": (lambda x: jnp.tanh(x) * 2 + x, "ab"),
    "by row": (lambda x: x / x.sum(1, keepdims=True), "a"),
    "by position": (lambda x: x * jnp.arange(6.0), "a"),
    "by size": (lambda x: x / x.shape[0], "b"),
    "turned around": (lambda x: x[::-1], "b"),
    "summed along": (lambda x: jnp.cumsum(x, 1), ""),
}


@pytest.mark.filterwarnings("ignore::jscaler.UnknownPrimitiveWarning")
@pytest.mark.parametrize("name", BLENDS)
def test_only_what_passes_through_is_believed(name: str) -> None:
    fun, factors = BLENDS[name]
    made = check(primitive(f"blend {name}", fun).bind, x)
    assert "".join(made.open) == factors


def test_what_shardy_opens_needs_no_warning_and_what_it_does_not_warns() -> None:
    fragment(primitive("quiet", BLENDS["by element"][0]).bind, x)
    with pytest.warns(UnknownPrimitiveWarning, match="'loud'"):
        fragment(primitive("loud", BLENDS["summed along"][0]).bind, x)
