"""Searches: the best of all points, by brute force; bounds; memory; reasons; and plans that run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from bench.small_step import arguments, train_step
from jscaler import spaces as s
from jscaler.clusters import find_cluster
from jscaler.errors import JscalerError, PlanError, PlanWarning, UnknownNameError
from jscaler.plan_search import auto, candidates
from jscaler.plan_search.auto import searched_plan
from jscaler.plan_search.branch_and_bound import CLOSE, BranchAndBound
from jscaler.plan_search.candidates import Candidate, Candidates
from jscaler.plan_search.engine import Progress, search_graph
from jscaler.plan_search.found import Found
from jscaler.plan_search.program import UnprovedError
from jscaler.plan_search.program.linear import Linear, TimeIsOverError

CLUSTER = find_cluster("4xV100-32GB")
INNER = [s.Space("megatron", tp=s.within_host(), dp=s.rest_of_devices("tp"), zero=s.in_order(1, 3))]
SMALL = [s.in_microbatches(*INNER, s.Space("recompute_layers", plan=INNER))]
STAGED = s.Space(
    "pipeline", stages=2, microbatches=s.parts_of_batch(least=2, most=8),
    schedule=s.in_order("1f1b", "zb_h1", saves=False), plan=s.in_each_stage(s.Space("zero1")),
)  # fmt: skip


@pytest.fixture(scope="module")
def graph() -> Any:
    return jscaler.parallelize("single", devices=1)(train_step).graph(*arguments())


@pytest.fixture(scope="module")
def every(graph: Any) -> dict[str, tuple[float, int]]:
    """Seconds and peak of every plan of the spaces, by brute force."""
    found = {}
    for point in (p for space in (*SMALL, STAGED) for p in space.points(s.Setting(4, 4, 16))):
        try:
            cost = jscaler.cost(graph, point.make(), CLUSTER)
        except JscalerError:
            continue
        found[point.text.removesuffix("()")] = cost.seconds.total, cost.memory.peak
    return found


def searched(graph: Any, memory: float | None = None, **how: Any) -> Found:
    return search_graph(graph, CLUSTER, [SMALL, [STAGED]], memory=memory, **how)


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("part", [1.0, 0.8, 0.6, 0.4])
def test_the_best_of_all_plans_is_found_and_the_bound_holds(graph: Any, every: Any, part: float) -> None:
    peaks = sorted(peak for _, peak in every.values())
    memory = peaks[round(part * (len(peaks) - 1))]
    best = min(seconds for seconds, peak in every.values() if peak <= memory)
    found = searched(graph, memory)
    assert found.complete
    assert found.cost is not None
    assert found.plan is not None
    assert best <= found.cost.seconds.total <= best * (1 + 2 * CLOSE)
    assert found.cost.memory.peak <= memory
    assert found.bound <= best
    assert found.gap == pytest.approx(found.cost.seconds.total / found.bound - 1)
    assert all(one.seconds >= found.bound for one in found.runners_up)
    for one in (c for c in found.candidates if c.cost is not None):
        assert (one.seconds, one.peak) == pytest.approx(every[one.text])


def test_a_search_orders_what_another_has_priced_by_its_space(graph: Any) -> None:
    """One plan is the only point of a space, and the first of a family in another."""
    known, at = Candidates(graph, CLUSTER), s.Setting(4, 4, 16)
    spaces = [s.Space("zero1")], [s.in_microbatches(s.Space("zero1"))]
    for space in spaces:
        search = BranchAndBound(known, [[point for one in space for point in one.points(at)]], 1.0)
        assert not any(one.is_known and one.fits(1.0) for one in search.steps())
        (family,) = search.families
        assert search.bound > 0
    assert len({len(point.ranks) for point in family.places.values()}) == 1
    assert any(one.point is not point for one, point in family.places.items())


def test_reasons_say_what_another_choice_costs(graph: Any, every: Any) -> None:
    least = min(peak for _, peak in every.values())
    found = searched(graph, 1.05 * least)
    assert found.chosen is not None
    binding = [one for one in found.why if one.seconds < 0]
    assert [one.what.partition("=")[0] for one in binding] == ["memory"]
    free = min(seconds for seconds, _ in every.values())
    assert found.chosen.seconds + binding[0].seconds == pytest.approx(free, rel=0.01)
    for one in found.why:
        assert every[one.instead][0] - found.chosen.seconds == pytest.approx(one.seconds, abs=1e-12)


def test_another_candidate_is_compared_with_what_was_found(graph: Any, every: Any) -> None:
    found = searched(graph)
    other = found.runners_up[-1]
    compared = found.diff(other)
    assert compared.names == (found.chosen.text, other.text)
    assert compared.seconds == pytest.approx(every[other.text][0] - every[found.chosen.text][0])
    assert sum(line.seconds for line in compared.lines) == pytest.approx(compared.seconds)
    with pytest.raises(PlanError, match="nothing fits, and so no plan was found to compare with"):
        searched(graph, 1.0).diff(other)


def test_a_limit_that_binds_is_named(graph: Any) -> None:
    narrow = s.Space("megatron", tp=s.divisors_of_devices(most=1), dp=s.rest_of_devices("tp"))
    free = s.Space("megatron", tp=s.divisors_of_devices(), dp=s.rest_of_devices("tp"))
    found, best = (search_graph(graph, CLUSTER, [[space]]) for space in (narrow, free))
    assert found.chosen is not None
    assert best.chosen is not None
    gain = found.chosen.seconds - best.chosen.seconds
    assert gain > 0
    assert {one.what: one.seconds for one in found.why} == {"tp=divisors_of_devices(most=1)": pytest.approx(-gain)}


def test_holes_are_filled_and_what_is_found_is_as_good_as_plans_of_experts(graph: Any) -> None:
    space = s.OpenSpace(s.per_op, microbatches=[1])
    found = search_graph(graph, CLUSTER, [[space]])
    expert = search_graph(graph, CLUSTER, [SMALL])
    assert found.chosen is not None
    assert expert.chosen is not None
    assert found.complete
    assert found.chosen.seconds <= expert.chosen.seconds * 1.01
    assert found.bound <= found.chosen.seconds
    assert {one.point.numbers["mesh"] for one in found.candidates} == {(4,), (2, 2)}
    less = search_graph(graph, CLUSTER, [[space]], memory=0.9 * found.chosen.peak)
    assert less.chosen is None or less.chosen.peak <= 0.9 * found.chosen.peak


def test_holes_that_nobody_could_fill_are_in_the_bound(graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unproved(*how: Any) -> Any:
        raise UnprovedError("no plan within 1 s; give more, or a smaller space", 1e-9)

    space = s.OpenSpace(s.per_op, microbatches=s.parts_of_batch(most=4))
    monkeypatch.setattr(candidates, "filling_of", unproved)
    found = search_graph(graph, CLUSTER, [SMALL, [space]])
    closed = search_graph(graph, CLUSTER, [SMALL])
    assert found.chosen is not None
    assert found.chosen.text == closed.chosen.text if closed.chosen is not None else False
    assert found.bound < 0.5 * closed.bound
    assert sum(why.startswith("UnprovedError: no plan within") for why in found.illegal.values()) == 6


def test_equal_inputs_give_equal_plans(graph: Any) -> None:
    first, second = (searched(graph) for _ in range(2))
    assert first.plan is not None
    assert second.plan is not None
    assert first.plan.to_json() == second.plan.to_json()
    assert [one.text for one in first.candidates] == [one.text for one in second.candidates]


def test_where_nothing_fits_the_least_is_named(graph: Any, every: Any) -> None:
    found = searched(graph, 1000.0)
    assert found.plan is None
    assert found.cost is None
    assert found.smallest is not None
    assert found.smallest.peak == pytest.approx(min(peak for _, peak in every.values()), rel=0.03)
    assert "nothing fits: the least is" in str(found)
    assert "parameters and optimizer take" in str(found)


def test_where_no_plan_with_holes_fits_what_each_has_to_hold_is_named(graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    space = s.OpenSpace(s.per_op, mesh=(4,), microbatches=[1, 2])
    found = search_graph(graph, CLUSTER, [[space]], memory=1000.0)
    assert found.least is not None
    assert f"nothing fits: no plan of {found.least[1]} holds less than" in str(found)
    for memory, fits in ((0.99 * found.least[0], False), (1.2 * found.least[0], True)):
        assert (search_graph(graph, CLUSTER, [[space]], memory=memory, reasons=False).chosen is not None) == fits
    solve = Linear.solve

    def without_time(self: Linear, seconds: float, gap: float, whole: bool = True) -> Any:
        if gap == 0:  # the least
            raise TimeIsOverError
        return solve(self, seconds, gap, whole)

    monkeypatch.setattr(Linear, "solve", without_time)
    found = search_graph(graph, CLUSTER, [[space]], memory=1000.0)
    assert found.least is None
    assert "nothing fits: none of the plans is legal for this step, or fits\n" in str(found)


def test_what_xla_finds_too_large_is_left_and_the_search_goes_on(graph: Any) -> None:
    asked: list[str] = []

    def peak(one: Candidate) -> int:
        asked.append(one.text)
        return 10**12 if len(asked) < 3 else 1000

    found = searched(graph, compiled_peak=peak)
    assert found.chosen is not None
    assert asked[-1] == found.chosen.text
    assert len({*asked}) == 3
    assert [one.compiled_peak for one in found.candidates if one.text in asked[:2]] == [10**12] * 2
    assert found.chosen.seconds == min(one.seconds for one in found.candidates if found.fits(one))


def test_a_search_that_is_stopped_has_an_incumbent_and_a_bound(graph: Any, every: Any) -> None:
    def told(progress: Progress) -> None:
        if progress.best is not None:
            raise KeyboardInterrupt

    for found in (searched(graph, told=told), searched(graph, seconds=1e-3)):
        assert not found.complete
        assert found.bound <= min(seconds for seconds, _ in every.values())
        assert found.chosen is None or found.gap > 0


def test_what_is_searched_runs(graph: Any) -> None:
    del graph
    with jax.enable_x64(True):
        state, batch = arguments(dtype=jnp.float64)
        expected = jax.jit(lambda state, batch: train_step(state, batch, jax.value_and_grad))
        want = expected(*expected(state, batch)[:1], batch)
        for space in (SMALL[0], STAGED):
            step = jscaler.parallelize(jscaler.Auto(space=space), devices=4, cluster=CLUSTER)(train_step)
            got = step(*step(state, batch)[:1], batch)
            for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)
            assert step.plan_name == "auto"


def test_auto_is_a_plan_and_evaluations_follow_it() -> None:
    state, batch = arguments(4)
    step = jscaler.parallelize("auto", devices=2, cluster="8xH100-80GB")(train_step)
    value = step(state, batch)[1]

    @step.follow
    def evaluate(state: Any, batch: Any) -> jax.Array:
        return train_step(state, batch, jax.value_and_grad)[1]

    np.testing.assert_allclose(evaluate(state, batch), value, rtol=1e-5)
    assert step.lower(state, batch).plan.plan.num_devices == 2


def test_an_interrupt_while_a_plan_is_priced_leaves_it_open(graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    price = Candidates._price

    def interrupted(self: Candidates, candidate: Candidate) -> None:
        if candidate.text == "data_parallel":
            raise KeyboardInterrupt
        price(self, candidate)

    monkeypatch.setattr(Candidates, "_price", interrupted)
    found = search_graph(graph, CLUSTER, [[s.Space("zero3"), s.Space("data_parallel")]])
    best = jscaler.cost(graph, "data_parallel", CLUSTER).seconds.total
    assert found.interrupted
    assert found.bound <= best
    monkeypatch.undo()
    monkeypatch.setattr(Candidates, "_price", lambda self, candidate: (_ for _ in ()).throw(KeyboardInterrupt))
    assert "stopped before any plan was looked at" in str(search_graph(graph, CLUSTER, [SMALL]))
    step = jscaler.parallelize(jscaler.Auto(space="zero"), devices=4, cluster=CLUSTER)(train_step)
    with pytest.raises(KeyboardInterrupt):
        step.lower(*arguments())


def test_policies_of_one_name_are_several_points(graph: Any) -> None:
    def named(plan: str) -> Any:
        def mine(graph: Any, devices: Any, parts: int) -> None:
            if parts < 16:
                raise PlanError("so few parts do not go")
            jscaler.plans.by_name(plan)(graph, devices)

        return mine

    spaces = [s.Space(named(plan), parts=s.in_order(1, 2, 4, 8, 16)) for plan in ("single", "zero1")]
    found = search_graph(graph, CLUSTER, [spaces])
    assert found.num_points == 10
    assert [one.text for one in found.candidates] == ["mine(16)"] * 2
    assert found.chosen is not None
    costs = sorted(jscaler.cost(graph, plan, CLUSTER).seconds.total or 0.0 for plan in ("single", "zero1"))
    assert [one.seconds for one in found.candidates] == pytest.approx(costs, rel=0.03)  # the slower one by tables
    assert found.chosen.seconds == costs[0]


def test_memory_counts_on_devices_of_several_kinds(graph: Any) -> None:
    cluster = find_cluster("2xV100-32GB+2xA100-80GB")
    assert search_graph(graph, cluster, [[s.Space("zero1")]], memory=1000.0).plan is None
    assert search_graph(graph, cluster, [[s.Space("zero1")]]).plan is not None


def test_a_plan_is_searched_once_for_what_init_and_lower_ask() -> None:
    state, batch = arguments(4)
    step = jscaler.parallelize(jscaler.Auto(space="zero"), devices=2, cluster="8xH100-80GB")(train_step)
    first = step.lower(state, batch).plan.plan
    assert step.lower(state, batch).plan.plan is first


def test_what_ends_a_search_is_told_to_the_processes_that_wait(graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def to_all(text: str) -> str:
        told.append(text)
        return told[0]

    monkeypatch.setattr(auto, "_to_all", to_all)
    with pytest.raises(PlanError, match="nothing fits"):
        searched_plan(jscaler.Auto(space="zero", memory=1000.0), graph, 4, CLUSTER, donated=True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(
        PlanError, match="process 0, which searches, ended with PlanError: auto: nothing fits: the least is"
    ):
        searched_plan(jscaler.Auto(space="zero"), graph, 4, CLUSTER, donated=True)
    told[:] = [jscaler.Plan("single", 4, ()).to_json()]
    assert searched_plan(jscaler.Auto(space="zero"), graph, 4, CLUSTER, donated=True).name == "single"


def test_devices_that_nobody_knows_are_said() -> None:
    with pytest.warns(PlanWarning, match="'cpu' is no kind of device"):
        found = jscaler.search(train_step, *arguments(), space="zero", confirm=False)
    assert found.cluster.num_devices == 8


def test_a_search_of_nothing_is_refused(graph: Any) -> None:
    with pytest.raises(PlanError, match="has no plan for 4 devices"):
        search_graph(graph, CLUSTER, [[s.Space("megatron", tp=s.divisors_of_devices(least=8))]])
    for wrong in ({"seconds": 0}, {"memory": -1}):
        with pytest.raises(PlanError, match="above 0"):
            jscaler.search(graph, target=CLUSTER, **wrong)


def test_the_batch_of_a_step_that_does_not_say_which() -> None:
    """Two arguments have rows of their own: plans split those that are named, and are text that says so."""

    def train(params: Any, images: jax.Array, queue: jax.Array) -> Any:
        loss, grads = jscaler.value_and_grad(lambda p: jnp.mean(jnp.tanh(images @ p)) + jnp.sum(queue @ p))(params)
        return params - grads, loss

    given = jnp.ones((64, 64)), jnp.ones((4096, 64)), jnp.ones((5, 64))
    graph = jscaler.parallelize("single", devices=1)(train).graph(*given)
    spaces = ["zero", s.OpenSpace(s.per_op, mesh=(4,), microbatches=[2])]
    found = jscaler.search(graph, target=CLUSTER, space=spaces, batch="images", confirm=False)
    texts = [one.text for one in found.candidates]
    assert "zero1(batch='images')" in texts
    assert "per_op(mesh=(4,), microbatches=2)" in texts
    assert all("batch='images'" in text for text in texts if "per_op" not in text)
    assert found.chosen is not None
    assert jscaler.cost(graph, found.chosen.text, CLUSTER).seconds.total == found.chosen.seconds
    step = jscaler.parallelize(jscaler.Auto(space=spaces[1], batch="images"), devices=4, cluster=CLUSTER)(train)
    np.testing.assert_allclose(step(*given)[1], train(*given)[1], rtol=1e-5)
    with pytest.raises(UnknownNameError, match="no input named 'pictures'"):
        jscaler.search(graph, target=CLUSTER, space="zero", batch="pictures")


def test_some_layers_run_again_where_memory_has_room_for_the_others() -> None:
    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return (jax.lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]), None), x, params)[0] ** 2).mean()

        value, gradients = jscaler.value_and_grad(loss)(params)
        return params - 0.1 * gradients, value

    shapes = jax.ShapeDtypeStruct((8, 2, 2048, 2048), "float32"), jax.ShapeDtypeStruct((32768, 2048), "float32")
    layers = jscaler.parallelize("single", devices=1)(step).graph(*shapes)
    one = find_cluster("H100-80GB")
    peaks = {n: jscaler.cost(layers, f"recompute_layers(layers={n})", one).memory.peak for n in (2, 4, 6, 8)}
    assert sorted(peaks.values(), reverse=True) == [*peaks.values()]
    space = [s.Space("single"), s.Space("recompute_layers", layers=s.some_layers())]
    for count in (4, 6):
        found = search_graph(layers, one, [space], memory=1.01 * peaks[count])
        assert found.chosen is not None
        assert found.chosen.text == f"recompute_layers(layers={count})"
        assert found.bound <= found.chosen.seconds
        for other in found.candidates:
            assert other.price is not None
            cost = jscaler.cost(layers, other.plan, one)
            assert other.price.seconds == pytest.approx(cost.seconds.total, rel=0.03)
            assert other.price.peak == pytest.approx(cost.memory.peak, rel=0.12)
