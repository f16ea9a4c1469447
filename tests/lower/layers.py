"""A stack of layers as a scan, with dropout inside, and the programs that loops come in."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jscaler
from jscaler import Replicate, Split

LAYERS, HIDDEN = 3, 4
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
UP = "state/params/layers/mlp/up/kernel"


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(HIDDEN, name="down")(nn.gelu(nn.Dense(2 * HIDDEN, name="up")(x)))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> tuple[jax.Array, None]:
        y = MLP(name="mlp")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dropout(0.2, deterministic=not train)(y), None


class Net(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        layer = nn.remat(Layer, static_argnums=(2,), prevent_cse=False) if self.remat else Layer
        stack = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,  # type: ignore[arg-type]
            length=LAYERS,
        )
        return nn.Dense(3, name="head")(stack(name="layers")(x, train)[0])


def net_step(remat: bool) -> Callable[..., Any]:
    """A train step of the net: Adam behind a clip, dropout from a key of the batch."""
    net = Net(remat)

    def step(state: dict[str, Any], batch: dict[str, Any]) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            out = net.apply({"params": params}, batch["x"], True, rngs={"dropout": batch["key"]})
            return ((out - batch["y"]) ** 2).mean()

        loss, grads = jscaler.value_and_grad(loss_fn)(state["params"])
        updates, opt = ADAMW.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


def net_batch() -> dict[str, Any]:
    return {"x": jax.random.normal(jax.random.key(2), (4, HIDDEN)), "y": jnp.ones((4, 3)), "key": jax.random.key(7)}


def net_state() -> dict[str, Any]:
    params = jax.jit(Net().init, static_argnums=2)(jax.random.key(0), jnp.zeros((1, HIDDEN)), False)["params"]
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.result_type(float)), params)
    return {"params": params, "opt": ADAMW.init(params)}


def columns_then_rows(graph: Any, devices: np.ndarray) -> None:
    """The body's MLP, tensor parallel in every layer."""
    factors = graph.factor_of(UP, 2)
    for op in graph.select("*/mlp/*"):
        if op in factors and graph.rule(op).factors[factors[op]].kind != "blocked":
            graph.op_assign(graph.op_trans(op, Split(factors[op], devices.size)), devices)


def batch_and_hidden(graph: Any, devices: np.ndarray) -> None:
    """Rows of the device grid split the batch, columns the MLP."""
    grid = devices.reshape(2, -1)
    rows, hidden = graph.factor_of("batch/x", 0), graph.factor_of(UP, 2)
    for op in graph.forward():
        if op not in rows or graph.rule(op).factors[rows[op]].kind == "blocked":
            continue
        inner = "/mlp/" in op.path and op in hidden
        across = Split(hidden[op], grid.shape[1]) if inner else Replicate(grid.shape[1])
        graph.op_assign(graph.op_trans(op, Split(rows[op], grid.shape[0]), across), grid)


