"""Every error that a user of jscaler can meet, each with its cause and its remedy.

A message says what went wrong, where (op, input or argument path), the numbers, and what to do about it. User
mistakes raise one of these classes; a broken invariant of our own is an ``assert``.
"""

import difflib
import inspect
import os
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

LEAST = 0.001  # of what a device computes, moves or holds in a step: less is not worth a warning


class JscalerError(Exception):
    """The base class of everything jscaler raises. It goes from process to process, whatever its class is made of.

    Example:
        >>> try:
        ...     jscaler.parallelize("data_paralel")
        ... except jscaler.JscalerError as error:
        ...     print(type(error).__name__)
        UnknownNameError
    """

    exit_code = 1  # of a command that it ends

    def __reduce__(self) -> Any:
        return _with_message, (type(self), self.args), self.__dict__ or None


def _with_message(kind: type[JscalerError], args: tuple[Any, ...]) -> JscalerError:
    return kind.__new__(kind, *args)


class CaptureError(JscalerError):
    """The step cannot be captured as a graph: a non-array argument, or no gradient where the plan needs one.

    Example:
        >>> train_step.lower(state, "a batch")
        Traceback (most recent call last):
        jscaler.errors.CaptureError: argument 'batch' is a str, not an array: ...
    """


class GradientError(CaptureError, TypeError):
    """A gradient of what has none, or a loss that is no real number; a ``TypeError``, too, as of ``jax.value_and_grad``.

    Example:
        >>> jscaler.value_and_grad(lambda w: 2.0 * w)(3)
        Traceback (most recent call last):
        jscaler.errors.GradientError: args[0] is int: gradients are taken of real floating-point leaves only
    """


class PlanError(JscalerError):
    """The plan contradicts itself, the graph or the devices.

    Example:
        >>> jscaler.parallelize(plan=3)
        Traceback (most recent call last):
        jscaler.errors.PlanError: a plan is a policy, a plan's name or a Plan, not 3

    Attributes:
        alone: paths of ops that need all micro-batches, where each might do with one.
        apart: whether the step needs several loops over micro-batches, and the plan can have but one.
    """

    alone: tuple[str, ...] = ()
    apart: bool = False


def check_count(what: str, count: Any, *, least: int = 1) -> int:
    """``count`` as an int.

    Raises:
        PlanError: it is no whole number, or less than ``least``.

    Example:
        >>> check_count("accumulate: microbatches", 2.5)
        Traceback (most recent call last):
        jscaler.errors.PlanError: accumulate: microbatches is a positive whole number, not 2.5
    """
    if isinstance(count, (int, np.integer)) and not isinstance(count, bool) and count >= least:
        return int(count)
    kind = "a positive whole number" if least == 1 else f"a whole number from {least}"
    raise PlanError(f"{what} is {kind}, not {count!r}")


def check_flag(what: str, flag: Any) -> bool:
    """``flag``; raises PlanError where it is neither True nor False: "no" would be taken for yes."""
    if isinstance(flag, (bool, np.bool_)):
        return bool(flag)
    raise PlanError(f"{what} is True or False, not {shown(flag)}")


def check_dim(name: str, shape: Sequence[int], dim: Any) -> int:
    """``dim`` as an int; raises PlanError unless it is one of the tensor ``name``, counted from 0."""
    if isinstance(dim, (int, np.integer)) and not isinstance(dim, bool) and 0 <= dim < len(shape):
        return int(dim)
    legal = f"give one from 0 to {len(shape) - 1}" if shape else "it has none"
    raise PlanError(f"'{name}' of shape {tuple(shape)} has no dim {dim!r}; {legal}")


class PlanFileError(PlanError):
    """A plan cannot be written to a file or read from one.

    Example:
        >>> Plan.from_json("no plan")
        Traceback (most recent call last):
        jscaler.errors.PlanFileError: ...
    """


class PlanFitError(PlanError):
    """A finished plan does not fit the graph: its op paths and rules are not those that the plan was made for.

    Example:
        >>> raise jscaler.PlanFitError("two_way", "op 'up/dot' is not in the graph; did you mean 'top/dot'?")
        Traceback (most recent call last):
        jscaler.errors.PlanFitError: plan 'two_way' does not fit this graph; the first difference: op 'up/dot' is not in the
        graph; did you mean 'top/dot'?
    """

    def __init__(self, plan: str, difference: str):
        super().__init__(f"plan '{plan}' does not fit this graph; the first difference: {difference}")


class OrderError(PlanError):
    """Order constraints and data dependencies form a cycle.

    Example:
        >>> circular = chr(10).join(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"])  # 0B0 waits for 1B0, and 1F1 for 0F1
        >>> train_step.under(plans.pipeline(2, 2, circular)).lower(state, batch)
        Traceback (most recent call last):
        jscaler.errors.OrderError: blocks wait for each other: ...
    """


class DeviceError(JscalerError):
    """The devices asked for are not the devices at hand.

    Example:
        >>> jscaler.parallelize("single", devices=0)(step).lower(state, batch)
        Traceback (most recent call last):
        jscaler.errors.DeviceError: 0 devices are asked for; ...
    """


