"""Models over sequences, graphs and tables as their papers' code has them, in linen and nnx."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from bench.foreign_models.training import (
    BATCH,
    Foreign,
    State,
    cross_entropy,
    integers,
    linen_state,
    normal,
    trained,
    trained_nnx,
)

WORDS, LENGTH, WIDTH = 32, 8, 16


def next_tokens(make: Callable[[nnx.Rngs], nnx.Module]) -> Callable[[], Foreign]:
    """An nnx model of the next word."""

    def loss(model: Any, batch: Any) -> jax.Array:
        return cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    return lambda: trained_nnx(loss, make, {"tokens": integers(BATCH, LENGTH + 1, below=WORDS)})


def rotate_half(x: jax.Array) -> jax.Array:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return jnp.concatenate([-x2, x1], axis=-1)


class LlamaAttention(nnx.Module):
    def __init__(self, heads: int, kv_heads: int, head_dim: int, rngs: nnx.Rngs):
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nnx.Linear(WIDTH, heads * head_dim, use_bias=False, rngs=rngs)
        self.k_proj = nnx.Linear(WIDTH, kv_heads * head_dim, use_bias=False, rngs=rngs)
        self.v_proj = nnx.Linear(WIDTH, kv_heads * head_dim, use_bias=False, rngs=rngs)
        self.o_proj = nnx.Linear(heads * head_dim, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        b, s, _ = x.shape
        q = self.q_proj(x).reshape(b, s, self.heads, self.head_dim)
        k = self.k_proj(x).reshape(b, s, self.kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(b, s, self.kv_heads, self.head_dim)
        cos, sin = cos[None, :, None, :], sin[None, :, None, :]
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.reshape(b, s, -1))


class LlamaMlp(nnx.Module):
    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.gate_proj = nnx.Linear(WIDTH, hidden, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(WIDTH, hidden, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(hidden, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.input_layernorm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.self_attn = LlamaAttention(4, 2, 4, rngs)
        self.post_attention_layernorm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp = LlamaMlp(48, rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """Rotary positions, grouped queries, SwiGLU."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.layers = nnx.List([LlamaLayer(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, WORDS, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # b s -> b s v
        inv_freq = 1.0 / (10000.0 ** (jnp.arange(0, 4, 2) / 4))
        freqs = jnp.outer(jnp.arange(tokens.shape[1]), inv_freq)
        emb = jnp.concatenate([freqs, freqs], axis=-1)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, jnp.cos(emb), jnp.sin(emb))
        return self.lm_head(self.norm(x))


class S5Layer(nn.Module):
    """A diagonal state space of complex numbers, discretised and scanned in parallel."""

    state_size: int = 8

    @nn.compact
    def __call__(self, u: jax.Array) -> jax.Array:  # l h -> l h
        h, p = u.shape[-1], self.state_size
        lambda_re = self.param("Lambda_re", lambda _: -0.5 * jnp.ones(p))
        lambda_im = self.param("Lambda_im", lambda _: jnp.pi * jnp.arange(p, dtype=jnp.float32))
        b = self.param("B", nn.initializers.lecun_normal(), (p, h, 2))
        c = self.param("C", nn.initializers.lecun_normal(), (h, p, 2))
        d = self.param("D", nn.initializers.normal(1.0), (h,))
        step = jnp.exp(self.param("log_step", nn.initializers.constant(-3.0), (p,)))
        lam = lambda_re + 1j * lambda_im
        lambda_bar = jnp.exp(lam * step)
        b_bar = ((lambda_bar - 1) / lam)[:, None] * (b[..., 0] + 1j * b[..., 1])

        def binary_operator(q_i: Any, q_j: Any) -> Any:
            (a_i, b_i), (a_j, b_j) = q_i, q_j
            return a_j * a_i, a_j * b_i + b_j

        lambda_elements = lambda_bar * jnp.ones((u.shape[0], p))
        bu_elements = jax.vmap(lambda one: b_bar @ one)(u)
        _, xs = jax.lax.associative_scan(binary_operator, (lambda_elements, bu_elements))
        ys = jax.vmap(lambda x: 2 * ((c[..., 0] + 1j * c[..., 1]) @ x).real)(xs)
        return ys + d * u


