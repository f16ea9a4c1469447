"""Pipeline parallelism: the model in stages on groups of devices, the batch in micro-batches that follow each other through
them, around another plan on the devices of each stage. (Huang et al., GPipe, 2019; Narayanan et al., PipeDream, 2019, and
1F1B with a flush, 2021.)

::

    devices 0 1   stage 0   F0 F1 F2 F3 .. B0 F4 B1 F5 B2 ..        time ──►
    devices 2 3   stage 1      F0 F1 F2 B0 F3 B1 F4 B2 ..

The numbers are those of the whole batch. A stage has its parameters, their updates and optimizer state, and the activations
of the micro-batches that are under way. Stages are cut where few tensors cross and work is balanced.
"""

import fnmatch
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jscaler.clusters.device import DeviceKind, find_kind
from jscaler.errors import PlanError, UnknownNameError, check_count, divisors
from jscaler.ir import Body, Nest, Op, PTensor
from jscaler.ir.loop import Item, flat, made_by, reads_of
from jscaler.ir.op import RANGES, range_mark
from jscaler.ir.walk import closure
from jscaler.plans.accumulate import MICROBATCH, accumulate
from jscaler.plans.argument_types import checked
from jscaler.plans.attention import holds_contraction
from jscaler.plans.data_parallel import data_parallel
from jscaler.plans.factors import Dims
from jscaler.plans.find_ends import find_ends
from jscaler.plans.layers import modules_of, of_parameters, stacks_of, weights_of
from jscaler.plans.single import single
from jscaler.plans.vocab_parallel import tables_of_words, vocab_parallel
from jscaler.primitives import Planner, Replicate, Split
from jscaler.tables import Published, Table, find_schedule
from jscaler.tables.table import cells_of
from jscaler.text.units import counted
from jscaler.xla_model.work import work_of

BALANCED_FOR = "H100-80GB"  # whose times balance stages, where no cluster says what its devices are
Words = Sequence[tuple[PTensor, int]]  # tables of words, and their dims of words
UNEVEN = 1.5  # what a slowest stage may take longer, so that fewer tensors cross