class ProcessError(JscalerError):
    """A process of a job has ended too early, or is about something else than the others.

    Example:
        >>> # jscaler train --local-processes 2 --platform cpu --devices 4, and one of the two is killed
        >>> raise jscaler.ProcessError("process 1 of 2 was killed by SIGKILL; the others were ended")
        Traceback (most recent call last):
        jscaler.errors.ProcessError: process 1 of 2 was killed by SIGKILL; ...
    """


class BlockError(JscalerError, RuntimeError):
    """A block of a step has failed while it ran: which one, of which stage, on which devices, for which
    micro-batch, with its ops and their source lines. The error that XLA, or a host callback, has raised is its cause.

    Example:
        >>> try:
        ...     new, loss = train_step(state, batch)
        ... except jscaler.BlockError as error:
        ...     print(error, error.__cause__)
    """


class OutOfMemoryError(BlockError, MemoryError):
    """A device's memory is full: what the plan's estimate has in it, and which plans `jscaler.fit` would try next.

    Example:
        >>> try:
        ...     new, loss = train_step(state, batch)
        ... except jscaler.OutOfMemoryError as error:
        ...     print(error)
    """


class NotFiniteError(JscalerError, FloatingPointError):
    """Under ``jax.debug_nans`` or ``jax.debug_infs``: the first op that has made a NaN, or an infinity, and where. Of
    `jscaler.train`: the step whose loss, or whose next state, is not finite.

    Example:
        >>> with jax.debug_nans(True):
        ...     jscaler.parallelize("single", devices=1)(jnp.log)(jnp.array([-1.0]))
        Traceback (most recent call last):
        jscaler.errors.NotFiniteError: op ... makes the first NaN, by log...
    """


class StateLostError(JscalerError, RuntimeError):
    """A step has failed after it took donated state: these leaves are gone. The error that it failed with is the cause.

    Example:
        >>> try:
        ...     new, loss = train_step(state, batch)
        ... except jscaler.StateLostError as error:
        ...     print(error)  # and go on from the last checkpoint
    """

    def __init__(self, lost: Sequence[str], donated: int, why: str):
        super().__init__(
            f"{len(lost)} of {donated} donated leaves are lost, the step failed when it had them: {listing(lost)}; "
            "go on from the last checkpoint (or a copy), or make the state anew; a step that donates nothing keeps its "
            f"arguments, at the price of a second state in memory. It failed with: {why}"
        )


class DeletedArgumentError(JscalerError, RuntimeError):
    """An argument is an array whose memory was given away.

    Example:
        >>> raise jscaler.DeletedArgumentError(["state/w"])
        Traceback (most recent call last):
        jscaler.errors.DeletedArgumentError: 1 argument has been deleted: 'state/w'; a step that donates its state takes it:
        give the state that the step has returned, or decorate it without donate_argnames / donate_argnums
    """

    def __init__(self, names: Sequence[str]):
        count = "1 argument has" if len(names) == 1 else f"{len(names)} arguments have"
        super().__init__(
            f"{count} been deleted: {listing(names)}; a step that donates its state takes it: give the state that the step "
            "has returned, or decorate it without donate_argnames / donate_argnums"
        )


class JobError(JscalerError):
    """What ``--job path.py:function`` names is no job: the file, its function, or what the function has returned.

    Example:
        >>> issubclass(jscaler.JobError, jscaler.JscalerError)  # what a command prints, before it ends with exit code 1
        True
    """


class OutputError(JscalerError):
    """A result cannot be written: a log, a checkpoint, a picture; there is no such place, no permission, or no space.

    Example:
        >>> jscaler.write_trace("/dev/null/trace.json", jscaler.simulate(lowered, "4xH100-80GB"))
        Traceback (most recent call last):
        jscaler.errors.OutputError: cannot write the trace '/dev/null/trace.json': ...
    """


class DataError(JscalerError):
    """Training data is missing or too short.

    Example:
        >>> jscaler.pad_batch({}, 4)
        Traceback (most recent call last):
        jscaler.errors.DataError: ...
    """


class VerificationError(JscalerError):
    """The emitted program does not deliver what the plan says, or a rule does not say what its op does.

    Of a program it says which device holds what in place of what: the plan is not at fault, please report it with the
    plan. Of a rule (`jscaler.verify_rule`) it says which factor lies, in how many parts and in which result.

    Example:
        >>> softmax = jscaler.op("a b -> a b")(jax.nn.softmax)  # not true of b, over which it sums
        >>> jscaler.verify_rule(softmax, np.eye(4))
        Traceback (most recent call last):
        jscaler.errors.VerificationError: ...
    """


class RuleError(JscalerError):
    """A rule cannot be read, or does not fit the shapes of the op that it is given to.

    Example:
        >>> raise jscaler.RuleError("b s -> b", "the op has 2 operands and the rule has 1")
        Traceback (most recent call last):
        jscaler.errors.RuleError: rule 'b s -> b': the op has 2 operands and the rule has 1
    """

    def __init__(self, rule: str, why: str):
        super().__init__(f"rule '{rule}': {why}")


