"""``PlannedJob``: a job under a plan, which is what a command works with."""

import functools
import inspect
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jscaler.api import Parallelized, PlanLike, parallelize
from jscaler.capture.names import leaf_names
from jscaler.clusters import Cluster
from jscaler.errors import CaptureError, DataError, listing
from jscaler.primitives import Plan
from jscaler.runtime.absent import is_absent
from jscaler.runtime.agreement import agree, digest
from jscaler.runtime.arguments import LeafType, leaf_type
from jscaler.runtime.compiled import Compiled
from jscaler.runtime.out_of_memory import is_out_of_memory, out_of_memory
from jscaler.runtime.training_state import TracedState, trace_state
from jscaler.training.batches import StartingAnywhere
from jscaler.training.job import Job

LARGE = 50_000  # parameters; so many are told in millions


def devices_for(plan: str, devices: int | None) -> int | None:
    """How many devices were asked for; where nobody says it, as many as a saved plan is for."""
    if devices is not None or not plan.endswith(".json"):
        return devices
    return Plan.load(plan).num_devices


class PlannedJob:
    """A model, its data and its train step under a plan.

    Args:
        plan: as ``parallelize`` takes it.
        devices: as ``parallelize`` takes them.
        seed: of the key that the state is made from.
        strict: whether a plan that loses parallelism is refused.
        target: what it is planned for; its devices count where these are unlike.

    Raises:
        UnknownNameError: no such plan.
    """

    def __init__(
        self, job: Job, plan: PlanLike, devices: Any, seed: int = 0, strict: bool = False, target: Cluster | None = None
    ):
        self.job, self.seed = job, seed
        cluster = target if target is not None and len(target.kinds) > 1 else None
        made = parallelize(plan, devices=devices, cluster=cluster, donate_argnums=0, strict=strict)
        step: Parallelized = made(job.train_step)
        self.step, self.plan_text = step, str(plan) if isinstance(plan, str | os.PathLike) else step.plan_name
        self.state_name, self.batch_name = list(inspect.signature(job.train_step).parameters)[:2]
        self._data = _on_and_on(job)

    @property
    def key(self) -> jax.Array:
        return jax.random.key(self.seed)

    @functools.cached_property
    def first_batch(self) -> Any:
        """The batch whose shapes all have. For what runs nothing it may be made of ``jax.ShapeDtypeStruct``s.

        Raises:
            DataError: there is none, or it holds something other than arrays.
        """
        batches = self.job.batches
        batch = batches.at(0) if isinstance(batches, StartingAnywhere) else next(self._data)
        if not jax.tree.leaves(batch):
            raise DataError(f"the first batch of {self.job.name} is {batch!r}, in which there is no array")
        self._types(batch, "the first batch")
        return batch

    def check_batches(self) -> None:
        """Raises DataError where batches are shapes alone."""
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(self.first_batch)):
            raise DataError(f"the batches of {self.job.name} are shapes alone, which can be planned, not run: give arrays")

    def batches(self, start: int = 0, wanted: Sequence[int] | None = None) -> Iterator[Any]:
        """The batches from that of step ``start`` on, without an end. They are handed out once.

        Args:
            wanted: the rows that this process needs; where batches can leave the others out, they do.

        Raises:
            DataError: they have ended and do not begin again, one is not like the first, or they are shapes alone.
        """
        self.check_batches()
        first = self._types(self.first_batch, "the first batch")
        if isinstance(self.job.batches, StartingAnywhere):
            every = self.job.batches.starting(start, wanted)
        else:
            every = itertools.islice(itertools.chain([self.first_batch], self._data), start, None)
        for step, batch in enumerate(every, start):
            if (types := self._types(batch, f"the batch of step {step}")) != first:
                raise DataError(
                    f"the batch of step {step} of {self.job.name} is not like the first: {_difference(first, types)}; a "
                    "step is compiled for one shape: leave out a last batch that is smaller"
                )
            yield batch
        raise DataError(f"the batches of {self.job.name} have ended, and those that begin anywhere have no end")

    def own_batches(self, compiled: Compiled, start: int) -> Iterator[Any]:
        """As `batches`; in a job of several processes each reads the rows of its own devices alone, where it can.

        Raises:
            ProcessError: at a batch that cannot be read so: not all processes have the same.
        """
        if jax.process_count() == 1:
            return self.batches(start)
        leaves, tree = jax.tree.flatten(self.first_batch)
        names = leaf_names(self.batch_name, self.first_batch)
        known = dict(zip(compiled.lowered.leaf_names, compiled.lowered.executable.in_shardings, strict=True))
        shardings = [known[name] for name in names]
        in_parts = isinstance(self.job.batches, StartingAnywhere)
        wanted = own_rows([np.shape(leaf) for leaf in leaves], shardings) if in_parts else None

        def own(step: int, batch: Any) -> Any:
            found = jax.tree.leaves(batch)
            if not in_parts:
                agree({f"batch of step {step} (of which each process gives all rows)": digest(*found)})
            return jax.tree.unflatten(tree, map(own_parts, found, shardings))

        return map(own, itertools.count(start), self.batches(start, wanted))

    def _types(self, batch: Any, which: str) -> dict[str, LeafType]:
        """What each leaf of a batch is, by its path."""
        found = {}
        for i, (path, leaf) in enumerate(zip(leaf_names(self.batch_name, batch), jax.tree.leaves(batch), strict=True)):
            try:
                found[path] = leaf_type(leaf, self.batch_name, batch, i)
            except (CaptureError, TypeError):
                what = f"an array of {leaf.dtype}" if isinstance(leaf, np.ndarray) else f"a {type(leaf).__name__}"
                raise DataError(
                    f"{which} of {self.job.name} holds '{path}', {what}: a batch is a tree of arrays of numbers "
                    "(numpy.asarray makes them of what other libraries have)"
                ) from None
        return found

    @functools.cached_property
    def _traced(self) -> TracedState:
        return trace_state([self.state_name], self.job.make_state, [self.key])

    def state(self) -> Any:
        """A fresh state, on one device."""
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return self._traced.assemble(self._traced.fill([here] * len(self._traced.structs())))[self.state_name]

    def start(self, checkpoint: Path | None = None) -> tuple[int, Any]:
        """The first step, and the state in the plan's layout: a fresh one, or the latest of ``checkpoint``."""
        make_state, given = self.job.make_state, {self.batch_name: self.first_batch}
        self._agree_on_the_step()
        if checkpoint is None:
            return 0, self.step.init(make_state, self.key, **given)
        from jscaler.runtime.checkpoint import latest_step, restore_latest

        latest_step(checkpoint)  # before minutes of planning: there is one
        try:
            return restore_latest(checkpoint, self.target())
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # not planned for before: the state that is restored has no weak types
            raise out_of_memory(self.step.lower(*self.arguments()).plan, "restoring the state", error) from error

    def target(self) -> Any:
        """The state's types, as the plan lays it out."""
        return self.step.abstract_state(self.job.make_state, self.key, **{self.batch_name: self.first_batch})

    def agree(self, options: dict[str, Any]) -> None:
        """Raises ProcessError where the processes of a job are about something else, before anything is planned.

        Args:
            options: all that says when they meet: how many steps, which are saved.
        """
        if jax.process_count() == 1:
            return
        flags = " ".join(sorted(os.environ.get("XLA_FLAGS", "").split()))
        facts = {name: str(value) for name, value in (self.about | options).items()}
        batch = "first batch (of which each process gives all rows)"
        agree(facts | {"XLA_FLAGS": flags, batch: digest(*jax.tree.leaves(self.first_batch))})

    def _agree_on_the_step(self) -> None:
        """Raises ProcessError where they are about another step, before anything is compiled."""
        if jax.process_count() == 1:
            return
        lowered = self.step.lower(*self.arguments())
        texts = (one.as_text() for one in lowered.segments)
        agree({"plan": f"{lowered.plan.name} ({lowered.plan.digest})", "lowered step": digest(*texts)})

    @property
    def about(self) -> dict[str, Any]:
        """What a checkpoint says of the run that it is of."""
        versions = {name: metadata.version(name) for name in ("jscaler", "jax", "jaxlib")}
        data = self.job.batches.described if isinstance(self.job.batches, StartingAnywhere) else ""
        versions |= {"data": data} if data else {}
        return {"job": self.job.name, "plan": self.plan_text, "seed": self.seed, **versions}

    def batches_read(self, checkpoint: Path, step: int) -> int:
        """How many batches a run had read when it saved the state after ``step`` steps."""
        from jscaler.runtime.checkpoint import written_beside

        return int(written_beside(checkpoint, step).get("batches", step))

    def told_of(self, checkpoint: Path, step: int) -> str:
        """What is another in this run than in that of the checkpoint, and tells on its numbers; "" where nothing is."""
        from jscaler.runtime.checkpoint import written_beside

        there = written_beside(checkpoint, step).get("run", {})
        data = self.about.get("data")
        if data is not None and there.get("data", data) != data:
            return f"the checkpoint's run read {there['data']}, this one reads {data}: its batches are others"
        if there.get("seed", self.seed) == self.seed or "data" in there:
            return ""
        return f"the checkpoint's run had --seed {there['seed']}, this one has --seed {self.seed}: its batches are others"

    def arguments(self) -> tuple[Any, Any]:
        """Shapes of a state and a batch. The state is not allocated."""
        state = self._traced.assemble(self._traced.structs())[self.state_name]
        types = self._types(self.first_batch, "the first batch").values()
        return state, jax.tree.unflatten(jax.tree.structure(self.first_batch), [one.struct for one in types])

    def describe(self) -> str:
        """``gpt-1.3b, bfloat16, stacked, 1,316.0 M parameters, batch 32 × 2048``."""
        state, batch = self.arguments()
        shapes = (" × ".join(map(str, leaf.shape)) or "a number" for leaf in jax.tree.leaves(batch))
        params = state.get("params") if isinstance(state, Mapping) else getattr(state, "params", None)
        leaves = jax.tree.leaves(state if params is None else params)
        count = sum(x.size for x in leaves)
        size = f"{count / 1e6:,.1f} M" if count >= LARGE else f"{count:,}"
        size += " numbers of state" if params is None else " parameters"
        return f"{self.job.name}, {size}, batch {', '.join(dict.fromkeys(shapes))}"


