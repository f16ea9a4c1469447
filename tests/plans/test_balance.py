"""Where a row is cut into stages: against every other choice of cuts, with what goes across counted naively."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from of_the_day import drawn
from plans.rows import Loss, draw_row, planner_of, row_of, shape, units_of

from jscaler import PlanError
from jscaler.clusters.device import find_kind
from jscaler.ir import Nest, Op, PTensor
from jscaler.ir.loop import made_by, reads_of
from jscaler.plans.balance import EVEN, LITTLE, UNEVEN, Unit, balanced, bottleneck
from jscaler.plans.chunk_cuts import FILL, StageOrder, cuts_of_chunks, shares_of, step_time
from jscaler.plans.stage_groups import BALANCED_FOR
from jscaler.primitives import Planner
from jscaler.tables import Published, find_schedule
from jscaler.tables.published import in_a_v
from jscaler.xla_model.work import work_of

Cuts = Sequence[int]


# -- the dynamic programme by itself


@given(st.integers(0, 2**32 - 1))
@drawn(400, one_in=2)
def test_the_slowest_stage_is_as_fast_as_any_choice_of_places_makes_it(seed: int) -> None:
    """No stage may be without work; of cuts that are as fast, those with the fewest stages of little work, then bytes."""
    rng = np.random.default_rng(seed)
    seconds, nbytes, stages = rng.integers(0, 5, 7), rng.integers(0, 9, 7).tolist(), int(rng.integers(2, 5))
    sums = np.concatenate([[0], np.cumsum(seconds)]).astype(float)
    places = sorted(rng.choice(range(1, 7), int(rng.integers(1, 7)), replace=False).tolist())

    def cost(cuts: Cuts) -> tuple[float, int, int]:
        shares = [sums[stop] - sums[start] for start, stop in itertools.pairwise([0, *cuts, 7])]
        little = sum(share < LITTLE * sums[-1] / stages for share in shares)
        return (max(shares), little, sum(nbytes[i] for i in cuts)) if min(shares[1:]) > 0 else (np.inf, 0, 0)

    best = min((cost(cuts) for cuts in itertools.combinations(places, stages - 1)), default=(np.inf, 0, 0))
    cuts = bottleneck(sums, places, nbytes, stages)
    assert (cuts is None) == (best[0] == np.inf)
    if cuts is not None:
        assert set(cuts) <= set(places)
        assert cost(cuts) == best


@given(st.integers(0, 2**32 - 1), st.sampled_from([in_a_v(2, 2), in_a_v(3, 2), [0, 1] * 2, [0, 1, 2] * 2, [0, 1] * 3]))
@drawn(400, one_in=2)
def test_with_several_stages_the_slowest_group_is_as_fast_as_any_choice_of_places_makes_it(
    seed: int, groups: list[int]
) -> None:
    """A group does all of its stages, and the slowest stage counts where the pipeline fills; then as above."""
    rng = np.random.default_rng(seed)
    units, stages = len(groups) + 3, len(groups)
    seconds, nbytes = rng.integers(1, 6, units), rng.integers(0, 9, units).tolist()
    sums = np.concatenate([[0], np.cumsum(seconds)]).astype(float)
    places = range(1, units)
    little = LITTLE * sums[-1] / stages

    def cost(cuts: Cuts) -> tuple[float, int, int]:
        shares = [sums[stop] - sums[start] for start, stop in itertools.pairwise([0, *cuts, units])]
        loads = [sum(share for share, own in zip(shares, groups, strict=True) if own == group) for group in set(groups)]
        few = sum(share < little for share in shares)
        return round(max(loads) + FILL * max(shares), 6), few, sum(nbytes[i] for i in cuts)

    start = bottleneck(sums, places, nbytes, stages)
    assert start is not None
    cuts, *_ = cuts_of_chunks(sums, places, nbytes, groups, start, little)
    assert cost(cuts) == min(map(cost, itertools.combinations(places, stages - 1)))


@pytest.mark.parametrize("groups", [in_a_v(4, 2), in_a_v(8, 2), [*range(4)] * 2, [*range(8)] * 2, [*range(4)] * 4])
def test_groups_with_several_stages_are_even_though_the_ends_are_heavy(groups: list[int]) -> None:
    """Layers in halves, an end in front, and logits behind that take as long as a layer: nearly as even as it can be."""
    stages, per_group = len(groups), 6
    layers = per_group * len(set(groups))
    seconds = [0.1, *[0.6, 0.4] * layers, 0.9]
    sums, nbytes = np.concatenate([[0.0], np.cumsum(seconds)]), [0, *[1] * len(seconds)]
    places = range(1, len(seconds))
    start = bottleneck(sums, places, nbytes, stages)
    assert start is not None
    shares = shares_of(sums, cuts_of_chunks(sums, places, nbytes, groups, start, 0.0)[0])
    loads = [sum(share for share, own in zip(shares, groups, strict=True) if own == group) for group in set(groups)]
    assert max(loads) <= sums[-1] / len(loads) + 0.4, "no more than the smaller half of a layer above the mean"
    assert step_time(shares, groups) <= step_time(shares_of(sums, start), groups)


@pytest.mark.parametrize("name", ["interleaved", "breadth_first", "zb_v", "search"])
def test_cuts_are_those_with_which_the_schedule_is_fastest(name: str) -> None:
    """Logits as long as two layers: interleaved stages are even group by group, and breadth-first ones stage by stage.

    Where the order is still to be searched, what counts is the slowest group.
    """
    loss, params = row_of([256] * 12 + [512], [])
    graph, schedule = planner_of(loss, params, shape(1 << 14, 256)), find_schedule(name)
    assert isinstance(schedule, Published)
    table = None if schedule.searched else schedule.table(2, 8, 2)
    row, order = Row(graph, 4), StageOrder.of(schedule.lies(2, 2), table)
    assert bool(order.turns) == (name != "search")
    found, slowest_first = (order.seconds(row.shares(balanced(graph, row.units, 4, set(), own))) for own in (order, None))
    assert found <= slowest_first, "cuts that make the slowest stage fastest"
    assert found <= 1.02 * min(order.seconds(row.shares(cuts)) for cuts in row.every())


@pytest.mark.parametrize(("layers", "stages"), [(5, 4), (6, 4), (7, 4), (5, 3), (6, 5), (9, 4)])
@pytest.mark.parametrize("ends", [False, True])
def test_equal_layers_lie_as_equally_as_they_divide(layers: int, stages: int, ends: bool) -> None:
    """A layer is a product and something small; behind the last a loss, in front of whose last op four bytes go across."""
    for product in (0.1, 0.7, 1 / 3):
        head = [0.5 * product, 0.3 * product] if ends else []
        seconds = [*head[:1], *[product, 0.1 * product] * layers, *head, 0.05 * product, 1e-4]
        nbytes = [0, *[1024] * (len(seconds) - 2), 4]
        sums = np.concatenate([[0.0], np.cumsum(seconds)])
        cuts = bottleneck(sums, range(1, len(seconds)), nbytes, stages)
        assert cuts is not None
        products = [seconds[a:b].count(product) for a, b in itertools.pairwise([0, *cuts, len(seconds)])]
        assert max(products) - min(products) == 1, products
        assert min(products) > 0


# -- rows of ops


@dataclasses.dataclass
class Row:
    """The units of a forward pass, with what they take and what goes across worked out op by op."""

    graph: Planner
    stages: int

    def __post_init__(self) -> None:
        self.units = units_of(self.graph)
        self.seconds = [sum(self.of_op(op) for op in unit.ops) for unit in self.units]

    def of_op(self, op: Op) -> float:
        """Its seconds, and those of its gradients: a product has as large a one for each operand that is differentiated."""
        if op.body is None:
            return 0.0
        work = work_of(op.body.jaxpr)
        operands = 2 if work.flops else 1  # also of an op that adds its product to something
        gradients = min(len(op.backward.gradients), operands) if op.backward is not None else 0
        return work.seconds(find_kind(BALANCED_FOR).at_peaks()) * (1 + gradients)

    def across(self, place: int) -> list[PTensor]:
        """What is made in front of a place and read behind it."""
        before = {t for unit in self.units[:place] for t in made_by(unit.item)}
        behind = {t for unit in self.units[place:] for t in reads_of(unit.item)}
        return sorted(before & behind, key=lambda t: t.name)

    def most_across(self, cuts: Cuts) -> int:
        return max(len(self.across(place)) for place in cuts)

    def largest(self, cuts: Cuts) -> int:
        return max(self.nbytes([place]) for place in cuts)

    def slowest(self, cuts: Cuts) -> float:
        return max(self.shares(cuts))

    def shares(self, cuts: Cuts) -> list[float]:
        return [sum(self.seconds[a:b]) for a, b in itertools.pairwise([0, *cuts, len(self.units)])]

    def nbytes(self, cuts: Cuts) -> int:
        return sum(t.nbytes for place in cuts for t in self.across(place))

    def every(self) -> list[tuple[int, ...]]:
        """All cuts that leave no stage without work."""
        choices = itertools.combinations(range(1, len(self.units)), self.stages - 1)
        return [cuts for cuts in choices if min(self.shares(cuts)) > 0]

    def cuts(self) -> tuple[int, ...]:
        return tuple(balanced(self.graph, self.units, self.stages, set()))


@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
@drawn(120, one_in=2)
def test_few_tensors_go_across_and_the_slowest_stage_is_fast(seed: int, stages: int) -> None:
    """Compared with all other cuts: none with as few tensors across, and as small ones, is faster, and none much faster."""
    row = Row(planner_of(*draw_row(seed)), stages)
    every = row.every()
    if not every:
        with pytest.raises(
            PlanError, match=f"{len(row.units)} ops, layers and loops in a row, too few for {stages} stages"
        ):
            row.cuts()
        return
    cuts = row.cuts()
    assert cuts in every
    tolerance = 1 + 1e-9
    for other in every:
        if row.most_across(other) <= row.most_across(cuts) and row.largest(other) <= row.largest(cuts):
            assert row.slowest(cuts) <= row.slowest(other) * tolerance, f"{other} is faster than {cuts}, with as few across"
            if stages == 2 and row.slowest(other) == row.slowest(cuts):
                assert row.nbytes(cuts) <= row.nbytes(other)
        assert row.slowest(cuts) <= row.slowest(other) * UNEVEN * tolerance, f"{other} is much faster than {cuts}"


def test_more_go_across_only_where_that_is_much_faster() -> None:
    """A sum leaps over all layers but the first: behind that layer one tensor goes across, and further on two."""
    for layers, wanted in ((4, 1), (8, 2)):
        loss, params = row_of([512] * (layers + 1), [(1, layers)])
        row = Row(planner_of(loss, params, shape(4096, 512)), 2)
        (cut,) = row.cuts()
        assert len(row.across(cut)) == wanted
        least = min(row.slowest(other) for other in row.every())
        fewest = min(row.slowest(other) for other in row.every() if row.most_across(other) == 1)
        assert (fewest > least * UNEVEN) == (wanted == 2)


def test_what_all_layers_read_alike_counts_nowhere() -> None:
    """An encoder's result goes across all stages of a decoder, wherever that is cut."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params["encoder"]:
            x = jnp.tanh(x @ w)
        h = jnp.sin(x)
        for w, v in params["decoder"]:
            h = jnp.tanh(h @ w + x) @ v
        return h.sum()

    params = {"encoder": [shape(512, 512)] * 3, "decoder": [(shape(512, 512), shape(512, 512))] * 4}
    row = Row(planner_of(loss, params, shape(4096, 512)), 2)
    fewest = min(row.slowest(cuts) for cuts in row.every() if row.most_across(cuts) == 1)
    cuts = row.cuts()
    assert len(row.across(*cuts)) == 2
    assert row.slowest(cuts) < fewest < min(map(row.slowest, row.every())) * UNEVEN, "else the cut would be there anyhow"


