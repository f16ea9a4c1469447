"""Loops over micro-batches whose ops lie on several device groups: pipelines, in every sense an expert may write."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from of_the_day import of_the_day

import jscaler
from jscaler import PlanError, Split, TimeSplit
from jscaler.errors import OrderError, VerificationError
from jscaler.lower.block_cuts import cut
from jscaler.lower.flat_program import results
from jscaler.lower.instructions import Run
from jscaler.lower.step_plan import StepPlan
from jscaler.tables import Table
from jscaler.tables.gpipe import gpipe
from jscaler.tables.one_f_one_b import one_f_one_b
from jscaler.verification.segments import check_values

WORDS = WIDTH = 12
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
Groups = Mapping[str, Sequence[int] | Sequence[Sequence[int]]]  # of a scope its group, or its groups by turns


def make_step(layers: int) -> Callable[..., Any]:
    """A language model with a tied table, dropout, a masked loss, clipping, AdamW and a key that is state."""

    def loss_of(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        mask = batch["y"] > 0
        with jax.named_scope("embed"):
            h = params["table"][batch["x"]]
        for i, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer_{i}"):
                h = h + jnp.tanh(h @ layer["w"] + layer["b"])
                h = h * jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, h.shape)
        with jax.named_scope("head"):
            losses = optax.softmax_cross_entropy_with_integer_labels(h @ params["table"].T, batch["y"])
            return jnp.sum(losses * mask) / jnp.sum(mask)

    def step(state: Any, batch: Any, value_and_grad: Any = jscaler.value_and_grad) -> Any:
        params, moments, key = state
        loss, grads = value_and_grad(lambda p: loss_of(p, batch, key))(params)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        state = optax.apply_updates(params, updates), moments, jax.random.fold_in(key, 1)
        return state, {"loss": loss, "norm": optax.tree.norm(grads)}

    return step


def arguments(layers: int, rows: int = 24) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    one = [{"w": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 4), "b": jnp.zeros(WIDTH)} for _ in range(layers)]
    params = {"table": jnp.asarray(rng.normal(size=(WORDS, WIDTH))), "layers": one}
    batch = {name: jnp.asarray(rng.integers(0, WORDS, (rows, 5))) for name in "xy"}
    return (params, OPTIMIZER.init(params), jax.random.key(3)), batch


def on(groups: Groups, microbatches: int, table: Any = None) -> Callable[[Any, np.ndarray], None]:
    """A policy that runs the ops of each scope on a group, in micro-batches, and on each of its devices a part of these."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        rows = graph.factor_of("batch/x", 0) | graph.factor_of("batch/y", 0)
        for scope, group in groups.items():
            places = devices[np.atleast_2d(np.array(group))]  # turns, devices
            turns = places if len(places) == 1 else np.resize(places, (microbatches, places.shape[1]))
            for op in graph.select(f"*{scope}/*", kind="forward"):
                if op in rows:
                    parts = [TimeSplit(rows[op], microbatches, "mb")]
                    parts += [Split(rows[op], places.shape[1])] if places.shape[1] > 1 else []
                    graph.op_assign(graph.op_trans(op, *parts), turns)
        if table is not None:
            graph.schedule(table)

    return policy


def chain_of(stages: int) -> Groups:
    return {"embed": [0], **{f"layer_{i}": [i] for i in range(stages)}, "head": [stages - 1]}


CASES: dict[str, tuple[Groups, int, Any]] = {
    "1f1b": (chain_of(3), 4, None),
    "gpipe": (chain_of(3), 4, "gpipe"),
    "rows on two devices each": ({"embed": [0, 1], "layer_0": [0, 1], "layer_1": [3, 2], "head": [3, 2]}, 3, None),
    "the table on all": ({"embed": [0, 1, 2, 3], "layer_0": [0, 1], "layer_1": [2, 3], "head": [0, 1, 2, 3]}, 3, None),
    "groups of other sizes": ({"embed": [0], "layer_0": [0, 1], "layer_1": [2, 3, 4, 5], "head": [6]}, 2, None),
    "there and back": ({"embed": [0], **{f"layer_{i}": [i % 2] for i in range(4)}, "head": [1]}, 3, None),
    "two directions": (
        {"embed": [[0], [2]], "layer_0": [[0], [2]], "layer_1": [1], "layer_2": [[2], [0]], "head": [[2], [0]]},
        4,
        None,
    ),
    "two directions, two devices each": (
        {"embed": [[0, 1], [2, 3]], "layer_0": [[0, 1], [2, 3]], "layer_1": [[2, 3], [0, 1]], "head": [[2, 3], [0, 1]]},
        2,
        None,
    ),
    "nested": ({"embed": [0, 1, 2, 3], "layer_0": [1, 2], "layer_1": [0, 1, 2, 3], "head": [2]}, 2, None),
}


def layers_in(groups: Groups) -> int:
    return sum(scope.startswith("layer") for scope in groups)


def devices_in(groups: Groups) -> int:
    return int(max(np.max(group) for group in groups.values())) + 1


