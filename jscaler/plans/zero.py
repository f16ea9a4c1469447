"""ZeRO: data parallelism without its copies. (Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models, SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023.)

Every device of data parallelism updates every parameter, and keeps the optimizer's state for it. Here each updates its own
part of every parameter::

    gradients, value shares ──► reduce-scatter ──► update of the own part ──► all-gather ──► parameters         stage 1

Reduce-scatter and all-gather send what the all-reduce of the gradients sent; the state shrinks by the number of devices.
A norm over all gradients is made of the parts' norms: scalars are all-reduced. In stage 3 parameters lie in parts as well::

    part ──► all-gather ──► forward ··· part ──► all-gather ──► backward ──► reduce-scatter ──► update of the part

half as much again is sent, and no device holds more whole parameters than are in use; of a stack of layers (``nn.scan``),
one layer's. What the forward casts is gathered after the cast.

With ``dp`` copies the devices are a grid (hybrid sharding: HSDP, PyTorch's HYBRID_SHARD, MiCS)::

              parts ──►
    copies  ┌ d0 d1 d2 d3 ┐   a row holds the state once: it gathers parameters, and reduces and scatters gradients
       │    └ d4 d5 d6 d7 ┘   a column holds the same part: it all-reduces what the rows have scattered
       ▼

Neighbours share a row, the faster links of a cluster. The batch is split over all devices.

A parameter is cut along its first dim that divides. Those with none stay whole everywhere; ``explain()`` lists them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jscaler.errors import PlanWarning, listing, warn
from jscaler.ir import Op, PTensor
from jscaler.ir.kinds import tensor_kinds
from jscaler.ir.walk import closure
from jscaler.plans.argument_types import checked
from jscaler.plans.data_parallel import batch_factors
from jscaler.plans.factors import Deals, Factors, can_be_split, device_grid, is_much, split
from jscaler.plans.layers import with_slices
from jscaler.primitives import Planner, Replicate


@checked
def zero1(batch: str = "batch", reduce_dtype: Any = None, dp: int = 1) -> Callable[..., None]:
    """`data_parallel`, with the optimizer's state and the updates split over all devices, or over groups of them.

    Args:
        batch, reduce_dtype: as for `data_parallel`.
        dp: as for `zero3`.

    Raises (when the plan is made):
        UnknownNameError, SplitError, CaptureError: as for `data_parallel`.
        PlanError: ``dp`` does not divide the number of devices.

    Example:
        >>> planned = train_step.under(plans.zero1()).lower(state, batch).plan
        >>> {kind: count for kind, (count, _) in planned.report.total.items()}
        {'all_reduce': 1, 'reduce_scatter': 5, 'all_gather': 5}
    """
    return _zero("zero1", batch, reduce_dtype, dp, stored=False)


@checked
def zero3(batch: str = "batch", reduce_dtype: Any = None, gather_once: bool = False, dp: int = 1) -> Callable[..., None]:
    """`zero1`, with the parameters themselves split too: fully sharded data parallelism.

    Args:
        batch, reduce_dtype: as for `data_parallel`.
        gather_once: over micro-batches, whether parameters are put together once a step and whole until its last backward,
            not in every forward and backward: less is sent, and more held; gradients and state lie in parts as before.
        dp: how many copies of the state there are, each on as many devices, which must be a divisor of theirs. Unlike
            `megatron`'s ``dp``, over which ``zero=`` splits the state, it is what the state is not split over.

    Raises (when the plan is made):
        UnknownNameError, SplitError, CaptureError: as for `data_parallel`.
        PlanError: ``dp`` does not divide the number of devices.

    Example:
        >>> shapes = train_step.under(plans.zero3()).abstract_state(make_state, jax.random.key(0), batch=batch)
        >>> shapes["params"]["up"].sharding.shard_shape((16, 64))
        (4, 64)
        >>> shapes = train_step.under(plans.zero3(dp=2)).abstract_state(make_state, jax.random.key(0), batch=batch)
        >>> shapes["params"]["up"].sharding.shard_shape((16, 64))  # twice on four devices
        (8, 64)
    """
    return _zero("zero3", batch, reduce_dtype, dp, stored=True, gather_once=gather_once)


@checked
def zero2(batch: str = "batch", reduce_dtype: Any = None, dp: int = 1) -> Callable[..., None]:
    """`zero1`, with the gradients split too where they add up over micro-batches: they are reduced and scattered each time.

    Without micro-batches that is `zero1`, whose gradients are scattered as they are made.

    Args:
        batch, reduce_dtype: as for `data_parallel`.
        dp: as for `zero3`. What a group has scattered is all-reduced over the groups once, behind the last micro-batch.

    Raises (when the plan is made):
        UnknownNameError, SplitError, CaptureError: as for `data_parallel`.
        PlanError: ``dp`` does not divide the number of devices.

    Example:
        >>> planned = train_step.under(plans.zero2()).lower(state, batch).plan
        >>> planned.plan.accumulation.each_time
        True
    """
    return _zero("zero2", batch, reduce_dtype, dp, stored=False)


def _zero(
    name: str, batch: str, reduce_dtype: Any, dp: int, stored: bool, gather_once: bool = False
) -> Callable[..., None]:
    def policy(graph: Planner, devices: np.ndarray) -> None:
        copies = device_grid(devices, name, dp=dp, parts=None)
        table = batch_factors(graph, batch, devices.size)
        if reduce_dtype is not None:
            graph.reduce_dtype(reduce_dtype)
        shard_parameters(graph, copies.T, stored)
        if name != "zero1":
            graph.accumulation(each_time=True, gather_once=gather_once)
        split(graph, devices, table)

    return policy


def shard_parameters(graph: Planner, grid: np.ndarray, stored: bool, cuts: Factors | None = None) -> None:
    """Shard every parameter over the first axis of ``grid``, where a dim of it divides.

    Args:
        stored: whether the parameters lie in parts too.
        cuts: what the other axis splits, op by op: a dim is cut by both if its size allows, else by one. Without any, the
            other axis counts copies.

    Warns:
        PlanWarning: no parameter has such a dim.
    """
    if graph.stored and not graph.calls:
        return  # an evaluation that follows a train step: its parameters lie as that step has sharded them
    graph.require_gradient()
    rows = grid.shape[0]
    if rows == 1:
        return
    parameters = [tensor for tensor, kind in tensor_kinds(graph.graph).items() if kind == "parameter"]
    parts = grid.size // rows if cuts else 1
    dims = {tensor: _dim(graph, tensor, rows, parts, cuts or {}) for tensor in parameters}
    for tensor, dim in dims.items():
        if dim is not None:
            graph.shard(tensor, dim, grid, stored=stored)
    if all(dim is None for dim in dims.values()):
        nbytes = sum(tensor.nbytes for tensor in parameters)
        warn(
            f"nothing is sharded: no dim of the {len(parameters)} parameters ({nbytes} bytes) divides by {rows}, so they "
            "and the optimizer's state stay whole on every device",
            PlanWarning,
        )


def shard_rest(graph: Planner, devices: np.ndarray, cuts: Factors, unequal: Factors, deals: Deals) -> None:
    """Let kernels and tables that ``cuts`` leaves whole lie in parts, where a dim of theirs divides; what reads them is
    computed everywhere.

    Args:
        unequal: the cuts whose last part may be shorter.
        deals: the cuts that are dealt out to several factors, or to some of the devices.

    Warns:
        PlanWarning: no dim of some divides.
    """
    if devices.size == 1 or not graph.calls:
        return
    forward = ((op, name) for op, name in cuts.items() if op.kind == "forward")
    legal = {op: f for op, f in forward if op in deals or can_be_split(graph, op, f, devices.size, unequal.get(op) == f)}
    readers: dict[Op, None] = {}
    whole: list[PTensor] = []
    for tensor, kind in tensor_kinds(graph.graph).items():
        if kind == "parameter" and len(tensor.shape) > 1:
            taken, cut = _seen_inside(graph, tensor, legal)
            own = [d for d in range(len(tensor.shape)) if d not in taken]  # of each layer, if it is a stack
            divides = [d for d in own if tensor.shape[d] and tensor.shape[d] % devices.size == 0]
            if len(own) < 2 or cut:
                continue
            if not divides:
                whole.append(tensor)
                continue
            graph.shard(tensor, divides[0], devices, stored=True)
            readers.update(dict.fromkeys(_read_by(graph, tensor)))
    if is_much(graph, whole):
        names = [f"{tensor.name} {tensor.shape}" for tensor in whole]
        warn(f"kernels of which no dim divides into {devices.size} parts stay whole: {listing(names)}", PlanWarning)
    for reader in (op for op in readers if op not in legal):
        for op in (reader, reader.backward) if reader.backward is not None else (reader,):
            graph.op_assign(graph.op_trans(op, Replicate(devices.size)), devices)


def _read_by(graph: Planner, leaf: PTensor) -> list[Op]:
    """The forward ops that read ``leaf``, its slice in a loop over layers, or a cast, together with something else."""
    known = with_slices(graph, [leaf])
    found: list[Op] = []
    for op in graph.forward():
        if not known.isdisjoint(op.inputs):
            if all(t in known for t in op.inputs if t.shape):
                known.update(with_slices(graph, op.outputs))
            else:
                found.append(op)
    return found


def _dim(graph: Planner, leaf: PTensor, rows: int, parts: int, cuts: Factors) -> int | None:
    """The dim of a parameter to cut in ``rows``: the first that any cut leaves divisible, else the first that divides."""
    taken, cut = _seen_inside(graph, leaf, cuts)
    divides = [d for d, size in enumerate(leaf.shape) if d not in taken and size and size % rows == 0]
    safe = [d for d in divides if leaf.shape[d] % (rows * parts) == 0]
    free = [d for d in divides if d not in cut]
    return next(iter(safe + free), None)


def _seen_inside(graph: Planner, leaf: PTensor, cuts: Factors) -> tuple[set[int | None], set[int | None]]:
    """The dims of ``leaf`` that loops take apart, and those that ``cuts`` cut, through what is made of it alone (casts)."""
    taken, cut = set[int | None](), set[int | None]()
    places: dict[PTensor, tuple[int | None, ...]] = {leaf: tuple(range(len(leaf.shape)))}  # by dim of a tensor, the leaf's

    def onward(tensor: PTensor) -> Iterable[PTensor]:
        dims = places[tensor]
        found: list[tuple[PTensor, tuple[int | None, ...]]] = []
        for op in graph.consumers.get(tensor, ()):
            rule = graph.rule(op)
            names = rule.operands[op.inputs.index(tensor)]
            cut.update(place for place, own in zip(dims, names, strict=True) if cuts.get(op) in own)
            if op.kind != "backward" and all(t in places for t in op.inputs if t.shape):
                place_of = {own[0]: place for place, own in zip(dims, names, strict=True) if own}
                results = zip(op.outputs, rule.results, strict=True)
                found += [(t, tuple(place_of.get(own[0]) if own else None for own in out)) for t, out in results]
        for piece in graph.graph.flow.targets(tensor, "slice"):
            taken.add(dims[0])
            found.append((piece, dims[1:]))
        for other, places_of_other in found:
            places.setdefault(other, places_of_other)
        return [t for t, _ in found]

    for _ in closure([leaf], onward):
        pass
    return taken, cut


def without_followers(graph: Planner, table: Factors, stored: bool) -> Factors:
    """``table`` without ops that follow what is sharded: the optimizer's, which read gradients and state, and if parameters
    are ``stored`` in parts, those that make something of them alone (casts)."""
    kinds = tensor_kinds(graph.graph)
    own = {t for t, kind in kinds.items() if kind in ("parameter", "optimizer", "gradient")}
    made = with_slices(graph, [t for t, kind in kinds.items() if kind == "parameter"] if stored else [])
    found = set()
    for op in graph.ops:
        known = {"update": own, "forward": made}.get(op.kind, set())
        large = [t for t in op.inputs if t.shape]
        if large and all(t in known for t in large):
            known.update(op.outputs if known is own else with_slices(graph, op.outputs))
            found.add(op)
    return {op: factor for op, factor in table.items() if op not in found}
