"""``--job path.py:function``: a model of the user's own, and what may be wrong with it."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jscaler.api import Parallelized
from jscaler.errors import JobError, JscalerError, PlanError, UnknownNameError, shown
from jscaler.plans.parse import PlanCall, parse_call
from jscaler.training.batches import BatchesFrom, StartingAnywhere
from jscaler.training.job import Job
from jscaler.user_file import function_in, raised

KINDS = {"batches": "iterable of batches (a list, a data set), nor a function that returns one (a generator function)"}
RETURNS = "return (make_state, train_step, batches), or a jscaler.Job"


def job_from_file(text: str) -> Job:
    """The job that ``path.py:function``, or ``path.py:function(hidden=64)``, returns.

    Raises:
        UnknownNameError: the file has no such function, or the function no such argument.
        JobError: there is no such file, it cannot be run, the function has raised, or what it has returned is no job.
    """
    named, args, kwargs = _parsed(text)
    path, _, function = named.rpartition(":")
    if not path.endswith(".py"):
        raise JobError(f"a job is a function in a Python file, path.py:function, and '{text}' is not")
    found = function_in(Path(path), function, "job", JobError)
    return checked_job(_called(found, named, args, kwargs), text)


def told_job(job: Job, text: str) -> Job:
    """``job``, read from ``text``; what its functions raise becomes a JobError that says which, and from which line."""
    path = Path(text.partition("(")[0].rpartition(":")[0])

    def told(role: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except JscalerError:
                raise
            except Exception as error:  # of whatever class: it is the user's
                raise JobError(f"{role} of job '{text}' has raised {raised(error, path)}") from error

        return called

    def told_one_by_one(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        every = told("batches", begin)()
        one, ended = told("batches", lambda: next(every, ended)), object()
        while (batch := one()) is not ended:
            yield batch

    given: Any = job.batches
    batches: Any
    if isinstance(given, StartingAnywhere):
        batches = BatchesFrom(
            lambda step, wanted: told_one_by_one(lambda: given.starting(step, wanted)),
            told("batches", given.at),
            given.described,
        )
    else:
        batches = functools.partial(told_one_by_one, lambda: iter(given if isinstance(given, Iterable) else given()))

    functions = {"make_state": told("make_state", job.make_state), "train_step": told("train_step", job.train_step)}
    if job.evaluation is not None:
        evaluation = job.evaluation._replace(step=told("the evaluation", job.evaluation.step))
        functions["evaluation"] = evaluation
    return job._replace(**functions, batches=batches)


def _parsed(text: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    name = text.partition("(")[0]
    wrong = JobError(f"cannot read the job '{text}': write its arguments as literals, such as {name}(hidden=64)")
    try:
        _, call = parse_call(text)
    except PlanError as error:
        raise wrong from error
    args, kwargs = ((), {}) if call is None else (call.args, call.kwargs)
    values = (*args, *kwargs.values())
    if any(isinstance(one, PlanCall) for value in values for one in (value if isinstance(value, list) else [value])):
        raise wrong
    return name.strip(), args, kwargs


def _called(function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    signature = inspect.signature(function)
    names = list(signature.parameters)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        if unknown := [argument for argument in kwargs if argument not in names]:
            raise UnknownNameError("argument", unknown[0], names, f" of job '{name}'") from None
        raise JobError(
            f"job '{name}': {error}; its arguments are {', '.join(names) or 'none'}: give them defaults, or values as in "
            f'--job "{name}({next(iter(names), "hidden")}=64)"'
        ) from None
    try:
        return function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise JobError(f"job '{name}' has raised {raised(error, Path(name.rpartition(':')[0]))}") from error


def checked_job(made: Any, text: str) -> Job:
    """What a job's function has returned as a `Job`; ``text`` is how the command line names it.

    Raises:
        JobError: it is none; says what is wrong with which part.
    """
    if not isinstance(made, tuple) or len(made) not in (3, 4, len(Job._fields)):
        what = f"a {type(made).__name__}" + (f" of {len(made)}" if isinstance(made, (tuple, list)) else "")
        raise JobError(f"job '{text}' has returned {what}: {RETURNS}")
    job = Job(*made)
    if not isinstance(job.name, str):
        raise JobError(f"the name of job '{text}' is {shown(job.name)}: reports print it, so give text")
    if isinstance(job.train_step, Parallelized):  # the plan is the command line's
        job = job._replace(train_step=job.train_step.fun)
    _check_takes(job.make_state, "make_state", ("key",), text)
    _check_takes(job.train_step, "train_step", ("state", "batch"), text)
    if not isinstance(job.batches, Iterable):
        _check_takes(job.batches, "batches", (), text)
    return job if job.name else job._replace(name=text)


def _check_takes(function: Any, role: str, wanted: Sequence[str], text: str) -> None:
    """Raises JobError unless ``function`` can be called with as many arguments, by position."""
    spelled = f"{role}({', '.join(wanted)})"
    if not callable(function):
        raise JobError(
            f"{role} of job '{text}' is a {type(function).__name__}, and no {KINDS.get(role, 'function')}; {RETURNS}"
        )
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*wanted)
    except TypeError as error:
        raise JobError(f"{role} of job '{text}' is called as {spelled}, and takes {signature}: {error}") from None
    if len(bound.arguments) < len(wanted):
        raise JobError(f"{role} of job '{text}' is called as {spelled}, and takes {signature}: give each argument a name")
