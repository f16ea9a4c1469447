"""Cells in time that are unequal, or ordered one by one: numbers, order in the scheduled program, temporaries."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from of_the_day import of_the_day
from plans.plan_steps import assert_same_numbers, gpt
from scheduled import Schedule

import jscaler
from jscaler import Replicate, Split, TimeSplit
from jscaler.errors import OrderError, PlanError
from jscaler.report.targets import described_devices
from jscaler.runtime.target import WITHOUT_GPU

Plan = Callable[[Any, np.ndarray], None]


def step(params: dict[str, jax.Array], x: jax.Array) -> Any:
    """Two independent branches of two products each: of the batch, and of the rows of a table."""

    def loss(p: dict[str, jax.Array]) -> jax.Array:
        with jax.named_scope("a"):
            left = jnp.exp(jnp.sin(x @ p["w"])) @ p["v"]
        with jax.named_scope("b"):
            right = jnp.exp(jnp.cos(x @ p["u"])) @ p["v"]
        return (left * right).sum()

    value, gradients = jscaler.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value


def arguments(rows: int = 8, width: int = 4) -> tuple[dict[str, jax.Array], jax.Array]:
    draws = np.random.default_rng(0)
    shapes = {"w": (width, 2 * width), "u": (width, 2 * width), "v": (2 * width, width)}
    params = {n: jnp.asarray(draws.normal(size=s) / 2) for n, s in shapes.items()}
    return params, jnp.asarray(draws.normal(size=(rows, width)))


def in_time(algorithm: Any, orders: Callable[[dict[str, Any]], list[tuple[Any, Any]]] = lambda parts: []) -> Plan:
    """The products in parts of the batch, on one device; ``orders`` are pairs of their cells."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        rows = graph.factor_of("x", 0)
        parts = {}
        for op in graph.forward():
            if op in rows and "dot" in op.path:
                how = algorithm(rows[op], graph.rule(op).factors[rows[op]].size // 8)
                parts[op.path] = graph.op_trans(op, how)
                if not isinstance(how, TimeSplit):
                    graph.op_assign(parts[op.path], [0] * parts[op.path].shape[0])
        for first, second in orders(parts):
            graph.op_order(first, second)

    return policy


def sized(factor: str, eighth: int) -> Split:
    return Split(factor, sizes=(5 * eighth, 3 * eighth))


def timed(factor: str, eighth: int) -> TimeSplit:
    return TimeSplit(factor, sizes=(3 * eighth, 4 * eighth, eighth))


def halves(factor: str, eighth: int) -> TimeSplit:
    return TimeSplit(factor, 2)


PLANS: dict[str, tuple[Plan, str]] = {  # and the order in which forward products run
    "unequal cells on one device": (in_time(sized), "a0 a1 b0 b1"),
    "unequal time": (in_time(timed), "a0 a1 a2 b0 b1 b2"),
    "reversed": (in_time(halves, lambda p: [(p["a/dot"][1], p["a/dot"][0])]), "a1 a0 b0 b1"),
    "interleaved": (
        in_time(halves, lambda p: [(p["a/dot.1"][0], p["b/dot"][0]), (p["b/dot.1"][0], p["a/dot"][1])]),
        "a0 b0 a1 b1",
    ),
    "before a whole op": (in_time(halves, lambda p: [("b/dot.1", p["a/dot"][0])]), "b0 b1 a0 a1"),
}


def lowered(plan: Plan, devices: Any = 1, **sizes: int) -> Any:
    found = jscaler.parallelize(plan, devices=devices)(step).lower(*arguments(**sizes))
    jscaler.verify(found)
    return found


@pytest.mark.parametrize("name", of_the_day(PLANS))
def test_cells_run_in_their_order_and_have_the_same_numbers(name: str) -> None:
    plan, order = PLANS[name]
    with jax.enable_x64(True):
        made = lowered(plan)
        run = made.compile()
        graph = made.plan.graph
        assert not graph.loops
        schedule = Schedule(run.as_text(), graph.ops)
        paths = [f"{cell[0]}/{dot}[{cell[1]}]" for cell in order.split() for dot in ("dot", "dot.1")]
        parts = len(paths) // 4
        paths += [f"a/dot.1@backward[{i}]" for i in reversed(range(parts))]
        assert {path for path in graph.by_path if "/dot" in path and "@" not in path} == set(paths[: 4 * parts])
        paths = [path for path in paths if schedule.positions(path)]  # a product of one row is no instruction of its own
        assert len(paths) > 3 * parts
        assert [(a, b) for a, b in itertools.pairwise(paths) if not schedule.holds(a, b)] == []
        ours, theirs = run(*arguments()), jax.jit(step)(*arguments())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), ours, theirs)


