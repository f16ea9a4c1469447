"""Recompute as a decision: which forward ops form a region that is computed again for the backward pass.

    graph.recompute("block_0/*", keep="block_0/attn/out/dot")

                 saved                     saved
    forward      x ──► norm ──► attn ──► out ──► … ──► y
    backward     x ──► norm' ─► attn'    out ──► …          what it does not keep is made anew, by clones

The ops become one region (`RecomputeRegion`), as if the user had written ``jax.checkpoint`` around them; what that means is
`capture.recompute`'s to say. Here a selection is checked, and ops are marked.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from jscaler.errors import PlanError, UnknownNameError, listing
from jscaler.ir import Graph, Nest, Op, PTensor, nested
from jscaler.ir.loop import Item, chain_of, flat, made_by, reads_of
from jscaler.ir.op import RecomputeRegion
from jscaler.ir.walk import between
from jscaler.primitives.plan import Decision, Recompute


def with_regions(graph: Graph, decisions: Iterable[Decision]) -> Graph:
    """``graph`` with the ops marked that some of ``decisions`` compute again."""
    for decision in decisions:
        if isinstance(decision, Recompute):
            graph = with_region(graph, decision)
    return graph


def with_region(graph: Graph, decision: Recompute) -> Graph:
    """``graph`` with one more region.

    Raises:
        UnknownNameError: no such op.
        PlanError: the ops cannot be one region.
    """
    if decision.instead:
        graph = _dissolved(graph, {region for path in decision.ops for region in graph[path].remat})
    members = [graph[path] for path in decision.ops]
    loop = _check(graph, members)
    region = RecomputeRegion(_name(graph, members), loop)
    kept = _kept(members, decision.keep)
    around = _regions_around(graph, members)
    changed: dict[str, Op] = {}
    for op in members:
        rest = tuple(r for r in op.remat if r not in around)
        remat = (*(r for r in op.remat if r in around), region, *rest)
        own = op.kept if around else tuple(t for t in op.outputs if t in kept)
        changed[op.path] = dataclasses.replace(op, remat=remat, kept=own)
    return with_ops(graph, changed)


def _dissolved(graph: Graph, regions: Set[RecomputeRegion]) -> Graph:
    """``graph`` without these regions: what their ops make is saved as other results are."""
    changed: dict[str, Op] = {}
    for op in graph.ops:
        if op.forward is None and not regions.isdisjoint(op.remat):
            rest = tuple(r for r in op.remat if r not in regions)
            changed[op.path] = dataclasses.replace(op, remat=rest, kept=op.kept if rest else ())
    return with_ops(graph, changed)


def with_ops(graph: Graph, changed: Mapping[str, Op]) -> Graph:
    """``graph`` with other forward ops of the same paths."""
    ops = []
    for op in graph.ops:
        forward = changed.get(op.forward.path) if op.forward is not None else None
        ops.append(dataclasses.replace(op, forward=forward) if forward is not None else changed.get(op.path, op))
    return dataclasses.replace(graph, ops=tuple(ops))


def _check(graph: Graph, members: Sequence[Op]) -> str | None:
    """The loop that the region of ``members`` stands in; raises PlanError if they cannot be one region."""
    names = listing([op.path for op in members])
    if not members:
        raise PlanError("recompute takes one op or more; none was given")
    wrong = [op.path for op in members if op.kind != "forward"]
    if wrong:
        raise PlanError(f"recompute takes forward ops, which their backwards need; {listing(wrong)} are none")
    if len({op.call for op in members}) > 1:
        raise PlanError(f"{names} belong to different gradient calls; recompute those of one call at a time")
    if all(op.backward is None for op in members):
        raise PlanError(f"no gradient flows through {names}: their results are for the forward pass alone, and not saved")
    loop = _loop_around(graph, members)
    items = _items_in(graph, loop, members)
    own = {op.path for op in members}
    for item in items:
        inside = [op.path for op in flat([item])]
        missing = [path for path in inside if path not in own]
        if missing and len(missing) < len(inside):
            assert isinstance(item, Nest)
            raise PlanError(
                f"recompute takes all of loop '{item.loop.name}' and what is around it, or ops inside it alone; "
                f"{listing(missing)} are in it and were not selected"
            )
    of_call = [item for item in items if _first(item).call == members[0].call]
    others = between(of_call, {item for item in of_call if _first(item).path in own}, reads_of, made_by)
    if others:
        paths = [_first(item).path for item in others]
        raise PlanError(
            f"{names} cannot be computed again as one: {listing(paths)} reads some of them and is read by others; select "
            "it too, and keep what is not to be computed again (keep=...)"
        )
    _regions_around(graph, members)
    return loop


def _loop_around(graph: Graph, members: Sequence[Op]) -> str | None:
    """The innermost loop that all of ``members`` stand in."""
    chains = [chain_of(op.loop, graph.loops) for op in members]
    common = [names[0] for names in zip(*chains, strict=False) if len(set(names)) == 1]
    return common[-1] if common else None


def _items_in(graph: Graph, loop: str | None, members: Sequence[Op]) -> tuple[Item, ...]:
    """The ops and loops that stand in ``loop`` itself, from the first of ``members`` to the last."""
    depth = len(chain_of(loop, graph.loops))

    def inside(place: int) -> Sequence[str]:
        return chain_of(graph.ops[place].loop, graph.loops)[depth : depth + 1]

    places = [graph.position[op.path] for op in members]
    first, last = min(places), max(places)
    while first and inside(first) and inside(first - 1) == inside(first):
        first -= 1
    while last + 1 < len(graph.ops) and inside(last) and inside(last + 1) == inside(last):
        last += 1
    items: tuple[Item, ...] = nested(graph.ops[first : last + 1], graph.loops)
    for name in chain_of(loop, graph.loops):
        items = next(item.items for item in items if isinstance(item, Nest) and item.loop.name == name)
    return items


def _first(item: Item) -> Op:
    return next(flat([item]))


def _regions_around(graph: Graph, members: Sequence[Op]) -> set[RecomputeRegion]:
    """The regions that hold all of ``members`` and more, of which theirs becomes part.

    Raises:
        PlanError: a region holds some of them, and others too.
    """
    own, around = {op.path for op in members}, set[RecomputeRegion]()
    for region in dict.fromkeys(r for op in members for r in op.remat):
        held = {op.path for op in graph.ops if op.kind == "forward" and region in op.remat}
        if held <= own:
            continue  # becomes part of this one
        if not own < held:
            outside = [op.path for op in graph.ops if op.path in held - own]
            raise PlanError(
                f"{listing([op.path for op in members if op.path in held])} are part of region '{region.name}', and so are "
                f"{listing(outside)}, which were not selected: select all ops of that region, or ops of it alone"
            )
        around.add(region)
    return around


def _kept(members: Sequence[Op], keep: Iterable[str]) -> set[PTensor]:
    """The tensors that ``keep`` names: by op, all its results."""
    by_name: dict[str, tuple[PTensor, ...]] = {t.name: (t,) for op in members for t in op.outputs}
    by_name |= {op.path: op.outputs for op in members}
    found = set[PTensor]()
    for name in keep:
        if name not in by_name:
            raise UnknownNameError("selected op or result", name, by_name, "; keep= names ops that are selected, too")
        found.update(by_name[name])
    return found


def _name(graph: Graph, members: Sequence[Op]) -> str:
    """A name for the region: the module that holds all of it, where that is no region's name yet."""
    parts = [op.path.split("/")[:-1] for op in members]
    common = [names[0] for names in zip(*parts, strict=False) if len(set(names)) == 1]
    taken = {region.name for op in graph.ops for region in op.remat}
    name = "/".join([*common, "again"])
    return name if common and name not in taken else members[0].path + "/again"


