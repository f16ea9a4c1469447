"""Random nets as pipelines, with another plan inside of their stages: what `bench.programs --pipelines` draws from.

A net is a chain of layers, or a stack; in half of them no layer ends at a residual. Seeds go through all pairs of an inner
plan and a schedule, so that as many cases have each. `accumulate` is no inner plan: a pipeline has micro-batches itself.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

import jscaler
from jscaler.errors import PlanError
from tests.programs import Drawer, Outcome, Program, StepFn, compared

INNER = {  # and the devices of a stage
    "co_shard(2)": 1, "co_shard(4)": 1, "co_shard(2, plan=tensor_parallel())": 2, "co_shard(2, plan=zero2())": 2,
    "recompute_layers()": 1, "recompute_layers(zero3())": 2, "zero1()": 2, "zero2()": 2, "zero3()": 2,
    "megatron(dp=2, tp=2, zero=1)": 4, "tensor_parallel()": 2,
}  # fmt: skip
SCHEDULES = (
    "gpipe", "1f1b", "eager_1f1b", "interleaved", "breadth_first", "zb_h1", "zb_v", "dualpipe_v", "chimera", "1f1b+R",
)  # fmt: skip
WIDTH, ROWS, LENGTH, MICROBATCHES = 8, 16, 4, 4


def plan_of(seed: int) -> tuple[str, int]:
    """The plan of ``seed``, and its devices."""
    inner, devices = list(INNER.items())[seed % len(INNER)]
    schedule = SCHEDULES[seed // len(INNER) % len(SCHEDULES)]
    return f"pipeline(2, {MICROBATCHES}, '{schedule}', plan={inner})", 2 * devices


def draw_net(seed: int) -> Program:
    """The net of ``seed``."""
    drawer = Drawer(seed)
    drawer.batch["x"] = drawer.rng.normal(size=(ROWS, LENGTH, WIDTH))
    drawer.batch["mask"] = (drawer.rng.random((ROWS, 1, 1)) < 0.7).astype(float) + 0.1
    residual, last = drawer.pick(True, False), drawer.pick(True, False)
    count, names, body = int(drawer.pick(4, 5, 6)), list[str](), list[StepFn]()
    if drawer.pick(True, False, False, False):
        names, body = ["stack" + ("+" if residual else "")], [stack(drawer, 4, residual)]
        count = 0
    for _ in range(count):
        made = drawer.pick(dense, pair, pair, attention, norm_pair)
        names.append(made.__name__ + ("+" if residual else ""))
        body.append(with_residual(made(drawer), residual))
    if last:
        names.append("head")
        body.append(head(drawer))
    return Program(names, drawer.params, drawer.batch, body, bounded=True)


def with_residual(layer: StepFn, residual: bool) -> StepFn:
    return (lambda env, v: v + layer(env, v)) if residual else layer


def dense(d: Drawer) -> StepFn:
    w, b, act = d.param(WIDTH, WIDTH), d.param(WIDTH), d.pick(jnp.tanh, jax.nn.gelu, jnp.sin)
    return lambda env, v: act(v @ env[w] + env[b])


def pair(d: Drawer) -> StepFn:
    """Hidden units between two kernels, of which the second may have nothing behind it."""
    up, down, inside, behind = d.param(WIDTH, 16), d.param(16, WIDTH), d.pick(jnp.tanh, jax.nn.gelu), d.pick(None, jnp.tanh)

    def run(env: Any, v: Any) -> Any:
        made = inside(v @ env[up]) @ env[down]
        return made if behind is None else behind(made)

    return run


def norm_pair(d: Drawer) -> StepFn:
    """Behind a norm, with dropout."""
    scale, inner, seed = d.param(WIDTH), pair(d), int(d.rng.integers(100))

    def run(env: Any, v: Any) -> Any:
        centred = v - v.mean(-1, keepdims=True)
        made = inner(env, centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-2) * env[scale])
        return jnp.where(jax.random.bernoulli(jax.random.key(seed), 0.8, made.shape), made / 0.8, 0)

    return run


def attention(d: Drawer) -> StepFn:
    """Four heads of two."""
    q, k, v, out = d.param(WIDTH, 4, 2), d.param(WIDTH, 4, 2), d.param(WIDTH, 4, 2), d.param(4, 2, WIDTH)

    def run(env: Any, x: Any) -> Any:
        query, key, value = (jnp.einsum("bsd,dhk->bshk", x, env[name]) for name in (q, k, v))
        weights = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", query, key) / math.sqrt(2))
        return jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", weights, value), env[out])

    return run


def stack(d: Drawer, layers: int, residual: bool) -> StepFn:
    up, down = d.param(layers, WIDTH, 16), d.param(layers, 16, WIDTH)

    def layer(x: Any, kernels: Any) -> Any:
        made = jnp.tanh(x @ kernels[0]) @ kernels[1]
        return (x + made if residual else jnp.tanh(made)), None

    return lambda env, v: jax.lax.scan(layer, v, (env[up], env[down]))[0]


def head(d: Drawer) -> StepFn:
    """Weighted rows, whose weights are divided by their sum over the batch."""
    w = d.param(WIDTH, 4)
    return lambda env, v: (v @ env[w]) * jnp.sqrt(env["mask"] / env["mask"].sum())


def measure_pipeline(seed: int, steps: int = 2) -> Outcome:
    """Run the net of ``seed`` under the plan of ``seed`` and under ``jax.jit``, in float64, for some steps."""
    program, (plan, devices) = draw_net(seed), plan_of(seed)
    try:
        lowered = jscaler.parallelize(plan, devices=devices)(program.train_step).lower(program.params, program.batch)
    except PlanError as error:
        return Outcome(program, devices, 0, 0.0, "", f"{plan}: {error}")
    return compared(program, lowered, devices, steps)
