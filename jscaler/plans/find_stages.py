"""The stages of a model: which ops, loops over layers, inputs and updates lie in each, found in its dataflow.

A forward pass is a row of units, which is cut where a policy says (by modules, by layers) or where that is balanced
(`jscaler.plans.balance`); in between the ends of a model of words (`jscaler.plans.find_ends`), or pass by pass, if it goes
over its own output. All else follows: a backward its forward, an update its parameter.
"""

import fnmatch
import glob
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp

from jscaler.errors import PlanError, UnknownNameError
from jscaler.ir import Nest, Op, PTensor
from jscaler.ir.loop import Item, flat, made_by, reads_of
from jscaler.ir.name import range_mark
from jscaler.ir.walk import closure, grouped
from jscaler.plans.balance import Unit, balanced
from jscaler.plans.chunk_cuts import StageOrder
from jscaler.plans.find_ends import find_ends
from jscaler.plans.layers import modules_of, of_parameters, stacks_of
from jscaler.plans.stage_groups import Speed
from jscaler.primitives import Planner
from jscaler.text.units import counted
from jscaler.xla_model.work import work_of

Words = Sequence[tuple[PTensor, int]]  # tables of words, and their dims of words


def find_stages(
    graph: Planner,
    stages: int,
    at: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    batch: str = "batch",
    passes: int = 0,
    words: Words | None = None,
    order: StageOrder | None = None,
    speeds: Sequence[Speed] = (),
    cut: Callable[..., list[int]] = balanced,
    firsts: Sequence[int | None] = (),
) -> dict[str, int]:
    """The stage of every forward op that is not made of the batch, keys and literals alone; loops over layers whose layers
    lie in several are cut into ranges. An average over state that the step follows has none.

    Args:
        passes: of a model that goes over its own output, how many stages one pass has.
        words: if the first and the last stage are the model's ends, its tables of words, with their dims of words.
        order: if groups have several stages, or are unlike, that in which these run.
        speeds: of the group of each stage, if they are unlike.
        cut: cuts rows, in place of `balanced`.
        firsts: of each stage how many layers of a stack are a range of their own, from its first on; None for none.

    Raises:
        PlanError: there are too few places where the model can be cut, or it has no ends.
        UnknownNameError: no module is called so.
    """
    known = _known_everywhere(graph, batch)
    apart = known | _of_parameters(graph, batch)  # what is made of these stands in no stage's way, wherever it is written
    units = _units(graph, batch, apart)
    if graph.stored and not graph.calls and not units:
        return {}
    if not units:
        raise PlanError("no op of a forward pass depends on data and parameters, so nothing can lie in stages")

    def cuts_of(chain: Sequence[Unit], stages: int) -> list[int]:
        if layers is not None:
            return _between_layers(chain, layers, stages, at)
        return _named(chain, at, stages) if at is not None else cut(graph, chain, stages, known, order, speeds[:stages])

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
    mixed = _cut_in_several_ways(staged)
    found: dict[str, int] = {}
    gone: Counter[tuple[int, int | None]] = Counter()  # layers of stacks, by stage and gradient
    for item, sizes in staged:
        left = {stage: firsts[stage] if firsts else None for stage in sizes}
        cuts = {stage: None if n is None else max(0, n - gone[stage, _call(item)]) for stage, n in left.items()}
        found.update(_staged(graph, item, sizes, mixed, cuts))
        if isinstance(item, Nest) and sum(sizes.values()) == item.loop.length:
            gone.update({(stage, _call(item)): size for stage, size in sizes.items()})
    return _with_makers(graph, found, batch)


def row_of(graph: Planner, batch: str = "batch") -> tuple[list[Unit], set[PTensor]]:
    """The row of units that is cut into stages, and what any stage can make by itself.

    Raises:
        PlanError: gradients that do not depend on each other have a row each.
    """
    known = _known_everywhere(graph, batch)
    units = _units(graph, batch, known | _of_parameters(graph, batch))
    if not units or len(_chains(graph, units)) > 1:
        raise PlanError(
            "this step has no forward pass, or several that are cut apart; pipeline(...) cuts them all by balance"
        )
    return units, known


def name_of(unit: Unit) -> str:
    """What ``at`` calls a unit with which a stage begins."""
    path = glob.escape(next(unit.ops).path)
    return f"{path}[{unit.iteration}:]" if unit.of > 1 else path


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
    found = grouped((_call(unit.item), unit) for unit in units)
    if len(found) < 2:
        return [list(units)]
    readers = grouped((tensor, item) for item in graph.tree for tensor in reads_of(item))
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


def _staged(
    graph: Planner, item: Item, sizes: Mapping[int, int], mixed: set[PTensor], firsts: Mapping[int, int | None]
) -> dict[str, int]:  # fmt: skip
    """The stage of each op of an item, so many of whose iterations lie in each; of a loop in several, of its ranges.

    Args:
        mixed: stacks that cannot lie in parts.
        firsts: how many iterations of each stage are a range of their own.
    """
    paths = [op.path for op in flat([item])]
    ranges = [(stage, size) for stage, whole in sizes.items() for size in _cut(whole, firsts[stage]) if size]
    if len(ranges) == 1:
        return dict.fromkeys(paths, ranges[0][0])
    assert isinstance(item, Nest)
    in_order = ranges[:: -1 if item.loop.reverse else 1]
    apart = len(sizes) > 1 and mixed.isdisjoint(x.stack for x in item.loop.xs)
    graph.ranges(item.loop.name, [size for _, size in in_order], apart=apart)
    bounds = itertools.pairwise(itertools.accumulate((size for _, size in in_order), initial=0))
    return {path + range_mark(own): stage for (stage, _), own in zip(in_order, bounds, strict=True) for path in paths}


