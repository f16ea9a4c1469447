"""Which of a step's inputs are its batch: those that the plan names, or else the data whose dim 0 is one thing."""

import math
from collections.abc import Mapping, Sequence, Set

import jax
import numpy as np

from jscaler.errors import PlanError, UnknownNameError
from jscaler.ir import Graph, Op, PTensor
from jscaler.ir.walk import closure
from jscaler.rules.reached_factors import all_reached_factors

BATCH = "batch"


def batch_leaves(graph: Graph, batch: str = BATCH) -> list[PTensor]:
    """The inputs whose dim 0 is the batch.

    Where none is called ``"batch"``, and the plan names no other, the data are taken: what is neither state, nor a key of
    random bits. Of data whose dim 0 has several sizes, those with rows alone (`_with_rows`), if that leaves one size.

    Raises:
        UnknownNameError: no input is called so, and which are data is open; names those that may be.
        PlanError: ``batch`` is no text.
    """
    if not isinstance(batch, str):
        raise PlanError(f"batch is the path or a pattern of inputs, such as 'batch' or 'batch/tok*', not {batch!r}")
    named = [t for t in graph.select_inputs(batch) if t.shape]
    if named:
        return named
    data = data_inputs(graph)
    if batch == BATCH:
        for found in (data, _with_rows(graph, data)):
            if len({t.shape[0] for t in found}) == 1:
                return found
    why = "; pass the plan batch=..., the path or a pattern of what may be data"
    raise UnknownNameError("input", batch, map(str, data) if data else (t.name for t in graph.inputs), why)


def data_inputs(graph: Graph) -> list[PTensor]:
    """The inputs that are neither state, nor in one argument with some, nor keys of random bits, and have rows.

    Where none has several rows (one long sequence), those of one row, and more than one element. Of a function without a
    gradient or new state, arguments whose leaves have several numbers of rows count as state.
    """
    state = {_argument(graph.inputs[i]) for i in graph.next_version.values()}
    state |= {_argument(t) for call in graph.calls for t in call.wrt}
    able = [t for t in graph.inputs if _argument(t) not in state and math.prod(t.shape) > 1 and not _is_key(t)]
    found = [t for t in able if t.shape[0] > 1] or able
    if state:
        return found
    rows: dict[str, set[int]] = {}
    for tensor in found:
        rows.setdefault(_argument(tensor), set()).add(tensor.shape[0])
    return [t for t in found if len(rows[_argument(t)]) == 1]


def _with_rows(graph: Graph, data: Sequence[PTensor]) -> list[PTensor]:
    """The data whose dim 0 is no other dim of other data, nor one of a parameter: no positions, and no table's rows."""
    key = "data with rows"
    if key not in graph.memo:
        learned = {t for call in graph.calls for t in call.wrt}
        graph.memo[key] = [t for t in data if not _is_elsewhere(graph, t, {*data} - {t}, learned)]
    return graph.memo[key]


def _is_elsewhere(graph: Graph, tensor: PTensor, data: Set[PTensor], learned: Set[PTensor]) -> bool:
    """Whether dim 0 of ``tensor`` reaches a dim of what is learned, or a later dim of other data, whose rows it meets."""
    reached = all_reached_factors(graph, [(tensor, 0)])
    for op, factors in reached.items():
        for other, dims in zip(op.inputs, graph.rule(op).operands, strict=True):
            places = [number for number, names in enumerate(dims) if factors.intersection(names)]
            later = bool(places) and other in data and places[0] > 0
            if places and (other in learned or (later and _meets_rows(graph, tensor, other, reached))):
                return True
    return False


def _meets_rows(graph: Graph, tensor: PTensor, other: PTensor, reached: Mapping[Op, Set[str]]) -> bool:
    """Whether an op that reads what is made of both still has dim 0 of ``other``, and hands on that of ``tensor``.

    Positions meet tokens so. Labels of each row meet a mean over time, so that ``other`` has time in front.
    """

    def onward(here: PTensor) -> list[PTensor]:
        return [*graph.flow.targets(here), *(t for op in graph.consumers.get(here, ()) for t in op.outputs)]

    rows = all_reached_factors(graph, [(other, 0)])
    mine, theirs = ({*closure([t], onward)} for t in (tensor, other))
    for op in graph.of_kind("forward"):
        if not mine.isdisjoint(op.inputs) and not (theirs - mine).isdisjoint(op.inputs):
            results = {name for dims in graph.rule(op).results for names in dims for name in names}
            if rows.get(op) and results & reached.get(op, set()):
                return True
    return False


def _argument(tensor: PTensor) -> str:
    return tensor.name.partition("/")[0]


def _is_key(tensor: PTensor) -> bool:
    raw = tensor.dtype == np.uint32 and tensor.shape in ((2,), (4,))
    return raw or jax.dtypes.issubdtype(tensor.dtype, jax.dtypes.prng_key)
