"""Flax models of the papers, each readable in one sitting."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jscaler.errors import UnknownNameError
from models import convnet, evoformer, gpt, llama, mbart, moe, swin

# ``model(config)`` is a linen module; of an nnx model it is a function that makes one: ``model(config)(rngs)``
MODELS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "gpt": (gpt.GPT, gpt.SIZES),
    "llama": (llama.from_config, llama.SIZES),
    "moe": (moe.MoE, moe.SIZES),
    "mbart": (mbart.MBart, mbart.SIZES),
    "convnet": (convnet.ConvNet, convnet.SIZES),
    "swin": (swin.Swin, swin.SIZES),
    "evoformer": (evoformer.Evoformer, evoformer.SIZES),
}


def make_model(name: str, size: str, **changes: Any) -> tuple[Any, Any]:
    """The model ``name`` in size ``size`` with ``changes`` of its config, and that config.

    Raises:
        UnknownNameError: no such model or size; it names a near one.
    """
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    model, sizes = MODELS[name]
    if size not in sizes:
        raise UnknownNameError("size", size, sizes, f" of model {name}")
    config = dataclasses.replace(sizes[size], **changes)
    return model(config), config
