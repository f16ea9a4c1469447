"""How the models are trained from the command line: step, fresh state, data, evaluation and options of each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from models.alignments import alignment_at
from models.images import stripes_at
from models.text import batch_at, held_out, load_bytes, pair_at
from models.training import (
    balanced_train_step,
    evaluation_of,
    evoformer_loss,
    evoformer_train_step,
    image_evaluation,
    image_train_step,
    language_loss,
    make_image_state,
    make_state,
    nnx_evaluation,
    nnx_train_step,
    train_step,
    translation_loss,
    translation_train_step,
)

BatchAt = Callable[[int, int, int], dict[str, Any]]  # (step, rows, seed) -> the batch
NO_STEP = 1 << 40  # from which batches are drawn that no training reads, where there is no end of them


class Recipe(NamedTuple):
    """What training a model takes.

    Attributes:
        step: its train step.
        make_state: ``make_state(model, config, optimizer, key)``, where the model is as `models.MODELS` has it.
        data: ``data(config, path, evaluated)`` is what makes the batch of a step, and what makes one that no step reads, if
            it is to be ``evaluated``; ``path`` is a text, or None for its own.
        evaluation: ``evaluation(state, batch)`` is a dict of numbers.
        options: which of ``OPTIONS`` it has.
    """

    step: Callable[..., Any]
    make_state: Callable[..., Any]
    data: Callable[[Any, Path | None, bool], tuple[BatchAt, BatchAt]]
    evaluation: Callable[[Any, Any], dict[str, Any]]
    options: tuple[str, ...]


def _state_of_text(model: Any, config: Any, optimizer: Any, key: Any) -> Any:
    return make_state(model, config.sequence, optimizer, key)


def _state_of_nnx(model: Any, config: Any, optimizer: Any, key: Any) -> Any:
    made = model(nnx.Rngs(key))
    return made, nnx.Optimizer(made, optimizer, wrt=nnx.Param)


def _state_of_texts(model: Any, config: Any, optimizer: Any, key: Any) -> Any:
    return make_state(model, [(config.sequence,), (config.sequence,)], optimizer, key)


def _state_of_images(model: Any, config: Any, optimizer: Any, key: Any) -> Any:
    return make_image_state(model, (config.image, config.image, 3), optimizer, key)


def _state_of_alignments(model: Any, config: Any, optimizer: Any, key: Any) -> Any:
    return make_state(model, [(config.sequences, config.residues), (config.residues,)], optimizer, key)


def _of_text(drawn: Callable[..., dict[str, Any]]) -> Callable[[Any, Path | None, bool], tuple[BatchAt, BatchAt]]:
    def data(config: Any, path: Path | None, evaluated: bool) -> tuple[BatchAt, BatchAt]:
        text = load_bytes(path)
        read, unread = held_out(text, config.sequence) if evaluated else (text, text)
        return (
            lambda step, rows, seed: drawn(read, step, rows, config.sequence, seed),
            lambda step, rows, seed: drawn(unread, step, rows, config.sequence, seed),
        )

    return data


def _of_steps(batch_of: Callable[[Any], BatchAt]) -> Callable[[Any, Path | None, bool], tuple[BatchAt, BatchAt]]:
    def data(config: Any, path: Path | None, evaluated: bool) -> tuple[BatchAt, BatchAt]:
        drawn = batch_of(config)
        return drawn, lambda step, rows, seed: drawn(NO_STEP + step, rows, seed)

    return data


_text, _texts = _of_text(batch_at), _of_text(pair_at)
_images = _of_steps(lambda c: lambda step, rows, seed: stripes_at(step, rows, c.image, c.classes, seed))
_alignments = _of_steps(lambda c: lambda step, rows, seed: alignment_at(step, rows, c.sequences, c.residues, c.bins, seed))
OPTIONS = ("seq", "data", "stacked", "remat")  # which not every model has
_language = evaluation_of(language_loss)
RECIPES = {
    "gpt": Recipe(train_step, _state_of_text, _text, _language, OPTIONS),
    "llama": Recipe(nnx_train_step, _state_of_nnx, _text, nnx_evaluation, OPTIONS),
    "moe": Recipe(balanced_train_step, _state_of_text, _text, _language, ("seq", "data")),
    "mbart": Recipe(translation_train_step, _state_of_texts, _texts, evaluation_of(translation_loss), OPTIONS),
    "convnet": Recipe(image_train_step, _state_of_images, _images, image_evaluation, ()),
    "swin": Recipe(image_train_step, _state_of_images, _images, image_evaluation, ("stacked", "remat")),
    "evoformer": Recipe(
        evoformer_train_step, _state_of_alignments, _alignments, evaluation_of(evoformer_loss), ("stacked", "remat")
    ),
}
