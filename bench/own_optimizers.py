"""Updates as users write them by hand, without or around Optax, for `bench.optimizers`."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bench.parity_updates import RATE, groups, kernels

Made = tuple[Callable[[Any], Any], Callable[..., tuple[Any, Any]]]  # init(params); update(gradients, state, params)


def zeros(params: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, params)


def norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum((jnp.sum(x**2) for x in jax.tree.leaves(tree)), jnp.zeros(())))


def sgd(gradients: Any) -> Any:
    return jax.tree.map(lambda g: -RATE * g, gradients)


def adamw() -> Made:
    """With a rate for each leaf: by its name, and none for those that a mask freezes."""

    def init(params: Any) -> Any:
        rates = jax.tree.map_with_path(lambda path, _: 0.1 * RATE if "head" in str(path) else RATE, params)
        return {"m": zeros(params), "v": zeros(params), "step": jnp.zeros((), jnp.int32), "rates": rates}

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        step = state["step"] + 1
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], gradients)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], gradients)

        def new(m: Any, v: Any, p: Any, rate: Any) -> Any:
            direction = m / (1 - 0.9**step) / (jnp.sqrt(v / (1 - 0.99**step)) + 1e-8)
            return -rate * (direction + 0.01 * p * (p.ndim > 1))

        return jax.tree.map(new, m, v, params, state["rates"]), {**state, "m": m, "v": v, "step": step}

    return init, update


def clip_by_value() -> Made:
    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return sgd(jax.tree.map(lambda g: jnp.clip(g, -0.01, 0.01), gradients)), state

    return lambda _: (), update


def clip_by_global_norm() -> Made:
    """As many write it: the norm of all leaves, joined as one vector."""

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        length = jnp.linalg.norm(jnp.stack([jnp.linalg.norm(g.ravel()) for g in jax.tree.leaves(gradients)]))
        scale = jnp.minimum(1.0, 0.1 / (length + 1e-6))
        return sgd(jax.tree.map(lambda g: g * scale, gradients)), {"norm": length}

    return lambda _: {"norm": jnp.zeros(())}, update


def clip_by_raveled_norm() -> Made:
    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        length = jnp.linalg.norm(jnp.concatenate([g.ravel() for g in jax.tree.leaves(gradients)]))
        return sgd(jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / length), gradients)), state

    return lambda _: (), update


def clip_by_layer_norm() -> Made:
    """Each layer of a dict by its own norm; a stack's by ``vmap``."""

    def clipped(layer: Any) -> Any:
        scale = jnp.minimum(1.0, 0.05 / (norm(layer) + 1e-6))
        return jax.tree.map(lambda g: g * scale, layer)

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        by_layer = {name: (jax.vmap(clipped) if name == "layers" else clipped)(layer) for name, layer in gradients.items()}
        return sgd(by_layer), state

    return lambda _: (), update


def ema() -> Made:
    """A moving average of the parameters beside them, with a decay that warms up."""

    def init(params: Any) -> Any:
        return {"average": params, "step": jnp.zeros((), jnp.int32)}

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, step = sgd(gradients), state["step"] + 1
        decay = jnp.minimum(0.99, (1 + step) / (10 + step))
        now = optax.apply_updates(params, updates)
        return updates, {"average": optax.incremental_update(now, state["average"], 1 - decay), "step": step}

    return init, update


def ema_every_other() -> Made:
    """The same at every other step, by ``lax.cond``."""

    def init(params: Any) -> Any:
        return {"average": params, "step": jnp.zeros((), jnp.int32)}

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates = sgd(gradients)

        def moved(average: Any) -> Any:
            return jax.tree.map(lambda a, p, u: 0.9 * a + 0.1 * (p + u), average, params, updates)

        average = jax.lax.cond(state["step"] % 2 == 1, moved, lambda a: a, state["average"])
        return updates, {"average": average, "step": state["step"] + 1}

    return init, update


def by_labels() -> Made:
    kinds: dict[Hashable, optax.GradientTransformation] = {
        "kernel": optax.adamw(RATE),
        "bias": optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(RATE)),
    }
    return optax.partition(kinds, groups)


def masked_decay() -> Made:
    decay = optax.masked(optax.add_decayed_weights(0.1), kernels)
    return optax.chain(optax.scale_by_adam(), decay, optax.scale(-RATE))


def if_finite() -> Made:
    return optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(RATE)), 3)


def multi_steps() -> Made:
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(RATE))
    return optax.MultiSteps(inner, 2).gradient_transformation()


def lookahead() -> Made:
    """Slow weights in the state, which every second step draws towards the fast ones."""

    def init(params: Any) -> Any:
        return {"slow": params, "step": jnp.zeros((), jnp.int32)}

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        step = state["step"] + 1
        fast = jax.tree.map(lambda p, u: p + u, params, sgd(gradients))
        slow = jax.tree.map(lambda s, f: jnp.where(step % 2 == 0, s + 0.5 * (f - s), s), state["slow"], fast)
        new = jax.tree.map(lambda s, f: jnp.where(step % 2 == 0, s, f), slow, fast)
        return jax.tree.map(lambda n, p: n - p, new, params), {"slow": slow, "step": step}

    return init, update


