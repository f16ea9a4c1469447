"""Which ops, inputs and updates lie in which stage: found in the dataflow of models whose names say nothing."""

import itertools
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from of_the_day import drawn
from plans.rows import Loss, draw_row, planner_of, row_of, shape, units_of

import jscaler
from jscaler import PlanError, UnknownNameError
from jscaler.ir import Op
from jscaler.ir.name import layers_of, without
from jscaler.plans.balance import balanced
from jscaler.plans.find_stages import find_stages, passes_of, stages_of_all, taken_apart
from jscaler.primitives import Planner


def forward_ops(graph: Planner) -> list[Op]:
    return [op for op in graph.ops if op.kind == "forward"]


@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
@drawn(80, one_in=2)
def test_stages_are_ranges_of_the_forward_pass(seed: int, stages: int) -> None:
    """Every forward op has a stage, which never goes back, and every stage has ops; asked again, they are the same."""
    model = draw_row(seed)
    graph = planner_of(*model)
    try:
        stage_of = find_stages(graph, stages)
    except PlanError:
        return  # too few ops with work: `test_balance` says when
    ops = forward_ops(graph)
    assert list(stage_of) == [op.path for op in ops]
    numbers = list(stage_of.values())
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(stages))
    assert find_stages(planner_of(*model), stages) == stage_of


@given(st.integers(0, 2**32 - 1))
@drawn(60, one_in=2)
def test_parameters_and_updates_lie_where_the_parameter_is_read_first(seed: int) -> None:
    """The updates too; the batch lies where it is read, which is the first stage."""
    graph = planner_of(*draw_row(seed))
    try:
        stage_of = find_stages(graph, 2)
    except PlanError:
        return
    stage_of_all = stages_of_all(graph, stage_of, "batch")
    for leaf in graph.inputs:
        readers = [stage_of[op.path] for op in graph.consumers[leaf] if op.path in stage_of]
        assert stage_of_all[leaf.name] == min(readers), leaf.name
        for op in graph.consumers[leaf]:
            if op.kind == "update":
                assert stage_of_all[op.path] == stage_of_all[leaf.name], op.path
    assert {op.path for op in graph.ops if op.kind == "update"} <= stage_of_all.keys()
    assert {path for path in stage_of_all if path in graph.by_path and graph[path].kind == "backward"} == set()


def test_a_parameter_of_two_stages_is_the_first_one_s() -> None:
    """So is what is added to it, and a moment of the optimizer, which nothing but updates reads."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ params["tied"])
        h = jnp.tanh(h @ params["w"])
        return (h @ params["tied"].T).sum()

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, grads = jscaler.value_and_grad(loss)(params, batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return (jax.tree.map(lambda p, m: p - m, params, moments), moments), value

    params = {"tied": shape(512, 512), "w": shape(512, 512)}
    state = params, params
    graph = Planner(jscaler.parallelize("single", devices=1)(step).graph(state, shape(512, 512)), 3)
    stage_of = find_stages(graph, 3)
    readers = [stage_of[op.path] for op in graph.consumers[graph.input("state/0/tied")] if op.path in stage_of]
    assert sorted(readers) == [0, 2]
    stage_of_all = stages_of_all(graph, stage_of, "batch")
    leaves = {name.removeprefix("state/"): stage_of_all[name] for name in stage_of_all if name.startswith("state/")}
    assert leaves == {"0/tied": 0, "0/w": 1, "1/tied": 0, "1/w": 1}
    updates = {
        path: stage for path, stage in stage_of_all.items() if path in graph.by_path and graph[path].kind == "update"
    }
    assert {stage for path, stage in updates.items() if "tied" in path} == {0}
    assert {stage for path, stage in updates.items() if "/w" in path} == {1}


def test_what_is_made_of_the_batch_alone_has_no_stage() -> None:
    """A mask that the last layer reads: any stage can make it. A product of the batch is work, and lies in a stage."""

    def loss(params: Any, batch: Any) -> jax.Array:
        mask = batch["y"] > 0
        spread = batch["x"] @ batch["x"].T
        h = batch["x"]
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.where(mask, h, 0).sum() + spread.sum()

    batch = {"x": shape(512, 64), "y": shape(512, 64)}
    graph = planner_of(loss, [shape(64, 64)] * 3, batch)
    stage_of = find_stages(graph, 2)
    left = [op.path for op in forward_ops(graph) if op.path not in stage_of]
    assert left
    reached = {t for t in graph.inputs if t.name.startswith("batch")}
    for op in forward_ops(graph):
        if op.path in left:
            assert set(op.inputs) <= reached, f"{op.path} reads what is trained"
            reached |= set(op.outputs)
    product = next(op for op in forward_ops(graph) if op.name == "dot" and "batch/x" in {t.name for t in op.inputs})
    assert product.path in stage_of


def test_what_is_made_of_parameters_alone_lies_with_its_first_reader() -> None:
    """A cast, though it is written in front of all layers; the first layer's kernel is the last one's, too."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        narrow = [w.astype("bfloat16") * 2 for w in params]
        h = x.astype("bfloat16")
        for w in (*narrow, narrow[0]):
            h = jnp.tanh(h @ w)
        return h.astype("float32").sum()

    graph = planner_of(loss, [shape(256, 256)] * 4, shape(512, 256))
    stage_of = find_stages(graph, 2)
    assert {stage_of[path] for path in stage_of if "/dot" in path} == {0, 1}
    for leaf in (t for t in graph.inputs if t.name.startswith("state")):
        casts = [op for op in graph.consumers[leaf] if op.kind == "forward" and op.inputs == (leaf,)]
        assert casts
        for cast in casts:
            readers = [stage_of[op.path] for op in graph.consumers[cast.outputs[0]] if op.kind == "forward"]
            assert stage_of[cast.path] == min(readers)
            assert (len(set(readers)) == 2) == (leaf.name == "state/0")


