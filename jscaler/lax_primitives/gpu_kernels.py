"""Kernels that somebody wrote for GPUs: any of Pallas whose programs do not ask where they are, and cuDNN's attention.

A Pallas kernel runs a program for each cell of its grid. Some axes of the grid are indices that operands and results
share: the batch, the heads. Along such an axis each program has one element of a dim, the dim has no others, and no program
asks for its place. A part runs the cells of its own elements. With scratch memory, which programs may hand on, all axes
stay whole.

    grid (b, h, blocks)   q: block (None, 64, None, d), program (r, n, i) has (r, i, n, 0)   r and n may be split, i not

cuDNN's attention (``jax.nn.dot_product_attention(implementation="cudnn")``) is two primitives, forward and backward; batch
and heads may be split. JAX binds them only where it finds cuDNN.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from jscaler.ir.equations import shape
from jscaler.lax_primitives.primitive import Part, Primitive
from jscaler.lax_primitives.spec import Dims, Label, Spec, seen_whole

# of cuDNN's operands; behind these come lengths, offsets and pages, empty where there are none
QUERY, KEY, VALUE, BIAS = range(4)
FORWARD_OPERANDS = 10
BTNH = 0  # the layout batch, tokens, heads, head size; else batch, heads, tokens, head size


def pallas(eqn: core.JaxprEqn) -> Spec:
    """The indices that a kernel's grid shares with its arrays."""
    grid = eqn.params["grid_mapping"]
    if not _is_plain(eqn):
        return seen_whole(eqn, "the kernel's grid or mesh depends on what it runs on, or its programs share scratch memory")
    blocked: dict[Label, str] = {}
    users = [axis for axis in range(len(grid.grid)) if axis not in grid.vmapped_dims]  # as the kernel's program counts them
    asked = {users[axis] for axis in _asked(eqn.params["jaxpr"])}
    first = len(eqn.invars) - grid.num_inputs  # in front of these stand what the index maps read
    sides: list[Dims] = [
        tuple(_whole(("operand", i, d), n, blocked) for d, n in enumerate(shape(v)))
        for i, v in enumerate(eqn.invars[:first])
    ]
    for number, mapping in enumerate(grid.block_mappings):
        axes, others = _axes_of(mapping, grid.grid)
        asked |= others
        if number >= grid.num_inputs:
            asked |= {axis for axis in range(len(grid.grid)) if axis not in axes.values()}
        sizes = mapping.array_aval.shape
        sides.append(
            tuple(
                (() if n == 1 else ((("grid", axes[d]), n),)) if d in axes else _whole((number, d), n, blocked)
                for d, n in enumerate(sizes)
            )
        )
    for operand, result in eqn.params["input_output_aliases"]:
        here, there = (_grid_axes(sides[at]) for at in (operand, first + grid.num_inputs + result))
        if here != there:  # what a part leaves of the operand would not lie as the result
            asked |= {axis for axis in (*here, *there) if axis is not None}
    why = "the kernel's programs ask for their place along it, or share results"
    blocked |= {
        label: why for dims in sides for dim in dims for label in dim if label[0][0] == "grid" and label[0][1] in asked
    }
    count = first + grid.num_inputs
    return Spec(tuple(sides[:count]), tuple(sides[count:]), blocked=blocked)


def _grid_axes(dims: Dims) -> list[int | None]:
    """Per dim the axis of the grid that it is an index of."""
    return [next((axis for (kind, axis, *_), _ in dim if kind == "grid"), None) for dim in dims]


def _is_plain(eqn: core.JaxprEqn) -> bool:
    grid = eqn.params["grid_mapping"]
    return (
        all(isinstance(size, int) for size in grid.grid)
        and eqn.params.get("mesh") is None
        and not grid.scratch_avals
        and len(eqn.outvars) == grid.num_outputs
        and all(hasattr(mapping, "array_aval") for mapping in grid.block_mappings)
    )


def _axes_of(mapping: Any, grid: Sequence[int]) -> tuple[dict[int, int], set[int]]:
    """Dims of which each program along an axis of the grid has one element -> that axis; and the axes used otherwise."""
    from jax.experimental import pallas as pl  # a kernel is there, so it is loaded

    program = mapping.index_map_jaxpr.jaxpr
    place = {var: axis for axis, var in enumerate(program.invars)}
    others = {place[atom] for eqn in program.eqns for atom in eqn.invars if isinstance(atom, core.Var) and atom in place}
    found: dict[int, int] = {}
    for dim, (atom, block) in enumerate(zip(program.outvars, mapping.block_shape, strict=True)):
        if not isinstance(atom, core.Var) or atom not in place:
            continue
        single = (
            block is None or isinstance(block, pl.Squeezed) or (isinstance(block, pl.Blocked) and block.block_size == 1)
        )
        if single and mapping.array_aval.shape[dim] == grid[place[atom]]:
            found[dim] = place[atom]
        else:
            others.add(place[atom])
    twice = [axis for axis in found.values() if list(found.values()).count(axis) > 1]
    return found, others | set(twice)


