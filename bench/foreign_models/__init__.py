"""Models that owe nothing to jscaler, each with a train step as its users write it: what `bench.foreign` runs.

`transformers`' Flax models are there where that library is (the extra ``foreign``); the rest is always there.
"""

import importlib.util
from collections.abc import Callable

from bench.foreign_models import attention, convolutional, generative, nnx_models, recurrent, sequences
from bench.foreign_models.training import Foreign

MODELS: dict[str, Callable[[], Foreign]] = {
    **convolutional.MODELS,
    **recurrent.MODELS,
    **attention.MODELS,
    **nnx_models.MODELS,
    **sequences.MODELS,
    **generative.MODELS,
}

if importlib.util.find_spec("transformers") is not None:
    from bench.foreign_models import hub_text, hub_vision, later

    MODELS |= {**hub_text.MODELS, **hub_vision.MODELS, **later.MODELS}
