"""``Job``: a model, its data and its train step under a plan, as the options of a command describe them."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jscaler import plans
from jscaler.api import Parallelized, parallelize
from jscaler.errors import JscalerError, UnknownNameError
from jscaler.primitives import Plan

DTYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "f32": "float32",
    "float32": "float32",
}  # fmt: skip


def model_and_size(model: str, size: str | None) -> tuple[str, str]:
    """``gpt-1.3b`` as (``gpt``, ``1.3b``); the size may come apart, and is ``nano`` where nobody says it.

    Raises:
        UnknownNameError: no such language model.
        JscalerError: two sizes are given.
    """
    from models.training import TEXT_STEPS

    name, _, said = model.partition("-")
    if name not in TEXT_STEPS:
        raise UnknownNameError("language model", name, TEXT_STEPS)
    if said and size and said != size:
        raise JscalerError(f"two sizes are given: --model {model} and --size {size}; leave one out")
    return name, said or size or "nano"


def stacked_by_default(model: str, stacked: bool | None) -> bool:
    """Whether layers are to be one scan, where nobody says: of a GPT, so that planning and compiling take that of one."""
    return model.partition("-")[0] == "gpt" if stacked is None else stacked


def devices_for(plan: str, devices: int | None) -> int | None:
    """How many devices were asked for; where nobody says it, as many as a saved plan is for."""
    if devices is not None or not plan.endswith(".json"):
        return devices
    return Plan.load(plan).num_devices


class Job:
    """A model, its data and its train step under a plan.

    Args:
        model, size: as ``model_and_size`` takes them.
        devices: as ``parallelize`` takes them.
        batch: sequences per step.
        seq: tokens per sequence; None for the model's own.
        dtype: a key of ``DTYPES``; None for the model's own.
        stacked, remat: of the model; None for its own.

    Raises:
        UnknownNameError: no such model, size, plan or dtype.
        JscalerError: the model has no such option.
    """

    def __init__(
        self, model: str, size: str | None, plan: str, devices: Any, batch: int, seq: int | None = None,
        dtype: str | None = None, stacked: bool | None = None, remat: bool = False, learning_rate: float = 3e-3,
        steps: int = 100, seed: int = 0,
    ):  # fmt: skip
        from models import make_model
        from models.training import TEXT_STEPS, make_optimizer

        self.name, self.size = model_and_size(model, size)
        made, config = make_model(self.name, self.size)
        changes = {"sequence": seq, "dtype": _dtype(dtype), "stacked": stacked, "remat": remat or None}
        if self.name != "gpt" and (stacked or remat):
            raise JscalerError(f"model {self.name} has no --stacked and no --remat; leave them out")
        self.config = dataclasses.replace(config, **{k: v for k, v in changes.items() if v is not None})
        self.model = type(made)(self.config)
        self.batch, self.seed = batch, seed
        self.optimizer = make_optimizer(learning_rate, steps=steps)
        self.step: Parallelized = parallelize(plans.by_name(plan), devices=devices, donate_argnames="state")(
            TEXT_STEPS[self.name]
        )

    def state(self) -> Any:
        """Fresh parameters and optimizer state."""
        from models.training import make_state

        return make_state(self.model, self.config.sequence, self.optimizer, self.seed)

    def start(self, batch: Any, checkpoint: Path | None = None) -> tuple[int, Any]:
        """The first step, and the state in the plan's layout: a fresh one, or the latest of ``checkpoint``."""
        from models.training import make_state

        arguments = (make_state, self.model, self.config.sequence, self.optimizer, self.seed)
        if checkpoint is None:
            return 0, self.step.init(*arguments, batch=batch)
        from jscaler.runtime.checkpoint import latest_step, restore

        step = latest_step(checkpoint)
        return step, restore(checkpoint, step, self.step.abstract_state(*arguments, batch=batch))

    def arguments(self) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
        """Shapes of a state and a batch, of which nothing is allocated."""
        tokens = jax.ShapeDtypeStruct((self.batch, self.config.sequence), "int32")
        return jax.eval_shape(self.state), {"tokens": tokens, "labels": tokens}

    def describe(self) -> str:
        """``gpt-1.3b, 1,316 M parameters, bfloat16, stacked, batch 32 × 2048``."""
        params = jax.tree.leaves(self.arguments()[0].params)
        words = [f"{self.name}-{self.size}", f"{sum(p.size for p in params) / 1e6:,.1f} M parameters"]
        words += [str(self.config.dtype)] if self.config.dtype else []
        words += [what for what in ("stacked", "remat") if getattr(self.config, what)]
        return ", ".join([*words, f"batch {self.batch} × {self.config.sequence}"])


class Batches:
    """The batches of a job's text: a function of the step."""

    def __init__(self, job: Job, data: Path | None):
        from models.text import load_bytes

        self.job, self.data = job, load_bytes(data)

    def __call__(self, step: int) -> dict[str, Any]:
        from models.text import batch_at

        return batch_at(self.data, step, self.job.batch, self.job.config.sequence, self.job.seed)


def _dtype(name: str | None) -> str | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise UnknownNameError("dtype", name, DTYPES)
    return DTYPES[name]
