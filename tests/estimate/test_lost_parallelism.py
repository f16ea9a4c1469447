"""What a plan leaves copied, or gathers unasked: found along the dataflow, priced, said once, and refused if ``strict``."""

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import Replicate, Split
from jscaler.errors import PlanError, PlanWarning
from jscaler.estimate.lost_parallelism import LostParallelism

PARAMS = {"a": jnp.linspace(-1, 1, 8 * 16).reshape(8, 16), "b": jnp.linspace(1, -1, 16 * 8).reshape(16, 8)}
BATCH = jnp.linspace(-1, 1, 16 * 8).reshape(16, 8)


def step_of(middle: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """A step of a model of two products with ``middle`` between them."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("up"):
            h = jnp.tanh(x @ params["a"])
        with jax.named_scope("middle"):
            h = middle(h)
        with jax.named_scope("down"):
            h = h @ params["b"]
        return jnp.mean(h**2)

    def step(params: Any, batch: jax.Array) -> Any:
        value, grads = jscaler.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def planned(plan: Any, step: Callable[..., Any], devices: int = 4, **options: Any) -> tuple[Any, list[str]]:
    """The lowered step, and what `PlanWarning`s say."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lowered = jscaler.parallelize(plan, devices=devices, **options)(step).lower(PARAMS, BATCH)
    assert all(issubclass(one.category, PlanWarning) for one in caught), [str(one.message) for one in caught]
    return lowered, [str(one.message) for one in caught]


def ranked(h: jax.Array) -> jax.Array:
    """Needs the whole batch, and says nothing that could be split."""
    return jnp.sort(h, axis=0)


def test_what_needs_the_whole_batch_is_named_with_all_behind_it() -> None:
    step = step_of(lambda h: jnp.exp(ranked(h)))
    lowered, said = planned("data_parallel", step)
    assert len(said) == 1
    for part in ("parallelism is lost", "at sort it is sorted", "'middle/", "nothing frees it"):
        assert part in said[0]
    lost = lowered.plan.lost
    first = [op for op in lost.ops if not op.behind]
    assert [op.tensor for op in first] == ["up/tanh:0"]
    assert {op.parts for op in lost.ops} == {4}
    assert first[0].gathered == 16 * 16 * 4 * 3 / 4  # each device sends, or takes, what it has not
    explained = lowered.plan.explain()
    assert lost.summary in explained
    assert all(line in explained for line in lost.lines)
    assert "lost, see below" in explained
    wanted = jax.jit(lambda p, x: step(p, x))(PARAMS, BATCH)
    for got, right in zip(jax.tree.leaves(lowered.compile()(PARAMS, BATCH)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5)


def test_a_loop_over_rows_runs_whole_on_every_device() -> None:
    """Chunks of rows, one after another; of chunks that have some rows of each device nothing is lost."""

    def scanned(chunks: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, x: (carry, jnp.tanh(x @ (jnp.eye(16) / 2))), 0.0, chunks)[1]

    lowered, said = planned("data_parallel", step_of(lambda h: scanned(h.reshape(4, 4, 16)).reshape(16, 16)))
    assert len(said) == 1
    for part in ("'middle/dot'", "dim 0 of 'middle/reshape:0' lies in 4 parts: the loop 'middle/scan' takes its slices",
                 "768 B gathered"):  # fmt: skip
        assert part in said[0]
    assert lowered.plan.lost.copied_flops > 0.5
    turned = step_of(lambda h: scanned(h.reshape(4, 4, 16).swapaxes(0, 1)).swapaxes(0, 1).reshape(16, 16))
    assert not planned("data_parallel", turned)[1]


def test_flops_that_other_devices_do_as_well_are_counted() -> None:
    # The sort and the first square product are one op; it and its backward run whole. The second and its backward are
    # split, and so are five of half the size: the outer two, their kernels' gradients, and one of an activation.
    square = jnp.eye(16) / 2
    lowered, said = planned("data_parallel", step_of(lambda h: ranked(h) @ square @ square))
    lost, product = lowered.plan.lost, 2 * 16 * 16 * 16
    assert sum(op.flops for op in lost.ops) == 2 * product * 3 / 4
    assert lost.flops == 2 * product + (2 * product + 5 * product / 2) / 4
    assert lost.copied_flops == 2 * product * 3 / 4 / lost.flops
    assert f"({lost.copied_flops:.1%} of a device's)" in said[0]


def test_strict_refuses_it() -> None:
    with pytest.raises(
        PlanError, match=r"'data_parallel' is refused, since strict=True: parallelism is lost: (?s:.*)at sort"
    ):
        jscaler.parallelize("data_parallel", devices=4, strict=True)(step_of(ranked)).lower(PARAMS, BATCH)
    jscaler.parallelize("data_parallel", devices=4, strict=True)(step_of(jnp.exp)).lower(PARAMS, BATCH)


@pytest.mark.parametrize("plan", ["data_parallel", "zero1", "zero3", "accumulate(2, data_parallel())", "single"])
def test_a_plan_that_loses_nothing_says_nothing(plan: str) -> None:
    lowered, said = planned(plan, step_of(lambda h: jax.nn.softmax(h)), 1 if plan == "single" else 4)
    assert said == []
    assert lowered.plan.lost == LostParallelism()


def test_where_nothing_is_lost_its_text_says_so() -> None:
    lowered, _ = planned("data_parallel", step_of(jnp.exp))
    assert str(lowered.plan.lost) == lowered.plan.lost.summary == "no parallelism is lost"


@pytest.mark.parametrize("way", ["lower", "call", "graph of a policy"])
def test_a_warning_is_of_the_line_that_asks(way: str) -> None:
    """Not of one of contextlib's, nor of this package's, however many of these stand between."""
    step = jscaler.parallelize("data_parallel", devices=4)(step_of(ranked))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "lower":
            line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
            step.lower(PARAMS, BATCH)
        elif way == "call":
            line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
            step(PARAMS, BATCH)
        else:
            graph = step.graph({"a": jnp.ones((8, 3)), "b": jnp.ones((3, 5))}, BATCH)
            line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
            jscaler.cost(graph, "zero1", "16xH100-80GB")
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, line)] * len(caught)
    assert caught