# -- loops over layers


def stack(params: Any, x: jax.Array) -> jax.Array:
    x = jnp.tanh(x @ params["first"])
    x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])[0]
    return (x @ params["last"]).sum()


def stack_of(layers: int) -> tuple[Loss, Any, Any]:
    square = shape(64, 64)
    return stack, {"first": square, "layers": shape(layers, 64, 64), "last": square}, shape(32, 64)


def ranges(stage_of: dict[str, int]) -> dict[tuple[int, int], set[int]]:
    """The ranges of layers, and the stages of the ops of each."""
    stages_by_range: dict[tuple[int, int], set[int]] = {}
    for path, stage in stage_of.items():
        bounds = layers_of(path)
        if bounds is not None:
            stages_by_range.setdefault(bounds, set()).add(stage)
    return stages_by_range


@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (5, 2), (7, 3), (8, 4), (9, 4)])
def test_every_layer_of_a_loop_lies_in_one_stage(layers: int, stages: int) -> None:
    graph = planner_of(*stack_of(layers))
    stage_of = find_stages(graph, stages)
    by_range = ranges(stage_of)
    assert [bounds for bounds, _ in sorted(by_range.items())] == [
        *itertools.pairwise([start for start, _ in sorted(by_range)] + [layers])
    ]
    assert [stages_of for _, stages_of in sorted(by_range.items())] == [{stage} for stage in range(stages)]
    source = {without(path, "layers") for path in stage_of}
    assert source == {op.path for op in planner_of(*stack_of(layers)).ops if op.kind == "forward"}
    around = [stage for path, stage in stage_of.items() if layers_of(path) is None]
    assert around == sorted(around)
    assert set(around) == {0, stages - 1}


