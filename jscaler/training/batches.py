"""``Batches``: a Grain data set as the batches of a job, each process reading the rows alone that its devices hold."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jscaler.errors import DataError, JscalerError, check_count


@runtime_checkable
class StartingAnywhere(Protocol):
    """Batches of which a run may begin with any, without those before it."""

    def starting(self, step: int, wanted: Sequence[int] | None = None) -> Iterator[Any]:
        """The batches from that of ``step`` on, without an end.

        Args:
            wanted: the rows that this process needs, in rising order; others may hold anything. None for all.
        """
        ...


@dataclass(frozen=True)
class BatchesFrom:
    """Batches that a function makes from a step on: ``make(step, wanted)``, as of `StartingAnywhere`."""

    make: Callable[[int, Sequence[int] | None], Iterator[Any]]

    def __call__(self) -> Iterator[Any]:
        return self.make(0, None)

    def starting(self, step: int, wanted: Sequence[int] | None = None) -> Iterator[Any]:
        return self.make(step, wanted)


class Batches:
    """Batches of a Grain data set, for `Job`: shuffled by a seed, again and again, read ahead by threads.

    In a job of several processes each reads the rows alone that its own devices hold: rows are shared out by data-parallel
    rank, and not by tensor- or pipeline-parallel rank. A resumed run goes on behind the last batch that its checkpoint's
    run has read, to which it jumps. A loader that is too slow shows as ``waited`` in each `StepRecord`.

    Args:
        source: what has a length and ``source[i]``, an example: a tree of arrays or numbers, all alike. A list,
            ``grain.sources.ArrayRecordDataSource(files)``, or a ``grain.MapDataset`` with all that it maps.
        rows: of a batch.
        seed: of the order, which is another in each epoch; None for that in which they lie.
        ahead: how many batches are read ahead.
        threads: that read them.

    Raises:
        JscalerError: Grain is not installed: ``pip install "jscaler[data]"``.
        DataError: the source is empty.
        PlanError: a count is none.

    Example:
        >>> examples = [np.full(3, i) for i in range(10)]
        >>> batches = jscaler.Batches(examples, rows=4, seed=None)
        >>> next(batches.starting(2))[:, 0]  # the third batch begins the data again
        array([8, 9, 0, 1])
        >>> next(batches.starting(0, wanted=[2, 3]))[:, 0]  # rows of others are not read
        array([0, 0, 2, 3])
    """

    def __init__(self, source: Any, rows: int, seed: int | None = 0, ahead: int = 4, threads: int = 4):
        try:
            import grain
        except ImportError:
            missing = 'data sets of Grain need it, and it is not installed: pip install "jscaler[data]"'
            raise JscalerError(missing) from None
        self.rows = check_count("Batches: rows", rows)
        if not len(source):
            raise DataError("the source of the batches is empty: there is nothing to train on")
        data = source if isinstance(source, grain.MapDataset) else grain.MapDataset.source(source)
        self._data = (data if seed is None else data.shuffle(seed=seed)).repeat()
        self._dataset = grain.MapDataset
        self._options = grain.ReadOptions(check_count("Batches: threads", threads), check_count("Batches: ahead", ahead))

    def __call__(self) -> Iterator[Any]:
        return self.starting(0)

    def starting(self, step: int, wanted: Sequence[int] | None = None) -> Iterator[Any]:
        """The batches from that of ``step`` on, without an end.

        Args:
            step: from 0.
            wanted: the rows to be read, in rising order; the others are zeros. None for all.
        """
        places = list(range(self.rows) if wanted is None else wanted)
        if not places:
            return self._nothing()
        some: Any = _Some(self._data, self.rows, places)
        batched = self._dataset.source(some)[step * len(places) :].batch(len(places)).to_iter_dataset(self._options)
        return iter(batched) if len(places) == self.rows else (self._whole(one, places) for one in batched)

    def _nothing(self) -> Iterator[Any]:
        """Batches of a process that has no row of any: their shapes are those of the others'."""
        empty = jax.tree.map(lambda x: np.zeros((self.rows, *np.shape(x)), np.asarray(x).dtype), self._data[0])
        while True:
            yield empty

    def _whole(self, part: Any, places: list[int]) -> Any:
        def whole(leaf: np.ndarray) -> np.ndarray:
            made = np.zeros((self.rows, *leaf.shape[1:]), leaf.dtype)
            made[places] = leaf
            return made

        return jax.tree.map(whole, part)


class _Some:
    """The wanted rows of one batch after another, of examples that go on and on."""

    def __init__(self, examples: Any, rows: int, places: Sequence[int]):
        self._examples, self._rows, self._places = examples, rows, places

    def __len__(self) -> int:
        return len(self._examples) // self._rows * len(self._places)

    def __getitem__(self, number: int) -> Any:
        batch, place = divmod(number, len(self._places))
        example = self._examples[batch * self._rows + self._places[place]]
        if example is None:
            raise DataError(
                f"row {self._places[place]} of batch {batch} is None, as Grain's filter leaves an example out: filter "
                "where the source is made, so that each number has an example"
            )
        return example