def schedule() -> Made:
    """A warm-up and a cosine, from a counter in the state."""

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        step = state["step"]
        rate = jnp.where(step < 2, RATE * (step + 1) / 2, RATE * 0.5 * (1 + jnp.cos(jnp.pi * (step - 2) / 8)))
        table = jnp.array([1.0, 0.5, 0.25])[jnp.minimum(step, 2)]
        return jax.tree.map(lambda g: -rate * table * g, gradients), {"step": step + 1, "rate": rate}

    return lambda _: {"step": jnp.zeros((), jnp.int32), "rate": jnp.zeros(())}, update


def noise() -> Made:
    """On gradients, from a key in the state, one key for each leaf."""

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(gradients)
        key, *keys = jax.random.split(state["key"], len(leaves) + 1)
        noisy = [g + 0.01 * jax.random.normal(k, g.shape, g.dtype) for g, k in zip(leaves, keys, strict=True)]
        return sgd(jax.tree.unflatten(tree, noisy)), {"key": key}

    return lambda _: {"key": jax.random.key(3)}, update


def noise_folded() -> Made:
    """The same from an old-style key and the step's number."""

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(gradients)
        key = jax.random.fold_in(state["key"], state["step"])
        noisy = [g + 0.01 * jax.random.normal(jax.random.fold_in(key, i), g.shape, g.dtype) for i, g in enumerate(leaves)]
        return sgd(jax.tree.unflatten(tree, noisy)), {**state, "step": state["step"] + 1}

    return lambda _: {"key": jax.random.PRNGKey(3), "step": jnp.zeros((), jnp.int32)}, update


def of_matrices(f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` for matrices; of stacks of matrices each layer's; what is smaller is left out."""

    def mapped(*xs: Any) -> Any:
        return jax.vmap(f)(*xs) if xs[0].ndim == 3 else f(*xs)

    return mapped


def is_matrix(path: Any, leaf: Any) -> bool:
    return "kernel" in str(path) or "embedding" in str(path)


def shampoo_like(root: Callable[[jax.Array], jax.Array]) -> Made:
    def init(params: Any) -> Any:
        def eyes(path: Any, p: jax.Array) -> Any:
            if not is_matrix(path, p):
                return None
            *lead, m, n = p.shape
            return {k: jnp.broadcast_to(jnp.eye(s, dtype=p.dtype), (*lead, s, s)) for k, s in (("l", m), ("r", n))}

        return jax.tree.map_with_path(eyes, params)

    def one(g: jax.Array, left: jax.Array, right: jax.Array) -> Any:
        left, right = left + g @ g.T, right + g.T @ g
        return root(left) @ g @ root(right), {"l": left, "r": right}

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(gradients)
        held = tree.flatten_up_to(state)
        made = [(g, s) if s is None else of_matrices(one)(g, s["l"], s["r"]) for g, s in zip(leaves, held, strict=True)]
        return sgd(jax.tree.unflatten(tree, [u for u, _ in made])), jax.tree.unflatten(tree, [s for _, s in made])

    return init, update


def shampoo() -> Made:
    """With the inverse roots by a few of Newton's steps, matmuls alone."""

    def root(a: jax.Array) -> jax.Array:
        eye = jnp.eye(a.shape[0], dtype=a.dtype)
        size = jnp.trace(a)
        y, z = a / size, eye
        for _ in range(3):
            t = 0.5 * (3 * eye - z @ y)
            y, z = y @ t, t @ z
        return z / jnp.sqrt(size)

    return shampoo_like(root)


def shampoo_eigh() -> Made:
    def root(a: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(a)
        return (vectors * values**-0.25) @ vectors.T

    return shampoo_like(root)


def newton_schulz() -> Made:
    """Momentum, orthogonalized by a ``fori_loop``."""

    def orthogonal(g: jax.Array) -> jax.Array:
        x = g.T if g.shape[0] > g.shape[1] else g
        x = x / (jnp.linalg.norm(x) + 1e-7)

        def once(_: Any, x: jax.Array) -> jax.Array:
            a = x @ x.T
            return 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x

        x = jax.lax.fori_loop(0, 5, once, x)
        return x.T if g.shape[0] > g.shape[1] else x

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state, gradients)
        made = jax.tree.map_with_path(lambda path, m: of_matrices(orthogonal)(m) if is_matrix(path, m) else m, momentum)
        return sgd(made), momentum

    return zeros, update


MADE: dict[str, Callable[[], Made]] = {
    "adamw": adamw,
    "clip_by_value": clip_by_value,
    "clip_by_global_norm": clip_by_global_norm,
    "clip_by_raveled_norm": clip_by_raveled_norm,
    "clip_by_layer_norm": clip_by_layer_norm,
    "ema": ema,
    "ema_every_other": ema_every_other,
    "by_labels": by_labels,
    "masked_decay": masked_decay,
    "if_finite": if_finite,
    "multi_steps": multi_steps,
    "lookahead": lookahead,
    "schedule": schedule,
    "noise": noise,
    "noise_folded": noise_folded,
    "shampoo": shampoo,
    "shampoo_eigh": shampoo_eigh,
    "newton_schulz": newton_schulz,
}
OWN = {f"own.{name}": lambda make=make: optax.GradientTransformation(*make()) for name, make in MADE.items()}
