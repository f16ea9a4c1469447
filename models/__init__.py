"""Flax models of the papers, each readable in one sitting."""

from jscaler.errors import UnknownNameError
from models.gpt import GPT, SIZES, GPTConfig

MODELS = {"gpt": (GPT, SIZES)}


def make_model(name: str, size: str) -> tuple[GPT, GPTConfig]:
    """The model ``name`` in size ``size``; raises UnknownNameError with the near one."""
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    model, sizes = MODELS[name]
    if size not in sizes:
        raise UnknownNameError("size", size, sizes, f" of model {name}")
    return model(sizes[size]), sizes[size]
