"""An evaluation between the steps of a run: a step that reads the state where it lies, over a few batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jscaler.api import Parallelized
from jscaler.errors import DataError, JobError
from jscaler.runtime.fetching import fetch
from jscaler.training.batches import StartingAnywhere


class Evaluation(NamedTuple):
    """What `jscaler.train` computes of the state every so many steps, and behind the last one.

    It follows the train step's plan (`Parallelized.follow`), in pipelines too: nothing of the state is moved.

    Attributes:
        step: ``step(state, batch)`` returns a number, or a dict of numbers; it calls the state as the train step does.
        batches: a list, or a function without arguments that returns an iterable; all are read each time, and the numbers
            are their mean.
        every: steps between two.

    Example:
        >>> def error(state, batch):
        ...     return {"error": loss_fn(state["params"], batch)}
        >>> jscaler.Evaluation(error, [batch], every=100).every
        100
    """

    step: Callable[..., Any]
    batches: Iterable[Any] | Callable[[], Iterable[Any]]
    every: int = 100

    def following(self, train_step: Parallelized) -> Callable[[Any], dict[str, float]]:
        """The evaluation of a state that lies as ``train_step`` has it.

        Args:
            train_step: has been planned for the state.

        Raises:
            DataError: at a call, there are no batches.
            JobError: the batches have no end, or can be read once.
            JobError: at a call, the step returns something other than numbers.

        Example:
            >>> evaluation = jscaler.Evaluation(lambda state, batch: loss_fn(state["params"], batch), [batch])
            >>> sorted(evaluation.following(train_step)(state))
            ['loss']
        """
        if isinstance(self.batches, StartingAnywhere):
            raise JobError(
                "the batches of an evaluation are all read each time, and these have no end: give a function that returns "
                "a few of them, lambda: itertools.islice(batches.starting(0), 10)"
            )
        if isinstance(self.batches, Iterator):
            raise JobError(
                f"the batches of an evaluation are all read each time, and a {type(self.batches).__name__} can be read "
                "once: give a list, or a function that returns an iterable"
            )
        followed = train_step.follow(self.step)

        def run(state: Any) -> dict[str, float]:
            found = [_numbers(fetch(followed(state, batch))) for batch in self._every_batch()]
            if not found:
                raise DataError(
                    "the batches of the evaluation are none: give a list, or a function that returns an iterable"
                )
            return {name: float(np.mean([one[name] for one in found])) for name in found[0]}

        return run

    def _every_batch(self) -> Iterator[Any]:
        return iter(self.batches() if callable(self.batches) else self.batches)


def _numbers(made: Any) -> dict[str, float]:
    named = made if isinstance(made, Mapping) else {"loss": made}
    for name, value in named.items():
        if np.ndim(value):
            raise JobError(f"the evaluation's '{name}' is an array of shape {np.shape(value)}: return numbers")
    return {str(name): float(value) for name, value in named.items()}