class UnknownNameError(JscalerError):
    """A name that nothing carries.

    Example:
        >>> raise jscaler.UnknownNameError("plan", "singel", ["single", "data_parallel"])
        Traceback (most recent call last):
        jscaler.errors.UnknownNameError: no plan named 'singel'; did you mean 'single'? known: single, data_parallel
    """

    def __init__(self, what: str, name: str, known: Iterable[str], where: str = ""):
        known = list(known)
        near = near_names(name, known)
        hint = f"; did you mean '{near[0]}'?" if near else ";"
        shown = ", ".join(known[:20]) + (f", … ({len(known)} in all)" if len(known) > 20 else "")
        super().__init__(f"no {what} named '{name}'{where}{hint} known: {shown or 'none'}")


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """The one of ``known`` that ``name`` may be meant for: by its whole path or its last part, whatever the case."""
    name = str(name)  # whatever was given for it
    folded = {k.lower(): k for k in reversed(known)} | {k.rsplit("/", 1)[-1].lower(): k for k in reversed(known)}
    return [folded[m] for m in difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.5)]


class SplitError(PlanError):
    """An op cannot be split as asked; ``comes_from`` says which dim of an argument the factor is.

    Example:
        >>> raise jscaler.SplitError("attn/qkv", "h", 12, 8)
        Traceback (most recent call last):
        jscaler.errors.SplitError: 'attn/qkv' cannot split factor 'h' of size 12 into 8 parts; legal: 1, 2, 3, 4, 6, 12
    """

    def __init__(self, op: str, factor: str, size: int, parts: int, why: str = "", comes_from: str = ""):
        reason = why or "legal: " + ", ".join(map(str, divisors(size)))
        self.factor, self._asked, self._comes_from = factor, (op, factor, size, parts, reason), comes_from
        named = f"; '{factor}' is {comes_from}" if comes_from else ""
        super().__init__(f"'{op}' cannot split factor '{factor}' of size {size} into {parts} parts; {reason}{named}")

    def of(self, comes_from: str) -> "SplitError":
        """The same error, which says what the factor is."""
        return SplitError(*self._asked, comes_from)

    def within(self, where: str) -> "SplitError":
        """The same error, which says where it is so."""
        op, factor, size, parts, reason = self._asked
        return SplitError(op, factor, size, parts, f"{reason}; {where}", self._comes_from)


def factor_name(factor: str, comes_from: str = "") -> str:
    """``'d' (up.kernel[1])``: a factor for the middle of a sentence, with what it is, if known."""
    return f"'{factor}' ({comes_from})" if comes_from else f"'{factor}'"


def divisors(number: int) -> list[int]:
    """All divisors of ``number`` in rising order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def shown(value: Any, most: int = 60) -> str:
    """``value`` for the middle of a sentence: in one line, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def listing(names: Sequence[str], most: int = 6) -> str:
    """``names`` in quotes, the rest of a long list as a count."""
    shown = ", ".join(f"'{n}'" for n in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def warn(message: str, category: type[Warning]) -> None:
    """Warn of a line of the user's own: the innermost in no file of this package, of Python's or of another library."""
    levels = list(enumerate(traceback.walk_stack(inspect.currentframe()), 1))
    files = [(level, frame.f_code.co_filename) for level, (frame, _) in levels]
    package, libraries = os.path.dirname(__file__), [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    outside = [(level, file) for level, file in files if not file.startswith((package, "<frozen "))]
    own = [level for level, file in outside if not file.startswith(tuple(libraries))]
    warnings.warn(message, category, stacklevel=next(iter([*own, *(level for level, _ in outside)]), 1))


class PlanWarning(UserWarning):
    """A step's plan is not the one that was asked for: the policy did not fit, and the plan was filled in; or it loses
    parallelism. Less than a thousandth (`LEAST`) of a device's FLOPs or bytes is not worth one.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", jscaler.PlanWarning)  # an error in its place
        ...     planned = jscaler.parallelize("data_parallel", devices=4)(jnp.sum).lower(jnp.ones(8))
    """


class ScheduleWarning(PlanWarning):
    """A step runs by another schedule than the one that was asked for, which does not go with its blocks.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", jscaler.ScheduleWarning)  # an error in its place
        ...     planned = jscaler.parallelize("data_parallel", devices=4)(jnp.sum).lower(jnp.ones(8))
    """


class CaptureWarning(UserWarning):
    """Something of the step is captured as near as it can be, and not quite as it was written.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", jscaler.CaptureWarning)  # an error in its place
        ...     planned = train_step.lower(state, batch)
    """


class CheckpointWarning(UserWarning):
    """A state of a checkpoint cannot be read, and the one before it is taken.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", jscaler.CheckpointWarning)  # an error in its place
    """


class UnknownPrimitiveWarning(UserWarning):
    """A primitive without a rule: ops that contain it are replicated, never split.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", jscaler.UnknownPrimitiveWarning)  # an error in its place
        ...     planned = jscaler.parallelize("data_parallel", devices=4)(jnp.sum).lower(jnp.ones(8))
    """
