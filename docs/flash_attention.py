"""A Pallas kernel with a derivative of its own, split over heads and batch. Run it: python docs/flash_attention.py

Of a kernel of Pallas, jscaler reads rows and heads off the grid; of what it cannot look into, it copies all. `@jscaler.op`
says how any function may be split, and runs it at the shapes of a part: the recipe for all other kernels. On CPU the kernel
is interpreted; on a GPU it is compiled by Triton.

Shapes: b batch, s queries, t keys, h heads, d head size, m model width.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import rich
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import jscaler
from jscaler import Split

BLOCK = 16  # queries per program, and keys per step of its loop


# 1. The kernel: one program per batch row, head and block of queries. It walks over the keys with a running maximum and a
#    running sum, so that the matrix of scores is never stored, and also returns the log-sum-exp of every row.


def kernel(q_ref, k_ref, v_ref, o_ref, lse_ref) -> None:
    q = q_ref[...]
    num_queries, width = q.shape

    def step(i, carry):
        top, total, out = carry
        k, v = k_ref[pl.ds(i * BLOCK, BLOCK), :], v_ref[pl.ds(i * BLOCK, BLOCK), :]
        scores = jnp.dot(q, k.T)
        new_top = jnp.maximum(top, scores.max(axis=1))
        shrink, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[:, None])
        return new_top, total * shrink + weights.sum(axis=1), out * shrink[:, None] + jnp.dot(weights, v)

    start = (jnp.full(num_queries, -jnp.inf), jnp.zeros(num_queries), jnp.zeros((num_queries, width)))
    top, total, out = jax.lax.fori_loop(0, k_ref.shape[0] // BLOCK, step, start)
    o_ref[...] = out / total[:, None]
    lse_ref[...] = top + jnp.log(total)


def flash_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """b s h d, b t h d, b t h d -> b s h d, b h s"""
    (b, s, h, d), t = q.shape, k.shape[1]
    queries = pl.BlockSpec((None, BLOCK, None, d), lambda row, head, i: (row, i, head, 0))
    keys = pl.BlockSpec((None, t, None, d), lambda row, head, i: (row, 0, head, 0))
    sums = pl.BlockSpec((None, None, BLOCK), lambda row, head, i: (row, head, i))
    call = pl.pallas_call(
        kernel,
        grid=(b, h, s // BLOCK),
        in_specs=[queries, keys, keys],
        out_specs=[queries, sums],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((b, h, s), q.dtype)],
        interpret=jax.default_backend() == "cpu",
        compiler_params=triton.CompilerParams(),
    )
    return call(q / np.sqrt(d), k, v)


# 2. Its derivative, from what the forward saves: scores again, but no second softmax.


@jax.custom_vjp
def flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return flash_forward(q, k, v)[0]


def flash_saving(q, k, v):
    out, lse = flash_forward(q, k, v)
    return out, (q, k, v, out, lse)


def flash_backward(saved, dout):
    q, k, v, out, lse = saved
    scale = 1 / np.sqrt(q.shape[-1])
    weights = jnp.exp(jnp.einsum("bshd,bthd->bhst", q, k) * scale - lse[..., None])
    dweights = jnp.einsum("bshd,bthd->bhst", dout, v)
    dscores = weights * (dweights - jnp.einsum("bshd,bshd->bhs", dout, out)[..., None]) * scale
    return (
        jnp.einsum("bhst,bthd->bshd", dscores, k),
        jnp.einsum("bhst,bshd->bthd", dscores, q),
        jnp.einsum("bhst,bshd->bthd", weights, dout),
    )


flash.defvjp(flash_saving, flash_backward)


# 3. The rule. b, h and s are carried by the result: any part of them can be computed alone. No result carries t, which in
#    an einsum would mean that the parts are added; a softmax over parts is not that, so t must be blocked, and so must d,
#    which the scores sum over.

attention = jscaler.op("b s h d, b t h d, b t h d -> b s h d", blocked="t d")(flash)


# 4. An ordinary train step.


def loss(params: dict, x: jax.Array, attend) -> jax.Array:
    q, k, v = (jnp.einsum("bsm,mhd->bshd", x, params[name]) for name in "qkv")
    return (jnp.einsum("bshd,hdm->bsm", attend(q, k, v), params["o"]) ** 2).mean()


def train_step(params: dict, x: jax.Array) -> tuple[dict, jax.Array]:
    value, grads = jscaler.value_and_grad(functools.partial(loss, attend=attention))(params, x)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


# 5. A plan by hand: batch two ways, heads two ways. The projections around the kernel, the backward and the update follow.


def batch_and_heads(graph, devices: np.ndarray) -> None:
    (flash_op,) = graph.select("*flash")
    graph.op_assign(graph.op_trans(flash_op, Split("b", 2), Split("h", 2)), devices.reshape(2, 2))


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """What the kernel must equal."""
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v)


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"q": (64, 4, 16), "k": (64, 4, 16), "v": (64, 4, 16), "o": (4, 16, 64)}
    params = {name: jax.random.normal(key, shape) / 8 for (name, shape), key in zip(shapes.items(), keys, strict=False)}
    x = jax.random.normal(keys[4], (4, 32, 64))

    # 6. Does the rule tell the truth? Whole against parts, forward and backward, for every factor that it leaves open.
    q, k, v = (jnp.einsum("bsm,mhd->bshd", x, params[name]) for name in "qkv")
    rich.print(jscaler.verify_rule(attention, q, k, v, parts=(2,)))

    # 7. Had t not been blocked, it would have been found out here, and not in a loss curve.
    careless = jscaler.op("b s h d, b t h d, b t h d -> b s h d", blocked="d")(flash)
    try:
        jscaler.verify_rule(careless, q, k, v, factors=["t"], parts=(2,))
    except jscaler.VerificationError as error:
        print(f"\n{error}\n")

    # 8. On four devices the numbers are those of plain attention on one. The kernel runs once: what its backward needs is
    #    saved by the forward, as tensors that the plan can see and that are split like everything else.
    lowered = jscaler.parallelize(batch_and_heads, devices=4)(train_step).lower(params, x)
    jscaler.verify(lowered)  # every tensor arrives where it is read
    print(lowered.plan.explain())
    (op,) = (op for op in lowered.graph.ops if op.path.endswith("flash"))
    print(f"\n{op.path} saves", *(str(t) for t in op.outputs[1:]))
    ours, value = lowered.compile()(params, x)

    expected, grads = jax.jit(jax.value_and_grad(functools.partial(loss, attend=plain)))(params, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(params[name] - ours[name], grad, rtol=1e-4, atol=1e-6)
    print("\nflash attention on four devices: the same loss and the same gradients as plain attention on one")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    main()
