"""The model that a saved plan was made for: options that nobody gives are those that ``--save`` has written."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import typer

from jscaler.commands.built_in_job import model_and_size, stacked_by_default
from jscaler.errors import PlanFileError, PlanFitError
from jscaler.primitives import Plan

REMEMBERED = {"model": str, "size": str, "batch": int, "seq": int, "dtype": str, "stacked": bool, "remat": bool}
DECIDING = ("dtype", "stacked", "remat")  # other values make other ops
SIZES = ("batch", "seq")  # these need only divide


def with_model(plan: Plan, job: str | None, model: str, size: str | None, stacked: bool | None, **options: Any) -> Plan:
    """``plan``, which remembers the built-in model that it is made for; nothing of a job in a file."""
    if job is not None:
        return replace(plan, told={})
    name, of_size = model_and_size(model, size)
    told = {"model": name, "size": of_size, "stacked": stacked_by_default(model, stacked), **options}
    return replace(plan, told=told)


def told_model(plan: str | None, given: Mapping[str, str], model: Mapping[str, Any]) -> dict[str, Any]:
    """``model``'s options, where nobody gives them those that the plan in a file was made with.

    Args:
        plan: as ``--plan`` is given; only files remember a model.
        given: by name the options that were given, as they are spelled.

    Raises:
        PlanFileError: what the file remembers is nothing that options are.
        PlanFitError: one is given that makes other ops than those that the plan was made for.
    """
    if plan is None or not plan.endswith(".json"):
        return dict(model)
    saved = Plan.load(plan)
    told = {name: value for name, value in saved.told.items() if value is not None}
    for name, value in told.items():
        if type(value) is not REMEMBERED.get(name) or (isinstance(value, int) and value < 0):
            raise PlanFileError(f"'{plan}': 'told' has {name} = {value!r}; leave it out, or write what --{name} takes")
    for name in DECIDING:
        if name in given and name in told and told[name] != model.get(name):
            raise PlanFitError(
                saved.name,
                f"'{plan}' was made with {_spelled(name, told[name])}, and {_spelled(name, model[name])} is given; leave "
                f"{given[name]} out, or make the plan anew with it",
            )
    if "model" in given:  # then the size is the one beside it, or in it
        told.pop("size", None)
    return {**model, **{name: value for name, value in told.items() if name not in given}}


def check_told_alike(first: str, second: str) -> None:
    """Raises PlanFitError where two saved plans were made with other models, or other options of one."""
    if not (first.endswith(".json") and second.endswith(".json")):
        return
    plans = Plan.load(first), Plan.load(second)
    for name in REMEMBERED:
        own, other = (plan.told.get(name) for plan in plans)
        if None not in (own, other) and own != other:
            raise PlanFitError(
                plans[1].name,
                f"'{second}' was made with {_spelled(name, other)}, and '{first}' with {_spelled(name, own)}: plans are "
                "compared for one step; make one of them anew with the other's option",
            )


def telling_sizes(command: Callable[..., None]) -> Callable[..., None]:
    """``command``, which says, where a saved plan does not fit, which sizes are given that it was not made with."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        try:
            command(**options)
        except PlanFitError as error:
            context, plan = options["context"], options["plan"]
            told = Plan.load(plan).told if plan.endswith(".json") else {}
            other = [
                f"--{name} {options[name]} is given, and '{plan}' was made with --{name} {told[name]}"
                for name in SIZES
                if is_given(context, name) and told.get(name, options[name]) not in (None, options[name])
            ]
            if other:
                error.args = (f"{error}; {', and '.join(other)}: leave it out, or make the plan anew with it",)
            raise

    return run


def is_given(context: typer.Context, option: str) -> bool:
    """Whether somebody has said it, rather than that it is the default."""
    return getattr(context.get_parameter_source(option), "name", "") != "DEFAULT"


def _spelled(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{name}"
    return f"--{name} {value}" if value is not None else f"no --{name}"
