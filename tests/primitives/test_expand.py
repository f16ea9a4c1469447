"""Algorithms with steps of their own: attention over key blocks, joined by (max, sum, output); and wrong steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jscaler
from jscaler import PlanError, Split
from jscaler.rules.expansion import Expanding, Site, Step


@dataclass(frozen=True)
class KeyBlocks:
    """Causal attention over blocks of keys: each block's maximum, sum and output, which are joined at the end."""

    factor: tuple[str, int]
    parts: int

    def expand(self, site: Site) -> Sequence[Step] | None:
        if len(site.operands) != 3 or len(site.jaxpr.outvars) != 1:
            return None  # the backward: it is split as usual
        return [
            Step("block", self.block, (0, 1, 2), ("max", "sum", "output")),
            Step("join", self.join, ("max", "sum", "output"), (0,)),
        ]

    def block(self, q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        k, v = (x.reshape(*x.shape[:2], self.parts, -1, x.shape[3]) for x in (k, v))
        positions = jnp.arange(k.shape[2] * k.shape[3]).reshape(k.shape[2:4])  # a block knows where it lies
        scores = jnp.einsum("bhqd,bhnkd->bhnqk", q, k)
        scores = jnp.where(positions[:, None] <= jnp.arange(q.shape[2])[:, None], scores, -1e9)
        largest = scores.max(-1)
        weights = jnp.exp(scores - largest[..., None])
        return [largest, weights.sum(-1), jnp.einsum("bhnqk,bhnkd->bhnqd", weights, v)]

    def join(self, largest: jax.Array, total: jax.Array, output: jax.Array) -> list[jax.Array]:
        scale = jnp.exp(largest - largest.max(2, keepdims=True))
        return [(output * scale[..., None]).sum(2) / (total * scale).sum(2)[..., None]]


def loss(k: jax.Array, v: jax.Array, q: jax.Array) -> jax.Array:
    with jax.named_scope("attention"):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        causal = jnp.arange(scores.shape[3]) <= jnp.arange(scores.shape[2])[:, None]
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
        out = jnp.einsum("bhqk,bhkd->bhqd", weights, v)
    with jax.named_scope("end"):
        return jnp.sin(out).sum()


def key_blocks(graph: Any, devices: np.ndarray) -> None:
    attention = graph.fuse(*graph.select("attention/*"), name="attention")
    heads = next(f for f in graph.rule(attention).factors.values() if f.size == 2 and f.kind == "parallel")
    cells = graph.op_trans(attention, Split(heads.name, 2), KeyBlocks(("k", 2), 4))
    graph.op_assign(cells, devices.reshape(2, 4))


@pytest.mark.smoke
def test_attention_over_blocks_of_keys_forward_and_backward() -> None:
    with jax.enable_x64(True):
        arguments = [jax.random.normal(jax.random.key(i), (1, 2, 8, 3)) for i in range(3)]
        step = jscaler.parallelize(key_blocks, devices=8)(jscaler.value_and_grad(loss, argnums=(0, 1)))
        lowered = step.lower(*arguments)
        jscaler.verify(lowered)
        ours, theirs = step(*arguments), jax.value_and_grad(loss, argnums=(0, 1))(*arguments)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), ours, theirs)
    ops = lowered.plan.completed.ops
    shown = {path: laid.placement.describe() for path, laid in ops.items()}
    factor = shown["attention/block"].split(" ")
    assert [part.split(":")[1] for part in factor] == ["2", "4"]
    backward = [path for path in shown if path.startswith("attention@backward")]
    assert len(backward) > 1  # cut where softmax reduces over keys, as usual
    assert all(shown[path] == shown["attention/block"] for path in backward)
    reduced = [s for a in lowered.plan.program.adapters for s in a.adapter.steps if s.kind == "all_reduce"]
    assert {"add", "max"} <= {s.combiner for s in reduced}


WHOLE = jnp.arange(24.0).reshape(8, 3)


def total(x: jax.Array) -> jax.Array:
    return jnp.sin(x.sum(0))


@dataclass(frozen=True)
class Given:
    """Steps from outside."""

    factor: str
    parts: int
    steps: Callable[[], Sequence[Step] | None]

    def expand(self, site: Site) -> Sequence[Step] | None:
        return self.steps()


def lower(steps: Callable[[], Sequence[Step] | None]) -> Any:
    def policy(graph: Any, devices: np.ndarray) -> None:
        graph.op_assign(graph.op_trans(graph.ops[0], Given("a", 2, steps)), devices)

    return jscaler.parallelize(policy, devices=2)(total).lower(WHOLE)


def rows(x: jax.Array) -> list[jax.Array]:
    return [x.reshape(2, 4, 3).sum(1)]


def test_a_sum_in_two_steps() -> None:
    steps = [Step("rows", rows, (0,), ("sums",)), Step("end", lambda s: [jnp.sin(s.sum(0))], ("sums",), (0,))]
    lowered = lower(lambda: steps)
    jscaler.verify(lowered)
    np.testing.assert_allclose(lowered.compile()(WHOLE), total(WHOLE), rtol=1e-6)
    shown = [laid.placement.describe() for laid in lowered.plan.completed.ops.values()]
    assert shown == ["a:2", "a:2", "copy"]  # the second step is cut behind its sum


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Step("rows", rows, (0,), ("sums",))], r"no step makes its results \[0\]"),
        ([Step("end", lambda s: [s.sum(0)], ("sums",), (0,))], r"reads \['sums'\], which no step before it makes"),
        ([Step("rows", rows, (0,), ("a", "b"))], r"step 'rows' returns 1 arrays for \['a', 'b'\]"),
        ([Step("rows", rows, (0,), (0,))], r"step 'rows' makes \(\(2, 3\), dtype\('float32'\)\) for result 0, which is"),
        ([Step("rows", rows, (0,), (1,))], "step 'rows' makes result 1, which is none or is made before"),
        ([Step("x", rows, (0,), ("s",)), Step("x", lambda s: [s.sum(0)], ("s",), (0,))], "two of its steps have one name"),
    ],
)  # fmt: skip
def test_steps_that_do_not_make_the_op(steps: Sequence[Step], message: str) -> None:
    with pytest.raises(PlanError, match=rf"'loss/reduce_sum' under Given\(.*: .*{message}"):
        lower(lambda: steps)


def test_what_is_no_algorithm() -> None:
    assert isinstance(KeyBlocks(("k", 2), 4), Expanding)
    graph = jscaler.parallelize("single")(total).graph(WHOLE)
    with pytest.raises(PlanError, match="'half' is no algorithm; give Split"):
        jscaler.primitives.Planner(graph, 2).op_trans(graph.ops[0], "half")  # type: ignore[arg-type]
