"""`transformers`' Flax models of images and sound, made from their configurations with random parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import transformers as hub  # pyright: ignore[reportMissingImports]

from bench.foreign_models.hub_text import WORDS, hub_state, with_loss
from bench.foreign_models.training import BATCH, Foreign, State, cross_entropy, integers, normal, trained

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
IMAGES: dict[str, Any] = {"image_size": 32, "patch_size": 8}
STAGES: dict[str, Any] = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 8}


def pictures() -> dict[str, jax.Array]:
    return {"image": normal(BATCH, 3, 32, 32), "label": integers(BATCH, below=8)}


def classified(name: str, config: Any) -> Callable[[], Foreign]:
    """One of eight classes of each image."""

    def inputs(batch: Any) -> dict[str, Any]:
        return {"pixel_values": batch["image"]}

    def loss(output: Any, batch: Any) -> jax.Array:
        return cross_entropy(output.logits, batch["label"])

    return lambda: with_loss(getattr(hub, f"Flax{name}")(config(), seed=0), loss, inputs, pictures())


def with_statistics(name: str, config: Any) -> Callable[[], Foreign]:
    """The same of a model with batch normalisation, which returns its new statistics."""

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        output, moved = state.apply_fn(batch["image"], params={"params": params, **state.rest}, train=True)
        return cross_entropy(output.logits, batch["label"]), moved

    return lambda: trained(loss, hub_state(getattr(hub, f"Flax{name}")(config(), seed=0)), pictures())


def clip() -> Foreign:
    """Which sentence belongs to which image of the batch."""
    words = {"vocab_size": WORDS, "max_position_embeddings": 32, "eos_token_id": 63, "bos_token_id": 62, "pad_token_id": 1}
    config = hub.CLIPConfig(text_config={**SIZES, **words}, vision_config={**SIZES, **IMAGES}, projection_dim=16)

    def inputs(batch: Any) -> dict[str, Any]:
        return {"input_ids": batch["tokens"], "pixel_values": batch["image"]}

    def loss(output: Any, batch: Any) -> jax.Array:
        own = jnp.arange(output.logits_per_text.shape[0])
        return 0.5 * (cross_entropy(output.logits_per_text, own) + cross_entropy(output.logits_per_image, own))

    batch = {"tokens": integers(BATCH, 16, below=WORDS), "image": normal(BATCH, 3, 32, 32)}
    return with_loss(hub.FlaxCLIPModel(config, seed=0), loss, inputs, batch)


def wav2vec2() -> Foreign:
    """Letters from sound: all ways to read them at some speed."""
    windows = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    around = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
    config = hub.Wav2Vec2Config(vocab_size=32, **SIZES, **windows, **around, do_stable_layer_norm=True, mask_time_prob=0.0)
    model = hub.FlaxWav2Vec2ForCTC(config, seed=0, input_shape=(1, 320))

    def inputs(batch: Any) -> dict[str, Any]:
        return {"input_values": batch["sound"]}

    def loss(output: Any, batch: Any) -> jax.Array:
        heard = jnp.zeros(output.logits.shape[:2])
        return optax.ctc_loss(output.logits, heard, batch["letters"], (batch["letters"] == 0).astype(jnp.float32)).mean()

    batch = {"sound": normal(BATCH, 320), "letters": integers(BATCH, 6, below=32)}
    return with_loss(model, loss, inputs, batch)


def whisper() -> Foreign:
    """Words from sound, one after another."""
    ways = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _WHISPER.items()}
    words = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sizes = {"num_mel_bins": 8, "d_model": 32, "max_source_positions": 16, "max_target_positions": 16}
    model = hub.FlaxWhisperForConditionalGeneration(
        hub.WhisperConfig(**ways, **words, **sizes), seed=0, input_shape=(1, 8, 32)
    )

    def inputs(batch: Any) -> dict[str, Any]:
        return {"input_features": batch["sound"], "decoder_input_ids": batch["tokens"][:, :-1]}

    def loss(output: Any, batch: Any) -> jax.Array:
        return cross_entropy(output.logits, batch["tokens"][:, 1:])

    return with_loss(model, loss, inputs, {"sound": normal(BATCH, 8, 32), "tokens": integers(BATCH, 9, below=WORDS)})


_WHISPER = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}

MODELS: dict[str, Callable[[], Foreign]] = {
    "hub vit": classified("ViTForImageClassification", lambda: hub.ViTConfig(**SIZES, **IMAGES, num_labels=8)),
    "hub beit": classified(
        "BeitForImageClassification",
        lambda: hub.BeitConfig(**SIZES, **IMAGES, num_labels=8, drop_path_rate=0.1, use_relative_position_bias=True),
    ),
    "hub resnet": with_statistics("ResNetForImageClassification", lambda: hub.ResNetConfig(**STAGES)),
    "hub regnet": with_statistics("RegNetForImageClassification", lambda: hub.RegNetConfig(**STAGES, groups_width=8)),
    "hub clip": clip,
    "hub wav2vec2": wav2vec2,
    "hub whisper": whisper,
}
