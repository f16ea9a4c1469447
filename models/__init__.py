"""Flax models of the papers, each readable in one sitting."""

from typing import Any

from jscaler.errors import UnknownNameError
from models import convnet, evoformer, gpt, mbart, moe, swin

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt": (gpt.GPT, gpt.SIZES),
    "moe": (moe.MoE, moe.SIZES),
    "mbart": (mbart.MBart, mbart.SIZES),
    "convnet": (convnet.ConvNet, convnet.SIZES),
    "swin": (swin.Swin, swin.SIZES),
    "evoformer": (evoformer.Evoformer, evoformer.SIZES),
}


def make_model(name: str, size: str) -> tuple[Any, Any]:
    """The model ``name`` in size ``size``, and its config; raises UnknownNameError with the near one."""
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    model, sizes = MODELS[name]
    if size not in sizes:
        raise UnknownNameError("size", size, sizes, f" of model {name}")
    return model(sizes[size]), sizes[size]