def selected(graph: Graph, selection: Any) -> tuple[str, ...]:
    """The paths of the forward ops that a selection means, in the order of the program.

    Args:
        selection: an op, a grid of one, a path or shell pattern, or several of these.

    Raises:
        UnknownNameError: a pattern matches nothing.
    """
    found = {op.path for op in _ops(graph, selection)}
    return tuple(sorted(found, key=graph.position.__getitem__))


def _ops(graph: Graph, selection: Any) -> list[Op]:
    if isinstance(selection, str):
        return [graph[selection]] if selection in graph.by_path else list(graph.select(selection))
    if isinstance(selection, Op):
        return [graph[selection.path]]
    if hasattr(selection, "op"):  # a grid, or a part of one
        return [graph[selection.op.path]]
    if isinstance(selection, Iterable):
        return [op for one in selection for op in _ops(graph, one)]
    raise PlanError(f"recompute takes ops, grids, paths and patterns, not {selection!r}")


def named(graph: Graph, ops: Sequence[str], keep: Any) -> tuple[str, ...]:
    """What ``keep`` names, of the results of ``ops``: paths of ops, and names of single results."""
    alone = isinstance(keep, (str, Op, PTensor)) or hasattr(keep, "op")
    several: list[Any] = [*keep] if isinstance(keep, Iterable) and not alone else [keep]
    tensors: Mapping[str, PTensor] = {t.name: t for path in ops for t in graph[path].outputs}
    found: list[str] = []
    for one in several:
        name = one.name if isinstance(one, PTensor) else one if isinstance(one, str) else ""
        if isinstance(one, PTensor) or name in tensors:
            found.append(name)
            continue
        paths = selected(graph, one)
        found += [path for path in paths if path in ops] or paths[:1]  # one outside is an error that names it
    return tuple(dict.fromkeys(found))