def own_rows(shapes: Sequence[tuple[int, ...]], shardings: Sequence[Any]) -> list[int] | None:
    """The rows of a batch that this process's devices hold, in rising order; None for all.

    A row is what dim 0 counts. Where a leaf has another dim 0 than the others, all rows are needed.
    """
    counts = {shape[:1] for shape in shapes}
    if len(counts) != 1 or counts == {()}:
        return None
    ((rows,),) = counts
    found = set[int]()
    for shape, sharding in zip(shapes, shardings, strict=True):
        for index in sharding.addressable_devices_indices_map(shape).values():
            found.update(range(rows)[index[0]])
    return sorted(found)


def own_parts(leaf: Any, sharding: Any) -> Any:
    """A leaf of which other processes have other rows, as the parts of this process's devices.

    ``jax.device_put`` compares what is given on all processes, where all have devices.
    """
    if not isinstance(leaf, np.ndarray) or is_absent(sharding):
        return leaf
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index].astype(dtype))


def _on_and_on(job: Job) -> Iterator[Any]:
    """The batches of ``job``, again and again where they can be begun again."""
    count = 0
    while True:
        before = count
        for batch in job.batches if isinstance(job.batches, Iterable) else job.batches():
            yield batch
            count += 1
        if count == before:
            ended = f"have ended after {count}, and do not begin again: give a list, or a function that returns an iterator"
            raise DataError(f"the batches of {job.name} {ended if count else 'are none: there is nothing to train on'}")


def _difference(first: Mapping[str, LeafType], types: Mapping[str, LeafType]) -> str:
    if first.keys() != types.keys():
        return f"it holds {listing(list(types))} instead of {listing(list(first))}"
    return next(f"'{path}' is {types[path]} instead of {one}" for path, one in first.items() if types[path] != one)
