"""Which job a command is about: a built-in model's, or the one in the user's file."""

from typing import Any

import typer

from jscaler.commands.built_in_job import built_in_job
from jscaler.commands.job_file import job_from_file, told_job
from jscaler.commands.told_model import is_given, told_model
from jscaler.errors import JobError
from jscaler.training.job import Job

OF_MODELS = ("model", "size", "data", "batch", "seq", "dtype", "stacked", "remat", "learning_rate")


def chosen_job(
    context: typer.Context, job: str | None, *, plan: str | None = None, steps: int = 100, seed: int = 0,
    eval_every: int | None = None, **model: Any,
) -> Job:  # fmt: skip
    """The job in a file, where one is named, or else the built-in model that the other options describe.

    Args:
        plan: as ``--plan`` is given; of a saved one come the options that nobody gives.
        eval_every: steps between evaluations; of a job in a file None for its own.

    Raises:
        JobError: options of built-in models are given beside a job; or what `job_from_file` and `built_in_job` raise.
        PlanFitError: options are given that contradict those that a saved plan was made with.
    """
    given = {
        str(option.name): max(option.opts, key=len)
        for option in context.command.params
        if option.name in OF_MODELS and is_given(context, option.name)
    }
    if job is None:
        return built_in_job(**told_model(plan, given, model), steps=steps, seed=seed, eval_every=eval_every)
    if given:
        raise JobError(
            f"{' and '.join(given.values())}: options of built-in models, and --job brings a model of its own; leave them "
            'out, or give such values to the function of the job, as in --job "path.py:function(hidden=64)"'
        )
    found = told_job(job_from_file(job), job)
    if eval_every is None:
        return found
    if found.evaluation is None:
        raise JobError(
            f"--eval-every {eval_every}: job '{job}' has no evaluation; return jscaler.Job(…, "
            "evaluation=jscaler.Evaluation(step, batches)), or leave the option out"
        )
    return found._replace(evaluation=found.evaluation._replace(every=eval_every))