@checked
def pipeline(
    stages: int,
    microbatches: int,
    schedule: "Published | Table | str" = "1f1b",
    plan: Callable[..., Any] | None = None,
    at: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    batch: str = "batch",
    accumulate_dtype: Any = None,
    per_microbatch: Any = None,
    chunks: int | None = None,
    ends: Callable[..., Any] | None = None,
    vocabulary: Dims | None = None,
) -> Callable[..., None]:
    """``plan`` on the devices of each stage, and micro-batches that follow each other through the stages.

    Args:
        stages: how many groups of devices; must divide the number of devices. Neighbours share a group.
        microbatches: how many; must divide each device's part of the batch.
        schedule: the name of a published one (``jscaler.tables.SCHEDULES``, docs/schedules.md); or a table, or its text or
            file, see `Table`. It says where stages lie: of a table of one's own, in whose row they stand.
        chunks: how many stages each group has, for schedules with several; else as many as the schedule has, or one. For
            ``"3f1b"`` how often the model goes over its own output.
        ends: the plan for the first and the last stage where they lie on all devices (``"interlaced"``); by default
            `vocab_parallel` where ends are found, else ``plan``.
        vocabulary: tables of words, at which the ends are found that lie on all devices; as for `vocab_parallel`.
        plan: the policy for the devices of one stage, given as many numbers from 0 on; `single` by default.
        at: shell patterns of the modules with which the second stage begins, the third, and so on; by default stages are
            balanced by the seconds of their forward ops on the cluster's devices, as `jscaler.cost` has them. With
            ``"interlaced"`` the stages between the ends; or two more, which say where these are.
        layers: of a model whose layers are one loop (``nn.scan``, ``lax.scan``), how many each stage takes; by default as
            many each, if that costs no more than a layer's time. Of ranges of other sizes the parameters lie in parts on
            all devices, and are brought to their stages once a step.
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
    inner = plan or single()
    check_count("pipeline: stages", stages)
    wanted = find_schedule(schedule)
    lies = _lies(wanted, stages, microbatches, chunks)
    everywhere = isinstance(wanted, Published) and wanted.everywhere
    passes = isinstance(wanted, Published) and wanted.passes
    count = len(lies) + 2 * everywhere
    turned = wanted.lies_turned(stages, 1) if isinstance(wanted, Published) and wanted.lies_turned is not None else None

    def policy(graph: Planner, devices: np.ndarray) -> None:
        if devices.size % stages:
            legal = divisors(devices.size)
            raise PlanError(f"pipeline: {devices.size} devices do not divide into {stages} stages; legal: {legal}")
        in_parts = len(set(lies)) == len(lies) and turned is None
        found: dict[str, int] = {}
        words = tables_of_words(graph, vocabulary) if everywhere else None
        if count > 1:
            found = find_stages(graph, count, at, layers, batch, in_parts, stages if passes else 0, words)
        if count > 1 and not found:
            return  # it only follows state, and goes where that lies

        def in_stages(graph: Planner, devices: np.ndarray) -> None:
            grid = devices.reshape(stages, -1)
            if count == 1:
                inner(graph, devices)
                return
            here = {path: where for path, where in found.items() if path in graph.by_path}  # others were fused
            groups = [*([devices] if everywhere else []), *grid[lies], *([devices] if everywhere else [])]
            for stage, group in enumerate(groups):
                own = [path for path, where in here.items() if where == stage]
                graph.on_devices(own, group, None if turned is None else grid[turned[stage]], MICROBATCH)
            stage_of = _of_all(graph, here, batch)
            outside = {path for path, stage in stage_of.items() if everywhere and stage in (0, count - 1)}
            between = {path: stage - everywhere for path, stage in stage_of.items() if path not in outside}
            graph.on_stages(inner, between, grid[lies], None if turned is None else grid[turned], MICROBATCH)
            if everywhere:
                at_ends = ends or (vocab_parallel(vocabulary) if words else inner)
                graph.on_stages(at_ends, dict.fromkeys(outside, 0), devices.reshape(1, -1))
            _spread(graph, devices, batch)
            graph.schedule(wanted)

        accumulate(microbatches, in_stages, batch, accumulate_dtype, per_microbatch)(graph, devices)

    policy.__name__ = "pipeline"
    policy.without_stages = plan or data_parallel()  # what `jscaler.compare` puts beside it
    return policy


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
    twice = [stage for stage in found if sum(stage in own for own in rows) > 1]
    if twice:
        raise PlanError(
            f"pipeline: stage {twice[0]} stands in several rows of the table; micro-batches that take turns on groups have "
            "a schedule that is published so ('chimera'), or a policy of one's own with graph.on_devices(turned=)"
        )
    return [found[stage] for stage in range(len(found))]


@dataclass(frozen=True)
class Unit:
    """What lies in one stage: an op, a loop, or an iteration of a loop over layers."""

    item: Item
    iteration: int = 0
    of: int = 1  # iterations that may lie apart

    @property
    def key(self) -> tuple[int, int]:
        return id(self.item), self.iteration

    @property
    def ops(self) -> Iterator[Op]:
        return flat([self.item])


def find_stages(
    graph: Planner,
    stages: int,
    at: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    batch: str = "batch",
    in_parts: bool = True,
    passes: int = 0,
    words: Words | None = None,
) -> dict[str, int]:
    """The stage of every forward op that is not made of the batch, keys and literals alone; loops over layers whose layers
    lie in several are cut into ranges. An average over state that the step follows has none.

    Args:
        in_parts: whether stacks whose ranges are of one size may lie in parts, as each group has one stage.
        passes: of a model that goes over its own output, how many stages one pass has.
        words: if the first and the last stage are the model's ends, its tables of words, with their dims of words.

    Raises:
        PlanError: there are too few places where the model can be cut, or it has no ends.
        UnknownNameError: no module is called so.
    """
    known = _known_everywhere(graph, batch)
    apart = known | _of_parameters(graph, batch)  # what is made of these stands in no stage's way, wherever it is written
    units = _units(graph, batch, apart)
    if graph.stored and not graph.calls and not units:
        return {}

    def cuts_of(chain: Sequence[Unit], stages: int) -> list[int]:
        if layers is not None:
            return _between_layers(chain, layers, stages, at)
        return _named(chain, at, stages) if at is not None else _balanced(graph, chain, stages, known)

    def stages_of(chain: Sequence[Unit]) -> dict[tuple[int, int], int]:
        if words is not None and (at is None or len(at) != stages - 1):
            chain, cuts = _between_ends(graph, chain, words, lambda between: cuts_of(between, stages - 2))
        elif passes:
            return dict(zip((u.key for u in chain), _of_passes(graph, chain, stages, passes, cuts_of), strict=True))
        else:
            cuts = cuts_of(chain, stages)
        return {unit.key: sum(i >= cut for cut in cuts) for i, unit in enumerate(chain)}

    try:
        stage_of = {key: stage for own in _chains(graph, units) for key, stage in stages_of(own).items()}
    except PlanError:  # one of them is too short
        stage_of = stages_of(units)
    stage_of_unit = [stage_of[unit.key] for unit in units]
    staged: list[tuple[Item, dict[int, int]]] = []
    for item, own in itertools.groupby(zip(units, stage_of_unit, strict=True), key=lambda pair: pair[0].item):
        staged.append((item, {s: len(list(pairs)) for s, pairs in itertools.groupby(own, key=lambda pair: pair[1])}))
    mixed = _cut_in_several_ways(staged) if in_parts else None
    found: dict[str, int] = {}
    for item, sizes in staged:
        found.update(_staged(graph, item, sizes, mixed))
    return _with_makers(graph, found, batch)


def _units(graph: Planner, batch: str, apart: set[PTensor]) -> list[Unit]:
    """What lies in stages, in order: all of the forward pass that does not stand ``apart``."""
    stacks = stacks_of(graph, _leaves_of_a_forward(graph, batch))
    units: list[Unit] = []
    for item in graph.tree:
        if next(flat([item])).kind == "forward" and not set(made_by(item)) <= apart:
            count = item.loop.length if isinstance(item, Nest) and item.loop.name in stacks else 1
            units += [Unit(item, i, count) for i in range(count)]
    return units


def passes_of(graph: Planner, batch: str = "batch") -> int:
    """How often a model goes over its own output: how often what is trained is read, most of it."""
    known = _known_everywhere(graph, batch)
    read = Counter(key for key in _read(graph, _units(graph, batch, known | _of_parameters(graph, batch))) if key[0])
    return Counter(read.values()).most_common(1)[0][0] if read else 1


def _read(graph: Planner, units: Sequence[Unit]) -> list[tuple[frozenset[PTensor], int]]:
    """What each unit reads of what is trained, and of a loop in which iteration."""
    trained = {t for call in graph.calls for t in call.wrt}
    trained.update(t for t in graph.inputs if not graph.calls and t.name in graph.stored)  # of an evaluation
    return [(frozenset(t for t in reads_of(unit.item) if t in trained), unit.iteration) for unit in units]


def _chains(graph: Planner, units: Sequence[Unit]) -> list[list[Unit]]:
    """The rows of units that are cut into stages: of gradients that do not wait for each other, each has its own.

    They are taken in one loop over micro-batches. One that needs another (of parameters which that has changed) stands
    behind it in one row, since only one loop may lie in several stages.
    """
    found: dict[int | None, list[Unit]] = {}
    for unit in units:
        found.setdefault(_call(unit.item), []).append(unit)
    if len(found) < 2:
        return [list(units)]
    readers: dict[PTensor, list[Item]] = {}
    for item in graph.tree:
        for tensor in reads_of(item):
            readers.setdefault(tensor, []).append(item)
    for call in found:
        own = [item for item in graph.tree if _call(item) == call]
        behind = closure(own, lambda item: [reader for t in made_by(item) for reader in readers.get(t, ())])
        if any(_call(item) in found.keys() - {call} for item in behind):
            return [list(units)]
    return list(found.values())


def _call(item: Item) -> int | None:
    """The gradient that an item is of."""
    return next(flat([item])).call


def _cut_in_several_ways(staged: Sequence[tuple[Item, Mapping[int, int]]]) -> set[PTensor]:
    """Stacks whose layers lie in other stages for one loop than for another: no one array can lie so."""
    ways: dict[PTensor, set[tuple[tuple[int, int], ...]]] = {}
    for item, sizes in staged:
        for x in item.loop.xs if isinstance(item, Nest) else ():
            ways.setdefault(x.stack, set()).add(tuple(sizes.items()))
    return {stack for stack, found in ways.items() if len(found) > 1}


def _staged(graph: Planner, item: Item, sizes: Mapping[int, int], mixed: set[PTensor] | None) -> dict[str, int]:
    """The stage of each op of an item, so many of whose iterations lie in each; of a loop in several, of its ranges.

    Args:
        mixed: stacks that cannot lie in parts; None if none can.
    """
    paths = [op.path for op in flat([item])]
    if len(sizes) == 1:
        return dict.fromkeys(paths, next(iter(sizes)))
    assert isinstance(item, Nest)
    in_order = list(sizes.items())[:: -1 if item.loop.reverse else 1]
    apart = len(set(sizes.values())) == 1 and mixed is not None and mixed.isdisjoint(x.stack for x in item.loop.xs)
    graph.ranges(item.loop.name, [size for _, size in in_order], apart=apart)
    bounds = itertools.pairwise(itertools.accumulate((size for _, size in in_order), initial=0))
    return {path + range_mark(own): stage for (stage, _), own in zip(in_order, bounds, strict=True) for path in paths}


def _with_makers(graph: Planner, found: Mapping[str, int], batch: str) -> dict[str, int]:
    """``found``, and what is made of parameters alone (casts, ``stop_gradient``): it has the stage that reads it first."""
    alone = _of_parameters(graph, batch)
    taken_apart = set(_taken_apart(graph, batch))
    stages = dict(found)
    for op in reversed(graph.ops):
        if op.kind == "forward" and op.path not in stages and op not in taken_apart and alone.issuperset(op.outputs):
            read = {t for out in op.outputs for t in (out, *(other for other, _ in graph.linked.get(out, ())))}
            readers = [reader for t in read for reader in graph.consumers.get(t, ()) if reader.kind == "forward"]
            if readers and all(reader.path in stages for reader in readers):
                stages[op.path] = min(stages[reader.path] for reader in readers)
    return stages


def _of_passes(
    graph: Planner, units: Sequence[Unit], stages: int, own: int, cuts_of: Callable[[Sequence[Unit], int], list[int]]
) -> list[int]:
    """The stage of each unit of a model that goes over its own output: every pass has its stages on the same groups.

    Args:
        cuts_of: the places where so many stages of the first pass begin.

    Raises:
        PlanError: the passes are not as many as the schedule has.
    """
    read = _read(graph, units)
    first: dict[object, int] = {}
    again = next((i for i, key in enumerate(read) if key[0] and first.setdefault(key, i) != i), len(units))
    cuts = cuts_of(units[:again], own)
    group_of = {key: sum(i >= cut for cut in cuts) for key, i in first.items() if i < again}
    found: list[int] = []
    done, whole = 0, True
    for key in read:
        last = found[-1] % own if found else 0
        group = group_of.get(key, last) if key[0] else last
        if group < last:
            whole = whole and last == own - 1
            done += 1
        found.append(done * own + group)
    if not whole or found[-1] % own != own - 1:
        raise PlanError(
            "pipeline: the schedule is for models that go over their own output, pass after pass, and this one does not; "
            "what it reads again it reads in a part of its stages"
        )
    if done + 1 != stages // own:
        raise PlanError(
            f"pipeline: the model has {counted(done + 1, 'pass', 'passes')} over its own output, and the schedule "
            f"{stages // own}; give chunks={done + 1}"
        )
    return found


def _between_ends(
    graph: Planner, units: Sequence[Unit], words: Words, cuts_of: Callable[[Sequence[Unit]], list[int]]
) -> tuple[list[Unit], list[int]]:
    """The units in another order, the model's first end in front and its last behind, and the places where stages begin.

    Args:
        cuts_of: the places between units that are of no end.

    Raises:
        PlanError: it has no ends.
    """
    ends = find_ends(graph, [unit.item for unit in units if unit.iteration == 0], words)
    if ends is None:
        tables = ", ".join(table.name for table, _ in words) or "none"
        raise PlanError(
            "pipeline: both ends of the model are to lie on all devices: look-ups in a table of words, and logits of as "
            f"many words behind its layers; this model has no such ends (tables of words: {tables}): say with "
            "vocabulary={pattern: dim} which tables have words; or with at= where the first stage between the ends begins, "
            "the second …, and where the last end begins; or take another schedule"
        )
    of_item: dict[int, list[Unit]] = {}
    for unit in units:
        of_item.setdefault(id(unit.item), []).append(unit)
    parts = [[unit for item in part for unit in of_item[id(item)]] for part in (ends.first, ends.between, ends.last)]
    first, between, _ = map(len, parts)
    return [*itertools.chain(*parts)], [first, *(first + cut for cut in cuts_of(parts[1])), first + between]


def _between_layers(units: Sequence[Unit], layers: Sequence[int], stages: int, at: Sequence[str] | None) -> list[int]:
    """The places between layers of a loop where stages begin that take so many of them."""
    lengths = {unit.of: i - unit.iteration for i, unit in enumerate(units) if unit.of > 1}
    if at is not None or len(layers) != stages or min(layers) < 1 or sum(layers) not in lengths:
        counts = " or ".join(map(str, lengths)) or "no such loop"
        raise PlanError(
            f"pipeline: layers={list(layers)} are {sum(layers)} layers of one loop on {len(layers)} stages; there are "
            f"{stages} stages, and loops over layers with {counts}; each stage has one or more, and at= is not given"
        )
    return [lengths[sum(layers)] + own for own in itertools.accumulate(layers[:-1])]


def _named(units: Sequence[Unit], at: Sequence[str], stages: int) -> list[int]:
    """The places of the first ops of the modules that begin stages."""
    if len(at) != stages - 1:
        raise PlanError(
            f"pipeline: {stages} stages begin at {stages - 1} modules behind the first, and at= names {len(at)}"
        )
    found = []
    for pattern in at:
        inside = [i for i, unit in enumerate(units) if any(_is_in(op.path, pattern) for op in unit.ops)]
        if not inside:
            modules = sorted({module for unit in units for op in unit.ops for module in modules_of(op.path)})
            raise UnknownNameError("module", pattern, modules, "; stages begin at modules")
        found.append(inside[0])
    if found != sorted(set(found)) or found[0] == 0:
        raise PlanError(
            f"pipeline: stages begin at {', '.join(at)}, which do not follow each other in the model; a stage is empty"
        )
    return found


def _is_in(path: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(part, pattern) for part in (*modules_of(path), path))


def _balanced(graph: Planner, units: Sequence[Unit], stages: int, known: set[PTensor]) -> list[int]:
    """Cuts with the fewest tensors across, which leave the slowest stage fastest; of equal ones those with fewer bytes.

    What all layers read alike (an encoder's result) does not count. More tensors go across where the slowest stage would
    else take half as long again.

    Equal ranges of a loop over layers are taken where that costs no more than a layer's time: their parameters then lie
    where they are used. If they do not divide, the first ranges have one more.
    """
    across = _across(graph, units, known)
    passes = _passing_by(graph, units)
    counts = [sum(i not in passes.get(t, ()) for t in tensors) for i, tensors in enumerate(across)]
    device = graph.device or find_kind(BALANCED_FOR)
    of_body: dict[Body, float] = {}
    of_item = {id(unit.item): _seconds(unit.item, device, of_body) for unit in units}
    seconds = [of_item[id(unit.item)] / unit.of for unit in units]
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    nbytes = [sum(t.nbytes for t in tensors) for tensors in across]

    def slowest(cuts: Sequence[int]) -> float:
        return max(sums[j] - sums[i] for i, j in itertools.pairwise([0, *cuts, len(units)]))

    best: list[int] | None = None
    allowed: set[int] = set()
    least = max([sums[-1] / stages, *seconds])
    for count in sorted(set(counts[1:])):
        places = [i for i in range(1, len(units)) if counts[i] <= count and sums[i] > 0]
        found = _bottleneck(sums, places, nbytes, stages)
        if found is not None and (best is None or slowest(found) * UNEVEN < slowest(best)):
            best, allowed = found, set(places)
        if best is not None and slowest(best) <= least * UNEVEN:
            break
    if best is not None:
        layer = max((one for one, unit in zip(seconds, units, strict=True) if unit.of > 1), default=0.0)
        even = (cuts for cuts in _even(units, sorted(allowed), sums, nbytes, stages) if set(cuts) <= allowed)
        return next((cuts for cuts in even if slowest(cuts) <= slowest(best) + layer * (1 + 1e-9)), best)
    raise PlanError(
        f"pipeline: the model's forward pass is {len(units)} ops, layers and loops in a row, too few for {stages} stages "
        "with work in each; a loop is cut where it takes a stack of parameters apart, layer by layer (nn.scan, lax.scan)"
    )


def _even(
    units: Sequence[Unit], places: Sequence[int], sums: np.ndarray, nbytes: Sequence[int], stages: int
) -> Iterator[list[int]]:
    """Cuts into ranges as equal as can be: of the one loop over layers; or of several, each over some of the stages."""
    stacks = [i for i, unit in enumerate(units) if unit.of > 1 and unit.iteration == 0]
    if len(stacks) == 1 and units[stacks[0]].of >= stages:
        least, more = divmod(units[stacks[0]].of, stages)
        sizes = [least + (stage < more) for stage in range(stages)]
        yield [stacks[0] + own for own in itertools.accumulate(sizes[:-1])]
    for parts in range(stages, 1, -1):
        even = [i for i in places if units[i].of == 1 or units[i].iteration * parts % units[i].of == 0]
        found = _bottleneck(sums, even, nbytes, stages)
        if found is not None and _is_equal(units, found):
            yield found


def _is_equal(units: Sequence[Unit], cuts: Sequence[int]) -> bool:
    """Whether each loop over layers lies in ranges of one size."""
    sizes: dict[int, list[int]] = {}
    for start, stop in itertools.pairwise([0, *cuts, len(units)]):
        for item, own in itertools.groupby(units[start:stop], key=lambda unit: id(unit.item)):
            sizes.setdefault(item, []).append(len(list(own)))
    return all(len(set(own)) == 1 for own in sizes.values())


def _bottleneck(sums: np.ndarray, places: Sequence[int], nbytes: Sequence[int], stages: int) -> list[int] | None:
    """Cuts at ``places`` by dynamic programming; None where there are too few with work in between."""
    end = len(sums) - 1
    best: dict[int, tuple[float, float, list[int]]] = {i: (sums[i], float(nbytes[i]), [i]) for i in places}

    def ways_to(i: int, sent_here: float) -> list[tuple[float, float, list[int]]]:
        """One stage more, which ends at ``i``."""
        return [
            (max(slowest, sums[i] - sums[j]), sent + sent_here, [*cuts, i])
            for j, (slowest, sent, cuts) in best.items()
            if j < i and sums[i] > sums[j]
        ]

    for _ in range(stages - 2):
        best = {i: min(ways) for i in places if (ways := ways_to(i, nbytes[i]))}
    ways = ways_to(end, 0.0)
    return min(ways)[2][:-1] if ways else None


def _across(graph: Planner, units: Sequence[Unit], known: set[PTensor]) -> list[list[PTensor]]:
    """In front of each unit: what those before it make and those from it on read."""
    start = {id(unit.item): i - unit.iteration for i, unit in enumerate(units)}
    ends = {item: i + units[i].of - 1 for item, i in start.items()}
    every = [(unit.item, i) for i, unit in enumerate(units) if unit.iteration == 0]
    place = {t: ends[id(item)] for item, _ in every for t in made_by(item)}
    last = dict(place)
    for item, i in every:
        throughout = set(reads_of(item)) if isinstance(item, Op) else {t for one in item.items for t in reads_of(one)}
        last.update((t, i) for t in reads_of(item) if t in place)
        last.update((t, ends[id(item)]) for t in throughout if t in place)
    across: list[list[PTensor]] = [[] for _ in units]
    for tensor, first in place.items():
        if tensor not in known:
            for i in range(first + 1, last[tensor] + 1):
                across[i].append(tensor)
    for i, unit in enumerate(units):
        if unit.iteration and isinstance(unit.item, Nest):
            across[i] += [c.inside for c in unit.item.loop.carries if c.inside is not c.out]
    return across


def _passing_by(graph: Planner, units: Sequence[Unit]) -> dict[PTensor, set[int]]:
    """In front of which units a tensor passes by that layers read alike: those behind read it as those before did, and a
    product with a kernel stands between."""
    weights = weights_of(graph)

    def has_kernel(item: Item) -> bool:
        return isinstance(item, Nest) or (holds_contraction(item) and not weights.isdisjoint(item.inputs))

    products = [*itertools.accumulate((has_kernel(unit.item) for unit in units), initial=0)]
    readers: dict[PTensor, list[tuple[int, int]]] = {}
    for i, unit in enumerate(units):
        for tensor in set(reads_of(unit.item)) - set(made_by(unit.item)):
            readers.setdefault(tensor, []).append((i, id(unit.item.body if isinstance(unit.item, Op) else unit.item)))
    found: dict[PTensor, set[int]] = {}
    for tensor, own in readers.items():
        last = max({key: i for i, key in reversed(own)}.values())  # that reads it as none before did
        for (one, _), (other, _) in itertools.pairwise(pair for pair in own if pair[0] >= last):
            loop = isinstance(units[one].item, Nest)
            places = (i for i in range(one + 1, other + 1) if loop or products[i] > products[one + 1])
            found.setdefault(tensor, set()).update(places)
    return found


def _known_everywhere(graph: Planner, batch: str) -> set[PTensor]:
    """What is made of the batch, keys and literals alone: any stage can make it."""
    trained = {t for call in graph.calls for t in call.wrt} | set(_leaves_of_a_forward(graph, batch))
    known = {t for t in graph.inputs if t not in trained} | {t for t, _ in graph.constants}
    for item in graph.tree:
        if all(t in known for t in reads_of(item) if t not in set(made_by(item))) and not _is_heavy(item):
            known.update(t for t in made_by(item) if t not in trained)
    return known


def _is_heavy(item: Item) -> bool:
    return isinstance(item, Nest) or (item.backward is not None) or bool(work_of(item.body.jaxpr).flops if item.body else 0)


def _seconds(item: Item, device: DeviceKind, known: dict[Body, float]) -> float:
    """Of all iterations of a loop; equal layers' bodies are the same."""
    if isinstance(item, Nest):
        return item.loop.length * sum(_seconds(one, device, known) for one in item.items)
    if item.body is None:
        return 0.0
    if item.body not in known:
        known[item.body] = work_of(item.body.jaxpr).seconds(device)
    return known[item.body]


def _of_all(graph: Planner, stage_of: Mapping[str, int], batch: str) -> dict[str, int]:
    """The stage of every input and update too: of the first forward op that a leaf reaches; of an update that of the
    largest tensor it reads, or else of who reads what it makes; of the optimizer's state that of its readers. A gradient
    belongs to its parameter's stage, though another has made a part of it.

    What is made of the batch, keys and literals alone has none: the stage that reads it makes it. Nor have stacks of
    parameters that lie on all devices, and their updates.
    """
    apart = {t for op in _taken_apart(graph, batch) for t in op.inputs}
    of_tensor: dict[PTensor, int] = {}
    everywhere = set(apart)
    begun: dict[PTensor, list[PTensor]] = {}  # what loops begin with -> their carries
    for carry in (c for loop in graph.loops.values() for c in loop.carries):
        begun.setdefault(carry.init, []).append(carry.inside)

    def behind(tensor: PTensor) -> list[PTensor]:
        readers = [op for op in graph.consumers.get(tensor, ()) if op.path not in stage_of and op.kind == "forward"]
        slices = [other for other, shift in graph.linked.get(tensor, ()) if shift < 0]
        return [*slices, *begun.get(tensor, ()), *(t for op in readers for t in op.outputs)]

    for leaf in graph.inputs:
        reached = list(closure([leaf], behind))
        stages = [stage_of[op.path] for t in reached for op in graph.consumers.get(t, ()) if op.path in stage_of]
        if not apart.isdisjoint(reached):
            everywhere.add(leaf)
        elif stages:
            of_tensor[leaf] = min(stages)
    of_op: dict[str, int] = {}
    parameter = {g: p for call in graph.calls for p, g in zip(call.wrt, call.gradients, strict=True)}
    of_tensor.update({g: of_tensor[p] for g, p in parameter.items() if p in of_tensor})  # zeros, of what is frozen
    for op in graph.ops:
        source = op.forward.path if op.forward is not None else op.path
        if source not in stage_of and not everywhere.isdisjoint(op.inputs):
            everywhere.update(t for t in op.outputs if t.shape)
            continue
        known = max((t for t in op.inputs if t in of_tensor), key=lambda t: t.nbytes, default=None)
        stage = stage_of[source] if source in stage_of else of_tensor[known] if known is not None else None
        if stage is not None:
            of_op[op.path] = stage
            made = (*op.outputs, *(graph.loops[op.loop].results if op.loop is not None else ()))
            of_tensor.update({t: of_tensor.get(parameter.get(t, t), stage) for t in made})
    for op in reversed(graph.ops):
        readers = [of_op[r.path] for t in op.outputs for r in graph.consumers.get(t, ()) if r.path in of_op]
        if op.kind == "update" and op.path not in of_op and readers:
            of_op[op.path] = readers[0]
    found = {**stage_of} | {op.path: of_op[op.path] for op in graph.ops if op.kind == "update" and op.path in of_op}
    for leaf in (t for t in graph.inputs if t not in everywhere):
        readers = (found[op.path] for op in graph.consumers.get(leaf, ()) if op.path in found)
        found[leaf.name] = of_tensor[leaf] if leaf in of_tensor else next(readers, 0)
    return found


def _spread(graph: Planner, devices: np.ndarray, batch: str) -> None:
    """Lay stacks of parameters whose ranges lie in several stages in parts on all devices."""
    for op in _taken_apart(graph, batch):
        left, splits = devices.size, list[Split]()
        parallel = [f for f in graph.rule(op).factors.values() if f.kind == "parallel"]
        for factor in sorted(parallel, key=lambda f: -math.gcd(f.size, devices.size)):
            if (parts := math.gcd(factor.size, left)) > 1:
                splits.append(Split(factor.name, parts))
                left //= parts
        copies = [Replicate(left)] if left > 1 else []
        graph.op_assign(graph.op_trans(op, *splits, *copies) if splits else op, devices)


def _taken_apart(graph: Planner, batch: str) -> list[Op]:
    """The ops that take stacks of parameters apart into the ranges of stages."""
    made = _of_parameters(graph, batch)
    return [op for op in graph.ops if RANGES in op.path and op.inputs and op.inputs[0] in made]


def _of_parameters(graph: Planner, batch: str) -> set[PTensor]:
    return of_parameters(graph, _leaves_of_a_forward(graph, batch))


def _leaves_of_a_forward(graph: Planner, batch: str) -> list[PTensor]:
    """The parameters of a module's forward, of which no gradient is taken: its floating inputs, but for the batch."""
    if graph.calls or graph.stored:
        return []
    rows = set(graph.select_inputs(batch))
    return [t for t in graph.inputs if t.shape and t not in rows and jnp.issubdtype(t.dtype, jnp.floating)]