def planned(groups: Groups, microbatches: int, table: Any = None, rows: int = 24) -> StepPlan:
    layers, devices = layers_in(groups), devices_in(groups)
    step = jscaler.parallelize(on(groups, microbatches, table), devices=devices)(make_step(layers))
    return step.lower(*arguments(layers, rows)).plan


@pytest.mark.one_day_in(2)
@pytest.mark.parametrize("case", of_the_day(CASES, 3))
def test_optimizer_steps_are_those_of_one_device(case: str) -> None:
    groups, microbatches, table = CASES[case]
    layers, devices = layers_in(groups), devices_in(groups)
    with jax.enable_x64(True):
        step = make_step(layers)
        train = jscaler.parallelize(on(groups, microbatches, table), devices=devices)(step)
        state, batch = arguments(layers)
        lowered = train.lower(state, batch)
        assert jscaler.verify(lowered).time_loops >= 1
        run, plain = lowered.compile(), jax.jit(lambda *args: step(*args, value_and_grad=jax.value_and_grad))
        ours = theirs = state
        for _ in range(3):
            (ours, mine), (theirs, true) = run(ours, batch), plain(theirs, batch)
            for one, other in ((ours[:2], theirs[:2]), (mine, true)):
                jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), one, other)


def test_what_goes_over_the_boundaries() -> None:
    """Of a micro-batch the activation and its cotangent; of a step the table, its gradient, a norm, keys and scalars."""
    stages = 3
    plan = planned(chain_of(stages), 4)
    assert plan.spanning is not None
    body = [t for t in plan.transfers if t.phase in plan.spanning.phases]
    assert len(body) == 2 * (stages - 1)
    assert {t.tensor.shape for t in body} == {(6, 5, WIDTH)}
    once = [t.tensor for t in plan.transfers if t.phase not in plan.spanning.phases]
    tables = [t.name for t in once if t.shape == (WORDS, WIDTH)]
    assert sorted(tables) == ["d(state/0/table)@2", "state/0/table"], "the table once, its gradient once, behind the loop"
    assert all(not t.shape for t in once if t.name not in tables)
    norms = [t.name for t in once if "@sum" in t.name]
    assert len(norms) == 2 * (stages - 1), "of each of two norms one scalar per group"
    assert not any("cut" in t.name or "index" in t.name for t in once)


def test_blocks_and_equations_do_not_grow_with_micro_batches() -> None:
    def size(microbatches: int) -> tuple[int, int, int]:
        plan = planned(chain_of(3), microbatches, rows=64)
        items = sum(len(block.flat.items) for block in plan.blocks)
        return len(plan.blocks), items, sum(isinstance(s, Run) for s in plan.instructions.steps)

    few, many = size(4), size(16)
    assert few[:2] == many[:2]
    assert many[2] - few[2] == 12 * 5, "five blocks for each micro-batch more"


@pytest.mark.parametrize(("table", "most"), [("1f1b", lambda s: 3 - s), ("gpipe", lambda _: 6)])
def test_few_micro_batches_are_live(table: str, most: Callable[[int], int]) -> None:
    """As instructions free their slots: a stage holds at most as many micro-batches as its schedule says."""
    plan = planned(chain_of(3), 6, table)
    assert plan.spanning is not None
    for stage, group in enumerate(plan.completed.groups):
        blocks = [i for i, b in enumerate(plan.blocks) if b.phase in plan.spanning.phases and b.group == group]
        if len(blocks) < 2:
            continue
        first, last = min(blocks, key=lambda i: plan.blocks[i].level), max(blocks, key=lambda i: plan.blocks[i].level)
        own = set(plan.blocks[first].exports) & set(plan.blocks[last].imports)
        live = peak = 0
        held: set[int] = set()
        for step in plan.instructions.steps:
            if isinstance(step, Run) and step.block == first:
                numbers = (*plan.blocks[first].results, *plan.blocks[first].exports)
                held |= {slot for slot, number in zip(step.writes, numbers, strict=True) if number in own}
                live += 1
                peak = max(peak, live)
            if isinstance(step, Run) and step.block == last:
                assert held & set(step.freed), "what a micro-batch kept goes with its backward"
                live -= 1
        assert peak == most(stage)


@pytest.mark.one_day_in(3)
def test_a_chain_without_a_table_runs_one_forward_one_backward() -> None:
    for stages, microbatches in itertools.product((2, 3), (2, 4)):
        assert planned(chain_of(stages), microbatches).instructions.table == one_f_one_b(stages, microbatches)
    assert planned(chain_of(2), 4, "gpipe").instructions.table == gpipe(2, 4)


