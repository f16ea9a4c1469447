"""Models that were picked when the code had been frozen (at 14f10ec): what they show, no one could mend before.

T5 and RoFormer are not among them: `transformers` 4.49 calls what JAX 0.10 does not have any more (``jnp.clip(a_max=)``).
"""

from collections.abc import Callable

import transformers as hub  # pyright: ignore[reportMissingImports]

from bench.foreign_models import hub_vision
from bench.foreign_models.hub_text import SIZES, WORDS, classified, masked, translated
from bench.foreign_models.training import Foreign

SIDES = {
    f"{side}_{what}": n
    for side in ("encoder", "decoder")
    for what, n in {"layers": 2, "attention_heads": 4, "ffn_dim": 64}.items()
}
PAIR = {"vocab_size": WORDS, "d_model": 32, "max_position_embeddings": 32, **SIDES}

MODELS: dict[str, Callable[[], Foreign]] = {
    "later albert": masked("AlbertForMaskedLM", lambda: hub.AlbertConfig(**SIZES, embedding_size=16)),
    "later roberta, norms in front": classified(
        "RobertaPreLayerNormForSequenceClassification", lambda: hub.RobertaPreLayerNormConfig(**SIZES, num_labels=3)
    ),
    "later big bird": masked("BigBirdForMaskedLM", lambda: hub.BigBirdConfig(**SIZES, attention_type="original_full")),
    "later pegasus": translated("PegasusForConditionalGeneration", lambda: hub.PegasusConfig(**PAIR)),
    "later mbart": translated("MBartForConditionalGeneration", lambda: hub.MBartConfig(**PAIR)),
    "later dinov2": hub_vision.classified(
        "Dinov2ForImageClassification", lambda: hub.Dinov2Config(**hub_vision.SIZES, **hub_vision.IMAGES, num_labels=8)
    ),
}
