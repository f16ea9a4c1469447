"""A loop in two: what others wait for, and behind it what nobody does; as ``lax.scan`` by hand would be written twice.

The backward of a stack of layers makes each layer's gradient of the input, which the layer before it needs, and the
gradients of its weights, which only the optimizer does::

    loop:  dx = dy @ w.T;  dw = x.T @ dy      ──►      loop:  dx = dy @ w.T, and a stack of all dy
                                                       loop:  dw = x.T @ dy, of the stacks of x and dy

What the second needs of the first is stacked, or made again of that, whichever is fewer bytes (`lower.kept_values`).
"""

import dataclasses
from collections.abc import Sequence, Set

from jax.extend import core

from jscaler.capture.jaxprs import fresh
from jscaler.lax_primitives import contracts
from jscaler.lower.flat_program import FlatLoop, Item, has_effects, reads, renamed, results
from jscaler.lower.kept_values import Cuttable, saved_or_again


def in_halves(
    loop: FlatLoop, early: Set[core.Var], originals: dict[core.Var, core.Var]
) -> tuple[FlatLoop, FlatLoop | None]:
    """The loop that makes the results ``early``, and the one behind it that makes the others; None if that has no work.

    For what the second makes again ``originals`` are told what it was first.
    """
    pairs = zip(loop.returned, loop.outvars, strict=True)
    wanted = {atom for atom, var in pairs if var in early and isinstance(atom, core.Var)}
    while True:  # a carry of the first half is made there
        first, second, needed = _divided(loop.items, wanted, originals)
        more = {out for _, inside, out, _ in loop.carries if inside in needed and isinstance(out, core.Var)} - wanted
        if not more:
            break
        wanted |= more
    kept = [carry for carry in loop.carries if carry[3] in early or carry[1] in needed or carry[2] in wanted]
    others = [carry for carry in loop.carries if carry not in kept]
    made = {v for item in first for v in results(item)}
    ys = [y for y in loop.ys if y[1] in early or not isinstance(y[0], core.Var) or y[0] in made]
    late = [y for y in loop.ys if y not in ys]
    if not any(map(_is_work, second)):
        return loop, None
    outputs = (*(out for _, _, out, _ in others), *(piece for piece, _ in late))
    inner = {inside for _, inside, _, _ in kept}
    free = {v for item in loop.items for v in reads(item)} - {v for item in loop.items for v in results(item)} - inner
    left = tuple(out for _, _, out, _ in kept)
    blocks = [Cuttable(tuple(first), left), Cuttable(tuple(second), outputs)]
    (first, second), again = saved_or_again(blocks, dict.fromkeys(inner, 0), free)
    originals.update(again)
    made = {v for item in first for v in results(item)} | inner
    handed = [v for v in dict.fromkeys(v for item in second for v in reads(item)) if v in made]
    handed += [v for v in dict.fromkeys(outputs) if isinstance(v, core.Var) and v in made and v not in handed]
    stacks = {v: core.Var(v.aval.update(shape=(loop.loop.length, *v.aval.shape))) for v in handed}  # type: ignore[attr-defined]
    slices = {v: fresh(v) for v in handed}
    one = _loop(loop, first, kept, [*ys, *stacks.items()])
    two = renamed(_loop(loop, second, others, late), slices)
    assert isinstance(two, FlatLoop)
    return one, dataclasses.replace(two, xs=(*two.xs, *((stacks[v], slices[v]) for v in handed)))


def _divided(
    items: Sequence[Item], wanted: Set[core.Var], originals: dict[core.Var, core.Var]
) -> tuple[list[Item], list[Item], set[core.Var]]:
    """The items that make what is ``wanted``, the others, and all that the first ones read."""
    needed = set(wanted)
    first: list[Item] = []
    second: list[Item] = []
    for item in reversed(items):
        early = needed.intersection(results(item))
        if not early and not has_effects(item):
            second.append(item)
            continue
        rest: FlatLoop | None = None
        if isinstance(item, FlatLoop) and not has_effects(item) and early != set(results(item)):
            item, rest = in_halves(item, early, originals)
        first.append(item)
        second += [rest] if rest is not None else []
        needed.update(reads(item))
    return first[::-1], second[::-1], needed


def _is_work(item: Item) -> bool:
    """Whether an item is worth a loop of its own: a product, a loop, what is sent."""
    return not isinstance(item, core.JaxprEqn) or contracts([item])


def _loop(loop: FlatLoop, items: Sequence[Item], carries: Sequence[tuple], ys: Sequence[tuple]) -> FlatLoop:
    read = {v for item in items for v in reads(item)} | {a for c in carries for a in c[2:3]} | {piece for piece, _ in ys}
    xs = tuple(x for x in loop.xs if x[1] in read)
    return FlatLoop(loop.loop, tuple(items), tuple(carries), xs, tuple(ys))