@pytest.mark.parametrize("reverse", [False, True])
def test_ranges_are_as_many_layers_as_asked_for(reverse: bool) -> None:
    """The last layers come first in a loop that runs backwards, so that the first stage has these."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params, reverse=reverse)[0].sum()

    graph = planner_of(loss, shape(7, 8, 8), shape(4, 8))
    by_range = ranges(find_stages(graph, 3, layers=[1, 4, 2]))
    forward = {(0, 1): {0}, (1, 5): {1}, (5, 7): {2}}
    assert by_range == (
        {(7 - stop, 7 - start): numbers for (start, stop), numbers in forward.items()} if reverse else forward
    )


@pytest.mark.parametrize("layers", [[2, 2, 2], [1, 2, 3]])
def test_a_stack_lies_in_the_ranges_of_its_stages(layers: Sequence[int]) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0].sum()

    graph = planner_of(loss, shape(6, 8, 8), shape(4, 8))
    stage_of = find_stages(graph, 3, layers=layers)
    stage_of_all = stages_of_all(graph, stage_of, "batch")
    parts = [t.name for t in graph.inputs if t.name.startswith("state")]
    assert [graph.input(name).shape[0] for name in parts] == layers
    assert [stage_of_all.get(name) for name in parts] == [0, 1, 2]
    assert not taken_apart(graph, "batch")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"layers": [2, 2]},
            r"layers=\[2, 2\] are 4 layers of one loop on 2 stages; there are 3 stages, and loops .* with 6",
        ),
        ({"layers": [2, 2, 3]}, r"are 7 layers of one loop on 3 stages"),
        ({"layers": [0, 3, 3]}, r"each stage has one or more"),
        ({"layers": [2, 2, 2], "at": ["loss"]}, r"at= is not given"),
        ({"at": ["first", "last", "last"]}, r"begin at 2 modules behind the first, and at= names 3"),
        ({"passes": 3, "layers": [2, 2, 2]}, r"what it reads again|over its own output"),
    ],
)
def test_cuts_that_cannot_be_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        find_stages(planner_of(*stack_of(6)), 3 if "passes" not in given else 6, **given)


# -- where it is said where stages begin


def modules(params: Any, x: jax.Array) -> jax.Array:
    for name in ("a", "b", "c", "d"):
        with jax.named_scope(name):
            x = jnp.tanh(x @ params[name])
    return x.sum()


def module_params() -> Any:
    return dict.fromkeys("abcd", shape(8, 8))


def test_stages_begin_at_the_modules_that_are_named() -> None:
    graph = planner_of(modules, module_params(), shape(4, 8))
    stage_of = find_stages(graph, 3, at=["b", "[dx]"])
    by_module = {path.split("/")[0]: stage for path, stage in stage_of.items() if path[0] in "abcd"}
    assert by_module == {"a": 0, "b": 1, "c": 1, "d": 2}
    with pytest.raises(UnknownNameError, match="no module named 'e'"):
        find_stages(planner_of(modules, module_params(), shape(4, 8)), 2, at=["e"])
    for at in (["c", "b"], ["b", "b"], ["a", "b"]):
        with pytest.raises(PlanError, match="do not follow each other in the model; a stage is empty"):
            find_stages(planner_of(modules, module_params(), shape(4, 8)), 3, at=at)


def test_it_is_balanced_where_it_is_not_said() -> None:
    """The cuts are those of `balanced` on the units."""
    loss, params = row_of([64, 512, 512, 64, 64])
    graph = planner_of(loss, params, shape(256, 64))
    stage_of = find_stages(graph, 3)
    cuts = balanced(graph, units_of(graph), 3, set())
    assert list(stage_of.values()) == [sum(i >= cut for cut in cuts) for i in range(len(stage_of))]


# -- models that go over their own output


def again(times: int) -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = x
        for _ in range(times):
            for w in params:
                h = jnp.tanh(h @ w)
        return h.sum()

    return loss


@pytest.mark.parametrize("times", [1, 2, 3])
def test_passes_are_counted_and_lie_on_the_same_groups(times: int) -> None:
    graph = planner_of(again(times), [shape(64, 64)] * 4, shape(32, 64))
    assert passes_of(graph) == times
    stage_of = find_stages(graph, 2 * times, passes=2)
    products = [stage for path, stage in stage_of.items() if "dot" in path]
    assert products == [
        stage for number in range(times) for stage in (2 * number, 2 * number, 2 * number + 1, 2 * number + 1)
    ]
    for other in {1, 2, 3} - {times}:
        with pytest.raises(PlanError, match=f"over its own output, and the schedule {other}; give chunks={times}"):
            find_stages(planner_of(again(times), [shape(64, 64)] * 4, shape(32, 64)), 2 * other, passes=2)


def test_what_most_parameters_are_read_for_is_a_pass() -> None:
    """A head is read once."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in 2 * params["layers"]:
            x = jnp.tanh(x @ w)
        return (x @ params["head"]).sum()

    graph = planner_of(loss, {"layers": [shape(8, 8)] * 4, "head": shape(8, 8)}, shape(4, 8))
    assert passes_of(graph) == 2


def test_ends_need_a_table_of_words() -> None:
    graph = planner_of(again(1), [shape(64, 64)] * 4, shape(32, 64))
    with pytest.raises(PlanError, match=r"no such ends \(tables of words: state/0\)"):
        find_stages(graph, 3, words=[(graph.input("state/0"), 0)])