def mlp_and_unequal_batch(graph: Any, devices: np.ndarray) -> None:
    """The MLP tensor parallel, and all that carries the batch in three unequal parts."""
    rows = graph.factor_of("batch/tokens", 0)
    hidden = graph.factor_of("state/params/block_0/mlp/up/kernel", 1)
    for op in graph.forward():
        if op in rows and graph.rule(op).factors[rows[op]].kind != "blocked":
            graph.op_trans(op, TimeSplit(rows[op], sizes=(4, 1, 3)))
            if "mlp/" in op.path and op in hidden:
                graph.op_assign(graph.op_trans(op, Split(hidden[op], devices.size)), devices)


@pytest.mark.one_day_in(3)
def test_optimizer_steps_of_a_gpt_in_unequal_parts() -> None:
    assert_same_numbers(mlp_and_unequal_batch, gpt, 2)


def test_gradients_are_added_in_the_dtype_that_is_asked_for() -> None:
    """Parts of float32 gradients, added in float64 and cast behind the last."""

    def wide(graph: Any, devices: np.ndarray) -> None:
        PLANS["unequal time"][0](graph, devices)
        graph.accumulation(dtype=jnp.float64)

    with jax.enable_x64(True):
        params, x = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), arguments())
        run = jscaler.parallelize(wide, devices=1)(step).lower(params, x)
        jscaler.verify(run)
        sums = [op for op in run.plan.graph.ops if "@more[" in op.path and op.outputs[0].name.startswith("d(")]
        assert len(sums) == 6
        assert {op.outputs[0].dtype for op in sums} == {np.dtype("float64")}
        ours, theirs = run.compile()(params, x), jax.jit(step)(params, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


def test_what_cannot_be() -> None:
    cyclic = in_time(halves, lambda p: [(p["a/dot"][0], p["a/dot"][1]), (p["a/dot"][1], p["a/dot"][0])])
    with pytest.raises(OrderError, match=r"a/dot\[1\] < a/dot\[0\].*drop one of the op_order calls"):
        lowered(cyclic)
    against_data = in_time(halves, lambda p: [(p["a/dot.1"][1], p["a/dot"][1])])
    with pytest.raises(OrderError, match=r"cyclic.*a/dot\.1\[1\] < a/dot\[1\]"):
        lowered(against_data)

    def in_space(graph: Any, devices: np.ndarray) -> None:
        parts = graph.op_trans("a/dot", Split(graph.factor_of("x", 0)[graph["a/dot"]], 2))
        graph.op_assign(parts, devices)
        graph.op_order(parts[0], parts[1])

    with pytest.raises(PlanError, match=r"cells of 'a/dot' along .*:2; only the cells along one time axis"):
        lowered(in_space, 2)

    def both(graph: Any, devices: np.ndarray) -> None:
        rows = graph.factor_of("x", 0)[graph["a/dot"]]
        parts = graph.op_trans("a/dot", Split(rows, 2), TimeSplit(rows, 2))
        graph.op_assign(parts, devices)
        graph.op_order(parts[:, 1], parts[:, 0])

    with pytest.raises(PlanError, match=r"'a/dot': its parts along '\w+' are ordered one by one, and devices split it too"):
        lowered(both, 2)


def test_an_order_of_cells_is_saved_with_the_plan() -> None:
    made = lowered(PLANS["reversed"][0]).plan
    assert "a/dot.1@backward[1]" in made.explain()
    assert "op_order  a/dot[1] < a/dot[0]" in str(made.plan)
    assert jscaler.Plan.from_json(made.plan.to_json()) == made.plan
    unequal = lowered(PLANS["unequal time"][0]).plan.plan
    assert jscaler.Plan.from_json(unequal.to_json()) == unequal


def test_an_op_may_be_split_further_behind_an_order_of_its_cells() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        rows = graph.factor_of("x", 0)
        for path in ("a/dot", "b/dot"):
            graph.op_trans(path, TimeSplit(rows[graph[path]], 2))
        graph.op_order(("a/dot", 1), ("a/dot", 0))
        for path in ("a/dot", "b/dot"):
            graph.op_assign(graph.op_trans(path, Replicate(2)), devices)

    run = lowered(policy, 2)
    params, x = arguments()
    ours, theirs = run.compile()(params, x), jax.jit(step)(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


def attention(params: dict[str, jax.Array], x: jax.Array) -> Any:
    """What its probabilities take is far more than what goes in and out."""

    def loss(p: dict[str, jax.Array]) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhe->bhse", x, p[n]) for n in "qkv")
        probs = jax.nn.softmax(jnp.einsum("bhse,bhte->bhst", q, k), axis=-1)
        return (jnp.einsum("bhst,bhte,hed->bsd", probs, v, p["o"]) ** 2).sum()

    value, gradients = jscaler.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def in_parts(**parts: Any) -> Plan:
    def policy(graph: Any, devices: np.ndarray) -> None:
        rows = graph.factor_of("x", 0)
        for op in graph.forward():
            if op in rows:
                graph.op_trans(op, TimeSplit(rows[op], **parts))

    return policy


@functools.cache
def temporaries(plan: Any) -> int:
    params = {n: jax.ShapeDtypeStruct((64, 4, 16), "float32") for n in "qkv"}
    params["o"] = jax.ShapeDtypeStruct((4, 16, 64), "float32")
    x = jax.ShapeDtypeStruct((8, 1024, 64), "float32")
    made = jscaler.parallelize(plan, devices=described_devices("1xH100-80GB"))(attention).lower(params, x)
    return made.lowered.compile(WITHOUT_GPU).memory_analysis().temp_size_in_bytes


@pytest.mark.aot
@pytest.mark.parametrize(
    ("parts", "largest"),
    [
        ({"parts": 2}, 1 / 2),
        ({"parts": 4}, 1 / 4),
        ({"sizes": (5, 3)}, 5 / 8),
        ({"sizes": (4, 2, 2)}, 4 / 8),
        ({"sizes": (2, 2, 2, 1, 1)}, 2 / 8),
    ],
)
def test_only_one_part_s_temporaries_live_at_a_time(parts: dict[str, Any], largest: float) -> None:
    assert temporaries(in_parts(**parts)) == pytest.approx(largest * temporaries("single"), rel=0.05)


@pytest.mark.aot
@pytest.mark.parametrize("name", ["unequal cells on one device", "reversed", "interleaved"])
def test_cells_run_in_their_order_on_gpus(name: str) -> None:
    plan, order = PLANS[name]
    made = lowered(plan, described_devices("1xH100-80GB"), rows=512, width=64)
    schedule = Schedule(made.lowered.compile(WITHOUT_GPU).as_text(), made.plan.graph.ops)
    paths = [f"{cell[0]}/{dot}[{cell[1]}]" for cell in order.split() for dot in ("dot", "dot.1")]
    assert [(a, b) for a, b in itertools.pairwise(paths) if not schedule.holds(a, b)] == []
    for op in ("a/dot", "b/dot"):
        assert schedule.holds(f"{op}@backward[1]", f"{op}@backward[0]")


def layers_in_parts(graph: Any, devices: np.ndarray) -> None:
    rows = graph.factor_of("batch/tokens", 0)
    for op in graph.forward():
        if op in rows and "mlp/" in op.path:
            graph.op_trans(op, TimeSplit(rows[op], sizes=(5, 3)))


@pytest.mark.one_day_in(2)
def test_parts_inside_of_a_loop_over_layers() -> None:
    assert_same_numbers(layers_in_parts, functools.partial(gpt, stacked=True, layers=2), 1)


@pytest.mark.parametrize(
    ("outer", "inner", "loops"),
    [
        ({"parts": 2}, {"sizes": (3, 5)}, True),  # in each iteration of a loop
        ({"sizes": (5, 3)}, {"parts": 2}, False),
        ({"sizes": (5, 3)}, {"sizes": (3, 5)}, False),
    ],
)
def test_parts_in_parts(outer: dict[str, Any], inner: dict[str, Any], loops: bool) -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        rows, hidden = graph.factor_of("x", 0), graph.factor_of("params/v", 0)
        for path in ("a/dot", "a/dot.1", "b/dot", "b/dot.1"):
            op = graph[path]
            graph.op_trans(op, TimeSplit(rows[op], axis="rows", **outer), TimeSplit(hidden[op], axis="hidden", **inner))

    with jax.enable_x64(True):
        made = lowered(policy)
        assert ("a/dot[1]" if loops else "a/dot[1][1]") in made.plan.graph.by_path
        assert bool(made.plan.graph.loops) == loops
        run = made.compile()
        ours, theirs = run(*arguments()), jax.jit(step)(*arguments())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), ours, theirs)