class S5Classifier(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # b l f -> b k
        layer = nn.vmap(S5Layer, in_axes=0, out_axes=0, variable_axes={"params": None}, split_rngs={"params": False})
        x = nn.Dense(WIDTH, name="encoder")(x)
        for i in range(2):
            y = nn.gelu(layer(name=f"seq_{i}")(nn.LayerNorm()(x)))
            x = x + y * nn.sigmoid(nn.Dense(WIDTH)(y))
        return nn.Dense(8, name="decoder")(x.mean(axis=1))


def s5() -> Foreign:
    batch = {"signal": normal(BATCH, 2 * LENGTH, 3), "label": integers(BATCH, below=8)}

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        return cross_entropy(state.apply_fn({"params": params}, batch["signal"]), batch["label"]), {}

    return trained(loss, linen_state(S5Classifier(), batch["signal"]), batch)


class MambaBlock(nnx.Module):
    """A selective state space, step by step."""

    def __init__(self, d_inner: int, d_state: int, rngs: nnx.Rngs):
        self.d_state, self.dt_rank = d_state, 2
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.in_proj = nnx.Linear(WIDTH, 2 * d_inner, use_bias=False, rngs=rngs)
        self.conv1d = nnx.Conv(d_inner, d_inner, (4,), padding="CAUSAL", feature_group_count=d_inner, rngs=rngs)
        self.x_proj = nnx.Linear(d_inner, self.dt_rank + 2 * d_state, use_bias=False, rngs=rngs)
        self.dt_proj = nnx.Linear(self.dt_rank, d_inner, rngs=rngs)
        self.A_log = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, d_state + 1), (d_inner, 1))))
        self.D = nnx.Param(jnp.ones(d_inner))
        self.out_proj = nnx.Linear(d_inner, WIDTH, use_bias=False, rngs=rngs)

    def ssm(self, x: jax.Array) -> jax.Array:  # b l d -> b l d
        a = -jnp.exp(self.A_log[...])
        delta, b, c = jnp.split(self.x_proj(x), [self.dt_rank, self.dt_rank + self.d_state], axis=-1)
        delta = jax.nn.softplus(self.dt_proj(delta))
        delta_a = jnp.exp(jnp.einsum("bld,dn->bldn", delta, a))
        delta_bu = jnp.einsum("bld,bln,bld->bldn", delta, b, x)

        def step(h: jax.Array, inputs: Any) -> Any:
            da, dbu, c_t = inputs
            h = da * h + dbu
            return h, jnp.einsum("bdn,bn->bd", h, c_t)

        h0 = jnp.zeros((x.shape[0], x.shape[2], self.d_state))
        swapped = [jnp.moveaxis(v, 1, 0) for v in (delta_a, delta_bu, c)]
        _, ys = jax.lax.scan(step, h0, tuple(swapped))
        return jnp.moveaxis(ys, 0, 1) + x * self.D

    def __call__(self, x: jax.Array) -> jax.Array:
        u, res = jnp.split(self.in_proj(self.norm(x)), 2, axis=-1)
        y = self.ssm(nnx.silu(self.conv1d(u)))
        return x + self.out_proj(y * nnx.silu(res))


class Mamba(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.layers = nnx.List([MambaBlock(32, 4, rngs) for _ in range(2)])
        self.norm_f = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # b s -> b s v
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embedding.attend(self.norm_f(x))


class SwitchFeedForward(nn.Module):
    """One expert per token; what is beyond an expert's capacity is dropped."""

    num_experts: int = 4
    capacity_factor: float = 1.25

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:  # b s d -> b s d
        batch, length, dim = x.shape
        tokens = x.reshape(-1, dim)
        capacity = int(self.capacity_factor * tokens.shape[0] / self.num_experts)
        probs = nn.softmax(nn.Dense(self.num_experts, use_bias=False, name="router")(tokens))
        gate, expert_index = probs.max(axis=-1), probs.argmax(axis=-1)
        expert_mask = jax.nn.one_hot(expert_index, self.num_experts)
        aux_loss = self.num_experts * jnp.sum(expert_mask.mean(axis=0) * probs.mean(axis=0))
        position = (jnp.cumsum(expert_mask, axis=0) - 1) * expert_mask
        expert_mask = expert_mask * (position < capacity)
        slot = jax.nn.one_hot(position.sum(axis=-1).astype(jnp.int32), capacity)
        dispatch = jnp.einsum("te,tc->tec", expert_mask, slot)
        combine = dispatch * gate[:, None, None]
        w1 = self.param("w1", nn.initializers.lecun_normal(batch_axis=0), (self.num_experts, dim, 4 * dim))
        w2 = self.param("w2", nn.initializers.lecun_normal(batch_axis=0), (self.num_experts, 4 * dim, dim))
        expert_inputs = jnp.einsum("tec,td->ecd", dispatch, tokens)
        hidden = nn.gelu(jnp.einsum("ecd,edf->ecf", expert_inputs, w1))
        out = jnp.einsum("ecf,efd->ecd", hidden, w2)
        return jnp.einsum("tec,ecd->td", combine, out).reshape(batch, length, dim), aux_loss


class SwitchTransformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, Any]:  # b s -> b s v
        x = nn.Embed(WORDS, WIDTH)(tokens) + self.param("pos", nn.initializers.normal(0.02), (tokens.shape[1], WIDTH))
        mask = nn.make_causal_mask(tokens)
        total = 0.0
        for _ in range(2):
            x = x + nn.SelfAttention(num_heads=4)(nn.LayerNorm()(x), mask)
            y, aux = SwitchFeedForward()(nn.LayerNorm()(x))
            x, total = x + y, total + aux
        return nn.Dense(WORDS)(nn.LayerNorm()(x)), total


