"""Pipeline parallelism: the model in stages on groups of devices, the batch in micro-batches that follow each other through
them, around another plan on the devices of each stage. (Huang et al., GPipe, 2019; Narayanan et al., PipeDream, 2019, and
1F1B with a flush, 2021.)

::

    devices 0 1   stage 0   F0 F1 F2 F3 .. B0 F4 B1 F5 B2 ..        time ──►
    devices 2 3   stage 1      F0 F1 F2 B0 F3 B1 F4 B2 ..

The numbers are those of the whole batch. A stage has its parameters, their updates and optimizer state, and the activations
of the micro-batches that are under way. Stages are cut where few tensors cross and work is balanced.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jscaler.errors import PlanError, shown
from jscaler.plans.accumulate import MICROBATCH, accumulate
from jscaler.plans.alone import Alone, Apart
from jscaler.plans.argument_types import checked
from jscaler.plans.balance import balanced
from jscaler.plans.chunk_cuts import StageOrder
from jscaler.plans.cuts_as_stored import CutsAsStored
from jscaler.plans.data_parallel import data_parallel
from jscaler.plans.factors import Dims
from jscaler.plans.find_stages import find_stages, stages_of_all, taken_apart
from jscaler.plans.layers import find_layers
from jscaler.plans.regions import recompute_rest
from jscaler.plans.single import single
from jscaler.plans.stage_groups import check_one_size, count_of, groups_of, speeds_of
from jscaler.plans.tried_rows import TriedRows, fastest_rows
from jscaler.plans.vocab_parallel import tables_of_words, vocab_parallel
from jscaler.primitives import Planner, Replicate, Split
from jscaler.tables import Published, Table, find_schedule, schedule_named
from jscaler.tables.recomputing import MARKS, recomputing
from jscaler.tables.stage_chain import StageChain
from jscaler.tables.table import cells_of
from jscaler.text.units import counted


@checked
def pipeline(
    stages: int | Sequence[Any],
    microbatches: int,
    schedule: "Published | Table | str" = "1f1b",
    plan: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    at: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    batch: str = "batch",
    accumulate_dtype: Any = None,
    per_microbatch: Any = None,
    chunks: int | None = None,
    ends: Callable[..., Any] | None = None,
    vocabulary: Dims | None = None,
    recompute: Literal["early", "late", "with"] | None = None,
) -> Callable[..., None]:
    """``plan`` on the devices of each stage, and micro-batches that follow each other through the stages.

    Args:
        stages: how many groups of devices; must divide the number of devices. Neighbours share a group. Or the sizes of
            groups, ``[8, 4]``, or their devices, ``[[0, 1], [2]]``.
        microbatches: how many; must divide each device's part of the batch.
        schedule: the name of a published one (``jscaler.tables.SCHEDULES``, docs/schedules.md); or a table, or its text or
            file, see `Table`. It says where stages lie: of a table of one's own, in whose row they stand. ``"search"``: the
            best order for the blocks of these stages within nine tenths of a device's memory, see `find_schedule`.
        chunks: how many stages each group has, for schedules with several; else as many as the schedule has, or one. For
            ``"3f1b"`` how often the model goes over its own output. A table of one's own says it itself.
        ends: the plan for the first and the last stage where they lie on all devices (``"interlaced"``); by default
            `vocab_parallel` where ends are found, else ``plan``.
        vocabulary: tables of words, at which the ends are found that lie on all devices; as for `vocab_parallel`.
        plan: the policy for the devices of one stage, given as many numbers from 0 on; `single` by default. Or one for each
            group: ``[data_parallel(), megatron(dp=1, tp=2)]``.
        at: shell patterns of the modules or ops with which the second stage begins, the third, and so on; ``"blocks[12:]"``
            is layer 12 of a loop over layers. By default stages are balanced by the seconds of their ops and backwards at
            the peaks of the cluster's devices; where groups are unlike, by what is reached of each. With
            ``"interlaced"`` the stages between the ends; or two more, which say where these are.
        recompute: have stages compute their layers again, of which they keep what enters them: in blocks R of their own
            right in front of each backward (``"late"``, as ``"1f1b+R"``) or one block earlier (``"early"``), or as a part
            of each backward (``"with"``). ``"search"`` puts such blocks anywhere.
        layers: of a model whose layers are one loop (``nn.scan``, ``lax.scan``), how many each stage takes; by default as
            many each, if that costs no more than a percent or two.
        batch, accumulate_dtype, per_microbatch: as for `accumulate`.

    Raises (when the plan is made):
        PlanError: stages do not divide the devices; the model has too few places to be cut, or no ends.
        UnknownNameError: no module, or no input, is called so.
        SplitError: the batch does not divide.

    Example:
        >>> planned = train_step.under(plans.pipeline(2, 2, plan=plans.data_parallel())).lower(state, batch).plan
        >>> print(planned.instructions.table)  # two groups of two devices, two micro-batches
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """
    given, stages = stages, count_of(stages)
    inner = _for_each(single() if plan is None else plan, stages)
    whole_plan = plan if callable(plan) else data_parallel(batch)
    wanted = _recomputing(find_schedule(schedule), recompute)
    lies = _lies(wanted, stages, microbatches, chunks)
    everywhere = isinstance(wanted, Published) and wanted.everywhere
    passes = isinstance(wanted, Published) and wanted.passes
    count = len(lies) + 2 * everywhere
    table = wanted.table(stages, microbatches, chunks) if isinstance(wanted, Published) else wanted
    in_chunks = count > stages and not everywhere and not passes
    searched = isinstance(wanted, Published) and wanted.searched
    whole = not everywhere and not passes and not searched
    order = StageOrder.of(lies[:stages] if passes else lies, table if whole else None)
    apart: list[Any] = [getattr(one, "first_layers", None) for one in inner]
    at_end = [None] * everywhere
    firsts = [*at_end, *(None if apart[group] is None else apart[group].count for group in lies), *at_end]
    again = {cell.stage for cell in table.cells() if cell.kind in ("BI" if recompute == "with" else "R")}
    turned = wanted.lies_turned(stages, 1) if isinstance(wanted, Published) and wanted.lies_turned is not None else None
    if turned is not None and not callable(plan) and plan is not None:
        raise PlanError(f"pipeline: under '{schedule}' each stage lies on two groups, so that plan is one plan for all")

    def staged(graph: Planner, devices: np.ndarray, rows: TriedRows | None) -> None:
        own = groups_of(given, devices)
        if turned is not None:
            check_one_size(own, f"under '{schedule}' micro-batches take turns on them")
        speeds = speeds_of([own[group] for group in lies], graph.cluster, plan is not None)
        if speeds and rows is None and graph.price is not None and at is None and layers is None:
            rows = fastest_rows(graph.price, lambda rows: lambda graph, devices: staged(graph, devices, rows))
        found: dict[str, int] = {}
        words = tables_of_words(graph, vocabulary) if everywhere else None
        if count > 1:
            follows = graph.stored and not graph.calls and not everywhere and not passes
            cut = CutsAsStored([frozenset(own[group].tolist()) for group in lies]) if follows else rows or balanced
            unlike = order if in_chunks or speeds else None, speeds, cut
            found = find_stages(graph, count, at, layers, batch, stages if passes else 0, words, *unlike, firsts)
        if count > 1 and not found:
            return  # it only follows state, and goes where that lies

        def in_stages(graph: Planner, devices: np.ndarray) -> None:
            if count == 1:
                inner[0](graph, devices)
                return
            here = {path: where for path, where in found.items() if path in graph.by_path}  # others were fused
            ends_on = [devices] if everywhere else []
            for stage, group in enumerate([*ends_on, *(own[group] for group in lies), *ends_on]):
                paths = [path for path, where in here.items() if where == stage]
                graph.on_devices(paths, group, None if turned is None else own[turned[stage]], MICROBATCH)
            stage_of = stages_of_all(graph, here, batch)
            outside = {path for path, stage in stage_of.items() if everywhere and stage in (0, count - 1)}
            between = {path: stage - everywhere for path, stage in stage_of.items() if path not in outside}
            turns = None if turned is None else [own[group] for group in turned]
            graph.on_stages([inner[group] for group in lies], between, [own[group] for group in lies], turns, MICROBATCH)
            if everywhere:
                at_ends = ends or (vocab_parallel(vocabulary) if words else whole_plan if plan else inner[0])
                graph.on_stages(at_ends, dict.fromkeys(outside, 0), devices.reshape(1, -1))
            _spread(graph, devices, batch)
            _compute_again(graph, {path: where for path, where in here.items() if where in again})
            graph.schedule(wanted)

        if count == 1 and apart[0] is not None:
            apart[0].cut_stacks(graph)
        accumulate(microbatches, in_stages, batch, accumulate_dtype, per_microbatch)(graph, devices)

    def policy(graph: Planner, devices: np.ndarray) -> None:
        staged(graph, devices, None)

    policy.alone = Alone(per_microbatch, lambda alone: pipeline(
        given, microbatches, schedule, plan, at, layers, batch, accumulate_dtype, alone, chunks, ends, vocabulary,
        recompute,
    ))  # fmt: skip
    policy.without_stages = whole_plan  # what `jscaler.compare` puts beside it
    inside = "plan" if callable(plan) else f"data_parallel({'' if batch == 'batch' else repr(batch)})"
    plain = plan is None and batch == "batch" and accumulate_dtype is None and per_microbatch is None
    policy.apart = Apart(
        f"accumulate({microbatches}, {inside}){'' if plain else ', with the arguments of this pipeline,'}",
        accumulate(microbatches, policy.without_stages, batch, accumulate_dtype, per_microbatch),
    )
    return policy


def stage_chain(
    stages: int, microbatches: int, schedule: str = "1f1b", chunks: int | None = None, **others: Any
) -> StageChain | None:
    """The chain of stages of `pipeline` with these arguments; None where they are none, or their order is not known yet."""
    known = schedule_named(schedule) if isinstance(schedule, str) else None
    if known is None or known.searched or known.everywhere or known.passes or others.get("recompute") in ("early", "late"):
        return None
    return StageChain(known.name, stages, microbatches, known.chunks_of(chunks))


def _for_each(plan: Callable[..., Any] | Sequence[Callable[..., Any]], groups: int) -> list[Callable[..., Any]]:
    """The plan of each group; raises PlanError where there are more or fewer."""
    if callable(plan):
        return [plan] * groups
    if not isinstance(plan, Sequence) or len(plan) != groups or not all(map(callable, plan)):
        raise PlanError(
            f"pipeline: plan is a plan, or a list of one for each of {counted(groups, 'group')}, not {shown(plan)}"
        )
    return [*plan]


def _recomputing(wanted: Published | Table, recompute: str | None) -> Published | Table:
    """A schedule with blocks R where ``recompute`` puts some; raises PlanError where it has no place for them."""
    if recompute not in ("early", "late"):
        return wanted
    if not isinstance(wanted, Published) or schedule_named(wanted.name + MARKS[recompute]) is None:
        raise PlanError(
            f"pipeline: recompute='{recompute}' puts blocks R into a published schedule that has none, and "
            f"{'the table has its own' if isinstance(wanted, Table) else repr(wanted.name) + ' is none'}; give "
            "recompute='with', or R in the table"
        )
    return recomputing(wanted, recompute)


def _lies(schedule: Published | Table, groups: int, microbatches: int, chunks: int | None) -> list[int]:
    """The group of each stage."""
    if isinstance(schedule, Published):
        schedule.table(groups, microbatches, chunks)
        return list(schedule.lies(groups, schedule.chunks_of(chunks)))
    rows = [{cell.stage for cell in cells_of(entries)} for entries in schedule.rows]
    found = {stage: row for row, own in enumerate(rows) for stage in own}
    if len(rows) != groups or sorted(found) != [*range(len(found))]:
        raise PlanError(
            f"pipeline: the table has {len(rows)} rows and the stages {sorted(found)}; there are {groups} groups, a row "
            "for each, and stages are numbered from 0 on"
        )
    first = [min(own, default=-1) for own in rows]
    if first != sorted(first):
        raise PlanError(
            f"pipeline: the rows of the table begin with the stages {first}; rows stand in the order of their first stages"
        )
    if chunks is not None and chunks * groups != len(found):
        raise PlanError(
            f"pipeline: chunks={chunks} are {counted(chunks * groups, 'stage')} on {counted(groups, 'group')}, and the "
            f"table has {len(found)}; leave chunks out, which is for published schedules"
        )
    twice = [stage for stage in found if sum(stage in own for own in rows) > 1]
    if twice:
        raise PlanError(
            f"pipeline: stage {twice[0]} stands in several rows of the table; micro-batches that take turns on groups have "
            "a schedule that is published so ('chimera'), or a policy of one's own with graph.on_devices(turned=)"
        )
    return [found[stage] for stage in range(len(found))]


def _compute_again(graph: Planner, stage_of: Mapping[str, int]) -> None:
    """Have the layers of stages keep what enters them alone; stages without layers, what enters the stage."""
    if not stage_of:
        return
    for regions in (find_layers(graph, needed=False), [graph.forward()]):
        for ops in regions:
            own = [op for op in ops if op.path in stage_of]
            for stage, call in dict.fromkeys((stage_of[op.path], op.call) for op in own if op.backward is not None):
                recompute_rest(graph, [op for op in own if (stage_of[op.path], op.call) == (stage, call)])
        done = {stage_of[op.path] for ops in regions for op in ops if op.path in stage_of}
        stage_of = {path: stage for path, stage in stage_of.items() if stage not in done}


def _spread(graph: Planner, devices: np.ndarray, batch: str) -> None:
    """Lay stacks of parameters whose ranges lie in several stages in parts on all devices."""
    for op in taken_apart(graph, batch):
        left, splits = devices.size, list[Split]()
        parallel = [f for f in graph.rule(op).factors.values() if f.kind == "parallel"]
        for factor in sorted(parallel, key=lambda f: -math.gcd(f.size, devices.size)):
            if (parts := math.gcd(factor.size, left)) > 1:
                splits.append(Split(factor.name, parts))
                left //= parts
        copies = [Replicate(left)] if left > 1 else []
        graph.op_assign(graph.op_trans(op, *splits, *copies) if splits else op, devices)
