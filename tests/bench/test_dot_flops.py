"""Products count as often as they run, as `dot` and as calls of cuBLAS."""

import jax
import jax.numpy as jnp
import pytest

from bench.dot_flops import dot_flops


def test_batched_products_count() -> None:
    a, b = jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))
    text = jax.jit(lambda a, b: jnp.einsum("bik,bkj->bij", a, b) + 1).lower(a, b).compile().as_text()
    assert dot_flops(text) == 2 * 3 * 4 * 5 * 6


def test_what_a_backward_computes_again_counts_again() -> None:
    def loss(w: jax.Array, x: jax.Array, remat: bool) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sin(jnp.sin(x @ w) @ w), None

        body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        return jax.lax.scan(body, x, w)[0].sum()

    w, x = jnp.ones((4, 8, 8)), jnp.ones((2, 8))
    texts = [jax.jit(jax.grad(loss), static_argnums=2).lower(w, x, remat).compile().as_text() for remat in (False, True)]
    one = 2 * 2 * 8 * 8
    assert [dot_flops(text) / one for text in texts] == [4 * 6, 4 * 8]


def test_convolutions_count_forward_and_backward() -> None:
    def loss(x: jax.Array, w: jax.Array, groups: int = 1) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=dims, feature_group_count=groups).sum()

    x, w, each = jnp.ones((2, 6, 6, 4)), jnp.ones((3, 3, 4, 8)), 2 * (2 * 4 * 4 * 8) * (3 * 3 * 4)
    assert dot_flops(jax.jit(loss).lower(x, w).compile().as_text()) == each
    assert dot_flops(jax.jit(jax.grad(lambda w: jnp.sin(loss(x, w)))).lower(w).compile().as_text()) == 2 * each
    grouped = jax.jit(loss, static_argnums=2).lower(x, w[:, :, :2], 2)
    assert dot_flops(grouped.compile().as_text()) == each / 2


CUBLAS = """
ENTRY %main (a: f16[24,64], b: f16[64,32]) -> f16[24,32] {
  %a = f16[24,64]{1,0} parameter(0)
  %b = f16[64,32]{1,0} parameter(1)
  %call = (f16[24,32]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  ROOT %out = f16[24,32]{1,0} get-tuple-element(%call), index=0
}
"""


@pytest.mark.parametrize("sign", ["%", ""])  # JAX 0.12 leaves out the sign before names
def test_calls_of_cublas_count(sign: str) -> None:
    assert dot_flops(CUBLAS.replace("%", sign)) == 2 * 24 * 64 * 32
