"""Constraints between ops: what they leave, that nothing better keeps them, and what they refuse."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from brute import best
from small_models import drawn, links_alone, mlp

from jscaler.errors import PlanError, UnknownNameError
from jscaler.estimate.prices import Prices
from jscaler.plan_search.program import fill
from jscaler.plan_search.program.fill import Filled, program_of
from jscaler.spaces import any_split, apart, on_all, same_as, space_of, together

FIRST, SECOND = "loss/dot", "loss/dot.1"  # hidden units are c of the first, and b of the second


@pytest.fixture(scope="module")
def prices() -> Prices:
    return Prices(mlp(4, 128, 1024), links_alone(1, 4))  # fastest: each product by its wide dims


def space(*said: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    """Products are no copies, and what is said beside."""

    def policy(graph: Any, devices: Any) -> None:
        for op in graph.forward():
            graph.op_trans(op, any_split(copies="never" if "dot" in op.path else "any"))
        for one in said:
            one(graph)

    return policy


def along(choices: Mapping[str, tuple[str | None, ...]]) -> list[tuple[set[str | None], set[str | None]]]:
    """By axis the dims along which it splits the first, and the second: rows ``a``, inner units ``u``."""
    names = ({"a": "a", "c": "u"}, {"a": "a", "b": "u"})
    return [
        ({names[0].get(one or "")} - {None}, {names[1].get(other or "")} - {None})
        for one, other in zip(choices[FIRST], choices[SECOND], strict=True)
    ]


def test_together_and_same_as_split_a_shared_dim_by_the_same_axes(prices: Prices) -> None:
    free = fill(prices, space(), (2, 2))
    for said in (
        lambda graph: graph.op_assign([FIRST, SECOND], together()),
        lambda graph: graph.op_assign(FIRST, same_as(graph[SECOND])),
    ):
        found = fill(prices, space(said), (2, 2))
        assert all(one == other for one, other in along(found.choices))
        assert found.seconds > free.seconds
    assert not all(one == other for one, other in along(free.choices))


def test_apart_no_axis_splits_a_shared_dim_of_two(prices: Prices) -> None:
    found = fill(prices, space(lambda graph: graph.op_assign("loss/dot*", apart())), (2, 2))
    assert not any(one & other for one, other in along(found.choices))


def test_on_all_no_axis_copies(prices: Prices) -> None:
    def copied(graph: Any, devices: Any) -> None:
        graph.op_assign(FIRST, on_all())

    allowed = space_of(copied, prices.graph, (2, 2))
    assert allowed is not None
    assert allowed.splits[FIRST] == (frozenset("abc"),) * 2
    with pytest.raises(PlanError, match=r"'loss/div': on_all\(\) leaves nothing on axis 0"):
        space_of(lambda graph, devices: graph.op_assign("loss/div", on_all()), prices.graph, (2, 2))


def test_numbers_of_parts(prices: Prices) -> None:
    def parts(found: Filled) -> int:
        return int(np.prod([2 for factor in found.choices[FIRST] if factor is not None]))

    def whole(graph: Any, devices: Any) -> None:
        graph.op_trans(FIRST, any_split(most=2))

    assert parts(fill(prices, whole, (2, 2))) <= 2
    assert parts(fill(prices, space(lambda graph: graph.op_trans(FIRST, any_split(least=4))), (2, 2))) == 4
    with pytest.raises(PlanError, match=r"any_split\(least=3, most=3\) leaves no number of parts.*legal: [24]"):
        space_of(lambda graph, devices: graph.op_trans(FIRST, any_split(least=3, most=3)), prices.graph, (2, 2))


@pytest.mark.parametrize(("seed", "where"), [(0, together()), (1, apart()), (3, together()), (7, apart()), (4, apart())])
def test_nothing_that_keeps_them_is_better(seed: int, where: Any) -> None:
    """Products of drawn models, by all choices tried one after another."""
    mesh = [(4,), (2,), (3,), (2, 2)][seed % 4]
    known = Prices(drawn(seed, 2 if len(mesh) == 1 else 1), links_alone(1, int(np.prod(mesh))))
    tied = [op.path for op in known.graph.forward() if op.outputs[0].shape][:3]
    allowed = space_of(space(lambda graph: graph.op_assign(tied, where)), known.graph, mesh)
    assert allowed is not None
    program = program_of(known, allowed, mesh, 1)
    dims = allowed.ties[0].dims

    def keeps(choices: Mapping[str, Any]) -> bool:
        each = (
            [choices[path].by_axis[axis] in factors for path, factors in own.items() if path in choices]
            for own in dims
            for axis in range(len(mesh))
        )
        return all(len({*own}) < 2 if where == together() else sum(own) < 2 for own in each)

    found = program.solve(20.0, 0.0)
    assert found is not None
    assert found.objective == pytest.approx(best(program, keeps)[0], rel=1e-6)


def unlike(graph: Any) -> None:
    """Rows alone, no rows, and the two alike."""
    graph.op_trans(FIRST, any_split(dims="batch", copies="never"))
    graph.op_trans(SECOND, any_split(never="batch"))
    graph.op_assign(FIRST, same_as(SECOND))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no dim in common": (
        lambda graph: graph.op_assign("loss/div", same_as(FIRST)),
        r"same_as\('loss/dot'\)\) matches nothing: 'loss/div' and 'loss/dot' share no dim",
    ),
    "by itself": (
        lambda graph: graph.op_assign(FIRST, together()), r"together\(\)\) matches nothing: 'loss/dot' share no dim"
    ),
    "nothing is left": (
        unlike, r"same_as\('loss/dot.1'\)\) leaves nothing over axis 0 of a mesh of \(2, 2\).*'loss/dot' 'a'.*nearest"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(prices: Prices, case: str) -> None:
    said, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        fill(prices, space(said), (2, 2))
    with pytest.raises(UnknownNameError, match="no op named 'nothing"):
        fill(prices, space(lambda graph: graph.op_assign("nothing/*", together())), (2, 2))
