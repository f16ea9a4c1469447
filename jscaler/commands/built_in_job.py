"""The built-in models as jobs, as ``--model`` and the options beside it describe them."""

import functools
import itertools
import math
from pathlib import Path
from typing import Any

from jscaler.errors import JscalerError, UnknownNameError
from jscaler.training.batches import BatchesFrom
from jscaler.training.evaluation import Evaluation
from jscaler.training.job import Job

DTYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "f32": "float32",
    "float32": "float32",
}  # fmt: skip

EVALUATED = 4  # batches


def built_in_job(
    model: str, size: str | None, batch: int, seq: int | None = None, dtype: str | None = None,
    stacked: bool | None = None, remat: bool = False, data: Path | None = None, learning_rate: float = 3e-3,
    steps: int = 100, seed: int = 0, eval_every: int | None = None,
) -> Job:  # fmt: skip
    """A built-in model with its train step and its data.

    Args:
        model, size: as ``model_and_size`` takes them.
        batch: rows per step: sequences, images, alignments.
        seq: tokens per sequence; None for the model's own.
        dtype: a key of ``DTYPES``; None for the model's own.
        stacked, remat: of the model; None for its own.
        data: a text file or a folder; None for the text of Python's documentation, or for data that is made up.
        steps: over which the learning rate decays.
        seed: of the data's order.
        eval_every: steps between evaluations, on rows that no step reads: the last twentieth of a text, or other rows
            that are made up; None for none.

    Raises:
        UnknownNameError: no such model, size or dtype.
        JscalerError: the model has no such option, or the learning rate is not positive.
        DataError: there is no text.
    """
    from models import make_model
    from models.recipes import OPTIONS, RECIPES
    from models.training import make_optimizer

    if not 0 < learning_rate < math.inf:
        raise JscalerError(f"--learning-rate is a positive number, not {learning_rate}")
    name, size = model_and_size(model, size)
    recipe = RECIPES[name]
    given = {"seq": seq, "data": data, "stacked": stacked, "remat": remat}
    lacking = [option for option in OPTIONS if option not in recipe.options]
    if any(given[option] for option in lacking):
        raise JscalerError(f"model {name} has no {' and no '.join(f'--{option}' for option in lacking)}; leave them out")
    changes = {"sequence": seq, "dtype": _dtype(dtype), "remat": remat or None}
    changes |= {"stacked": stacked} if "stacked" in recipe.options else {}
    module, config = make_model(name, size, **{k: v for k, v in changes.items() if v is not None})
    optimizer = make_optimizer(learning_rate, steps=steps)
    batch_at, unread_at = recipe.data(config, data, eval_every is not None)

    def make_state(key: Any) -> Any:
        return recipe.make_state(module, config, optimizer, key)

    words = [f"{name}-{size}", *([str(config.dtype)] if config.dtype else [])]
    words += [what for what in ("stacked", "remat") if getattr(config, what, False)]

    def one(step: int) -> Any:
        return batch_at(step, batch, seed)

    described = f"{Path(data).name if data else 'the default data'} by seed {seed}"
    described += ", a part of it held out" if eval_every is not None and "data" in recipe.options else ""
    batches = BatchesFrom(lambda first, wanted: map(one, itertools.count(first)), one, described)
    evaluation = None
    if eval_every is not None:
        unread = [functools.partial(unread_at, number, batch, 0) for number in range(EVALUATED)]  # those of any seed
        evaluation = Evaluation(recipe.evaluation, lambda: (made() for made in unread), eval_every)
    return Job(make_state, recipe.step, batches, ", ".join(words), evaluation)


def model_and_size(model: str, size: str | None) -> tuple[str, str]:
    """``gpt-1.3b`` as (``gpt``, ``1.3b``); the size may come apart, and is ``nano`` where nobody says it.

    Raises:
        UnknownNameError: no such model.
        JscalerError: two sizes are given.
    """
    from models import MODELS

    name, _, said = model.partition("-")
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    if said and size and said != size:
        raise JscalerError(f"two sizes are given: --model {model} and --size {size}; leave one out")
    return name, said or size or "nano"


def stacked_by_default(model: str, stacked: bool | None) -> bool:
    """Whether layers are one scan, where nobody says: if they can, so that planning and compiling take that of one."""
    from models.recipes import RECIPES

    recipe = RECIPES.get(model.partition("-")[0])
    return recipe is not None and "stacked" in recipe.options if stacked is None else stacked


def _dtype(name: str | None) -> str | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise UnknownNameError("dtype", name, DTYPES)
    return DTYPES[name]
