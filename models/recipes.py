"""How the models are trained from the command line: each one's step, its fresh state, its data, its options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from models.alignments import alignment_at
from models.images import stripes_at
from models.text import batch_at, load_bytes, pair_at
from models.training import (
    balanced_train_step,
    evoformer_train_step,
    image_train_step,
    make_image_state,
    make_state,
    train_step,
    translation_train_step,
)

BatchAt = Callable[[int, int, int], dict[str, Any]]  # (step, rows, seed) -> the batch


class Recipe(NamedTuple):
    """What training a model takes.

    Attributes:
        step: its train step.
        make_state: ``make_state(model, config, optimizer, key)``.
        data: ``data(config, path)`` is what makes the batch of a step; ``path`` is a text, or None for its own.
        options: which of ``OPTIONS`` it has.
    """

    step: Callable[..., Any]
    make_state: Callable[..., Any]
    data: Callable[[Any, Path | None], BatchAt]
    options: tuple[str, ...]


def _state_of_text(model: Any, config: Any, optimizer: Any, key: Any) -> Any:
    return make_state(model, config.sequence, optimizer, key)


def _state_of_texts(model: Any, config: Any, optimizer: Any, key: Any) -> Any:
    return make_state(model, [(config.sequence,), (config.sequence,)], optimizer, key)


def _state_of_images(model: Any, config: Any, optimizer: Any, key: Any) -> Any:
    return make_image_state(model, (config.image, config.image, 3), optimizer, key)


def _state_of_alignments(model: Any, config: Any, optimizer: Any, key: Any) -> Any:
    return make_state(model, [(config.sequences, config.residues), (config.residues,)], optimizer, key)


def _text(config: Any, path: Path | None) -> BatchAt:
    text = load_bytes(path)
    return lambda step, rows, seed: batch_at(text, step, rows, config.sequence, seed)


def _texts(config: Any, path: Path | None) -> BatchAt:
    text = load_bytes(path)
    return lambda step, rows, seed: pair_at(text, step, rows, config.sequence, seed)


def _images(config: Any, path: Path | None) -> BatchAt:
    return lambda step, rows, seed: stripes_at(step, rows, config.image, config.classes, seed)


def _alignments(config: Any, path: Path | None) -> BatchAt:
    return lambda step, rows, seed: alignment_at(step, rows, config.sequences, config.residues, config.bins, seed)


OPTIONS = ("seq", "data", "stacked", "remat")  # which not every model has
RECIPES = {
    "gpt": Recipe(train_step, _state_of_text, _text, OPTIONS),
    "moe": Recipe(balanced_train_step, _state_of_text, _text, ("seq", "data")),
    "mbart": Recipe(translation_train_step, _state_of_texts, _texts, OPTIONS),
    "convnet": Recipe(image_train_step, _state_of_images, _images, ()),
    "swin": Recipe(image_train_step, _state_of_images, _images, ("stacked", "remat")),
    "evoformer": Recipe(evoformer_train_step, _state_of_alignments, _alignments, ("stacked", "remat")),
}
