"""A cross entropy over a large vocabulary that never holds all its logits: fuse, then run in chunks.

The logits of a language model are its largest tensor: tokens x vocabulary, in float32, and their gradient once more.
Only the loss reads them. `fuse` makes one op of the head's dot and the cross entropy, so that they are inside it, and
its backward, ``jax.vjp`` of the whole, computes them again. `Chunk` runs both along the tokens, one chunk after another:

    x[tokens, d] ──► logits[tokens / 16, vocabulary] ──► sum of losses       16 times in a loop, on the same device

Run it with:  python docs/chunked_loss.py
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jscaler
from jscaler import Chunk, Split

TOKENS, WIDTH, VOCABULARY = 2048, 64, 8192


def loss_fn(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    with jax.named_scope("hidden"):
        x = jnp.tanh(batch["x"] @ params["hidden"])
    with jax.named_scope("head"):
        logits = x @ params["head"]
    with jax.named_scope("loss"):
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def in_chunks(count: int) -> Callable[[Any, np.ndarray], None]:
    """The policy: data parallel, and the loss in ``count`` chunks of every device's tokens."""

    def chunked_loss(graph: Any, devices: np.ndarray) -> None:
        *_, logits, labels, loss, _mean = graph.forward()
        fused = graph.fuse(logits, labels, loss, name="loss/chunked")
        tokens = graph.factor_of("batch/labels", 0)[fused]
        graph.op_assign(graph.op_trans(fused, Split(tokens, devices.size), Chunk(tokens, count)), devices)

    return chunked_loss


def make_arguments() -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "hidden": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 8,
        "head": jax.random.normal(keys[1], (WIDTH, VOCABULARY)) / 8,
    }
    batch = {
        "x": jax.random.normal(keys[2], (TOKENS, WIDTH)),
        "labels": jax.random.randint(keys[3], (TOKENS,), 0, VOCABULARY),
    }
    return params, batch


def main() -> None:
    params, batch = make_arguments()
    print(f"logits: {TOKENS} x {VOCABULARY} in float32 are {TOKENS * VOCABULARY * 4 / 2**20:.0f} MiB")
    plain = jax.jit(jax.value_and_grad(loss_fn)).lower(params, batch).compile()
    loss, grads = plain(params, batch)
    print(f"jax.jit               loss {loss:.6f}  temporaries {_mebibytes(plain)} MiB")
    for count in (1, 4, 16):
        step = jscaler.parallelize(in_chunks(count), devices=1)(jscaler.value_and_grad(loss_fn))
        compiled = step.lower(params, batch).compile()
        ours, our_grads = step(params, batch)
        print(f"in {count:2} chunks          loss {ours:.6f}  temporaries {_mebibytes(compiled)} MiB")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), our_grads, grads)
    print("the same gradients")


def _mebibytes(compiled: Any) -> str:
    return f"{compiled.memory_analysis().temp_size_in_bytes / 2**20:6.1f}"


if __name__ == "__main__":
    main()