def _asked(jaxpr: core.Jaxpr) -> Iterator[int]:
    """The axes of the grid of which a kernel's program asks the number of its cell, or of all."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("program_id", "num_programs"):
            yield eqn.params["axis"]
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _asked(getattr(inner, "jaxpr", inner))


def _whole(name: Any, size: int, blocked: dict[Label, str]) -> tuple[Label, ...]:
    if size == 1:
        return ()
    label = (("whole", *name) if isinstance(name, tuple) else ("whole", name)), size
    blocked[label] = "each program of the kernel may see all of it"
    return (label,)


def _local_pallas(part: Part, eqn: core.JaxprEqn) -> Mapping[str, Any]:
    """The parameters of a kernel that runs the cells of a part."""
    grid, cost = eqn.params["grid_mapping"], eqn.params["cost_estimate"]
    ends = [*eqn.invars[len(eqn.invars) - grid.num_inputs :], *eqn.outvars]
    sizes = list(grid.grid)
    mappings = []
    for mapping, var in zip(grid.block_mappings, ends, strict=True):
        own = part.shape(var)
        for dim, axis in _axes_of(mapping, grid.grid)[0].items():
            if shape(var)[dim] > 1:
                sizes[axis] = own[dim]
        mappings.append(dataclasses.replace(mapping, array_aval=mapping.array_aval.update(shape=own)))
    share = math.prod(sizes) / math.prod(grid.grid)
    if cost is not None:
        counts = {field.name: getattr(cost, field.name) for field in dataclasses.fields(cost)}
        cost = dataclasses.replace(cost, **{k: int(v * share) for k, v in counts.items() if isinstance(v, int)})
    return {
        "grid_mapping": dataclasses.replace(grid, grid=tuple(sizes), block_mappings=tuple(mappings)),
        "out_avals": tuple(
            aval.update(shape=part.shape(v)) for aval, v in zip(eqn.params["out_avals"], eqn.outvars, strict=True)
        ),
        "cost_estimate": cost,
    }


def attention(eqn: core.JaxprEqn) -> Spec:
    """cuDNN's attention, forward and backward: batch, heads of keys, and the queries' heads of each of them.

    A backward's gradients of keys, values and a bias are sums over what they do not carry.
    """
    queries, keys = shape(eqn.invars[QUERY]), shape(eqn.invars[KEY])
    heads = 2 if eqn.params["layout"] == BTNH else 1
    tokens = 3 - heads
    shared, group = keys[heads], queries[heads] // max(1, keys[heads])
    blocked: dict[Label, str] = {}

    def whole(name: Any, size: int) -> tuple[Label, ...]:
        if size <= 1:
            return ()
        blocked[name, size] = "cuDNN's attention sees all of it"
        return ((name, size),)

    batch: tuple[Label, ...] = (("batch", queries[0]),) if queries[0] > 1 else ()
    of_keys: tuple[Label, ...] = (("heads", shared),) if shared > 1 else ()
    of_queries = (*of_keys, *((("group", group),) if group > 1 else ()))

    def laid(own: tuple[Label, ...], sequence: str, sizes: tuple[int, ...]) -> Dims:
        middle = [own, whole(sequence, sizes[tokens])]
        middle = middle if heads == 1 else middle[::-1]
        return (batch, *middle, whole(f"size {sizes[3]}", sizes[3]))

    query = laid(of_queries, "queries", queries)
    key, value = (laid(of_keys, "keys", shape(eqn.invars[at])) for at in (KEY, VALUE))
    result = laid(of_queries, "queries", (*queries[:3], shape(eqn.invars[VALUE])[3]))
    statistics = batch, of_queries, whole("queries", queries[tokens])
    bias = _bias(shape(eqn.invars[BIAS]), batch, of_queries, whole)
    lengths = [_lengths(i, shape(v), batch, whole) for i, v in enumerate(eqn.invars[BIAS + 1 : FORWARD_OPERANDS])]
    if any(len(own) > 1 for own in lengths):
        return seen_whole(eqn, "cuDNN packs sequences, or has keys in pages, in an order of its own")
    if eqn.params["dropout_rate"]:
        why = "cuDNN draws in an order of its own"
        blocked |= dict.fromkeys((*batch, *of_queries), why)
    operands = query, key, value, bias, *lengths
    if len(eqn.invars) == FORWARD_OPERANDS:
        return Spec(operands, (result, statistics)[: len(eqn.outvars)], blocked=blocked)
    results = (query, key, value, bias)[: len(eqn.outvars)]
    return Spec((*operands, statistics, result, result), results, blocked=blocked)


def _bias(sizes: tuple[int, ...], batch: tuple[Label, ...], heads: tuple[Label, ...], whole: Any) -> Dims:
    if len(sizes) != 4:
        return tuple(whole(("empty", "bias", d), n) for d, n in enumerate(sizes))
    first = batch if sizes[0] > 1 else ()
    return first, heads if sizes[1] > 1 else (), whole("queries", sizes[2]), whole("keys", sizes[3])


def _lengths(number: int, sizes: tuple[int, ...], batch: tuple[Label, ...], whole: Any) -> Dims:
    """One length for each row of the batch; nothing; or several, of packed sequences."""
    if len(sizes) == 1 and batch and sizes[0] == batch[0][1]:
        return (batch,)
    return tuple(whole(("lengths", number, d), n) for d, n in enumerate(sizes))


def _attention_flops(eqn: core.JaxprEqn) -> float:
    """Of two products forward and of five backward; a causal mask leaves half of them out."""
    queries, keys = shape(eqn.invars[QUERY]), shape(eqn.invars[KEY])
    tokens = 1 if eqn.params["layout"] == BTNH else 2
    products = 2 if len(eqn.invars) == FORWARD_OPERANDS else 5
    share = 0.5 if "CAUSAL" in str(eqn.params["mask_type"]) else 1.0
    return share * 2.0 * products * math.prod(queries) * keys[tokens]


RECORDS = (
    Primitive("pallas_call", pallas, shaped=_local_pallas, asks_shardy=False, role="alone", weight=70),
    *(
        Primitive(
            f"dot_product_attention_{way}_wrapper",
            attention,
            role="alone",
            weight=72,
            word="attention",
            flops=_attention_flops,
        )
        for way in ("fwd", "bwd")
    ),
)