def params() -> dict[str, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    shapes = {"w": (3, 4, 4), "s": (4, 4), "v": (2, 3, 4, 4), "c": (4,)}
    return {name: jax.random.normal(next(keys), shape) / 2 for name, shape in shapes.items()}


def batch() -> dict[str, Any]:
    return {"x": jax.random.normal(jax.random.key(5), (2, 4)), "key": jax.random.key(3)}


def _layer(x: Any, w: Any, p: Any) -> Any:
    return jnp.tanh(jnp.sin(x @ w) @ p["s"])


def shared_and_stacked(p: Any, b: Any) -> Any:
    """Parameters that every layer reads, results of every layer, the last layer first."""

    def body(x: Any, w: Any) -> Any:
        x = _layer(x, w, p) + p["c"]
        return x, (x, (x * 2).sum(), jnp.zeros(3))

    x, (every, sums, zeros) = lax.scan(body, b["x"], p["w"], reverse=True)
    return (x * every[0]).sum() + (sums**2).sum() + zeros.sum() + (p["s"] ** 2).sum()


def many_carries(p: Any, b: Any) -> Any:
    """A counter, a key, two values that change places, one that stays, one that starts as a literal."""

    def body(carry: Any, w: Any) -> Any:
        i, key, first, second, same, total = carry
        key, drawn = jax.random.split(key)
        kept = jax.random.bernoulli(drawn, 0.5, first.shape)
        return (i + 1, key, jnp.tanh(second @ w) * (i + 1), first * same * kept, same, total + first.sum()), (i, w)

    start = (jnp.int32(0), b["key"], b["x"], b["x"] * 2, p["c"], 0.0)
    (i, _, first, second, same, total), (counts, ws) = lax.scan(body, start, p["w"])
    return (first * second).sum() * i + same.sum() + total + counts.sum() + (ws[1] ** 2).sum()


def unread_and_replaced(p: Any, b: Any) -> Any:
    """A carry whose end nobody reads, one that each layer replaces by what lies outside, a start without inputs."""

    def body(carry: Any, w: Any) -> Any:
        x, unread, _, made = carry
        return (jnp.tanh(x @ w), unread @ p["s"], p["c"], jnp.tanh(b["x"] @ w + made)), unread

    start = (b["x"], b["x"], p["c"] * 2, jnp.zeros((2, 4)))
    (x, _, replaced, made), unread = lax.scan(body, start, p["w"])
    return (x * replaced).sum() + made.sum() + unread[2].sum()


def loops_in_loops(p: Any, b: Any) -> Any:
    def outer(x: Any, v: Any) -> Any:
        return lax.scan(lambda y, w: (_layer(y, w, p) + x, y.sum()), x, v)

    x, sums = lax.scan(outer, b["x"], p["v"])
    return x.sum() + (sums**2).sum()


def checkpointed(p: Any, b: Any) -> Any:
    """Regions in a row (one inside another), with a policy, and around the layers of a stack."""
    layer = jax.checkpoint(lambda x, w: _layer(x, w, p))
    both = jax.checkpoint(lambda x: jnp.cos(layer(layer(x, p["w"][0]), p["w"][1])))
    dots = jax.checkpoint(lambda x: _layer(x, p["s"], p), policy=jax.checkpoint_policies.dots_saveable)

    def body(x: Any, w: Any) -> Any:
        y = layer(x, w)
        return layer(y, w) + y, y.sum()

    x, sums = lax.scan(body, dots(both(both(b["x"]))), p["w"])
    return x.sum() + (sums**2).sum()


def checkpointed_stacks(p: Any, b: Any) -> Any:
    """A stack inside a region, twice, and once more inside the body of a stack."""
    layer = jax.checkpoint(lambda x, w: _layer(x, w, p))
    stack = jax.checkpoint(lambda x, ws: lax.scan(lambda y, w: (layer(y, w), y.sum()), x, ws))
    x, sums = stack(stack(b["x"], p["w"])[0], p["w"])
    x, more = lax.scan(lambda y, ws: (stack(y, ws)[0] + y, None), x, p["v"])[0], sums
    return x.sum() + (more**2).sum()


def checkpointed_once(p: Any, b: Any) -> Any:
    """Checkpointed stacks of one layer, outside and in each layer of a stack; two regions in the layer."""
    layer = jax.checkpoint(lambda x, w: _layer(x, w, p))

    def once(x: Any, ws: Any) -> Any:
        return lax.scan(lambda y, w: (layer(y, w) + layer(y + p["c"], w), y.sum()), x, ws)

    x, sums = once(b["x"], p["w"][:1])
    x, more = lax.scan(lambda y, ws: once(y, ws[:1]), x, p["v"])
    return x.sum() + (sums**2).sum() + (more**2).sum()


def handed_through(p: Any, b: Any) -> Any:
    """Checkpointed stacks of which the backward reads the slices alone, or what passes unchanged or changes places."""
    h = b["x"] @ p["s"]
    inner = lambda v: lax.scan(lambda c, w: (c, h @ w), 0.0, v)[1]  # noqa: E731
    every = jax.checkpoint(lambda v: lax.scan(lambda c, w: (c, inner(w)), 0.0, v)[1])(p["v"])

    def region(x: Any) -> Any:
        def body(carry: Any, w: Any) -> Any:
            first, second, same, y = carry
            return (second, first, same, jnp.tanh(y @ w)), (w, second)

        (first, second, same, y), (ws, seconds) = lax.scan(body, (x, x * 2, x * 3, x), p["w"])
        return jnp.sin(first) * jnp.cos(second) * jnp.tan(same) * jnp.sin(ws.sum()) * jnp.cos(seconds).sum(0), y

    z, y = jax.checkpoint(region)(h)
    return (every**2).sum() + (z**2).sum() + y.sum()


def barely_loops(p: Any, b: Any) -> Any:
    """A body that computes nothing that is read, none at all, no iterations, results that are literals."""

    def unread(x: Any, w: Any) -> Any:
        _ = x @ w
        return x, (x, w)

    x, (every, _) = lax.scan(unread, b["x"] @ p["s"], p["w"])
    lax.scan(lambda x, w: (x, x @ w), x, p["w"])
    none, nones = lax.scan(lambda x, w: (x @ w, x.sum()), x, p["w"][:0])
    y, (twos, threes) = lax.scan(lambda x, w: (jnp.tanh(x @ w), (2.5, 3)), x, p["w"])
    return (x * every[1] * none).sum() + nones.sum() + y.sum() * jnp.sum(twos) * jnp.sum(threes)


PROGRAMS = (
    shared_and_stacked, many_carries, unread_and_replaced, loops_in_loops, checkpointed, checkpointed_stacks,
    checkpointed_once,
)  # fmt: skip


def step_of(loss_fn: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A step that also has a loop among its updates."""

    def step(p: Any, b: Any) -> Any:
        loss, grads = jscaler.value_and_grad(loss_fn)(p, b)
        turned, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), grads["s"], p["w"])
        return loss, jax.tree.map(lambda x, g: x - 0.1 * g, p, grads), turned

    return step
