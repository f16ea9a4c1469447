"""Megatron-LM: data × tensor parallelism on a grid of devices, with the vocabulary and, if asked for, the sequence.
(Shoeybi et al. 2019; Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021; Korthikanti
et al. 2022.)

::

             tp ──►
        dp   ┌ d0 d1 d2 d3 ┐   rows: one part of the batch each
        │    └ d4 d5 d6 d7 ┘   columns: heads, hidden units, vocabulary (and the sequence between them)
        ▼

Activations are reduced within a row (see `tensor_parallel`, `sequence_parallel`, `vocab_parallel`), gradients within a
column, where all of them combine into one all-reduce. Neighbours share a row, the faster links of a cluster.

With ``pp`` there are as many such grids as stages, through which micro-batches follow each other (see `pipeline`).

With ``zero``, what a column holds copies of is split over it, on top of the cuts of ``tp`` (see `zero`): optimizer state,
sums of gradients over micro-batches, or parameters too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from jscaler.errors import PlanError
from jscaler.plans.accumulate import accumulate
from jscaler.plans.alone import Apart
from jscaler.plans.argument_types import checked
from jscaler.plans.column_row_pairs import column_factors
from jscaler.plans.data_parallel import batch_factors
from jscaler.plans.factors import Deals, Dims, Factors, device_grid, reached, split
from jscaler.plans.find_sequence import sequence_of
from jscaler.plans.pipeline import pipeline
from jscaler.plans.vocab_parallel import tables_of_words, word_factors
from jscaler.plans.zero import shard_parameters, without_followers
from jscaler.primitives import Planner
from jscaler.tables import Published, Table


@checked
def megatron(
    dp: int | None = None,
    tp: int | None = None,
    sequence: bool | Dims = False,
    vocab: bool | Dims = True,
    zero: Literal[0, 1, 2, 3] = 0,
    batch: str = "batch",
    columns: Dims | Sequence[str] | None = None,
    pp: int = 1,
    microbatches: int | None = None,
    schedule: "Published | Table | str" = "1f1b",
    chunks: int | None = None,
    gather_once: bool = False,
    at: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
) -> Callable[..., None]:
    """The batch over ``dp`` rows of the devices; heads, hidden units and vocabulary over their ``tp`` columns.

    Where two of them reach one op on the same devices, heads and hidden units come first, then the vocabulary, then the
    sequence.

    Args:
        dp, tp: how many parts; one that is not given is what the other leaves; with neither, ``tp`` is all.
        sequence: whether what lies between heads and hidden units is split along the sequence; ``{input: dim}`` says
            where that is, which is found by default (see `sequence_parallel`).
        vocab: whether embedding, logits and cross entropy are split too; ``{pattern: dim}`` as for `vocab_parallel`.
        zero: what is split over the ``dp`` rows beside the batch: 1 the optimizer's state, 2 what gradients add up to over
            micro-batches, 3 the parameters too.
        batch: as for `data_parallel`.
        columns: as for `tensor_parallel`.
        pp: how many groups of devices have stages, each a grid of its own, see `pipeline`.
        microbatches, schedule, chunks, at, layers: as for `pipeline`; the first is needed where ``pp`` is more than 1. Ends
            that lie on all devices (``"interlaced"``) split the vocabulary over ``tp`` × ``pp``.
        gather_once: as for `zero3`, where ``zero`` is 3.

    Raises (when the plan is made):
        PlanError: dp × tp is not the number of devices, or there is no such stage of ZeRO.
        UnknownNameError: no batch or kernel matches.
        SplitError: the batch, the heads or the sequence does not divide.

    Example:
        >>> planned = train_step.under(plans.megatron(dp=2, tp=2, columns={"*/up": 1})).lower(state, batch).plan
        >>> sorted(planned.plan.split_factors["mlp/dot"])  # rows of the batch, and hidden units
        ['a', 'd']
    """

    def on_grid(graph: Planner, devices: np.ndarray, tp: int | None, columns: Dims | Sequence[str] | None) -> None:
        grid = device_grid(devices, "megatron", dp=dp, tp=tp)
        rows, parts = grid.shape
        words = _word_factors(graph, parts)
        table, deals = _tensor_factors(graph, parts, columns, words)
        if zero:
            shard_parameters(graph, grid, stored=zero == 3, cuts=table)
            if zero > 1:
                graph.accumulation(each_time=True, gather_once=gather_once)
            table = without_followers(graph, table, stored=zero == 3)
        split(graph, grid, batch_factors(graph, batch, rows), table, unequal=words, deals=deals)

    def _word_factors(graph: Planner, parts: int) -> Factors:
        if parts == 1 or not vocab:
            return {}
        return word_factors(graph, tables_of_words(graph, None if vocab is True else vocab), parts)

    def _tensor_factors(
        graph: Planner, parts: int, columns: Dims | Sequence[str] | None, words: Factors
    ) -> tuple[Factors, Deals]:  # fmt: skip
        if parts == 1:
            return {}, {}
        table, deals = Factors(), Deals()
        if columns is None or columns:
            table, deals = column_factors(graph, columns, parts, "pass megatron(columns=...)")
        table = words | table
        if sequence:
            tokens = sequence_of(graph, None if sequence is True else sequence, parts, "megatron")
            table = reached(graph, tokens, parts) | table
        return table, deals

    def policy(graph: Planner, devices: np.ndarray) -> None:
        on_grid(graph, devices, tp, columns)

    def ends(graph: Planner, devices: np.ndarray) -> None:
        on_grid(graph, devices, tp and tp * pp, ())

    if zero not in (0, 1, 2, 3):
        raise PlanError(f"megatron: zero is 0, 1, 2 or 3, not {zero!r}")
    if pp != 1 and microbatches is None:
        raise PlanError(f"megatron: pp={pp} stages need micro-batches that follow each other; give microbatches=")
    if microbatches is None:
        return policy
    words = vocab if isinstance(vocab, Mapping) else None
    staged = pipeline(pp, microbatches, schedule, policy, at, layers, batch, chunks=chunks, ends=ends, vocabulary=words)
    staged.without_stages = megatron(dp and dp * pp, tp, sequence, vocab, zero, batch, columns, gather_once=gather_once)
    sizes = ", ".join(f"{name}={size}" for name, size in (("dp", dp and dp * pp), ("tp", tp)) if size)
    staged.apart = Apart(
        f"accumulate({microbatches}, megatron({sizes})), with the other arguments of this one,",
        accumulate(microbatches, staged.without_stages, batch),
    )
    return staged