def switch() -> Foreign:
    batch = {"tokens": integers(BATCH, LENGTH + 1, below=WORDS)}

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        logits, aux = state.apply_fn({"params": params}, batch["tokens"][:, :-1])
        return cross_entropy(logits, batch["tokens"][:, 1:]) + 0.01 * aux, {}

    return trained(loss, linen_state(SwitchTransformer(), batch["tokens"][:, :-1]), batch)


class EmbeddingBags(nnx.Module):
    """Tables of different sizes; of several words of a feature the mean."""

    def __init__(self, sizes: tuple[int, ...], dim: int, rngs: nnx.Rngs):
        self.tables = nnx.List([nnx.Embed(size, dim, rngs=rngs) for size in sizes])

    def __call__(self, ids: list[jax.Array], weights: list[jax.Array]) -> list[jax.Array]:
        bags = []
        for table, i, w in zip(self.tables, ids, weights, strict=True):
            summed = (table(i) * w[..., None]).sum(axis=1)
            bags.append(summed / jnp.maximum(w.sum(axis=1, keepdims=True), 1.0))
        return bags


class DLRM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.bottom_mlp = nnx.Sequential(nnx.Linear(6, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 8, rngs=rngs), nnx.relu)
        self.embeddings = EmbeddingBags((64, 16, 48), 8, rngs)
        self.top_mlp = nnx.Sequential(nnx.Linear(8 + 6, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 1, rngs=rngs))

    def __call__(self, dense: jax.Array, ids: list[jax.Array], weights: list[jax.Array]) -> jax.Array:
        bottom = self.bottom_mlp(dense)
        features = jnp.stack([bottom, *self.embeddings(ids, weights)], axis=1)
        interactions = features @ features.swapaxes(1, 2)
        rows, columns = jnp.triu_indices(features.shape[1], k=1)
        return self.top_mlp(jnp.concatenate([bottom, interactions[:, rows, columns]], axis=1)).squeeze(-1)