def test_what_every_stage_can_make_counts_nowhere() -> None:
    """What is ``known`` to all does not go across."""
    loss, params = row_of([512] * 6, [(2, 5)])
    row = Row(planner_of(loss, params, shape(4096, 512)), 2)
    (leaping,) = {*row.across(3)} & {*row.across(4)}
    balanced_cut = min(row.every(), key=row.slowest)
    assert tuple(balanced(row.graph, row.units, 2, set())) != balanced_cut
    assert tuple(balanced(row.graph, row.units, 2, {leaping})) == balanced_cut


# -- loops over layers


def stack_and_head(layers: int, width: int, head: int) -> tuple[Loss, Any, Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])[0]
        return jnp.tanh(x @ params["head"]).sum()

    return loss, {"layers": shape(layers, width, width), "head": shape(width, head)}, shape(1024, width)


def sizes_of(units: Sequence[Unit], cuts: Cuts) -> list[int]:
    """How many layers of the loop each stage has."""
    bounds = itertools.pairwise([0, *cuts, len(units)])
    return [sum(unit.of > 1 for unit in units[start:stop]) for start, stop in bounds]


@given(st.integers(4, 9), st.integers(2, 4), st.sampled_from([64, 512, 2048, 4096]))
@drawn(60, one_in=2)
def test_layers_lie_in_equal_ranges_where_that_costs_little(layers: int, stages: int, head: int) -> None:
    row = Row(planner_of(*stack_and_head(layers, 512, head)), stages)
    assert sum(isinstance(unit.item, Nest) for unit in row.units) == layers
    cuts = row.cuts()
    sizes = sizes_of(row.units, cuts)
    least, more = divmod(layers, stages)
    even = [least + (stage < more) for stage in range(stages)]
    best = min(map(row.slowest, row.every()))
    (even_cuts,) = (other for other in row.every() if sizes_of(row.units, other) == even and max(other) < layers)
    most = best * EVEN * (1 + 1e-9)
    if row.slowest(even_cuts) <= most:
        assert sizes == even, "the first ranges have one more"
    elif len(set(filter(None, sizes))) == 1:
        assert row.slowest(cuts) <= most, "ranges on fewer stages, which are equal"
    else:
        assert row.slowest(cuts) <= best * (1 + 1e-9)


def test_large_tensors_cross_only_where_a_step_would_else_take_half_as_long_again() -> None:
    """Logits are 32 times what goes from layer to layer: the loss stays with them, unless it is most of the work."""

    def loss(params: Any, x: jax.Array, passes: int) -> jax.Array:
        for w in params:
            x = x @ w
        for number in range(passes):
            with jax.named_scope(f"loss_{number}"):
                x = jnp.sin(x)
        return x.sum()

    seen = set()
    for passes in (0, 1, 2, 4, 8):
        own = functools.partial(loss, passes=passes)
        row = Row(planner_of(own, [shape(64, 64)] * 12 + [shape(64, 2048)], shape(512, 64)), 2)
        small = [cuts for cuts in row.every() if row.largest(cuts) == row.largest((1,))]
        slow = min(map(row.slowest, small)) / min(map(row.slowest, row.every()))
        assert (row.largest(row.cuts()) == row.largest((1,))) == (slow <= UNEVEN)
        seen.add((slow > 1 + 1e-9, slow > UNEVEN))
    assert seen == {(False, False), (True, False), (True, True)}
