"""``op_order`` inside one executable holds in the program that XLA has scheduled, for CPUs and (marked ``aot``) GPUs."""

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from of_the_day import of_the_day
from scheduled import Schedule

import jscaler
from jscaler import Split
from jscaler.ir import Graph
from jscaler.lower.in_order import in_order, in_order_p
from jscaler.report.targets import described_devices
from jscaler.runtime.target import WITHOUT_GPU

BRANCHES = 4


def step(state: dict[str, jax.Array], batch: jax.Array) -> Any:
    """Independent branches of two products each, one with a loop between them."""

    def loss(p: dict[str, jax.Array]) -> jax.Array:
        total = jnp.zeros((), batch.dtype)
        for i in range(BRANCHES):
            with jax.named_scope(f"b{i}"):
                h = jnp.tanh(batch @ p[f"w{i}"])
                if i == 0:
                    with jax.named_scope("loop"):
                        h, _ = lax.scan(lambda c, w: (jnp.tanh(c @ w), None), h, p["s"])
                total += jnp.sum(jnp.sin(h @ p[f"v{i}"]))
        return total

    value, gradients = jscaler.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


def arguments(scale: int = 1) -> tuple[dict[str, jax.Array], jax.Array]:
    draws = np.random.default_rng(0)
    sizes = {f"w{i}": (8, 8 + 4 * i) for i in range(BRANCHES)} | {f"v{i}": (8 + 4 * i, 8) for i in range(BRANCHES)}
    sizes |= {"s": (3, 8, 8)}
    state = {n: jnp.asarray(draws.normal(size=(*s[:-2], *(scale * d for d in s[-2:]))) / 4) for n, s in sizes.items()}
    return state, jnp.asarray(draws.normal(size=(16, 8 * scale)))


def random_order(graph: Graph, seed: int) -> list[str]:
    """The products, forward and backward, in a random order that their data allows; loops as one of their ops."""
    chosen = random.Random(seed)
    items = {op.path: op for op in graph.ops}
    unit = {path: op.loop or path for path, op in items.items()}
    reads: dict[str, set[str]] = {name: set() for name in unit.values()}
    makers = {t: unit[op.path] for op in graph.ops for t in op.outputs}
    for loop in graph.loops.values():
        makers |= dict.fromkeys(loop.results, loop.name)
        reads[loop.name] |= {makers[t] for t in loop.operands if t in makers}
    for op in graph.ops:
        reads[unit[op.path]] |= {makers[t] for t in op.inputs if t in makers}
    waiting, done = sorted(reads), list[str]()
    while waiting:
        ready = [name for name in waiting if reads[name] - {name} <= set(done)]
        done.append(chosen.choice(ready))
        waiting.remove(done[-1])
    heavy = {unit[path]: path for path, op in items.items() if "/dot" in path and op.kind != "update"}
    return [heavy[name] for name in done if name in heavy]


def ordered(paths: Sequence[str], split: bool = False) -> Callable[[Any, np.ndarray], None]:
    """A plan with these ops in a row; ``split`` has the second products' inner dims split, whose results are summed."""

    def policy(graph: Any, devices: np.ndarray) -> None:
        for i in range(1, BRANCHES) if split else ():
            hidden = graph.factor_of(f"state/v{i}", 0)
            for op in graph.forward():
                if op in hidden and "/dot" in op.path:
                    graph.op_assign(graph.op_trans(op, Split(hidden[op], devices.size)), devices)
        for first, second in zip(paths, paths[1:]):  # noqa: B905, RUF007
            graph.op_order(first, second)

    return policy


@functools.cache
def base() -> Graph:
    return jscaler.parallelize("single", devices=1)(step).lower(*arguments()).plan.graph


def broken(schedule: Schedule, paths: Sequence[str]) -> list[tuple[str, str]]:
    return [(a, b) for a, b in zip(paths, paths[1:]) if not schedule.holds(a, b)]  # noqa: B905, RUF007


@pytest.mark.parametrize(("seed", "devices"), of_the_day([(0, 1), (1, 1), (2, 2)], 2))
def test_a_random_order_of_independent_ops(seed: int, devices: int) -> None:
    with jax.enable_x64(True):
        paths = random_order(base(), seed)
        assert len(paths) == 4 * BRANCHES + 2
        state, batch = arguments()
        lowered = jscaler.parallelize(ordered(paths, devices > 1), devices=devices)(step).lower(state, batch)
        jscaler.verify(lowered)
        run = lowered.compile()
        assert not broken(Schedule(run.as_text(), lowered.plan.graph.ops), paths)
        new, loss = run(state, batch)
        expected, value = jax.jit(step)(state, batch)
        assert abs(loss - value) < 1e-12
        for leaf, want in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(leaf, want, rtol=0, atol=1e-12)


