"""`transformers`' Flax models of text, made from their configurations with random parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import transformers as hub  # pyright: ignore[reportMissingImports]

from bench.foreign_models.training import (
    BATCH,
    Foreign,
    State,
    cross_entropy,
    integers,
    masked_mean,
    optimizer,
    trained,
)

WORDS, LENGTH = 64, 16
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
TRAIN: dict[str, Any] = {"train": True}
Inputs = Callable[[Any], dict[str, Any]]


def hub_state(model: Any) -> State:
    """A state of the model's own parameters; its statistics, if it has any, are the rest."""
    rest = {} if "params" not in model.params else {"batch_stats": model.params["batch_stats"]}
    params = model.params["params"] if rest else model.params
    return State.create(apply_fn=model.__call__, params=params, tx=optimizer(), key=jax.random.key(2), rest=rest)


def with_loss(model: Any, loss: Callable[[Any, Any], jax.Array], inputs: Inputs, batch: Any, **mode: Any) -> Foreign:
    """A model whose ``loss(output, batch)`` is trained on; ``mode`` is how it is told to train."""

    def full(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        output = state.apply_fn(**inputs(batch), params=params, dropout_rng=key, **(mode or TRAIN))
        return loss(output, batch), {}

    return trained(full, hub_state(model), batch)


def tokens(batch: Any) -> dict[str, Any]:
    return {"input_ids": batch["tokens"], "attention_mask": batch["mask"]}


def text(length: int = LENGTH) -> dict[str, jax.Array]:
    """Sentences of several lengths, 3 being the smallest word."""
    lengths = length // 2 + integers(BATCH, below=length // 2, seed=1)[:, None]
    mask = (jnp.arange(length) < lengths).astype(jnp.int32)
    return {"tokens": 3 + integers(BATCH, length, below=WORDS - 3) * mask, "mask": mask}


def causal(name: str, config: Any, **mode: Any) -> Callable[[], Foreign]:
    """Next words."""

    def loss(output: Any, batch: Any) -> jax.Array:
        each = optax.softmax_cross_entropy_with_integer_labels(output.logits[:, :-1], batch["tokens"][:, 1:])
        return masked_mean(each, batch["mask"][:, 1:])

    def made() -> Foreign:
        return with_loss(getattr(hub, f"Flax{name}")(config(), seed=0), loss, tokens, text(), **mode)

    return made


def masked(name: str, config: Any) -> Callable[[], Foreign]:
    """Words that were hidden, where ``labels`` has them; -100 elsewhere."""

    def loss(output: Any, batch: Any) -> jax.Array:
        hidden = batch["labels"] >= 0
        labels = jnp.where(hidden, batch["labels"], 0)
        return masked_mean(optax.softmax_cross_entropy_with_integer_labels(output.logits, labels), hidden)

    def made() -> Foreign:
        batch = text()
        hidden = (integers(BATCH, LENGTH, below=4, seed=3) == 0) & (batch["mask"] > 0)
        shown = jnp.where(hidden, 2, batch["tokens"])
        batch = {**batch, "tokens": shown, "labels": jnp.where(hidden, batch["tokens"], -100)}
        return with_loss(getattr(hub, f"Flax{name}")(config(), seed=0), loss, tokens, batch)

    return made


def classified(name: str, config: Any) -> Callable[[], Foreign]:
    """One of three classes of each sentence."""

    def loss(output: Any, batch: Any) -> jax.Array:
        return cross_entropy(output.logits, batch["label"])

    def made() -> Foreign:
        batch = {**text(), "label": integers(BATCH, below=3, seed=4)}
        return with_loss(getattr(hub, f"Flax{name}")(config(), seed=0), loss, tokens, batch)

    return made


def replaced() -> Foreign:
    """ELECTRA: which words are not the sentence's own."""

    def loss(output: Any, batch: Any) -> jax.Array:
        return masked_mean(optax.sigmoid_binary_cross_entropy(output.logits, batch["replaced"]), batch["mask"])

    batch = {**text(), "replaced": (integers(BATCH, LENGTH, below=4, seed=3) == 0).astype(jnp.float32)}
    config = hub.ElectraConfig(**SIZES, embedding_size=16)
    return with_loss(hub.FlaxElectraForPreTraining(config, seed=0), loss, tokens, batch)


def translated(name: str, config: Any) -> Callable[[], Foreign]:
    """The words of another sentence, from the ones before and the whole first sentence; labels are smoothed."""

    def inputs(batch: Any) -> dict[str, Any]:
        return {**tokens(batch), "decoder_input_ids": batch["shifted"], "decoder_attention_mask": batch["labels_mask"]}

    def loss(output: Any, batch: Any) -> jax.Array:
        soft = optax.smooth_labels(jax.nn.one_hot(batch["labels"], WORDS), 0.1)
        return masked_mean(optax.softmax_cross_entropy(output.logits, soft), batch["labels_mask"])

    def made() -> Foreign:
        target = text(8)
        shifted = jnp.pad(target["tokens"], ((0, 0), (1, 0)), constant_values=2)[:, :-1]
        batch = {**text(), "labels": target["tokens"], "labels_mask": target["mask"], "shifted": shifted}
        return with_loss(getattr(hub, f"Flax{name}")(config(), seed=0), loss, inputs, batch)

    return made


def bart() -> Any:
    ways = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _BART.items()}
    return hub.BartConfig(vocab_size=WORDS, d_model=32, max_position_embeddings=32, **ways)


_BART = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
NEO = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8}
GPT: dict[str, Any] = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": WORDS, "max_position_embeddings": 32}
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32, **{k: v for k, v in SIZES.items() if k != "intermediate_size"}}
XGLM = {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 32}

MODELS: dict[str, Callable[[], Foreign]] = {
    "hub bert": masked("BertForMaskedLM", lambda: hub.BertConfig(**SIZES)),
    "hub bert, classes": classified("BertForSequenceClassification", lambda: hub.BertConfig(**SIZES, num_labels=3)),
    "hub roberta": masked("RobertaForMaskedLM", lambda: hub.RobertaConfig(**SIZES)),
    "hub electra": replaced,
    "hub distilbert": masked("DistilBertForMaskedLM", lambda: hub.DistilBertConfig(**DISTIL)),
    "hub gpt2": causal("GPT2LMHeadModel", lambda: hub.GPT2Config(**GPT)),
    "hub gpt-neo": causal(
        "GPTNeoForCausalLM",
        lambda: hub.GPTNeoConfig(vocab_size=WORDS, hidden_size=32, max_position_embeddings=32, **NEO),
    ),
    "hub gpt-j": causal("GPTJForCausalLM", lambda: hub.GPTJConfig(**GPT, rotary_dim=4)),
    "hub opt": causal("OPTForCausalLM", lambda: hub.OPTConfig(**OPT), deterministic=False),
    "hub bloom": causal("BloomForCausalLM", lambda: hub.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4)),
    "hub llama": causal("LlamaForCausalLM", lambda: hub.LlamaConfig(**SIZES)),
    "hub mistral": causal(
        "MistralForCausalLM", lambda: hub.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8)
    ),
    "hub xglm": causal("XGLMForCausalLM", lambda: hub.XGLMConfig(vocab_size=WORDS, **XGLM)),
    "hub bart": translated("BartForConditionalGeneration", bart),
}
