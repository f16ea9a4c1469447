"""Where tensors come from and where they go in nested loops, against an interpreter that runs their iterations.

::

    x ─► pre ─► c0, q0                    p0            k             w, two stacks in one
    outer, 2 times:
        c = c0, then c1    p = p0, then c    q = q0, then d2    k' = k always    v = a slice of w
        inner, 2 times:
            d = c, then d1    u = a slice of v
            cell: d, u ─► d1      tap: d ─► h, stacked as hs
        add: d2, hs, k' ─► c1      log: p ─► s, stacked as ss
    end: c2, ss ─► y      rest: p2, q2, k2 ─► z
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import pytest

from jscaler.ir import Carry, Graph, Loop, Op, PTensor, Stacked
from jscaler.ir.flow import ACYCLIC
from jscaler.ir.loop import Item
from jscaler.ir.walk import closure

Values = dict[PTensor, list[Any]]  # of a tensor one for each time that it is made


def named(names: str) -> tuple[PTensor, ...]:
    return tuple(PTensor(name, jax.ShapeDtypeStruct((), "float32")) for name in names.split())


def op(path: str, reads: str, makes: str, loop: str | None = None) -> Op:
    return Op(path, "forward", named(reads), named(makes), loop=loop)


def carry(names: str) -> Carry:
    return Carry(*named(names))


def stacked(names: str) -> Stacked:
    return Stacked(*named(names))


@functools.cache
def graph() -> Graph:
    inner = Loop("inner", 2, carries=(carry("c d d1 d2"),), xs=(stacked("v u"),), ys=(stacked("hs h"),), parent="outer")
    carries = (carry("c0 c c1 c2"), carry("p0 p c p2"), carry("q0 q d2 q2"), carry("k k' k' k2"))
    outer = Loop("outer", 2, carries=carries, xs=(stacked("w v"),), ys=(stacked("ss s"),))
    ops = (
        op("pre", "x", "c0 q0"),
        op("cell", "d u", "d1", "inner"),
        op("tap", "d", "h", "inner"),
        op("add", "d2 hs k'", "c1", "outer"),
        op("log", "p", "s", "outer"),
        op("end", "c2 ss", "y"),
        op("rest", "p2 q2 k2", "z"),
    )
    inputs, outputs = named("x w p0 k"), named("y z")
    return Graph(ops, inputs, (), outputs, ("0", "1"), {}, (), None, {"inner": inner, "outer": outer})  # type: ignore[arg-type]


TENSORS = sorted({*graph().inputs, *graph().homes})


def run(times: int, made: Callable[[Op, PTensor, list[Any]], Any], handed: Callable[[PTensor, list[Any]], Any]) -> Values:
    """All values of all tensors. Loops take ``times`` iterations, and may end before the body of any, or behind it.

    Args:
        made: the value of an op's result, of its operands.
        handed: the value of a tensor that a loop hands on, of those that it may be.
    """
    now: dict[PTensor, Any] = {t: handed(t, []) for t in graph().inputs}
    values: Values = {t: [value] for t, value in now.items()}

    def define(tensor: PTensor, value: Any) -> None:
        now[tensor] = value
        values.setdefault(tensor, []).append(value)

    def run_items(items: Sequence[Item]) -> None:
        for item in items:
            if isinstance(item, Op):
                for t in item.outputs:
                    define(t, made(item, t, [now[source] for source in item.inputs]))
                continue
            loop, left = item.loop, {t: list[Any]() for t in item.loop.results}
            arriving = [now[c.init] for c in loop.carries]
            for _ in range(times):
                for c, value in zip(loop.carries, arriving, strict=True):
                    define(c.inside, handed(c.inside, [value]))
                for x in loop.xs:
                    define(x.slice, handed(x.slice, [now[x.stack]]))
                run_items(item.items)
                for c in loop.carries:
                    left[c.final] += [now[c.out], now[c.inside]]
                for y in loop.ys:
                    left[y.stack].append(now[y.slice])
                arriving = [now[c.out] for c in loop.carries]
            for t, own in left.items():
                define(t, handed(t, own))

    run_items(graph().tree)
    return values


def with_itself(tensor: PTensor, values: Iterable[set[str]]) -> set[str]:
    return {tensor}.union(*values)


def origins(times: int, through_ops: bool = True) -> dict[PTensor, set[str]]:
    """Tensor -> itself and all that it is made of; or, but for ``through_ops``, all that it may be a copy of."""
    values = run(times, lambda _, t, operands: with_itself(t, operands if through_ops else []), with_itself)
    return {t: set().union(*own) for t, own in values.items()}


def test_sources_lead_to_all_that_a_tensor_is_made_of() -> None:
    flow, made_of = graph().flow, origins(times=4)  # more than there are carries to go through

    def back(tensor: PTensor) -> Sequence[PTensor]:
        return flow.producer[tensor].inputs if tensor in flow.producer else flow.sources(tensor)

    assert {t: set(closure([t], back)) for t in TENSORS} == made_of


def test_targets_lead_to_all_that_is_made_of_a_tensor() -> None:
    flow, made_of = graph().flow, origins(times=4)

    def onward(tensor: PTensor) -> Sequence[PTensor]:
        return [*flow.targets(tensor), *(t for reader in flow.consumers.get(tensor, ()) for t in reader.outputs)]

    assert {t: set(closure([t], onward)) for t in TENSORS} == {t: {o for o in TENSORS if t in made_of[o]} for t in TENSORS}


def test_operands_lead_to_all_that_a_tensor_is_made_of_within_an_iteration() -> None:
    once, often = origins(times=1), origins(times=4)
    assert {t: set(closure([t], graph().flow.operands)) for t in TENSORS} == once
    assert once != often  # the first iteration of `log` reads p0 alone


def test_the_maker_is_the_op_whose_result_is_handed_on() -> None:
    def first(_: PTensor, values: list[str | None]) -> str | None:
        return next(filter(None, values), None)

    makers = run(1, lambda maker, *_: maker.path, first)
    assert {t: [maker and maker.path] for t in TENSORS for maker in [graph().flow.maker(t)]} == makers
    assert {makers[t][0] for t in named("c d")} == {"pre"}  # not what makes the next one


def test_readers_are_ops_that_read_what_may_be_a_copy() -> None:
    copies = origins(times=1, through_ops=False)
    begins = {
        "c0": "add",
        "c": "cell",
        "p0": "pre",
        "q0": "cell",
    }  # what a carry begins with -> the maker of its next value
    for t in TENSORS:
        readers = [o.path for o in graph().ops if any(t in copies[source] for source in o.inputs)]
        expected = [*readers, begins[t]] if t in begins else readers
        assert [o.path for o in graph().flow.readers(t)] == expected, t


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        ("entry", {"c d", "c0 c", "p0 p", "q0 q", "k k'"}),
        ("slice", {"v u", "w v"}),
        ("back", {"d1 d", "c1 c", "c p", "d2 q", "k' k'"}),
        ("bypass", {"d d2", "c c2", "p p2", "q q2", "k' k2"}),
        ("exit", {"d1 d2", "c1 c2", "c p2", "d2 q2", "k' k2"}),
        ("stack", {"h hs", "s ss"}),
    ],
)
def test_edges_by_kind(kind: Any, pairs: set[str]) -> None:
    flow = graph().flow
    assert {f"{t.name} {target.name}" for t in TENSORS for target in flow.targets(t, kind)} == pairs
    assert {f"{source.name} {t.name}" for t in TENSORS for source in flow.sources(t, kind)} == pairs
    assert (kind in ACYCLIC) == (kind != "back")


def test_linked_are_a_carrys_tensors_and_stacks_with_their_slices() -> None:
    expected: dict[str, set[tuple[str, int]]] = {}
    for loop in graph().loops.values():
        for c in loop.carries:
            for a in c.tensors:
                expected.setdefault(a, set()).update((b, 0) for b in c.tensors if a != b)
        for s in (*loop.xs, *loop.ys):
            expected.setdefault(s.slice, set()).add((s.stack, 1))
            expected.setdefault(s.stack, set()).add((s.slice, -1))
    assert {t: set(links) for t, links in graph().flow.linked.items()} == expected
    assert {t: set(graph().flow.neighbours(t)) for t in TENSORS} == {
        t: {other for other, _ in expected.get(t, ())} for t in TENSORS
    }