def in_loop(graph: Any, devices: np.ndarray) -> None:
    graph.op_order("right/dot", "left/dot")
    graph.op_order("left/dot@backward", "right/dot@backward")


def stacked(params: dict[str, jax.Array], x: jax.Array) -> Any:
    """A loop over layers, each of two independent products."""

    def loss(p: dict[str, jax.Array]) -> jax.Array:
        def layer(carry: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            with jax.named_scope("left"):
                left = carry @ w[0]
            with jax.named_scope("right"):
                right = carry @ w[1]
            return jnp.tanh(left) * jnp.sin(right), None

        with jax.named_scope("layers"):
            return lax.scan(layer, x, (p["a"], p["b"]))[0].sum()

    return jscaler.value_and_grad(loss)(params)


def stacked_arguments() -> tuple[dict[str, jax.Array], jax.Array]:
    draws = np.random.default_rng(0)
    return {n: jnp.asarray(draws.normal(size=(3, 8, 8)) / 3) for n in "ab"}, jnp.asarray(draws.normal(size=(16, 8)))


def test_an_order_inside_a_loop_s_body() -> None:
    with jax.enable_x64(True):
        lowered = jscaler.parallelize(in_loop, devices=1)(stacked).lower(*stacked_arguments())
        run = lowered.compile()
        schedule = Schedule(run.as_text(), lowered.plan.graph.ops)
        assert schedule.holds("right/dot", "left/dot", schedule.body_of("left/dot"))
        assert schedule.holds("left/dot@backward", "right/dot@backward", schedule.body_of("left/dot@backward"))
        ours, theirs = run(*stacked_arguments()), jax.jit(stacked)(*stacked_arguments())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), ours, theirs)


def test_an_ordered_op_is_not_computed_twice() -> None:
    """Its backward computes again what it reads from the fence, which merges with the forward."""

    def dots(plan: Any) -> int:
        flat = jscaler.parallelize(plan, devices=1)(step).lower(*arguments()).plan.flat
        return sum(eqn.primitive is not in_order_p for eqn in flat.equations)

    assert dots(ordered(["b2/dot.1", "b1/dot.1"])) == dots("single")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "bool", "complex64", "key"])
def test_a_fence_changes_no_bit(dtype: str) -> None:
    if dtype == "key":
        x, bits = jax.random.split(jax.random.key(3), 4), lambda x: np.asarray(jax.random.key_data(x))
    else:
        values = np.array([0.0, 1, 0.5, -3, np.nan, np.inf]) if dtype not in ("int8", "uint32", "bool") else np.arange(6)
        x, bits = jnp.asarray(values).astype(dtype), np.asarray
    for before in (x[:1], x[1:], x[-1:], x[:0]):
        late = jax.jit(lambda x, b: in_order([x], [b])[0])(x, before)
        assert bits(late).tobytes() == bits(x).tobytes()
    assert bits(in_order([x], [x[:1]])[0]).tobytes() == bits(x).tobytes()
    assert in_order_p.name == jax.make_jaxpr(lax.optimization_barrier)(x).eqns[0].primitive.name  # known to all who know it


@pytest.mark.aot
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_random_order_on_gpus(seed: int, devices: int) -> None:
    """XLA for GPUs drops barriers behind its scheduler, the one that hides collectives too."""
    paths = random_order(base(), seed)
    found = described_devices(f"{devices}xH100-80GB")
    lowered = jscaler.parallelize(ordered(paths, devices > 1), devices=found)(step).lower(*arguments(16))
    options = WITHOUT_GPU | {"xla_gpu_enable_latency_hiding_scheduler": devices > 1}
    text = lowered.lowered.compile(options).as_text()
    assert not broken(Schedule(text, lowered.plan.graph.ops), paths)


@pytest.mark.aot
def test_an_order_inside_a_loop_s_body_on_gpus() -> None:
    lowered = jscaler.parallelize(in_loop, devices=described_devices("1xH100-80GB"))(stacked).lower(*stacked_arguments())
    schedule = Schedule(lowered.lowered.compile(WITHOUT_GPU).as_text(), lowered.plan.graph.ops)
    assert schedule.holds("right/dot", "left/dot", schedule.body_of("left/dot"))