def test_a_gather_of_less_than_a_thousandth_is_not_told() -> None:
    """A few numbers are put together for a sort, beside products of many, though nothing else is sent."""

    def evaluation(weights: jax.Array, batch: Any) -> jax.Array:
        with jax.named_scope("ranked"):
            rank = jnp.tanh(batch["rank"])
        with jax.named_scope("sorted"):
            least = jnp.sort(rank)[0]
        return jnp.mean(jnp.tanh(batch["x"] @ weights) ** 2) + least

    def told(width: int) -> list[str]:
        weights, x, rank = (jax.ShapeDtypeStruct(s, np.float32) for s in ((width, width), (512, width), (512,)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jscaler.parallelize("data_parallel", devices=4)(evaluation).lower(weights, {"x": x, "rank": rank})
        return [str(one.message) for one in caught]

    assert "parallelism is lost" in told(8)[0]
    assert told(4096) == []


def test_an_evaluation_puts_parameters_together_as_the_step_that_it_follows() -> None:
    """What is made of parameters alone, and cannot be split, runs whole in both; ZeRO-3 asks for that."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("table"):
            table = jnp.sort(params["b"], axis=0)
        with jax.named_scope("up"):
            return jnp.mean((x[:, None] + table) @ params["a"])

    def step(params: Any, batch: jax.Array) -> Any:
        value, grads = jscaler.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel = jscaler.parallelize("zero3", devices=4)(step)
        parallel.lower(PARAMS, BATCH)
        lowered = parallel.follow(loss).lower(PARAMS, BATCH)
    assert "all_gather" in lowered.plan.explain()
    assert lowered.plan.lost == LostParallelism()


def rows(graph: Any, devices: np.ndarray, *others: Any) -> None:
    graph.op_assign(graph.op_trans("up/dot", Split(graph.factor_of("batch", 0)[graph["up/dot"]], 4)), devices)


def test_what_the_policy_copies_is_as_it_was_asked_for() -> None:
    def policy(graph: Any, devices: np.ndarray) -> None:
        rows(graph, devices)
        for op in graph.ops:
            if op.kind == "forward" and op.path != "up/dot":
                graph.op_assign(graph.op_trans(op, Replicate(4)), devices)

    _, said = planned(policy, step_of(jnp.exp))
    assert said == []


def test_a_policy_s_copy_of_what_cannot_be_split_is_lost() -> None:
    """As `plans.factors.split` leaves a factor that is blocked: nobody wanted that."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        rows(graph, devices)
        middle = next(op for op in graph.ops if op.kind == "forward" and op.path.startswith(("middle", "down")))
        graph.op_assign(graph.op_trans(middle, Replicate(4)), devices)

    _, said = planned(policy, step_of(ranked))
    assert "at sort it is sorted" in said[0]


def test_what_would_have_to_be_cut_says_how() -> None:
    """A normalisation between two kernels that are split by channels: a sum over the channels stands in the way."""

    def columns(graph: Any, devices: np.ndarray) -> None:
        graph.op_assign(graph.op_trans("up/dot", Split(graph.factor_of("params/a", 1)[graph["up/dot"]], 4)), devices)

    def norm(h: jax.Array) -> jax.Array:
        return (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-3)

    _, said = planned(columns, step_of(norm))
    asked = re.search(
        r"'([\w/]+)' .*is blocked: a partial add of it meets .*op_trans\(op, Split\('(\w+)', 4\)\) cuts the op", said[0]
    )
    assert asked is not None

    def remedied(graph: Any, devices: np.ndarray) -> None:
        columns(graph, devices)
        for op in graph.ops:
            name = graph.factor_of("params/a", 1).get(op)
            if op.kind == "forward" and op.path not in ("up/dot",) and name:
                graph.op_assign(graph.op_trans(op, Split(name, 4)), devices)

    _, said = planned(remedied, step_of(norm))
    assert said == []


def test_a_gather_that_nobody_asked_for_is_one_though_the_op_is_split() -> None:
    def crossed(graph: Any, devices: np.ndarray) -> None:
        for path, leaf, dim in (("up/dot", "batch", 0), ("side/dot", "params/a", 1)):
            graph.op_assign(graph.op_trans(path, Split(graph.factor_of(leaf, dim)[graph[path]], 4)), devices)

    def step(params: Any, batch: jax.Array) -> jax.Array:
        with jax.named_scope("up"):
            one = batch @ params["a"]
        with jax.named_scope("side"):
            other = jnp.ones((16, 8)) @ params["a"]
        with jax.named_scope("both"):
            return jnp.einsum("ij,kl->ikjl", one, other)

    lowered, said = planned(crossed, step)
    (lost,) = lowered.plan.lost.ops
    assert (lost.path, lost.copied, lost.flops) == ("both/dot", False, 0.0)
    assert lost.gathered > 0
    assert said[0].startswith("plan 'crossed': parallelism is lost: ")
    assert "are gathered that no decision asked for" in said[0]


def two_towers(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["a"]), jnp.sin(x @ params["a"])


def itself(params: Any, x: jax.Array) -> jax.Array:
    return (jnp.tanh(x @ params["a"]),) * 2


@pytest.mark.parametrize("towers", [two_towers, itself])
def test_rows_of_the_batch_that_meet_all_rows_are_gathered_with_a_word(towers: Any) -> None:
    """A contrastive loss: data parallelism splits one side of the pairs, and has the other put together."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("towers"):
            one, other = towers(params, x)
        with jax.named_scope("turned"):
            other = other.T
        with jax.named_scope("pairs"):
            scores = one @ other
        return -jnp.mean(jnp.sum(jnp.eye(16) * jax.nn.log_softmax(scores), -1))

    def step(params: Any, batch: jax.Array) -> Any:
        value, grads = jscaler.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    lowered, said = planned("data_parallel", step)
    (lost,) = [op for op in lowered.plan.lost.ops if op.path == "pairs/dot"]
    assert (lost.copied, lost.flops, lost.gathered) == (False, 0.0, 16 * 16 * 4 * 3 / 4)
    assert "'pairs/dot'" in said[0]
    assert "rows of the batch meet all its rows" in said[0]
    with pytest.raises(PlanError, match="strict=True: parallelism is lost"):
        planned("data_parallel", step, strict=True)


def test_positions_that_meet_all_positions_are_what_a_plan_of_positions_is() -> None:
    """Keys are gathered because the plan splits queries: no axis cuts the batch's rows."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(24, 8)(tokens)
            return nn.Dense(24)(x + nn.MultiHeadDotProductAttention(2)(x))

    model, tokens = Model(), jnp.arange(32).reshape(4, 8) % 24
    params = model.init(jax.random.key(0), tokens)

    def step(params: Any, batch: jax.Array) -> Any:
        loss = lambda p, t: jnp.mean(model.apply(p, t) ** 2)  # noqa: E731
        value, grads = jscaler.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    def positions(graph: Any, devices: np.ndarray) -> None:
        for op, name in graph.factor_of("batch", 1).items():
            if op.kind == "forward" and graph.rule(op).factors[name].splittable:
                graph.op_assign(graph.op_trans(op, Split(name, 4)), devices)

    lowered = jscaler.parallelize(positions, devices=4)(step).lower(params, tokens)
    assert any("all_gather" in move.moved for row in lowered.plan.report.ops for move in row.moves)
    assert not lowered.plan.lost.ops


def test_like_layers_are_one_line() -> None:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(nn.Dense(8)(jnp.sort(x, axis=0)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for i in range(6):
                x = Layer(name=f"layer_{i}")(nn.Dense(8)(x))
            return x

    model = Model()
    params = model.init(jax.random.key(0), BATCH)
    step = jscaler.parallelize("data_parallel", devices=4)(lambda params, batch: model.apply(params, batch))
    with pytest.warns(PlanWarning, match=r"×\d"):
        lowered = step.lower(params, BATCH)
    assert len(lowered.plan.lost.lines) < 6
