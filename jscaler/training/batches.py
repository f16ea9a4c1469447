"""``Batches``: a Grain data set as the batches of a job, each process reading the rows alone that its devices hold."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jscaler.errors import DataError, JscalerError, PlanError, check_count, shown

ENDLESS = 1 << 50  # examples: more than any run reads, and few enough to be counted in floats


@runtime_checkable
class StartingAnywhere(Protocol):
    """Batches of which a run may begin with any, without those before it. They have no end."""

    @property
    def described(self) -> str:
        """What tells them from others; "" where the step's number says all."""
        ...

    def at(self, step: int) -> Any:
        """That of one step, and no more of them."""
        ...

    def starting(self, step: int, wanted: Sequence[int] | None = None) -> Iterator[Any]:
        """Those from that of ``step`` on.

        Args:
            wanted: the rows that this process needs, in rising order; others may hold anything. None for all.
        """
        ...


@dataclass(frozen=True)
class BatchesFrom:
    """Batches that functions make, as of `StartingAnywhere`.

    Attributes:
        make: ``make(step, wanted)`` those from a step on.
        one: ``one(step)`` that of a step.
        described: what tells them from others, for checkpoints.
    """

    make: Callable[[int, Sequence[int] | None], Iterator[Any]]
    one: Callable[[int], Any]
    described: str = ""

    def __call__(self) -> Iterator[Any]:
        return self.make(0, None)

    def at(self, step: int) -> Any:
        return self.one(step)

    def starting(self, step: int, wanted: Sequence[int] | None = None) -> Iterator[Any]:
        return self.make(step, wanted)


class Batches:
    """Batches of a Grain data set, for `Job`: shuffled by a seed, again and again, read ahead by threads.

    In a job of several processes each reads the rows alone that its own devices hold: rows are shared out by data-parallel
    rank, and not by tensor- or pipeline-parallel rank. A resumed run goes on behind the last batch that its checkpoint's
    run has read, to which it jumps. A loader that is too slow shows as ``waited`` in each `StepRecord`. They have no end.

    Args:
        source: what has a length and ``source[i]``, an example: a tree of arrays or numbers, all alike. A list,
            ``grain.sources.ArrayRecordDataSource(files)``, or a ``grain.MapDataset`` with all that it maps.
        rows: of a batch: 1 or more.
        seed: of the order, 0 or above, which is another in each epoch; None for that in which they lie.
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
        self.rows, self.seed = check_count("Batches: rows", rows), seed
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise DataError(f"the source of batches has a length and source[i], and is not {shown(source)}")
        if not 0 < len(source) < ENDLESS:
            raise DataError(
                "the source of the batches is empty: there is nothing to train on" if not len(source) else
                "the source of the batches is repeated already: give it as it is, batches begin it again"
            )  # fmt: skip
        if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 1 << 32):
            raise DataError(f"Batches: seed is a whole number from 0 to 2**32 - 1, or None, not {shown(seed)}")
        self.examples = len(source)
        data = source if isinstance(source, grain.MapDataset) else grain.MapDataset.source(source)
        self._data = (data if seed is None else data.shuffle(seed=seed)).repeat()
        self._dataset = grain.MapDataset
        self._options = grain.ReadOptions(check_count("Batches: threads", threads), check_count("Batches: ahead", ahead))

    def __call__(self) -> Iterator[Any]:
        return self.starting(0)

    @property
    def described(self) -> str:
        """``8 rows of 400 examples, shuffled by seed 5``: a checkpoint knows by it whether a run goes on with others.

        Example:
            >>> jscaler.Batches([1, 2, 3], rows=2, seed=None).described
            '2 rows of 3 examples, in their order'
        """
        order = "in their order" if self.seed is None else f"shuffled by seed {self.seed}"
        return f"{self.rows} rows of {self.examples} examples, {order}"

    def at(self, step: int) -> Any:
        """That of one step; nothing is read ahead.

        Args:
            step: from 0.

        Example:
            >>> jscaler.Batches([1, 2, 3], rows=2, seed=None).at(1)
            array([3, 1])
        """
        return self._batched(step, list(range(self.rows)))[0]

    def starting(self, step: int, wanted: Sequence[int] | None = None) -> Iterator[Any]:
        """The batches from that of ``step`` on, without an end.

        Args:
            step: from 0.
            wanted: the rows to be read, in rising order; the others are zeros. None for all.

        Raises:
            PlanError: there is no such step or row.
        """
        places = list(range(self.rows) if wanted is None else wanted)
        if step < 0 or any(not 0 <= place < self.rows for place in places):
            raise PlanError(
                f"batches begin with step 0 and have rows 0 to {self.rows - 1}; {step} and {places} are asked for"
            )
        if not places:
            return self._nothing()
        batched = self._batched(step, places).to_iter_dataset(self._options)
        return iter(batched) if len(places) == self.rows else (self._whole(one, places) for one in batched)

    def _batched(self, step: int, places: list[int]) -> Any:
        some: Any = _Some(self._data, self.rows, places)
        return self._dataset.source(some)[step * len(places) :].batch(len(places))

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
        return min(len(self._examples), ENDLESS) // self._rows * len(self._places)

    def __getitem__(self, number: int) -> Any:
        batch, place = divmod(number, len(self._places))
        example = self._examples[batch * self._rows + self._places[place]]
        if example is None:
            raise DataError(
                f"row {self._places[place]} of batch {batch} is None, as Grain's filter leaves an example out: filter "
                "where the source is made, so that each number has an example"
            )
        return example
