"""Models in linen over sequences, graphs and tables that are no Transformers."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from bench.foreign_models.training import (
    BATCH,
    Foreign,
    State,
    cross_entropy,
    integers,
    linen_state,
    masked_mean,
    normal,
    trained,
)

WORDS, LENGTH = 32, 8


class Sentiment(nn.Module):
    """Words forward and backward through LSTMs, and attention over their states."""

    @nn.compact
    def __call__(self, words: jax.Array, lengths: jax.Array, train: bool = True) -> jax.Array:  # b s, b -> b
        x = nn.Dropout(0.1, deterministic=not train)(nn.Embed(WORDS, 16)(words))
        forward, backward = nn.RNN(nn.LSTMCell(16)), nn.RNN(nn.LSTMCell(16))
        states = nn.Bidirectional(forward, backward)(x, seq_lengths=lengths)
        scores = nn.Dense(1, use_bias=False)(jnp.tanh(nn.Dense(16)(states)))[..., 0]
        inside = jnp.arange(words.shape[1]) < lengths[:, None]
        weights = nn.softmax(jnp.where(inside, scores, -1e9))
        return nn.Dense(1)(jnp.tanh(nn.Dense(16)(jnp.einsum("bs,bsd->bd", weights, states))))[..., 0]


def sst2() -> Foreign:
    batch = {
        "words": integers(BATCH, LENGTH, below=WORDS),
        "lengths": 1 + integers(BATCH, below=LENGTH, seed=1),
        "label": integers(BATCH, below=2, seed=2).astype(jnp.float32),
    }

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        logits = state.apply_fn({"params": params}, batch["words"], batch["lengths"], rngs={"dropout": key})
        return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean(), {}

    return trained(loss, linen_state(Sentiment(), batch["words"], batch["lengths"]), batch)


class Addition(nn.Module):
    """One LSTM reads a question of one-hot characters, another says the answer from its state."""

    @nn.compact
    def __call__(self, questions: jax.Array, answers: jax.Array) -> jax.Array:  # b s c, b t c -> b t c
        carry, _ = nn.RNN(nn.LSTMCell(32), return_carry=True, name="encoder")(questions)
        said = nn.RNN(nn.LSTMCell(32), name="decoder")(answers[:, :-1], initial_carry=carry)
        return nn.Dense(answers.shape[-1])(said)


def seq2seq() -> Foreign:
    def one_hot(seed: int) -> jax.Array:
        return jax.nn.one_hot(integers(BATCH, LENGTH, below=16, seed=seed), 16)

    batch = {"question": one_hot(0), "answer": one_hot(1), "lengths": 1 + integers(BATCH, below=LENGTH - 1, seed=2)}

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        logits = state.apply_fn({"params": params}, batch["question"], batch["answer"])
        each = optax.softmax_cross_entropy(logits, batch["answer"][:, 1:])
        return masked_mean(each, jnp.arange(each.shape[1]) < batch["lengths"][:, None]), {}

    return trained(loss, linen_state(Addition(), batch["question"], batch["answer"]), batch)


class GraphNet(nn.Module):
    """Messages along edges, summed at nodes; the answer is of the whole graph."""

    @nn.compact
    def __call__(self, nodes: jax.Array, edges: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        nodes, edges = nn.Dense(16)(nodes), nn.Dense(16)(edges)
        for _ in range(2):
            ends = [edges, nodes[senders], nodes[receivers]]
            edges = edges + nn.Dense(16)(nn.relu(nn.Dense(32)(jnp.concatenate(ends, axis=-1))))
            received = jax.ops.segment_sum(edges, receivers, nodes.shape[0])
            nodes = nn.LayerNorm()(nodes + nn.relu(nn.Dense(16)(jnp.concatenate([nodes, received], axis=-1))))
        return nn.Dense(4)(nodes.mean(axis=0))


def graphs() -> Foreign:
    """Eight graphs of equal sizes, with missing answers."""
    answers = jnp.where(integers(BATCH, 4, below=4, seed=5) == 0, jnp.nan, integers(BATCH, 4, below=2, seed=6))
    batch = {
        "nodes": normal(BATCH, 6, 8),
        "edges": normal(BATCH, 12, 4, seed=1),
        "senders": integers(BATCH, 12, below=6, seed=2),
        "receivers": integers(BATCH, 12, below=6, seed=3),
        "answers": answers,
    }

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        parts = [batch[name] for name in ("nodes", "edges", "senders", "receivers")]
        logits = jax.vmap(lambda *one: state.apply_fn({"params": params}, *one))(*parts)
        known = ~jnp.isnan(batch["answers"])
        each = optax.sigmoid_binary_cross_entropy(logits, jnp.where(known, batch["answers"], 0.0))
        return masked_mean(each, known), {}

    one = [batch[name][0] for name in ("nodes", "edges", "senders", "receivers")]
    return trained(loss, linen_state(GraphNet(), *one), batch)


class Clicks(nn.Module):
    """Numbers and categories to vectors, and the products of all pairs of them."""

    @nn.compact
    def __call__(self, numbers: jax.Array, categories: jax.Array) -> jax.Array:  # b f, b t -> b
        dense = nn.relu(nn.Dense(8)(nn.relu(nn.Dense(16)(numbers))))
        tables = [nn.Embed(WORDS, 8, name=f"table_{i}")(categories[:, i]) for i in range(categories.shape[1])]
        vectors = jnp.stack([dense, *tables], axis=1)
        products = jnp.einsum("bid,bjd->bij", vectors, vectors)
        below = jnp.tril_indices(vectors.shape[1], k=-1)
        x = jnp.concatenate([dense, products[:, below[0], below[1]]], axis=-1)
        return nn.Dense(1)(nn.relu(nn.Dense(16)(x)))[:, 0]


def clicks() -> Foreign:
    batch = {
        "numbers": normal(BATCH, 6),
        "categories": integers(BATCH, 4, below=WORDS),
        "label": integers(BATCH, below=2, seed=2).astype(jnp.float32),
    }

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        logits = state.apply_fn({"params": params}, batch["numbers"], batch["categories"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean(), {}

    return trained(loss, linen_state(Clicks(), batch["numbers"], batch["categories"]), batch)


class WaveNet(nn.Module):
    """Dilated causal convolutions, gated, whose outputs add up beside the stack."""

    @nn.compact
    def __call__(self, samples: jax.Array) -> jax.Array:  # b s -> b s 32
        x, skipped = nn.Embed(WORDS, 16)(samples), 0.0
        for dilation in (1, 2, 4):
            y = nn.Conv(32, (2,), kernel_dilation=(dilation,), padding="CAUSAL")(x)
            value, gate = jnp.split(y, 2, axis=-1)
            y = nn.Dense(32)(jnp.tanh(value) * nn.sigmoid(gate))
            x, skipped = x + y[..., :16], skipped + y[..., 16:]
        return nn.Dense(WORDS)(nn.relu(nn.Dense(32)(nn.relu(skipped))))


def wavenet() -> Foreign:
    batch = {"samples": integers(BATCH, 16, below=WORDS)}

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        logits = state.apply_fn({"params": params}, batch["samples"][:, :-1])
        return cross_entropy(logits, batch["samples"][:, 1:]), {}

    return trained(loss, linen_state(WaveNet(), batch["samples"][:, :-1]), batch)


MODELS: dict[str, Callable[[], Foreign]] = {
    "linen sst2 bi-lstm": sst2,
    "linen seq2seq lstm": seq2seq,
    "linen ogbg graph net": graphs,
    "linen dlrm": clicks,
    "linen wavenet": wavenet,
}