def test_a_stage_keeps_what_cannot_be_made_again_cheaply() -> None:
    """Between forward and backward of a stage: its input, of the tanh one tensor, and the mask in one byte."""
    plan = planned(chain_of(3), 4)
    assert plan.spanning is not None
    body = [b for b in plan.blocks if b.phase in plan.spanning.phases and b.group.devices == (1,)]
    forward, backward = sorted(body, key=lambda block: block.level)
    kept = [v.aval for v, layout in zip(forward.flat.outputs, forward.outputs, strict=True) if layout is None]  # type: ignore[union-attr]
    assert sorted(str(a.dtype) for a in kept) == ["bool", "float32"]  # type: ignore[attr-defined]
    dots = [e for e in backward.flat.equations if e.primitive.name == "dot_general"]
    assert len(dots) == 2, "the gradients of operand and weight, and no forward product again"


def test_orders_that_cannot_be() -> None:
    stuck = "0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0"
    with pytest.raises(OrderError, match=r"blocks wait for each other: 0B0 \(.*next on devices \[0\], waits for 1F0\+1B0"):
        planned(chain_of(2), 2, stuck)
    with pytest.raises(PlanError, match=r"row 1 of the table, that of devices \[1\], lacks '1B1'"):
        planned(chain_of(2), 2, "0F0 0B0 0F1 0B1\n1F0 1B0 1F1")
    with pytest.raises(PlanError, match="the table has 3 rows, and the loop's ops lie on 2 device groups"):
        planned(chain_of(2), 2, str(gpipe(3, 2)))
    backwards = "0F1 0F0 0B1 0B0\n1F1 1B1 1F0 1B0"
    assert planned(chain_of(2), 2, backwards).instructions.table == Table.parse(backwards)


@pytest.mark.one_day_in(2)
def test_orders_of_single_parts() -> None:
    """(op, micro-batch) pairs: the second micro-batch first, forward and backward, and what cannot be."""

    def with_orders(*pairs: Any) -> StepPlan:
        def policy(graph: Any, devices: np.ndarray) -> None:
            on(chain_of(2), 2)(graph, devices)
            for before, after in pairs:
                graph.op_order(before, after)

        return jscaler.parallelize(policy, devices=2)(make_step(2)).lower(*arguments(2)).plan

    forward, backward = "layer_0/dot", "layer_0/dot@backward"
    table = with_orders(((forward, 1), (forward, 0))).instructions.table
    assert table is not None
    cells = [str(cell) for cell in table.rows[0]]
    assert cells.index("0F1") < cells.index("0F0")
    table = with_orders(((backward, 1), (backward, 0))).instructions.table
    assert table is not None
    cells = [str(cell) for cell in table.rows[0]]
    assert cells.index("0B1") < cells.index("0B0")
    with pytest.raises(OrderError, match="blocks wait for each other"):
        with_orders(((backward, 0), (forward, 0)))
    with pytest.raises(PlanError, match=r"part 2 of 'layer_0/dot' is to be ordered"):
        with_orders(((forward, 2), (forward, 0)))
    with pytest.raises(PlanError, match="name a part of both ops"):
        with_orders(((forward, 1), "layer_1/dot"))


def test_two_loops_over_groups() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        del devices
        rows = graph.factor_of("batch/x", 0) | graph.factor_of("batch/y", 0)
        for scope, (name, group) in {
            "layer_0": ("a", 0),
            "layer_1": ("a", 1),
            "layer_2": ("b", 0),
            "head": ("b", 1),
        }.items():
            for op in graph.select(f"*{scope}/*", kind="forward"):
                if op in rows:
                    graph.op_assign(graph.op_trans(op, TimeSplit(rows[op], 2, name)), group)

    with pytest.raises(PlanError, match=r"two loops have ops on several device groups, 'a@.*' and '.*': one loop"):
        jscaler.parallelize(policy, devices=2)(make_step(3)).lower(*arguments(3))


def test_a_carry_in_another_layout_is_noticed() -> None:
    plan = planned(CASES["rows on two devices each"][0], 3)
    assert plan.spanning is not None
    first, second, *rest = plan.spanning.carries
    swapped = dataclasses.replace(first, out=second.out), dataclasses.replace(second, out=first.out)
    wrong = dataclasses.replace(plan.spanning, carries=(*swapped, *rest))
    with pytest.raises(VerificationError, match="carried in another layout than it is left in"):
        check_values(dataclasses.replace(plan, spanning=wrong))


def test_a_step_leaves_nothing_behind() -> None:
    train = jscaler.parallelize(on(chain_of(2), 4), devices=2, donate_argnames="state")(make_step(2))
    state, batch = arguments(2)
    counts = []
    for _ in range(6):
        state, metrics = train(state, batch)
        jax.block_until_ready((state, metrics))
        counts.append(len(jax.live_arrays()))
    assert len(set(counts[2:])) == 1, counts


def test_every_equation_runs_in_one_block_or_is_made_again_cheaply() -> None:
    plan = planned(chain_of(3), 4)
    for segment in plan.segments:
        known = {v for item in segment.flat.items for v in results(item)}
        blocks, _ = cut(segment.program, segment.flat, plan.instructions.slots)  # before passes rewrite each block
        made = [v for block in blocks for item in block.flat.items for v in results(item)]
        assert len(made) == len(set(made))
        assert set(made) >= known
