"""A stack of layers whose masters have more bits: cast slice by slice, its gradients summed in the masters' bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

import jscaler
from jscaler.lax_primitives import is_cast
from jscaler.lower.flat_program import FlatLoop
from jscaler.lower.sums import summing_dtypes

MASTERS, X = np.linspace(-1, 1, 3 * 64, dtype=np.float32).reshape(3, 8, 8), np.ones((4, 8), np.float32)


def step(masters: jax.Array, x: jax.Array) -> Any:
    def loss(masters: jax.Array) -> jax.Array:
        def layer(carry: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            with jax.named_scope("layer"):
                return jnp.tanh(carry @ kernel), None

        last, _ = lax.scan(layer, x.astype(jnp.bfloat16), masters.astype(jnp.bfloat16))
        return (last.astype(jnp.float32) ** 2).sum()

    return masters - 0.1 * jscaler.grad(loss)(masters)


def narrowed(items: Any) -> list[tuple[int, ...]]:
    """The shapes of what is cast to 16 bits."""
    casts = [i for i in items if isinstance(i, core.JaxprEqn) and is_cast(i)]
    return [i.outvars[0].aval.shape for i in casts if i.outvars[0].aval.dtype == jnp.bfloat16]  # type: ignore[attr-defined]


def test_no_copy_of_all_layers_lies_in_fewer_bits() -> None:
    lowered = jscaler.parallelize("single", devices=1)(step).lower(MASTERS, X)
    jscaler.verify(lowered)  # a slice that is cast is the slice of the cast
    flat = lowered.plan.flat
    assert MASTERS.shape not in narrowed(flat.items)
    loops = [item for item in flat.items if isinstance(item, FlatLoop)]
    assert len(loops) == 2
    assert all(narrowed(loop.items) == [(8, 8)] for loop in loops)


def test_what_a_loop_stacks_up_for_masters_is_summed_in_their_bits() -> None:
    graph = jscaler.parallelize("single", devices=1)(step).lower(MASTERS, X).plan.graph
    found = summing_dtypes(graph, graph.ops, None)
    assert {(t.shape, kind) for t, kind in found.items()} == {((3, 8, 8), "float32"), ((8, 8), "float32")}
    assert {t.dtype.name for t in found} == {"bfloat16"}