def dlrm() -> Foreign:
    batch = {
        "dense": jnp.log1p(jnp.abs(normal(BATCH, 6))),
        "ids": [integers(BATCH, 4, below=n, seed=i) for i, n in enumerate((64, 16, 48))],
        "weights": [integers(BATCH, 4, below=2, seed=3 + i).astype(jnp.float32) for i in range(3)],
        "label": integers(BATCH, below=2, seed=9).astype(jnp.float32),
    }

    def loss(model: DLRM, batch: Any) -> jax.Array:
        logits = model(batch["dense"], batch["ids"], batch["weights"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean()

    return trained_nnx(loss, DLRM, batch)


class Perceiver(nn.Module):
    """Latents that look at an array of bytes, and at each other; the same weights in every round."""

    num_latents: int = 4
    rounds: int = 2

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:  # b h w c -> b k
        b, h, w, c = inputs.shape
        grid = jnp.stack(jnp.meshgrid(jnp.linspace(-1, 1, h), jnp.linspace(-1, 1, w), indexing="ij"), axis=-1)
        scaled = grid[..., None] * jnp.linspace(1.0, 4.0, 3) * jnp.pi
        fourier = jnp.concatenate([jnp.sin(scaled), jnp.cos(scaled)], axis=-1).reshape(h * w, -1)
        data = jnp.concatenate([inputs.reshape(b, h * w, c), jnp.broadcast_to(fourier, (b, *fourier.shape))], axis=-1)
        latents = self.param("latents", nn.initializers.truncated_normal(0.02), (self.num_latents, WIDTH))
        x = jnp.repeat(latents[None], b, axis=0)
        cross = nn.MultiHeadDotProductAttention(num_heads=1, qkv_features=WIDTH, out_features=WIDTH, name="cross_attend")
        attend = nn.MultiHeadDotProductAttention(num_heads=4, name="self_attend")
        widen, narrow = nn.Dense(4 * WIDTH, name="fc1"), nn.Dense(WIDTH, name="fc2")
        norms = [nn.LayerNorm(name=f"norm_{i}") for i in range(4)]
        for _ in range(self.rounds):
            x = x + cross(norms[0](x), norms[1](data))
            y = norms[2](x)
            x = x + attend(y, y)
            x = x + narrow(nn.gelu(widen(norms[3](x))))
        return nn.Dense(8, name="classifier")(x.mean(axis=1))


def perceiver() -> Foreign:
    batch = {"image": normal(BATCH, 8, 8, 3), "label": integers(BATCH, below=8)}

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        return cross_entropy(state.apply_fn({"params": params}, batch["image"]), batch["label"]), {}

    return trained(loss, linen_state(Perceiver(), batch["image"]), batch)


def segment_softmax(logits: jax.Array, segments: jax.Array, count: int) -> jax.Array:
    highest = jax.ops.segment_max(logits, segments, count)
    exp = jnp.exp(logits - jax.lax.stop_gradient(highest)[segments])
    return exp / (jax.ops.segment_sum(exp, segments, count)[segments] + 1e-9)


class GraphTransformer(nn.Module):
    """Attention along edges."""

    heads: int = 4

    @nn.compact
    def __call__(self, nodes: jax.Array, edges: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        count, dim = nodes.shape[0], WIDTH // self.heads
        x = nn.Dense(WIDTH)(nodes)
        for i in range(2):
            h = nn.LayerNorm()(x)
            q, k, v = (nn.DenseGeneral((self.heads, dim), name=f"{name}_{i}")(h) for name in ("query", "key", "value"))
            bias = nn.Dense(self.heads)(edges)
            logits = jnp.sum(q[receivers] * k[senders], axis=-1) / jnp.sqrt(dim) + bias
            weights = segment_softmax(logits, receivers, count)
            message = jax.ops.segment_sum(weights[..., None] * v[senders], receivers, count)
            x = x + nn.Dense(WIDTH)(message.reshape(count, WIDTH))
            x = x + nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return x


class GraphRegression(nn.Module):
    """Several graphs as one whose parts do not touch, as jraph batches them."""

    @nn.compact
    def __call__(self, graph: Any) -> jax.Array:
        x = GraphTransformer()(graph["nodes"], graph["edges"], graph["senders"], graph["receivers"])
        graphs = graph["n_node"].shape[0]
        graph_ids = jnp.repeat(jnp.arange(graphs), graph["n_node"], total_repeat_length=x.shape[0])
        pooled = jax.ops.segment_sum(x, graph_ids, graphs) / graph["n_node"][:, None]
        return nn.Dense(1)(nn.relu(nn.Dense(WIDTH)(pooled)))[:, 0]


NODES, EDGES = 6, 12


def edge_lists() -> tuple[jax.Array, jax.Array]:
    return integers(BATCH, EDGES, below=NODES, seed=2), integers(BATCH, EDGES, below=NODES, seed=3)


def batched_graphs() -> Foreign:
    first = NODES * jnp.arange(BATCH)[:, None]
    senders, receivers = edge_lists()
    batch = {
        "nodes": normal(BATCH * NODES, 5),
        "edges": normal(BATCH * EDGES, 3, seed=1),
        "senders": (senders + first).reshape(-1),
        "receivers": (receivers + first).reshape(-1),
        "n_node": jnp.full(BATCH, NODES),
        "target": normal(BATCH, seed=4),
    }

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        return jnp.mean((state.apply_fn({"params": params}, batch) - batch["target"]) ** 2), {}

    return trained(loss, linen_state(GraphRegression(), batch), batch)


class NodeClassifier(nn.Module):
    @nn.compact
    def __call__(self, nodes: jax.Array, edges: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        return nn.Dense(4, name="head")(GraphTransformer(name="encoder")(nodes, edges, senders, receivers))


def graph_transformer() -> Foreign:
    senders, receivers = edge_lists()
    batch = {
        "nodes": normal(BATCH, NODES, 5),
        "edges": normal(BATCH, EDGES, 3, seed=1),
        "senders": senders,
        "receivers": receivers,
        "label": integers(BATCH, NODES, below=4, seed=4),
    }
    names = ("nodes", "edges", "senders", "receivers")

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        def one(graph: Any) -> jax.Array:
            return cross_entropy(state.apply_fn({"params": params}, *(graph[n] for n in names)), graph["label"])

        return jax.vmap(one)(batch).mean(), {}

    return trained(loss, linen_state(NodeClassifier(), *(batch[n][0] for n in names)), batch)


MODELS: dict[str, Callable[[], Foreign]] = {
    "nnx llama": next_tokens(Llama),
    "linen s5": s5,
    "nnx mamba": next_tokens(Mamba),
    "linen switch transformer": switch,
    "nnx dlrm, bags": dlrm,
    "linen perceiver": perceiver,
    "linen graph transformer": graph_transformer,
    "linen graphs in one": batched_graphs,
}
