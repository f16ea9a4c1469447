"""``Split`` and ``Replicate`` against an op's rule: by name, by tensor and dim, and every way to get it wrong."""

from typing import Any

import jax.numpy as jnp
import pytest
from lower.steps import make_batch, make_params, tied_loss

import jscaler
from jscaler import PlanError, Replicate, Split, SplitError, UnknownNameError
from jscaler.ir import Graph
from jscaler.primitives import GridAxis
from jscaler.primitives.algorithms import grid_axis


@pytest.fixture(scope="module")
def graph() -> Graph:
    """up/dot is ``a b, b c -> a c`` of (16, 8) and (8, 16)."""
    return jscaler.parallelize("single")(jscaler.grad(tied_loss)).graph(make_params(), make_batch())


def axis(graph: Graph, path: str, algorithm: Any, *before: GridAxis) -> GridAxis:
    return grid_axis(graph[path], graph.rule(graph[path]), algorithm, before)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("factor", "name"),
    [
        ("b", "b"),
        (("kernel", 0), "b"),
        (("kernel", 1), "c"),
        (("kernel", -1), "c"),
        (("params/up/kernel", 1), "c"),
        (("batch/x", 0), "a"),
        (("up/dot:0", 1), "c"),  # results have names too
    ],
    ids=str,
)
def test_factors_by_name_and_by_tensor(graph: Graph, factor: Any, name: str) -> None:
    assert str(graph.rule(graph["up/dot"])) == "a b, b c -> a c"
    assert axis(graph, "up/dot", Split(factor, 4)) == GridAxis(name, 4)


def test_replicate_splits_no_factor(graph: Graph) -> None:
    assert axis(graph, "up/dot", Replicate(3)) == GridAxis(None, 3)
    assert str(GridAxis(None, 3)) == "copy:3"
    assert str(GridAxis("b", 2)) == "b:2"


def test_a_typo_suggests_the_near_factor(graph: Graph) -> None:
    with pytest.raises(UnknownNameError, match=r"no factor named 'A' in op 'up/dot' \(a b, b c -> a c\).* known: a, b, c"):
        axis(graph, "up/dot", Split("A", 2))


def test_a_typo_suggests_the_near_tensor(graph: Graph) -> None:
    with pytest.raises(
        UnknownNameError, match=r"no tensor named 'params/up/kernl' at op 'up/dot'; did you mean 'params/up/kern"
    ):
        axis(graph, "up/dot", Split(("params/up/kernl", 0), 2))


def test_a_wrong_count_lists_the_legal_ones(graph: Graph) -> None:
    with pytest.raises(SplitError, match="'up/dot' cannot split factor 'b' of size 8 into 3 parts; legal: 1, 2, 4, 8"):
        axis(graph, "up/dot", Split("b", 3))


def test_uneven_sizes_add_up(graph: Graph) -> None:
    assert axis(graph, "up/dot", Split("b", sizes=(5, 3))) == GridAxis("b", 2, (5, 3))
    assert str(GridAxis("b", 2, (5, 3))) == "b:5+3"
    assert axis(graph, "up/dot", Split("b", sizes=(4, 4))) == GridAxis("b", 2)  # equal parts, said in a longer way
    with pytest.raises(SplitError, match=r"factor 'b' of size 8 into 2 parts; the sizes \[5, 4\] add up to 9"):
        axis(graph, "up/dot", Split("b", sizes=(5, 4)))
    for sizes in ((8, 0), (9, -1), (4.0, 4), ()):
        with pytest.raises(PlanError, match="'up/dot': the sizes of parts are positive whole numbers, not"):
            axis(graph, "up/dot", Split("b", sizes=sizes))  # type: ignore[arg-type]


def test_a_split_has_parts_or_sizes(graph: Graph) -> None:
    with pytest.raises(PlanError, match=r"'up/dot': a Split has parts or sizes; .* has none"):
        axis(graph, "up/dot", Split("b"))
    with pytest.raises(PlanError, match=r"'up/dot': a Split has parts or sizes; .* has both"):
        axis(graph, "up/dot", Split("b", 2, (5, 3)))


def test_uneven_sizes_do_not_nest(graph: Graph) -> None:
    for before, algorithm in (
        (GridAxis("b", 2, (5, 3)), Split("b", 3)),
        (GridAxis("b", 2), Split("b", sizes=(3, 1))),
    ):
        with pytest.raises(
            PlanError, match=r"factor 'b' is split by b:.* already; .* give all sizes to one Split\('b', sizes"
        ):
            axis(graph, "up/dot", algorithm, before)
    assert axis(graph, "up/dot", Split("a", sizes=(9, 7)), GridAxis("b", 2, (5, 3))) == GridAxis("a", 2, (9, 7))


def test_a_wrong_count_names_uneven_sizes(graph: Graph) -> None:
    with pytest.raises(
        SplitError, match=r"legal: 1, 2, 4, 8; or unequal parts by sizes, like Split\('b', sizes=\(3, 3, 2\)\)"
    ):
        axis(graph, "up/dot", Split("b", 3))


def test_what_was_split_before_has_less_to_split(graph: Graph) -> None:
    before = GridAxis("b", 4), GridAxis("a", 2), GridAxis(None, 2)
    assert axis(graph, "up/dot", Split("b", 2), *before) == GridAxis("b", 2)
    with pytest.raises(SplitError, match="of size 2 into 4 parts; legal: 1, 2"):
        axis(graph, "up/dot", Split(("kernel", 0), 4), *before)


def test_a_blocked_factor_says_why() -> None:
    graph = jscaler.parallelize("single")(lambda x: jnp.sort(x, 1)).graph(jnp.ones((4, 4)))
    (op,), name = graph.ops, "b"
    reason = graph.rule(op).factors[name].reason
    assert reason
    with pytest.raises(SplitError) as error:
        axis(graph, op.path, Split(name, 2))
    assert str(error.value).startswith(f"'{op.path}' cannot split factor '{name}'")
    assert f"; it is blocked: {reason}; " in str(error.value)
    assert axis(graph, op.path, Split(name, 1)) == GridAxis(name, 1)  # one part is no split


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_the_tensor_lacks(graph: Graph, dim: int) -> None:
    with pytest.raises(PlanError, match=rf"'params/up/kernel' of shape \(8, 16\) has no splittable dim {dim}"):
        axis(graph, "up/dot", Split(("kernel", dim), 2))


def test_a_dim_of_size_one_cannot_be_split() -> None:
    graph = jscaler.parallelize("single")(lambda x: jnp.sin(x)).graph(jnp.ones((1, 4)))
    with pytest.raises(PlanError, match=r"'x' of shape \(1, 4\) has no splittable dim 0"):
        grid_axis(graph.ops[0], graph.rule(graph.ops[0]), Split(("x", 0), 2))


@pytest.mark.parametrize("count", [0, -2, 2.0, "2"])
def test_counts_are_positive_whole_numbers(graph: Graph, count: Any) -> None:
    for algorithm in (Split("b", count), Replicate(count)):
        with pytest.raises(PlanError, match=f"'up/dot': the number of parts is a positive whole number, not {count!r}"):
            axis(graph, "up/dot", algorithm)
