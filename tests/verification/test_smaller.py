"""Large exchanges are proven on smaller tensors: as many equations, the same faults, and what cannot be is said."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from lower.steps import planned
from materialize.layouts import every_layout, mesh_of
from of_the_day import of_the_day

import jscaler
from jscaler.errors import VerificationError
from jscaler.ir import PTensor
from jscaler.lower.program import Adapt
from jscaler.materialize import Layout, find_adapter
from jscaler.materialize.crossing import find_crossing
from jscaler.verification import exchanges, flow
from jscaler.verification.exchanges import Exchanges, outline
from jscaler.verification.flow import HeldSlot
from jscaler.verification.smaller import layouts_of, ratios_of, smaller_adapter, smaller_masks

MESH = mesh_of(2, 2)
LARGE = ((24, 8), (16,))  # a dim of two sub-dims, and one that is cut as it is


def tensor(shape: tuple[int, ...]) -> PTensor:
    import jax

    return PTensor("x", jax.core.ShapedArray(shape, "float32"))


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "MOST_CELLS", 0)


def prove(source: Layout, target: Layout) -> Exchanges:
    known, x = Exchanges(), tensor(source.shape)
    task = Adapt(x, find_adapter(source, target, 4), 0, 1)
    held, wanted = (HeldSlot(x, tuple(layout.mask(p) for p in range(4))) for layout in (source, target))
    known.prove(MESH, task, held, wanted, "exchange")
    return known


@pytest.mark.smoke
def test_all_pairs_of_layouts_are_smaller_or_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is proven as it is and on a smaller tensor, which says the same."""
    layouts = list(every_layout(MESH, LARGE, ("add",)))
    pairs = list(itertools.product(layouts, layouts))
    smaller = 0
    for source, target in of_the_day(pairs, 8):
        monkeypatch.setattr(exchanges, "MOST_CELLS", 10**9)
        assert not prove(source, target).on_smaller
        monkeypatch.setattr(exchanges, "MOST_CELLS", 0)
        known = prove(source, target)
        smaller += known.on_smaller
        assert not known.left_out
    assert smaller > 0.8 * len(of_the_day(pairs, 8))


def test_by_how_much_a_tensor_may_be_smaller() -> None:
    rows = Layout(MESH, ((64,), (48,)), (("x0", "x1"), ()))
    columns = Layout(MESH, ((64,), (48,)), ((), ("x0", "x1")))
    assert ratios_of([rows, columns]) == (8, 6)  # two rows of each part stay
    assert ratios_of([rows, columns], [0]) == (1, 6)
    assert ratios_of([Layout(MESH, ((7,),), (("x0",),))]) is None  # padded
    assert ratios_of([Layout(MESH, ((4,),), (("x0", "x1"),))]) is None  # of one row each
    fine = Layout(MESH, ((16, 4), (48,)), (("x0",), (), ()))
    assert ratios_of([rows, fine]) == (2, 24)
    assert smaller_masks((rows.mask(0),), (3, 1)) is None
    adapter = smaller_adapter(find_adapter(rows, columns, 4), (8, 6))
    assert adapter is not None
    assert {layout.shape for layout in layouts_of(adapter)} == {(8, 8)}


@pytest.mark.parametrize(("fault", "message"), [
    (lambda local: local, r"leaves local arrays of \[2, 8\]; \[8, 2\] are wanted"),
    (lambda local: local.T, r"exchange, of \[8, 8\] rows: device 0 holds element \(1, 0\) where element \(0, 1\) belongs"),
])  # fmt: skip
@pytest.mark.usefixtures("all_large")
def test_a_fault_of_a_large_exchange(fault: Callable[[Any], Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "exchange", lambda adapter, local, *_: fault(local))
    rows = Layout(MESH, ((64,), (64,)), (("x0", "x1"), ()))
    with pytest.raises(VerificationError, match=message):
        prove(rows, Layout(MESH, ((64,), (64,)), ((), ("x0", "x1"))))


@pytest.mark.usefixtures("all_large")
def test_what_differs_on_a_smaller_tensor_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof speaks of the program that runs: a smaller one with other equations is none."""
    rows = Layout(MESH, ((64,), (48,)), (("x0", "x1"), ()))
    whole = Layout.replicated(MESH, (64, 48))
    assert not prove(rows, whole).left_out
    emitted = flow.exchange

    def longer(adapter: Any, local: Any, *rest: Any) -> Any:
        return emitted(adapter, local + 0 if local.shape[0] > 4 else local, *rest)

    monkeypatch.setattr(flow, "exchange", longer)
    known = prove(rows, whole)  # it is small enough as it is
    assert (known.on_smaller, known.left_out, known.distinct) == (0, [], 1)
    monkeypatch.setattr(exchanges, "MOST_DIRECT", 0)
    known = prove(rows, whole)
    assert (known.left_out, known.distinct) == (["x"], 0)


def test_crossings(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = mesh_of(2), mesh_of(2, devices=(2, 3))
    source, target = (Layout(mesh, ((64,), (48,)), (("x0",), ())) for mesh in groups)
    for most_cells, on_smaller in ((10**9, 0), (0, 1)):
        monkeypatch.setattr(exchanges, "MOST_CELLS", most_cells)
        known = Exchanges()
        passed, elements = known.prove_crossing(find_crossing(source, target, 4), (64, 48), "float32", "crossing")
        assert (known.on_smaller, known.left_out, elements) == (on_smaller, [], 64 * 48)
        assert passed == ["ppermute"]


def test_a_step_says_what_was_proven_how(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("data_parallel", 8)
    assert "large" not in str(jscaler.verify(plan))
    monkeypatch.setattr(exchanges, "MOST_CELLS", 0)
    report = jscaler.verify(plan)
    assert 0 < report.on_smaller < report.distinct  # scalars are as small as can be
    monkeypatch.setattr(exchanges, "MOST_DIRECT", 0)
    report = jscaler.verify(plan)
    assert report.on_smaller == report.distinct
    assert f"left out     '{report.left_out[0]}'" in str(report)
    assert f"large        {report.on_smaller} exchanges, on smaller tensors" in str(report)


def test_an_outline_has_no_sizes() -> None:
    known = Exchanges()
    made = []
    for size in (8, 64):
        rows = Layout(MESH, ((size,),), (("x0", "x1"),))
        task = Adapt(tensor((size,)), find_adapter(rows, Layout.replicated(MESH, (size,)), 4), 0, 1)
        made.append(outline(known.traced(MESH, task)[1].jaxpr))
    assert made[0] == made[1]
    assert made[0]
