"""``Job``: what the command line needs to know of a model: how its state is made, its train step, its data."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Job(NamedTuple):
    """A model of one's own on the command line: what the function that ``--job path.py:function`` names returns.

    A plain tuple of the first three does as well. Nothing in it knows of devices or plans: ``--plan`` says how the step
    is made parallel.

    Attributes:
        make_state: ``make_state(key)`` makes the training state from a key, as on one device. It is traced, so that
            every device makes its own parts.
        train_step: ``train_step(state, batch)`` with ``jscaler.value_and_grad`` returns ``(state, loss)``; in place of the
            loss there may be a dict with a ``"loss"``. Its arguments may have any names. A state of nnx objects is
            changed in place, and the step returns the loss alone.
        batches: an iterable of batches, or a function without arguments that returns one (a generator function). A batch
            is a tree of arrays; the first one's shapes are those of all. What has ended begins again where it can.
            `jscaler.Batches` are those of a Grain data set, of which each process reads its own rows alone.
        name: what reports call it; by default as it was given on the command line.
        evaluation: a `jscaler.Evaluation`, computed between the steps.

    Example:
        >>> def job(batches=10):  # in my_model.py; jscaler train --job "my_model.py:job(batches=20)"
        ...     return jscaler.Job(make_state, step, [batch] * batches)
        >>> job().make_state is make_state
        True
    """

    make_state: Callable[[Any], Any]
    train_step: Callable[..., Any]
    batches: Iterable[Any] | Callable[[], Iterable[Any]]
    name: str = ""
    evaluation: Any = None  # typed above, in what trains