def _cut(size: int, first: int | None) -> tuple[int, int]:
    return (size, 0) if first is None else (min(first, size), size - min(first, size))


def _with_makers(graph: Planner, found: Mapping[str, int], batch: str) -> dict[str, int]:
    """``found``, and what is made of parameters alone (casts, ``stop_gradient``): it has the stage that reads it first."""
    alone = _of_parameters(graph, batch)
    apart = set(taken_apart(graph, batch))
    stages = dict(found)
    for op in reversed(graph.ops):
        if op.kind == "forward" and op.path not in stages and op not in apart and alone.issuperset(op.outputs):
            read = {t for out in op.outputs for t in (out, *graph.graph.flow.neighbours(out))}
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
            "the second …, and where the last end begins; or take another schedule of pipeline"
        )
    of_item = grouped((id(unit.item), unit) for unit in units)
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
    for given in at:
        pattern, layer = _layer_named(given)
        here = [(i, unit) for i, unit in enumerate(units) if unit.iteration == layer or not layer]
        inside = [i for i, unit in here if any(_is_in(op.path, pattern) for op in unit.ops)]
        lengths = [unit.of for unit in units if any(_is_in(op.path, pattern) for op in unit.ops)]
        if not inside and lengths:
            raise PlanError(f"pipeline: no stage can begin at '{given}': '{pattern}' has {max(lengths)} layers, from 0 on")
        if not inside:
            modules = sorted({module for unit in units for op in unit.ops for module in modules_of(op.path)})
            raise UnknownNameError("module", pattern, modules, "; stages begin at modules")
        found.append(inside[0])
    if found != sorted(set(found)) or found[0] == 0:
        raise PlanError(
            f"pipeline: stages begin at {', '.join(at)}, which do not follow each other in the model; a stage is empty"
        )
    return found


def _layer_named(pattern: str) -> tuple[str, int]:
    """``"blocks/dot[12:]"`` as a pattern and an iteration of the loop that it names; 0 where it names none."""
    name, _, rest = pattern.rpartition("[")
    return (name, int(rest[:-2])) if rest.endswith(":]") and rest[:-2].isdecimal() else (pattern, 0)


def _is_in(path: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(part, pattern) for part in (*modules_of(path), path))


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


def stages_of_all(graph: Planner, stage_of: Mapping[str, int], batch: str) -> dict[str, int]:
    """The stage of every input and update too: of the first forward op that a leaf reaches; of an update that of the
    largest tensor it reads, or else of who reads what it makes; of the optimizer's state that of its readers. A gradient
    belongs to its parameter's stage, though another has made a part of it.

    What is made of the batch, keys and literals alone has none: the stage that reads it makes it. Nor have stacks of
    parameters that lie on all devices, and their updates.
    """
    apart = {t for op in taken_apart(graph, batch) for t in op.inputs}
    of_tensor: dict[PTensor, int] = {}
    everywhere = set(apart)

    def behind(tensor: PTensor) -> list[PTensor]:
        readers = [op for op in graph.consumers.get(tensor, ()) if op.path not in stage_of and op.kind == "forward"]
        return [*graph.graph.flow.targets(tensor, "slice", "entry"), *(t for op in readers for t in op.outputs)]

    for leaf in graph.inputs:
        reached = list(closure([leaf], behind))
        stages = [stage_of[op.path] for t in reached for op in graph.consumers.get(t, ()) if op.path in stage_of]
        if not apart.isdisjoint(reached):
            everywhere.add(leaf)
        elif stages:
            of_tensor[leaf] = min(stages)
    of_op: dict[str, int] = {}
    left: set[str] = set()  # loops whose results have a stage
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
            made = op.outputs
            if op.loop is not None and op.loop not in left:
                left.add(op.loop)
                made = (*op.outputs, *graph.loops[op.loop].results)
            of_tensor.update({t: of_tensor.get(parameter.get(t, t), stage) for t in made})
    for op in reversed(graph.ops):
        readers = [r for t in op.outputs for r in graph.consumers.get(t, ()) if r.path in of_op]
        readers = [of_op[r.path] for r in sorted(readers, key=lambda r: r.ranges == "joined")]  # which reads parts of all
        if op.kind == "update" and op.path not in of_op and readers:
            of_op[op.path] = readers[0]
    found = {**stage_of} | {op.path: of_op[op.path] for op in graph.ops if op.kind == "update" and op.path in of_op}
    for leaf in (t for t in graph.inputs if t not in everywhere):
        readers = (found[op.path] for op in graph.consumers.get(leaf, ()) if op.path in found)
        found[leaf.name] = of_tensor[leaf] if leaf in of_tensor else next(readers, 0)
    return found


def taken_apart(graph: Planner, batch: str) -> list[Op]:
    """The ops that take stacks of parameters apart into the ranges of stages."""
    made = _of_parameters(graph, batch)
    return [op for op in graph.ops if op.ranges == "apart" and op.inputs[0] in made]


def _of_parameters(graph: Planner, batch: str) -> set[PTensor]:
    return of_parameters(graph, _leaves_of_a_forward(graph, batch))


def _leaves_of_a_forward(graph: Planner, batch: str) -> list[PTensor]:
    """The parameters of a module's forward, of which no gradient is taken: its floating inputs, but for the batch."""
    if graph.calls or graph.stored:
        return []
    rows = set(graph.select_inputs(batch))
    return [t for t in graph.inputs if t.shape and t not in rows and jnp.issubdtype(t.dtype, jnp.floating)]
